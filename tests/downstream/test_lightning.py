"""examples/recipes/lightning_module.py on a tiny model and a CPU."""

import runpy
import sys

import torch
from conftest import json_lines, words
from snippets import RECIPES
from transformers import AutoModelForCausalLM
from watched import Seen


def test_recipe(home, tmp_path, monkeypatch, record_property):
    data, out = tmp_path / "texts.jsonl", tmp_path / "out"
    json_lines(data, ({"text": words(i, 4 + i % 5)} for i in range(16)))
    arguments = ("--model", home, "--data", data, "--out", out, "--length", 32, "--steps", 3, "--lr", 0.01)
    monkeypatch.setattr(sys, "argv", ["lightning_module.py", *map(str, arguments)])
    with Seen() as seen:
        runpy.run_path(str(RECIPES / "lightning_module.py"), run_name="__main__")
    ran = {operator.removesuffix("_forward") for operator in seen.counts}
    assert {"fused_linear_cross_entropy", "rms_norm", "gated", "rope"} <= ran
    before, after = (AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in (home, out))
    assert not any(torch.equal(before[key], after[key]) for key in before if "proj" in key)
    record_property("setup", "examples/recipes/lightning_module.py")
    record_property("result", "runs")
