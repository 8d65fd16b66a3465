"""TRL's trainers on tiny data, of the versions that are tested."""

import copy
import importlib

import pytest
import torch
import trl
from conftest import COMMON, words
from datasets import Dataset
from transformers import AutoModelForCausalLM


def rewards(completion_ids, **ignored):
    """Differ within a group and from group to group, whatever was drawn."""
    return [sum(ids[:3]) / 60 + 0.3 * i for i, ids in enumerate(completion_ids)]


def prompts():
    return Dataset.from_list([{"prompt": words(i, 4 + i % 3)} for i in range(8)])


def preferences():
    return Dataset.from_list(
        [
            {
                "prompt": words(i, 4 + i % 3),
                "chosen": " " + words(20 + i, 5),
                "rejected": " " + words(40 + i, 3 + i % 4),
            }
            for i in range(8)
        ]
    )


def completions(**more):
    """Of unequal lengths; `more` are columns, functions of the row's number."""
    return Dataset.from_list(
        [
            {
                "prompt": words(i, 4),
                "completion": " " + words(20 + i, 3 + i % 4),
                **{name: of(i) for name, of in more.items()},
            }
            for i in range(8)
        ]
    )


def contexts():
    """With what the teacher reads beside a prompt."""
    return Dataset.from_list([{"prompt": words(i, 4), "privileged_context": words(60 + i, 3)} for i in range(8)])


def messages():
    return Dataset.from_list(
        [
            {
                "messages": [
                    {"role": "user", "content": words(i, 4)},
                    {"role": "assistant", "content": words(20 + i, 3 + i % 4)},
                ]
            }
            for i in range(8)
        ]
    )


def teacher_of(model):
    """A model that is near a model, or near that of a folder."""
    teacher = AutoModelForCausalLM.from_pretrained(model) if isinstance(model, str) else copy.deepcopy(model)
    with torch.no_grad():
        teacher.lm_head.weight.add_(torch.randn_like(teacher.lm_head.weight), alpha=0.2)
    return teacher


#: kind -> (the names of trainer and configuration, options of the configuration, arguments of the trainer for a model)
KINDS = {
    "sft": ("SFT", {}, lambda model: dict(train_dataset=completions())),
    "dpo": ("DPO", dict(beta=0.5), lambda model: dict(train_dataset=preferences())),
    "kto": ("KTO", dict(beta=0.5), lambda model: dict(train_dataset=completions(label=lambda i: i % 3 > 0))),
    "grpo": (
        "GRPO",
        dict(num_generations=4, max_completion_length=6, beta=0.1, temperature=0.9),
        lambda model: dict(reward_funcs=rewards, train_dataset=prompts()),
    ),
    "rloo": (
        "RLOO",
        # The advantages of a group add up to zero, and so does its loss before the first step.
        dict(num_generations=4, max_completion_length=6, beta=0.1, temperature=0.9, num_iterations=2),
        lambda model: dict(reward_funcs=rewards, train_dataset=prompts()),
    ),
    "distillation": (
        "Distillation",
        dict(max_completion_length=6, temperature=0.9),
        lambda model: dict(teacher_model=teacher_of(model), train_dataset=prompts()),
    ),
    "gkd": (
        "GKD",
        dict(max_new_tokens=6, lmbda=0.0),
        lambda model: dict(teacher_model=teacher_of(model), train_dataset=messages()),
    ),
    "server_distillation": (
        "ServerDistillation",
        dict(max_completion_length=6, temperature=0.9, teacher_model_server_url="http://nowhere"),
        lambda model: dict(train_dataset=prompts()),
    ),
    "sdft": (
        "SDFT",
        dict(num_generations=4, max_completion_length=6, temperature=0.9, distillation_topk=8),
        lambda model: dict(train_dataset=contexts()),
    ),
    "sdpo": (
        "SDPO",
        dict(num_generations=4, max_completion_length=6, temperature=0.9, distillation_mode="topk_logits"),
        lambda model: dict(reward_funcs=rewards, train_dataset=contexts()),
    ),
    "iw_opd": (
        "IWOPD",
        dict(max_completion_length=6, max_length=32, temperature=0.9),
        lambda model: dict(teacher_model=teacher_of(model), train_dataset=messages()),
    ),
}
#: The modules of trl.experimental.
EXPERIMENTAL = ("gkd", "server_distillation", "sdft", "sdpo", "iw_opd")


def trainer_of(kind, model, tokenizer, folder, more={}, **options):
    """A trainer of a model or of a folder's; `more` are arguments of the trainer, `options` of its configuration."""
    name, own, arguments = KINDS[kind]
    home = importlib.import_module(f"trl.experimental.{kind}") if kind in EXPERIMENTAL else trl
    if kind in ("gkd", "iw_opd"):
        end = "{% if message['role'] == 'assistant' %}</s>{% endif %}"
        tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }} " + end + "{% endfor %}"
    config = getattr(home, f"{name}Config")(output_dir=str(folder), **COMMON | own | options)
    return getattr(home, f"{name}Trainer")(
        model=model, processing_class=tokenizer, args=config, **arguments(model), **more
    )


def train(kind, model, tokenizer, folder, watch=lambda trainer: None, **options):
    """(what was logged in each step, how the parameters have changed)."""
    model = copy.deepcopy(model)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    torch.manual_seed(5)
    trainer = trainer_of(kind, model, tokenizer, folder, **options)
    watch(trainer)
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    return steps, {name: p.detach() - before[name] for name, p in model.named_parameters()}


def assert_same_steps(expected, found, keys):
    """Both logged the same under these keys in each step, and have changed every parameter by the same."""
    (expected, expected_change), (found, change) = expected, found
    assert len(found) == len(expected) == COMMON["max_steps"]
    for want, got in zip(expected, found):
        # Rewards and divergences are differences of log-probabilities of sequences, which are rounded.
        largest = max((abs(value) for name, value in want.items() if name.startswith("logps/")), default=0)
        least = max(2e-6, 4 * torch.finfo(torch.float32).eps * largest)
        for name in keys:
            assert got[name] == pytest.approx(want[name], rel=1e-4, abs=least, nan_ok=True), name
    for name, want in expected_change.items():
        size = want.abs().max()
        assert size > 1e-5, f"{name} has not changed"
        assert (want - change[name]).abs().max() <= 1e-3 * size, name
