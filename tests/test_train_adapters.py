"""liger-train's LoRA adapters against PEFT's on plain transformers, both ways through PEFT's files."""

import copy
import dataclasses
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer

pytest.importorskip("transformers")
pytest.importorskip("peft")
from peft import LoraConfig, PeftModel, get_peft_model  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

sys.path.insert(0, str(Path(__file__).parent / "cpp"))
import training_runs  # noqa: E402

pytestmark = pytest.mark.skipif(
    "LIGER_TRAIN" not in os.environ, reason="LIGER_TRAIN names no liger-train: tests/run.sh builds it"
)


class Adapters:
    """liger-train and PEFT on a tiny checkpoint, and rows of tokens for both."""

    batch, passes, steps, seed = 2, 2, 5, 3

    def __init__(self, folder, **fields):
        self.folder = folder
        training_runs.checkpoint(folder, **fields)
        self.runs = training_runs.Runs(os.environ["LIGER_TRAIN"], folder, "cpu")
        torch.manual_seed(1)
        self.ids = torch.randint(1, training_runs.VOCABULARY, (10, 24))
        self.rows = folder / "rows.safetensors"
        save_file({"input_ids": self.ids}, self.rows)

    def base(self, dtype="float32"):
        return AutoModelForCausalLM.from_pretrained(self.folder, dtype=dtype)

    def peft(self, dtype="float32", **fields):
        """A model with an adapter that is not 0."""
        model = get_peft_model(self.base(dtype), LoraConfig(task_type="CAUSAL_LM", **fields)).train()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(0, 0.1)
        return model

    def saved(self, model, path):
        model.save_pretrained(path)
        return path

    def loss(self, model, ids):
        """Their mean, as Trainer computes it: under autocast where the weights have 16 bits."""
        with torch.autocast("cpu", torch.bfloat16, enabled=model.dtype == torch.bfloat16):
            return training_runs.nll(model, ids, ids) / ids[:, 1:].numel()

    def train(self, *options):
        """The folder of the last checkpoint, and the lines of the log."""
        out, lines = self.runs(
            "--data", self.rows, "--eval", self.rows, "--batch", self.batch, "--accumulate", self.passes, "--steps",
            self.steps, "--seed", self.seed, "--lr", 1e-2, "--warmup", 1, "--weight-decay", 0.1, *options,
        )  # fmt: skip
        about = json.loads((out / "log.jsonl").read_text().splitlines()[0])
        return out / f"checkpoint-{self.steps}", lines, about

    def plain_steps(self, model):
        order = torch.cat([torch.randperm(10, generator=torch.Generator().manual_seed(self.seed + e)) for e in (0, 1)])

        def losses(step):
            torch.manual_seed(self.seed + 1 + step)  # liger-train's, of the masks of dropouts
            for part in order[step * 4 :][:4].split(self.batch):
                yield self.loss(model, self.ids[part]) / self.passes

        return list(training_runs.plain_steps(model, losses, self.steps, lr=1e-2, warmup=1, decay=0.1))


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    return Adapters(tmp_path_factory.mktemp("adapters"))


# Of a loss, a mean over many tokens: a rounding of bfloat16, and of float32 what AdamW's first steps make of one, which
# are signs of gradients.
BOUNDS = {"float32": 1e-5, "bfloat16": 2**-8}


def test_adapters_in_cpp_on_a_base_in_eight_bits(adapters, tmp_path):
    """The losses are those of PEFT on weights that are rounded here, in the layers with at least 128 rows."""
    larger = Adapters(tmp_path, hidden_size=128, intermediate_size=256, initializer_range=0.1)
    model = larger.peft(r=4, target_modules="all-linear", lora_alpha=6)
    start = larger.saved(model, tmp_path / "adapter")
    rounded = 0
    for name, module in model.named_modules():
        if name.endswith("base_layer") and len(module.weight) >= 128:
            scale = module.weight.data.abs().amax(1, keepdim=True) / 127
            module.weight.data = (module.weight.data / scale).round() * scale
            rounded += 1
    assert rounded == 10  # of 14: keys and values have 64 rows
    _, lines, _ = larger.train("--adapter", start, "--base", "int8")
    for line, (loss, norm) in zip(lines, larger.plain_steps(model)):
        training_runs.close(f"loss of step {line['step']}", line["loss"], loss, BOUNDS["float32"])
        training_runs.close(f"norm of step {line['step']}", line["gradient_norm"], norm, 10 * BOUNDS["float32"])
    adapters.runs.refused("--base requires --lora-rank or --adapter", "--data", adapters.rows, "--base", "int8")
    adapters.runs.refused(
        "no linear layer has 128 rows", "--data", adapters.rows, "--lora-rank", 2, "--base", "int8", "--steps", 1
    )


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize(
    "fields",
    [
        {"target_modules": "all-linear", "lora_alpha": 6},
        {"target_modules": ["q_proj", "v_proj"], "lora_alpha": 6, "use_rslora": True},
        {"target_modules": "all-linear", "lora_dropout": 0.3},
    ],
    ids=["all layers", "queries and values, rsLoRA", "dropout"],
)
def test_adapters_in_cpp_have_the_losses_of_peft(adapters, tmp_path, dtype, fields):
    """Both begin with an adapter that PEFT saved; PEFT then runs the one that C++ trained."""
    model = adapters.peft(dtype, r=4, **fields)
    start = adapters.saved(model, tmp_path / "adapter")
    checkpointing = ["--gradient-checkpointing"] if "lora_dropout" in fields else []
    trained, lines, about = adapters.train("--adapter", start, "--dtype", dtype, *checkpointing)
    counted, total = model.get_nb_trainable_parameters()
    assert (about["trainable_parameters"], about["parameters"]) == (counted, total)
    with safe_open(trained / "optimizer.safetensors", "pt") as state:  # of the adapters only
        moments = [state.get_tensor(name).numel() for name in state.keys() if name.startswith("mean.")]
        assert sum(moments) == counted and not [name for name in state.keys() if name.startswith("master.")]
    bound = BOUNDS[dtype]
    expected = adapters.plain_steps(model)
    assert abs(expected[0][0] - expected[-1][0]) > 0.02  # it learns
    for line, (loss, norm) in zip(lines, expected):
        training_runs.close(f"loss of step {line['step']}", line["loss"], loss, bound)
        training_runs.close(f"norm of step {line['step']}", line["gradient_norm"], norm, 10 * bound)

    again = PeftModel.from_pretrained(adapters.base(dtype), trained).eval()
    config, before = again.peft_config["default"], model.peft_config["default"]
    for name in ("r", "lora_alpha", "lora_dropout", "use_rslora", "target_modules", "task_type", "peft_type"):
        assert getattr(config, name) == getattr(before, name), name
    assert Path(config.base_model_name_or_path) == adapters.folder
    with torch.no_grad():
        training_runs.close("evaluation", lines[-1]["eval_loss"], adapters.loss(again, adapters.ids).item(), bound)
        base = adapters.loss(adapters.base(dtype), adapters.ids).item()
    assert abs(base - lines[-1]["eval_loss"]) > 0.1  # the adapter says something
    for (name, ours), theirs in zip(again.named_parameters(), model.parameters()):
        if "lora_" in name:
            assert ours.dtype == torch.float32
            assert (ours - theirs).abs().mean() <= 0.1 * 1e-2 * (1 + 10 * (dtype != "float32")), name
        else:
            assert torch.equal(ours, theirs), name


def test_fresh_adapters_begin_as_the_model(adapters):
    """The first step's loss is the model's; PEFT and transformers load what is saved, by the names in it."""
    common = ["--lora-rank", 4, "--lora-alpha", 10, "--no-shuffle"]
    groups = {"all": 7, "attention": 4, "mlp": 3, "q_proj,v_proj": 2, "mlp,o_proj": 4}
    for target, layers in groups.items():
        trained, lines, about = adapters.train(*common, "--lora-target", target)
        with torch.no_grad():
            first = adapters.loss(adapters.base(), adapters.ids[:4]).item()
        training_runs.close(target, lines[0]["loss"], first, 1e-5)
        config = json.loads((trained / "adapter_config.json").read_text())
        assert (config["r"], config["lora_alpha"], len(config["target_modules"])) == (4, 10, layers)
        assert not (trained / "config.json").exists() and (trained / "tokenizer.json").exists()
        again = AutoModelForCausalLM.from_pretrained(trained)  # with PEFT: the base model is named in the config
        assert sum("lora_A" in name for name, _ in again.named_parameters()) == 2 * layers
        numbers = sum(p.numel() for name, p in again.named_parameters() if "lora_" in name)
        assert about["trainable_parameters"] == numbers
        with torch.no_grad():
            evaluated = adapters.loss(again.eval(), adapters.ids).item()
        training_runs.close(target, lines[-1]["eval_loss"], evaluated, 1e-4)


def test_dpo_of_adapters_compares_with_the_beginning(adapters, tmp_path):
    """The reference is the model with the adapter that the run began with."""

    pairs = tmp_path / "pairs.jsonl"
    training_runs.write(pairs, training_runs.PAIRS)
    tokenizer = Tokenizer.from_file(str(adapters.folder / "tokenizer.json"))
    model = adapters.peft(r=4, target_modules="all-linear", lora_dropout=0.0)
    start = adapters.saved(model, tmp_path / "adapter")
    _, lines = adapters.runs(
        "--data", pairs, "--loss", "dpo", "--dpo-beta", 0.3, "--steps", 3, "--batch", 2, "--lr", 1e-2, "--no-shuffle",
        "--length", 64, "--adapter", start,
    )  # fmt: skip
    reference = copy.deepcopy(model)

    def losses(step):
        for pair in training_runs.PAIRS[2 * step : 2 * step + 2]:
            difference = 0
            for sign, which in ((1, "chosen"), (-1, "rejected")):
                ids, labels = training_runs.answer(tokenizer, pair["prompt"], pair[which])
                with torch.no_grad():
                    of_reference = training_runs.nll(reference, ids, labels)
                difference = difference + sign * (of_reference - training_runs.nll(model, ids, labels))
            yield -F.logsigmoid(0.3 * difference) / 2

    for line, (loss, norm) in zip(lines, training_runs.plain_steps(model, losses, 3, 1e-2, 0, 0.0), strict=True):
        training_runs.close(f"DPO loss of step {line['step']}", line["loss"], loss, 1e-3)
        training_runs.close(f"DPO norm of step {line['step']}", line["gradient_norm"], norm, 1e-2)
    # New adapters begin as the model, which they are compared with: −ln σ(0).
    _, (line,) = adapters.runs("--data", pairs, "--loss", "dpo", "--steps", 1, "--length", 64, "--lora-rank", 4)
    training_runs.close("DPO loss of new adapters", line["loss"], math.log(2), 1e-6)


#: Values of PEFT's fields that mean another model; None: any value means the same.
REFUSED = {
    "task_type": "SEQ_CLS", "peft_type": "IA3", "exclude_modules": ["v_proj"], "fan_in_fan_out": True,
    "bias": "lora_only", "modules_to_save": ["lm_head"], "init_lora_weights": "pissa", "layers_to_transform": [0],
    "layers_pattern": "layers", "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"q_proj": 2},
    "megatron_config": {"a": 1}, "trainable_token_indices": [1], "use_dora": True, "velora_config": {"scale": 1},
    "alora_invocation_tokens": [1], "use_qalora": True, "monteclora_config": {"num_samples": 8},
    "layer_replication": [[0, 1]], "lora_bias": True, "target_parameters": ["q_proj.weight"],
    "use_bdlora": {"nblocks": 2}, "arrow_config": {"top_k": 2}, "kasa_config": {"beta": 1},
    "ensure_weight_tying": True,
    # Those that are read, where they say nothing that can be done.
    "r": 0, "lora_alpha": "eight", "lora_dropout": 1.0, "use_rslora": 2, "target_modules": "all-linear",
    "base_model_name_or_path": 3,
    "of_a_later_version": 1,
    **dict.fromkeys(
        "auto_mapping peft_version revision inference_mode megatron_core loftq_config eva_config corda_config "
        "lora_ga_config qalora_group_size runtime_config".split()
    ),
}  # fmt: skip


def test_adapters_that_mean_another_model_are_refused_by_name(adapters, tmp_path):

    fields = {field.name for field in dataclasses.fields(LoraConfig)}
    assert fields - REFUSED.keys() == set() and REFUSED.keys() - fields == {"of_a_later_version"}
    start = adapters.saved(adapters.peft(r=4, target_modules=["q_proj"]), tmp_path / "adapter")
    config = json.loads((start / "adapter_config.json").read_text())

    def said(changes):
        (start / "adapter_config.json").write_text(json.dumps(config | changes))
        out = tmp_path / "out"
        command = adapters.runs.command(out, "--data", adapters.rows, "--steps", 1, "--adapter", start)
        done = subprocess.run(command, capture_output=True, text=True)
        for path in sorted(out.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        return "" if done.returncode == 0 else done.stderr

    assert said({}) == said({"of_a_later_version": None}) == said({"of_a_later_version": []}) == ""
    assert said({name: "other" for name, value in REFUSED.items() if value is None}) == ""
    for name, value in REFUSED.items():
        if value is not None:
            stderr = said({name: value})
            assert re.search(rf"adapter_config\.json: {name}\b", stderr), (name, stderr)
    assert "there is no" in said({"target_modules": ["v_proj"]})
    assert "model.layers.0.self_attn.q_proj" in said({"r": 3})
    assert "nothing is no linear layer of a block" in said({"target_modules": ["q_proj", "nothing"]})
