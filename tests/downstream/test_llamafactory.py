"""LLaMA-Factory with `enable_liger_kernel: true` against the same file without."""

import json

import pytest
import yaml
from conftest import words
from llamafactory.train.tuner import run_exp
from snippets import RECIPES, yaml_of
from watched import LAYERS, assert_ran, assert_same, watched

SWITCH = yaml_of("LLaMA-Factory")
FULL = dict(finetuning_type="full", learning_rate=0.05)
LORA = dict(finetuning_type="lora", lora_target="all", lora_rank=4, learning_rate=0.5)
TUNERS = {"full": FULL, "LoRA": LORA}
#: What computes the loss: the fused head, the loss on logits, or LLaMA-Factory itself.
LOSSES = {"pt": "fused_linear_cross_entropy", "sft": "fused_linear_cross_entropy"}


def rows(kind):
    for i in range(8):
        question, answer = words(i, 4 + i % 3), words(20 + i, 5 + i % 4)
        row = {"instruction": question, "input": "", "output": answer}
        if kind == "pt":
            row = {"text": question + " " + answer}
        elif kind == "dpo":
            row = {"instruction": question, "input": "", "chosen": answer, "rejected": words(40 + i, 3 + i % 4)}
        elif kind == "kto":
            row["kto_tag"] = i % 3 > 0
        yield row


COLUMNS = {
    "pt": dict(columns=dict(prompt="text")),
    "sft": {},
    "dpo": dict(ranking=True, columns=dict(prompt="instruction", query="input", chosen="chosen", rejected="rejected")),
    "kto": dict(columns=dict(prompt="instruction", query="input", response="output", kto_tag="kto_tag")),
}


def train(kind, home, tuner, liger, folder, **more):
    data = home.parent / f"data-{kind}"
    data.mkdir(exist_ok=True)
    (data / "rows.json").write_text(json.dumps(list(rows(kind))))
    (data / "dataset_info.json").write_text(json.dumps({"rows": dict(file_name="rows.json", **COLUMNS[kind])}))
    arguments = dict(
        stage=kind,
        do_train=True,
        model_name_or_path=str(home),
        dataset="rows",
        dataset_dir=str(data),
        template="default",
        cutoff_len=48,
        output_dir=str(folder),
        overwrite_cache=True,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=1,
        max_steps=3,
        optim="sgd",
        lr_scheduler_type="constant",
        max_grad_norm=1e9,
        logging_steps=1,
        save_steps=3,
        use_cpu=True,
        flash_attn="disabled",
        report_to="none",
        pref_beta=0.5,
        **TUNERS[tuner],
        **(SWITCH if liger else {}),
        **more,
    )
    return watched(lambda run: run_exp(arguments), liger)


@pytest.mark.parametrize("tuner", TUNERS)
@pytest.mark.parametrize("kind", COLUMNS)
def test_training(kind, tuner, home, initial, reader, tmp_path, record_property):
    off, on = (train(kind, home, tuner, liger, tmp_path / f"out-{liger}") for liger in (False, True))
    said = assert_same(off, on, initial, (*LAYERS[tuner], *LOSSES.get(kind, "").split()))
    folder, base = tmp_path / "out-True", home if tuner == "LoRA" else None
    reader.assert_holds(folder, on, base)
    record_property("setup", f"{kind.upper()}, {tuner}")
    record_property("result", said)


def test_in_4_bits(home, initial_in_4_bits, tmp_path, record_property):
    quantised = dict(quantization_bit=4, quantization_method="bnb")
    off, on = (train("sft", home, "LoRA", liger, tmp_path / f"out-{liger}", **quantised) for liger in (False, True))
    record_property("setup", "SFT, QLoRA")
    record_property("result", assert_same(off, on, initial_in_4_bits, (*LAYERS["LoRA"], LOSSES["sft"])))


def test_recipe(home, tmp_path, record_property):
    """examples/recipes/llamafactory.yaml, on the tiny model and a CPU."""
    (tmp_path / "rows.json").write_text(json.dumps(list(rows("sft"))))
    (tmp_path / "dataset_info.json").write_text(json.dumps({"rows": dict(file_name="rows.json")}))
    small = dict(
        model_name_or_path=str(home), dataset="rows", dataset_dir=str(tmp_path), template="default",
        output_dir=str(tmp_path / "out"), bf16=False, use_cpu=True, max_steps=2, cutoff_len=48, flash_attn="disabled",
        report_to="none", gradient_accumulation_steps=1,
    )  # fmt: skip
    recipe = yaml.safe_load((RECIPES / "llamafactory.yaml").read_text()) | small
    assert_ran(watched(lambda run: run_exp(recipe), True), (*LAYERS["LoRA"], LOSSES["sft"]))
    assert (tmp_path / "out" / "adapter_model.safetensors").exists()
    record_property("setup", "examples/recipes/llamafactory.yaml")
    record_property("result", "runs")
