"""examples/recipes with TRL, on a tiny model and data of a folder instead of those that they name."""

import runpy
import subprocess
import sys

import pytest
import torch
from conftest import conversation, json_lines, words
from snippets import RECIPES
from transformers import AutoModelForCausalLM
from watched import Seen

SMALL = (
    *("--use_cpu", "True", "--bf16", "False", "--max_steps", "2", "--per_device_train_batch_size", "4"),
    *("--learning_rate", "0.05", "--report_to", "none", "--dtype", "float32", "--attn_implementation", "eager"),
)
ROWS = {
    "sft": lambda i: {"messages": conversation(i)},
    "dpo": lambda i: {"prompt": words(i, 5) + " ", "chosen": words(20 + i, 5), "rejected": words(40 + i, 4)},
    "grpo": lambda i: {"prompt": words(i, 5)},
    "distillation": lambda i: {"prompt": words(i, 5)},
}
MORE = {
    "sft": ("--max_length", "48"),
    "dpo": ("--max_length", "48"),
    "grpo": ("--max_completion_length", "6", "--num_generations", "4"),
    "distillation": ("--max_completion_length", "6"),
}
#: What computes the loss.
LOSSES = {
    "sft": "linear_log_prob",
    "dpo": "linear_log_prob",
    "grpo": "linear_log_prob",
    "distillation": "linear_distillation",
}


def run(monkeypatch, name, *arguments):
    """A recipe as a user starts it: the operators that ran."""
    monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
    with Seen() as seen:
        runpy.run_path(str(RECIPES / f"{name}.py"), run_name="__main__")
    return seen.counts


@pytest.mark.parametrize("adapters", (False, True), ids=("whole", "LoRA"))
@pytest.mark.parametrize("name", ROWS)
def test_recipe(name, adapters, home, teacher, tmp_path, monkeypatch):
    data, out = tmp_path / "data", tmp_path / "out"
    data.mkdir()
    json_lines(data / "train.jsonl", map(ROWS[name], range(16)))
    more = ("--teacher_model_name_or_path", teacher) if name == "distillation" else ()
    lora = ("--use_peft", "--lora_r", 4, "--lora_target_modules", "all-linear") if adapters else ()
    places = ("--model_name_or_path", home, "--dataset_name", data, "--output_dir", out)
    ran = run(monkeypatch, name, *places, *SMALL, *MORE[name], *more, *lora)
    assert {LOSSES[name], "rms_norm", "rope"} <= {operator.removesuffix("_forward") for operator in ran}
    if adapters:
        assert (out / "adapter_model.safetensors").exists()
    else:
        before, after = (AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in (home, out))
        assert before.keys() == after.keys()
        assert not any(torch.equal(before[key], after[key]) for key in before if "proj" in key)


def test_fsdp2(home, tmp_path):
    """On two processes of a CPU."""
    data, out = tmp_path / "texts.jsonl", tmp_path / "out"
    json_lines(data, ({"text": words(i, 40)} for i in range(24)))
    run = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    arguments = ("--model", home, "--data", data, "--out", out, "--length", "48", "--steps", "2", "--lr", "0.01")
    command = [*run, RECIPES / "fsdp2.py", *arguments]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "step 0: loss" in done.stdout
    before, after = (AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in (home, out))
    assert before.keys() == after.keys()
    assert not any(torch.equal(before[key], after[key]) for key in before if "proj" in key)
