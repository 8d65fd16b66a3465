"""liger-train's losses with other files of a tokenizer beside the model: those of transformers on the same folder."""

import itertools
import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parent / "cpp"))
import tokenizer_files  # noqa: E402
import training_runs  # noqa: E402

pytestmark = pytest.mark.skipif(
    "LIGER_TRAIN" not in os.environ, reason="LIGER_TRAIN names no liger-train: tests/run.sh builds it"
)
CASES = {
    "nothing": {},
    "an end of the map": {"special_tokens_map": {"eos_token": tokenizer_files.END}},
    "an end that is new": {"special_tokens_map": {"eos_token": "<new>"}},
    "added tokens": {"added_tokens": {"one": 331, "<pad>": 332}, "tokenizer_config": {"eos_token": "<pad>"}},
    "a decoder": {
        "tokenizer_config": {
            "added_tokens_decoder": {
                "0": tokenizer_files.token(tokenizer_files.END, special=True),
                "331": tokenizer_files.token("two", special=True, lstrip=True),
            },
            "eos_token": tokenizer_files.END,
        }
    },
    "other special tokens": {
        "tokenizer_config": {"additional_special_tokens": ["one", "three"], "eos_token": "<|end|>"}
    },
    "special tokens as text": {"tokenizer_config": {"split_special_tokens": True, "eos_token": tokenizer_files.END}},
    "a space before": {
        "tokenizer_config": {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True, "eos_token": "<|end|>"}
    },
    "a space that this class does not add": {"tokenizer_config": {"add_prefix_space": True, "eos_token": "<|end|>"}},
    "a class with its own words": {"config": {"tokenizer_class": "Qwen2TokenizerFast"}},
}
TEXTS = ["one two  three", "three <|begin|> one 12345", "two <more> <|end|>", "twenty-one"]
PAIRS = [("one plus one is", " two"), ("two and", " three"), ("twenty minus <more> is", " one <|end|>")]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    return folder, training_runs.checkpoint(folder)[0]


@pytest.mark.parametrize("what", CASES)
def test_losses_with_the_files_of_a_tokenizer(model, tmp_path, what):
    weights, plain = model
    case = CASES[what]
    config = json.loads((weights / "config.json").read_text()) | case.get("config", {})
    folder = tmp_path / "folder"
    tokenizer_files.write(folder, case | {"config": config})
    shutil.copy(weights / "model.safetensors", folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    end = tokenizer.eos_token

    def ended(text):
        """As TRL does it; without an end token that has a name, config.json's id follows."""
        return text if end is None or text.endswith(end) else text + end

    def ids_of(text):
        # The post-processor of these files adds nothing at the end.
        ids = tokenizer(text)["input_ids"]
        return ids if end is not None or ids[-1] == config["eos_token_id"] else [*ids, config["eos_token_id"]]

    def parts(prompt, completion):
        """Encoded apart, so that no token spans both."""
        asked = tokenizer(prompt)["input_ids"]
        answer = tokenizer(ended(completion), add_special_tokens=False)["input_ids"]
        if end is None and answer[-1] != config["eos_token_id"]:
            answer.append(config["eos_token_id"])
        return torch.tensor([asked + answer]), torch.tensor([[-100] * len(asked) + answer])

    runs = training_runs.Runs(os.environ["LIGER_TRAIN"], folder, "cpu")
    for name, lines, rows in (
        ("texts", [{"text": text} for text in TEXTS], [(torch.tensor([ids_of(ended(text))]),) * 2 for text in TEXTS]),
        (
            "answers",
            [{"prompt": prompt, "completion": completion} for prompt, completion in PAIRS],
            list(itertools.starmap(parts, PAIRS)),
        ),
    ):
        path = training_runs.write(tmp_path / f"{name}.jsonl", lines)
        out, (line,) = runs("--data", path, "--packing", "none", "--steps", 1, "--lr", 0, "--batch", len(rows))
        with torch.no_grad():
            total = sum(training_runs.nll(plain, *row) for row in rows).item()
        counted = sum(labels[:, 1:].ne(-100).sum().item() for _, labels in rows)
        assert line["tokens"] == len(rows) * max(ids.numel() for ids, _ in rows)
        training_runs.close(f"{what}, {name}", line["loss"], total / counted, 1e-5)
    saved = transformers.AutoTokenizer.from_pretrained(out / "checkpoint-1")
    assert [saved(ended(text))["input_ids"] for text in TEXTS] == [
        tokenizer(ended(text))["input_ids"] for text in TEXTS
    ]
    assert saved.eos_token == end


@pytest.mark.parametrize(
    "file", ["chat_template.jinja", "additional_chat_templates/tools.jinja", "tokenizer_config.json"]
)
def test_chat_templates_are_refused(model, tmp_path, file):
    template = json.dumps({"chat_template": "{{ messages }}"}) if file.endswith("json") else "{{ messages }}"
    folder = tmp_path / "folder"
    config = json.loads((model[0] / "config.json").read_text())
    tokenizer_files.write(folder, {"config": config, "files": {file: template}})
    shutil.copy(model[0] / "model.safetensors", folder)
    runs = training_runs.Runs(os.environ["LIGER_TRAIN"], folder, "cpu")
    path = training_runs.write(tmp_path / "chat.jsonl", [{"messages": [{"role": "user", "content": "one"}]}])
    runs.refused("line 1: the tokenizer has a chat template", "--data", path)
