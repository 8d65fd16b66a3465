"""What a patch, a plan, adapters or an optimizer know of a model dies with it."""

import gc
import weakref

import peft
import pytest
import torch
from conftest import batch, make
from liger_kernel import memory
from liger_kernel.graphs import capture_model, capture_step
from liger_kernel.optim import LigerAdamW
from liger_kernel.transformers import (
    AutoLigerKernelForCausalLM,
    _apply_liger_kernel_to_instance,
    apply_liger_kernel_by_structure,
    monkey_patch,
)

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def patched(model):
    return monkey_patch.apply_liger_kernel_to_llama(model)


def adapters(model):
    return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=ALL))


def undone(model):
    report = patched(model)
    report.undo()
    return report


def planned(model):
    return patched(model), memory.plan(model, batch(), "1GiB").apply()


def with_adapters(model):
    return patched(model), adapters(model)


def over_adapters(model):
    return adapters(model), patched(model)


def optimised(model):
    patched(model)
    optimizer = LigerAdamW(model.parameters(), master_weights=True)
    model(**batch()).loss.backward()
    optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    return optimizer


def stepped(model):
    optimizer = LigerAdamW(model.parameters())
    step = capture_step(model, optimizer, batch())
    step(batch())
    return step


WAYS = {
    "patch": patched,
    "undo": undone,
    "structure": apply_liger_kernel_by_structure,
    "instance": _apply_liger_kernel_to_instance,
    "budget": lambda model: _apply_liger_kernel_to_instance(model, memory_budget="1GiB"),
    "graphs": capture_model,
    "step": stepped,
    "recompute": lambda model: (patched(model), memory.recompute(model)),
    "keep": lambda model: (patched(model), memory.keep(model, "cheap")),
    "plan": planned,
    "adapters later": with_adapters,
    "adapters first": over_adapters,
    "optimizer": optimised,
}


def watched(model, *others):
    """Weak references to the modules, the gradients and what else can be referred to."""
    found = [*model.modules(), *(p.grad for p in model.parameters() if p.grad is not None)]
    for other in others:
        found += other if isinstance(other, tuple) else (other,)
    return [weakref.ref(o) for o in found]


@pytest.fixture(autouse=True, scope="module")
def only_what_is_new():
    """What is there before these tests, the objects of imported packages, is not gone through by each collection."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.parametrize("way", WAYS)
def test_a_model_is_collected(way):
    def use():
        model = make("llama")
        result = WAYS[way](model)
        model(**batch()).loss.backward()
        return watched(model, result)

    references = use()
    gc.collect()
    assert len(references) > 30 and not any(reference() for reference in references)


def test_a_model_that_was_loaded_is_collected(tmp_path):
    make("llama").save_pretrained(tmp_path)

    def use():
        model = AutoLigerKernelForCausalLM.from_pretrained(tmp_path)
        adapters(model)(**batch()).loss.backward()
        return watched(model)

    references = use()
    gc.collect()
    assert not any(reference() for reference in references)


def test_no_round_adds_to_memory():
    """After the first rounds, in which caches by class are filled, there are no more tensors than before."""

    def round_():
        for use in (with_adapters, planned, optimised):
            model = make("llama", num_hidden_layers=1)
            use(model)
            model(**batch()).loss.backward()
        del model
        gc.collect()
        return sum(isinstance(o, torch.Tensor) for o in gc.get_objects())

    counts = [round_() for _ in range(6)]
    assert counts[-1] == counts[2], counts
