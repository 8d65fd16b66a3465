"""Axolotl with its Liger plugin against the same file without."""

import os

os.environ |= {"AXOLOTL_DO_NOT_TRACK": "1"}

import axolotl.common.datasets  # noqa: F401 it imports late, and a child process should not
import axolotl.train  # noqa: F401
import pytest
import torch
import yaml
from axolotl.cli.train import do_cli
from conftest import json_lines, unequal, words
from snippets import RECIPES, yaml_of
from watched import LAYERS, assert_ran, assert_same, watched

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


def test_recipe(home, tmp_path, monkeypatch, record_property):
    """examples/recipes/axolotl.yaml, on the tiny model and a CPU."""
    monkeypatch.setattr("sys.argv", ["axolotl"])
    recipe = yaml.safe_load((RECIPES / "axolotl.yaml").read_text())
    data = json_lines(tmp_path / "rows.jsonl", rows())
    small = dict(
        base_model=str(home), output_dir=str(tmp_path / "out"), dataset_prepared_path=str(tmp_path / "prepared"),
        datasets=[recipe["datasets"][0] | dict(path=str(data), ds_type="json")], special_tokens=dict(pad_token="<pad>"),
        max_steps=2, use_cpu=True, bf16=False, optimizer="sgd", sequence_len=128, attn_implementation="eager",
        dataset_num_proc=1,
    )  # fmt: skip
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe | small))
    assert_ran(watched(lambda run: do_cli(str(path)), True), (*LAYERS["LoRA"], KINDS["SFT"][2]))
    assert (tmp_path / "out" / "adapter_model.safetensors").exists()
    record_property("setup", "examples/recipes/axolotl.yaml")
    record_property("result", "runs")


@pytest.mark.parametrize("normalise", (True, False))
@pytest.mark.parametrize("beta", (0.0, 0.5, 1.0))
def test_distillation_from_the_most_probable_classes(normalise, beta):
    """Its loss on this package's base class, against the call that docs/losses.md names: value and gradients."""
    from axolotl.integrations.kd.kernels.liger import LigerFusedLinearKLTopKLogprobLoss
    from liger_kernel.chunked_loss import LigerFusedLinearTopKDistillationLoss

    g = torch.Generator().manual_seed(5)
    hidden, weight = torch.randn(1, 12, 16, generator=g), torch.randn(50, 16, generator=g) / 2
    logp, ids = torch.randn(1, 12, 50, generator=g).log_softmax(-1).topk(6, -1)
    logp = logp.log_softmax(-1) if normalise else logp
    labels, mask = torch.randint(0, 50, (1, 12), generator=g), torch.ones(1, 12, 6)
    labels[:, :3], mask[:, :3] = -100, 0
    weights = dict(weight_hard_loss=0.3, weight_soft_loss=0.8, beta=beta)
    theirs = LigerFusedLinearKLTopKLogprobLoss(**weights, compiled=False, normalize_topk=normalise)
    ours = LigerFusedLinearTopKDistillationLoss(**weights, tail="renormalise" if normalise else "drop", reduction="sum")
    shifted = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)  # as its loss does
    mask[:, [2, -1]] = 0  # the tokens that predict nothing else
    kept = mask.bool()
    results = []
    for own in (False, True):
        leaves = [t.clone().requires_grad_() for t in (hidden, weight)]
        if own:
            masked = ids.masked_fill(~kept, -1)
            loss = ours(leaves[1], leaves[0], masked, logp, shifted)[0]
        else:
            loss = theirs(leaves[1], leaves[0], ids, logp, mask, labels)
        results.append((loss, *torch.autograd.grad(loss, leaves)))
    for found, expected in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-5 * max(1, expected.abs().max().item()))


def test_trainers_that_were_imported_before_the_patch():
    """Those of TRL 1.14 have the fused head under names of their own."""
    import liger_kernel.trl
    from trl.trainer import dpo_trainer, grpo_trainer, kto_trainer, utils

    places = [m for m in (utils, dpo_trainer, grpo_trainer, kto_trainer) if hasattr(m, "_ChunkedLogProbFunction")]
    before = [place._ChunkedLogProbFunction for place in places]
    report = liger_kernel.trl.patch()
    try:
        assert {place._ChunkedLogProbFunction.liger_original for place in places} == set(before)
    finally:
        report.undo()
    assert [place._ChunkedLogProbFunction for place in places] == before
