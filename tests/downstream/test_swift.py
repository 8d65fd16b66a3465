"""ms-swift with `--use_liger_kernel true` against the same command without."""

import shlex

import pytest
from conftest import conversation, json_lines, unequal, words
from snippets import RECIPES, arguments_of, snippet
from swift import rlhf_main, sft_main
from swift.rewards import ORM, orms
from watched import LAYERS, assert_ran, assert_same, watched

SWITCH = arguments_of("ms-swift")
LORA = ("--tuner_type", "lora", "--target_modules", "all-linear", "--lora_rank", "4", "--learning_rate", "0.1")
FULL = ("--tuner_type", "full", "--learning_rate", "0.05")
TUNERS = {"full": FULL, "LoRA": LORA}
#: Its adapters have a dropout of 0.05, but GKD trains without: each layer is an operator, and so is the product of
#: gate and up.
DROPPED = ("rms_norm", "linear", "gated", "rope")
#: What computes the loss. DPO and KTO have their own, on logits.
LOSSES = {"sft": "fused_linear_cross_entropy", "grpo": "linear_log_prob", "gkd": "linear_distillation"}


class Unequal(ORM):
    def __call__(self, completions, **ignored):
        return unequal(completions)


orms["unequal"] = Unequal


def rows(kind):
    for i in range(8):
        messages = conversation(i)
        if kind == "dpo":
            yield {"messages": messages, "rejected_response": words(40 + i, 3 + i % 4)}
        elif kind == "kto":
            yield {"messages": messages, "label": i % 3 > 0}
        elif kind == "grpo":
            yield {"messages": messages[:1]}
        else:
            yield {"messages": messages}


def command(kind, home, folder, tuner, *more):
    data = json_lines(home.parent / "data.jsonl", rows(kind))
    own = {
        "sft": (),
        "dpo": ("--rlhf_type", "dpo", "--beta", "0.5"),
        "kto": ("--rlhf_type", "kto", "--beta", "0.5"),
        "grpo": (
            *("--rlhf_type", "grpo", "--beta", "0.1", "--num_generations", "4", "--max_completion_length", "6"),
            *("--reward_funcs", "unequal", "--temperature", "0.9"),
        ),
        "gkd": (
            *("--rlhf_type", "gkd", "--teacher_model", str(home.parent / "teacher"), "--teacher_model_type", "llama"),
            *("--lmbda", "0", "--beta", "0.3", "--temperature", "0.9", "--max_completion_length", "6"),
        ),
    }[kind]
    return [
        *("--model", str(home), "--model_type", "llama", "--template", "default", "--dataset", str(data)),
        *("--torch_dtype", "float32", "--use_cpu", "true", "--max_steps", "3", "--per_device_train_batch_size", "4"),
        *("--gradient_accumulation_steps", "1", "--optim", "sgd", "--lr_scheduler_type", "constant"),
        *("--warmup_ratio", "0"),
        *("--logging_steps", "1", "--save_steps", "3", "--output_dir", str(folder), "--add_version", "false"),
        *("--split_dataset_ratio", "0", "--max_length", "64", "--dataloader_num_workers", "0", "--report_to", "none"),
        *("--check_model", "false"),  # asks a hub about the model
        *("--gradient_checkpointing", "false", "--attn_impl", "eager", "--weight_decay", "0", "--max_grad_norm", "1e9"),
        *own, *TUNERS[tuner], *more,
    ]  # fmt: skip


def train(kind, home, tuner, liger, folder, *more):
    main = sft_main if kind == "sft" else rlhf_main
    switch = SWITCH if liger else ()
    return watched(lambda run: main(command(kind, home, folder, tuner, *switch, *more)), liger)


@pytest.mark.parametrize("tuner", TUNERS)
@pytest.mark.parametrize("kind", ("sft", "dpo", "grpo", "gkd"))
def test_training(kind, tuner, home, teacher, initial, reader, tmp_path, record_property):
    off, on = (train(kind, home, tuner, liger, tmp_path / f"out-{liger}") for liger in (False, True))
    layers = DROPPED if tuner == "LoRA" and kind != "gkd" else LAYERS[tuner]
    said = assert_same(off, on, initial, (*layers, *LOSSES.get(kind, "").split()))
    saved = tmp_path / "out-True" / "checkpoint-3"
    reader.assert_holds(saved, on, home if tuner == "LoRA" else None)
    record_property("setup", f"{kind.upper()}, {tuner}")
    record_property("result", said)


def test_in_4_bits(home, initial_in_4_bits, tmp_path, record_property):
    quantised = ("--quant_method", "bnb", "--quant_bits", "4", "--bnb_4bit_compute_dtype", "float32")
    off, on = (train("sft", home, "LoRA", liger, tmp_path / f"out-{liger}", *quantised) for liger in (False, True))
    record_property("setup", "SFT, QLoRA")
    record_property("result", assert_same(off, on, initial_in_4_bits, (*DROPPED, LOSSES["sft"])))


def test_recipe(home, tmp_path, record_property):
    """examples/recipes/ms_swift.sh, on the tiny model and a CPU: later options replace earlier ones."""
    command = shlex.split((RECIPES / "ms_swift.sh").read_text().replace("\\\n", " "), comments=True)
    assert command[:2] == ["swift", "sft"] and command[-1] == "$@"
    data = json_lines(tmp_path / "data.jsonl", rows("sft"))
    small = [
        *("--model", str(home), "--model_type", "llama", "--template", "default", "--dataset", str(data)),
        *("--torch_dtype", "float32", "--use_cpu", "true", "--max_steps", "2", "--gradient_accumulation_steps", "1"),
        *("--output_dir", str(tmp_path / "out"), "--add_version", "false", "--split_dataset_ratio", "0"),
        *("--max_length", "64", "--dataloader_num_workers", "0", "--report_to", "none", "--check_model", "false"),
        *("--attn_impl", "eager"),
    ]
    assert_ran(watched(lambda run: sft_main([*command[2:-1], *small]), True), (*DROPPED, LOSSES["sft"]))
    assert (tmp_path / "out" / "checkpoint-2" / "adapter_model.safetensors").exists()
    record_property("setup", "examples/recipes/ms_swift.sh")
    record_property("result", "runs")


#: ms-swift 4.6 leaves out the constructor of TRL's trainer, which makes the loss that `use_liger_kernel` then calls.
KTO_ERRORS = {"full": "has no attribute 'kto_loss_fn'", "LoRA": "'NoneType' object is not callable"}


@pytest.mark.parametrize("tuner", TUNERS)
def test_kto_fails_with_the_switch_whatever_is_installed(tuner, home, tmp_path, record_property, monkeypatch):
    for patched in (True, False):
        if not patched:
            monkeypatch.setattr("transformers.trainer.apply_liger_kernel", lambda *args: None)
        run = train("kto", home, tuner, True, tmp_path / "out")
        assert bool(run.replaced) == patched and KTO_ERRORS[tuner] in run.error
        assert "liger_kernel/" not in run.error, "a frame of this package"
    record_property("setup", f"KTO, {tuner}")
    record_property("result", "fails in ms-swift, with this package's patches and without")


@pytest.mark.parametrize("tuner", TUNERS)
def test_kto_with_a_plugin(tuner, home, initial, reader, tmp_path, record_property):
    plugin = tmp_path / "patch_llama.py"
    plugin.write_text(snippet("ms-swift", "python"))
    folder = tmp_path / "out"
    off = train("kto", home, tuner, False, folder)
    on = watched(lambda run: rlhf_main(command("kto", home, folder, tuner, "--external_plugins", str(plugin))), True)
    said = assert_same(off, on, initial, LAYERS[tuner])
    reader.assert_holds(folder / "checkpoint-3", on, home if tuner == "LoRA" else None)
    record_property("setup", f"KTO, {tuner}, patched by a plugin")
    record_property("result", said)


@pytest.mark.parametrize("tuner", TUNERS)
@pytest.mark.parametrize("beta", ("0", "0.5"))
def test_gkd_from_the_most_probable_classes(beta, tuner, home, teacher, initial, reader, tmp_path, record_property):
    """`--gkd_logits_topk`, which ms-swift refuses beside its switch, with a plugin."""
    plugin = tmp_path / "patch_gkd.py"
    plugin.write_text(snippet("ms-swift", "python", 1))
    options, folder = ("--gkd_logits_topk", "5", "--beta", beta), tmp_path / "out"
    off = train("gkd", home, tuner, False, folder, *options)
    patched = (*options, "--external_plugins", str(plugin))
    on = watched(lambda run: rlhf_main(command("gkd", home, folder, tuner, *patched)), True)
    assert not on.replaced and off.error is None and on.error is None, (off.error, on.error)
    on.replaced = ["GKDTrainer.compute_loss"]  # whose report is not that of a model
    said = assert_same(off, on, initial, ("class_logits",))
    reader.assert_holds(folder / "checkpoint-3", on, home if tuner == "LoRA" else None)
    record_property("setup", f"GKD of 5 classes, beta {beta}, {tuner}, patched by a plugin")
    record_property("result", said)
