"""Oumi with `model: {enable_liger_kernel: true}` against the same file without."""

import os
import shutil

os.environ |= {"DO_NOT_TRACK": "1"}

import oumi.core.trainers.oumi_trainer as own_trainer
import oumi.train
import pytest
import yaml
from conftest import conversation, json_lines, unequal, words
from oumi.core.configs import TrainingConfig
from oumi.core.datasets import BaseExperimentalGrpoDataset
from oumi.core.registry import RegistryType, register, register_dataset
from safetensors import safe_open
from snippets import yaml_of
from watched import LAYERS, assert_same, logits_of, watched

SWITCH = yaml_of("Oumi")
TUNERS = {
    "full": dict(training=dict(learning_rate=0.05)),
    "LoRA": dict(
        training=dict(learning_rate=0.2, use_peft=True),
        peft=dict(lora_r=4, lora_alpha=8, lora_target_modules=["q_proj", "v_proj", "gate_proj", "down_proj"]),
    ),
}
HEAD = "fused_linear_cross_entropy"
COLLATOR = dict(
    collator_name="text_completions_only_with_padding",
    collator_kwargs=dict(response_template="assistant", instruction_template="user"),
)


@pytest.fixture
def roles():
    return "user", "assistant"  # by which the collator tells the answers


@register("unequal", RegistryType.REWARD_FUNCTION)
def reward(completions, **ignored):
    return unequal(completions)


@register_dataset("prompts_of_rows")
class Prompts(BaseExperimentalGrpoDataset):
    default_dataset = "prompts_of_rows"

    def transform(self, sample):
        return {"prompt": sample["prompt"]}


#: trainer -> (its data, what is added to the training's parameters, what runs with the switch on besides the layers)
TRAINERS = {
    "HF": ("text_sft_jsonl", {}, (HEAD,)),
    "TRL_SFT": ("text_sft_jsonl", {}, (HEAD,)),
    # Oumi's own trainer patches the classes of a model that exists already: functions and the head, not the layers.
    "OUMI": ("text_sft_jsonl", {}, ("rope", HEAD)),
    "TRL_DPO": ("text_dpo_jsonl", dict(trainer_kwargs=dict(beta=0.5)), ("log_prob",)),
    "TRL_KTO": ("text_dpo_jsonl", {}, ()),
    "TRL_GRPO": (
        "prompts_of_rows",
        dict(
            reward_functions=["unequal"],
            trainer_kwargs=dict(beta=0.1),
            grpo=dict(max_completion_length=6, num_generations=4, temperature=0.9),
        ),
        ("log_prob",),
    ),
}


def rows(data):
    for i in range(8):
        if data == "text_sft_jsonl":
            yield {"messages": conversation(i)}
        else:
            yield {"prompt": words(i, 4 + i % 3), "chosen": words(20 + i, 5), "rejected": words(40 + i, 3 + i % 4)}


def train(name, home, tuner, liger, folder):
    data, own, _ = TRAINERS[name]
    lines = json_lines(home.parent / "rows.jsonl", rows(data))
    dataset = dict(dataset_name=data, dataset_path=str(lines), split="train")
    training = dict(
        trainer_type=name,
        output_dir=str(folder),
        max_steps=3,
        per_device_train_batch_size=4,
        optimizer="sgd",
        lr_scheduler_type="constant",
        max_grad_norm=1e9,
        logging_steps=1,
        save_steps=0,
        enable_tensorboard=False,
        dataloader_num_workers=0,
        include_performance_metrics=False,
        **own,
    )
    tuning = TUNERS[tuner]
    config = dict(
        model=dict(
            model_name=str(home),
            torch_dtype_str="float32",
            device_map="cpu",
            model_max_length=48,
            attn_implementation="eager",
            **(SWITCH["model"] if liger else {}),
        ),
        data=dict(train=dict(datasets=[dataset], **(COLLATOR if data == "text_sft_jsonl" else {}))),
        training=training | tuning["training"],
        **{key: value for key, value in tuning.items() if key != "training"},
    )
    if name != "OUMI":
        training.setdefault("trainer_kwargs", {})
        config["training"]["trainer_kwargs"] = {**training["trainer_kwargs"], "use_cpu": True}
    path = folder.parent / f"config-{liger}.yaml"
    path.write_text(yaml.safe_dump(config))

    def run_it(run):
        watch_own_trainer(run)
        loaded = TrainingConfig.from_yaml(str(path))
        loaded.finalize_and_validate()
        oumi.train.train(loaded)

    return watched(run_it, liger)


def watch_own_trainer(run):
    """Oumi's own trainer is none of transformers'. A child process changes it, which ends afterwards."""
    cls = own_trainer.Trainer
    log, train_it = cls.log_metrics, cls.train

    def log_metrics(self, metrics, step):
        run.losses.append(metrics["train/loss"])
        return log(self, metrics, step)

    def train(self, *args, **kwargs):
        train_it(self, *args, **kwargs)
        run.logits = logits_of(self.model)

    cls.log_metrics, cls.train = log_metrics, train


#: What the tool refuses, with the switch on and whatever liger_kernel is installed.
REFUSED = {
    ("TRL_DPO", "LoRA"): "Liger DPO loss is not implemented for PEFT models",  # TRL up to 1.6
    ("TRL_KTO", "full"): "Unrecognized trainer type!",
}


@pytest.mark.parametrize("tuner", TUNERS)
@pytest.mark.parametrize("name", [name for name in TRAINERS if name != "TRL_KTO"])
def test_training(name, tuner, home, initial, reader, tmp_path, record_property):
    record_property("setup", f"{name}, {tuner}")
    folders = tmp_path / "out-False", tmp_path / "out-True"
    off, on = (train(name, home, tuner, folder is folders[1], folder) for folder in folders)
    if said := REFUSED.get((name, tuner)):
        assert off.error is None and said in on.error and "liger_kernel/" not in on.error
        record_property("result", f"refused: {said}")
        return
    layers = () if name == "OUMI" else LAYERS[tuner]
    record_property("result", assert_same(off, on, initial, (*layers, *TRAINERS[name][2])))
    if name == "OUMI":
        assert not any("rms_norm" in ran or "gated" in ran for ran in on.operators)
        assert len({tuple(sorted(safe_open(folder / "model.safetensors", "pt").keys())) for folder in folders}) == 1
        shutil.copy(home / "config.json", folders[1])  # it saves the weights alone, and an adapter's in its own way
    if (name, tuner) != ("OUMI", "LoRA"):
        reader.assert_holds(folders[1], on, home if tuner == "LoRA" else None)


def test_kto_is_refused(home, tmp_path, record_property):
    error = train("TRL_KTO", home, "full", True, tmp_path / "out").error
    assert REFUSED["TRL_KTO", "full"] in error and "liger_kernel/" not in error
    record_property("setup", "TRL_KTO, full")
    record_property("result", f"refused: {REFUSED['TRL_KTO', 'full']}")
