"""TRL's trainers, transformers' and a loop of Accelerate's with this library's layers, against those without.

The switch is `use_liger_kernel=True`, and where `kernels` fits the installed transformers, `use_kernels=True`.
"""

import peft
import pytest
import torch
from accelerate import Accelerator
from conftest import COMMON, words
from snippets import snippet
from torch.utils.data import DataLoader
from trainers import trainer_of
from transformers import (
    AutoModelForCausalLM,
    DataCollatorForSeq2Seq,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)
from transformers.integrations.hub_kernels import is_kernels_available
from watched import LAYERS, assert_same, logits_of, watched

HEAD = "fused_linear_cross_entropy"
LINEARS = ["q_proj", "v_proj", "gate_proj", "down_proj"]
TUNERS = {
    "full": None,
    "LoRA": dict(target_modules=LINEARS),
    "LoRA, the head in modules_to_save": dict(target_modules=LINEARS, modules_to_save=["lm_head"]),
    "LoRA, also on the head": dict(target_modules=[*LINEARS, "lm_head"]),
}
SWITCHES = ["use_kernels"] if is_kernels_available() else ["use_liger_kernel"]
KINDS = ("sft", "dpo", "kto", "grpo", "rloo", "distillation")


def layers(tuner, switch="use_liger_kernel"):
    """What runs: kernels of a hub stand for modules of transformers, not for PEFT's."""
    return LAYERS["full" if tuner == "full" or switch == "use_kernels" else "LoRA"]


def lora(tuner):
    return TUNERS[tuner] and peft.LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", **TUNERS[tuner])


def typed_for(what):
    """The names that the page's block of code about this defines."""
    places = {"use_liger_kernel": 0, "use_kernels": 2, "a loop": 3}
    exec(snippet("transformers, TRL and Accelerate", "python", places[what]), names := {})
    return names


def options_of(switch, run):
    """(what a configuration takes, what a model is loaded with), with this switch on, or off where there is none."""
    typed = typed_for(switch) if switch else {}
    if "handle" in typed:
        run.handle = typed["handle"]
    return typed.get("options", {}), dict(typed.get("loading", {}), attn_implementation="eager")


def finish(trainer, run, folder):
    trainer.train()
    trainer.save_model(folder)
    if hasattr(run, "handle"):
        run.replaced.append(str(run.handle))
        del run.handle


def check(runs, initial, reader, folder, base, operators, record_property, setup):
    said = assert_same(*runs, initial, operators)
    reader.assert_holds(folder, runs[1], base)
    record_property("setup", setup)
    record_property("result", said)


@pytest.mark.parametrize("tuner", ("full", "LoRA"))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("switch", SWITCHES)
def test_trl(switch, kind, tuner, home, initial, reader, tmp_path, record_property):
    tokenizer = PreTrainedTokenizerFast.from_pretrained(home, padding_side="left")
    folder = tmp_path / "out"

    def train(switch):
        def body(run):
            more = {} if tuner == "full" else dict(peft_config=lora(tuner))
            options, loading = options_of(switch, run)
            options |= dict(model_init_kwargs=loading, learning_rate=0.3 if more else 0.05)
            finish(trainer_of(kind, str(home), tokenizer, folder, more, **options), run, folder)

        return watched(body, bool(switch))

    base = home if tuner == "LoRA" else None
    runs, setup = [train(None), train(switch)], f"{kind.upper()}, {tuner}, `{switch}=True`"
    check(runs, initial, reader, folder, base, layers(tuner, switch), record_property, setup)


def rows():
    ids = torch.tensor([[4 + sum(map(ord, word)) % 56 for word in words(i, 12).split()] for i in range(12)])
    return [dict(input_ids=row[: 8 + i % 5], labels=row[: 8 + i % 5]) for i, row in enumerate(ids.tolist())]


@pytest.mark.parametrize("tuner", TUNERS)
@pytest.mark.parametrize("switch", SWITCHES)
def test_transformers(switch, tuner, home, initial, reader, tmp_path, record_property):
    tokenizer = PreTrainedTokenizerFast.from_pretrained(home)
    folder = tmp_path / "out"

    def train(switch):
        def body(run):
            options, loading = options_of(switch, run)
            model = AutoModelForCausalLM.from_pretrained(home, dtype=torch.float32, **loading)
            if tuner != "full":
                model = peft.get_peft_model(model, lora(tuner))
            arguments = dict(gradient_accumulation_steps=2, per_device_train_batch_size=2, learning_rate=0.2)
            arguments = TrainingArguments(str(folder), **COMMON | arguments | options)
            collate = DataCollatorForSeq2Seq(tokenizer)
            finish(Trainer(model, arguments, train_dataset=rows(), data_collator=collate), run, folder)

        return watched(body, bool(switch))

    base = None if tuner == "full" else home
    # An adapter on the head adds to its logits: they are made, and the loss is the model's own.
    fused = () if tuner == "LoRA, also on the head" else (HEAD,)
    setup = f"transformers' Trainer, {tuner}, `{switch}=True`"
    ran = (*layers(tuner, switch), *fused)
    check([train(None), train(switch)], initial, reader, folder, base, ran, record_property, setup)


@pytest.mark.parametrize("tuner", TUNERS)
def test_accelerate(tuner, home, initial, reader, tmp_path, record_property):
    tokenizer = PreTrainedTokenizerFast.from_pretrained(home)
    folder = tmp_path / "out"

    def train(liger):
        def body(run):
            auto = typed_for("a loop")["AutoModelForCausalLM"] if liger else AutoModelForCausalLM
            torch.manual_seed(3)
            model = auto.from_pretrained(home, dtype=torch.float32).train()
            if tuner != "full":
                model = peft.get_peft_model(model, lora(tuner))
            loader = DataLoader(rows(), batch_size=4, collate_fn=DataCollatorForSeq2Seq(tokenizer))
            accelerator = Accelerator(cpu=True)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
            model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
            for inputs in loader:
                loss = model(**inputs).loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                run.losses.append(loss.item())
            model = accelerator.unwrap_model(model)
            run.logits = logits_of(model)
            model.save_pretrained(folder)

        return watched(body, liger)

    fused = () if tuner == "LoRA, also on the head" else (HEAD,)
    base = None if tuner == "full" else home
    setup = f"a loop of Accelerate's, {tuner}, AutoLigerKernelForCausalLM"
    check([train(False), train(True)], initial, reader, folder, base, (*layers(tuner), *fused), record_property, setup)
