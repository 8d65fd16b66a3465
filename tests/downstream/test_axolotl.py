"""Axolotl with its Liger plugin against the same file without."""

import os

os.environ |= {"AXOLOTL_DO_NOT_TRACK": "1"}

import axolotl.common.datasets  # noqa: F401 it imports late, and a child process should not
import axolotl.train  # noqa: F401
import pytest
import yaml
from axolotl.cli.train import do_cli
from conftest import json_lines, unequal, words
from snippets import yaml_of
from watched import LAYERS, assert_same, watched

FULL = dict(learning_rate=0.05)
LORA = dict(adapter="lora", lora_r=4, lora_alpha=8, lora_dropout=0.0, lora_target_linear=True, learning_rate=0.2)
# Its own LoRA kernels are on by default, and for CUDA.
LORA |= dict(lora_mlp_kernel=False, lora_qkv_kernel=False, lora_o_kernel=False)
TUNERS = {"full": FULL, "LoRA": LORA, "QLoRA": LORA | dict(adapter="qlora", load_in_4bit=True)}
PLUGIN = yaml_of("Axolotl")


def reward(completions, **ignored):
    return unequal(completions)


def as_prompt(cfg, *args, **kwargs):
    return lambda row, **ignored: {"prompt": row["instruction"]}


#: kind -> (what is added to a file, what switches liger on, the operator of its loss)
KINDS = {
    "SFT": (dict(datasets=[dict(type="alpaca")]), PLUGIN, "fused_linear_cross_entropy"),
    "SFT, packed": (
        dict(datasets=[dict(type="alpaca")], sample_packing=True, sequence_len=128, micro_batch_size=1),
        PLUGIN,
        "fused_linear_cross_entropy",
    ),
    "SFT, liger_cross_entropy": (
        dict(datasets=[dict(type="alpaca")]),
        {**PLUGIN, "liger_fused_linear_cross_entropy": None, "liger_cross_entropy": True},
        "cross_entropy",
    ),
    "DPO": (
        dict(rl="dpo", rl_beta=0.5, datasets=[dict(type="chatml.intel", split="train")]),
        yaml_of("Axolotl", 1),
        "log_prob",
    ),
    "KTO": (
        dict(rl="kto", rl_beta=0.5, remove_unused_columns=False, datasets=[dict(type="chatml.argilla", split="train")]),
        {**PLUGIN, "liger_fused_linear_cross_entropy": None},
        "",
    ),
    "GRPO": (
        dict(
            rl="grpo",
            datasets=[dict(type="test_axolotl.as_prompt", split="train")],
            trl=dict(
                beta=0.1,
                max_completion_length=6,
                num_generations=4,
                temperature=0.9,
                reward_funcs=["test_axolotl.reward"],
            ),
        ),
        yaml_of("Axolotl", 2),
        "log_prob",
    ),
}


def rows():
    """With the columns of every kind."""
    for i in range(24):
        question, answer = words(i, 4 + i % 3), words(20 + i, 5 + i % 4)
        asked = dict(instruction=question, question=question, input="", system="")
        answered = dict(output=answer, completion=answer, label=i % 3 > 0, chosen=answer)
        yield asked | answered | dict(rejected=words(40 + i, 3 + i % 4))


def merged(config, more):
    """`more` over a configuration, through nested tables."""
    both = {key: merged(config[key], value) for key, value in more.items() if isinstance(value, dict) and key in config}
    return {**config, **more, **both}


def train(kind, home, tuner, liger, folder):
    own, switch, _ = KINDS[kind]
    data = json_lines(home.parent / "rows.jsonl", rows())
    file = dict(ds_type="json", path=str(data))
    config = dict(
        base_model=str(home),
        sequence_len=1024,
        dataset_prepared_path=str(folder.parent / "prepared"),
        dataset_num_proc=1,
        val_set_size=0,
        output_dir=str(folder),
        micro_batch_size=4,
        gradient_accumulation_steps=1,
        max_steps=3,
        num_epochs=1,
        optimizer="sgd",
        lr_scheduler="constant",
        max_grad_norm=1e9,
        weight_decay=0.0,
        logging_steps=1,
        use_cpu=True,
        bf16=False,
        fp16=False,
        tf32=False,
        seed=3,
        attn_implementation="eager",
        gradient_checkpointing=False,
        special_tokens=dict(pad_token="<pad>"),
        **TUNERS[tuner],
    )
    config |= {**own, "datasets": [{**dataset, **file} for dataset in own["datasets"]]}
    config = merged(config, switch) if liger else config
    path = folder.parent / f"config-{liger}.yaml"
    path.write_text(yaml.safe_dump({key: value for key, value in config.items() if value is not None}))
    return watched(lambda run: do_cli(str(path)), liger)


@pytest.mark.parametrize("tuner", ("full", "LoRA"))
@pytest.mark.parametrize("kind", KINDS)
def test_training(kind, tuner, home, initial, reader, tmp_path, record_property, monkeypatch):
    monkeypatch.setattr("sys.argv", ["axolotl"])
    off, on = (train(kind, home, tuner, liger, tmp_path / f"out-{liger}") for liger in (False, True))
    said = assert_same(off, on, initial, (*LAYERS[tuner], *KINDS[kind][2].split()))
    reader.assert_holds(tmp_path / "out-True", on, home if tuner == "LoRA" else None)
    record_property("setup", f"{kind}, {tuner}")
    record_property("result", said)


def test_in_4_bits(home, initial_in_4_bits, tmp_path, record_property, monkeypatch):
    monkeypatch.setattr("sys.argv", ["axolotl"])
    off, on = (train("SFT", home, "QLoRA", liger, tmp_path / f"out-{liger}") for liger in (False, True))
    record_property("setup", "SFT, QLoRA")
    record_property("result", assert_same(off, on, initial_in_4_bits, (*LAYERS["LoRA"], KINDS["SFT"][2])))
