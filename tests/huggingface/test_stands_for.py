"""What a replaced part stands for is looked at when it runs: its submodules, their hooks, its plain attributes."""

import copy

import test_families
import torch
import transformers
from conftest import TOLERANCE
from liger_kernel.transformers.causal_lm import names_in, original_forward
from liger_kernel.transformers.patching.attention import IMPLEMENTATION
from liger_kernel.transformers.patching.families import FAMILIES
from test_families import switches_of
from tiny import model_of
from torch import nn
from transformers import PreTrainedModel

apply, family, inputs, kind = (getattr(test_families, name) for name in ("apply", "family", "inputs", "kind"))


class Larger(nn.Module):
    """Another module in the place of one: half as much again comes out of it."""

    def __init__(self, module):
        super().__init__()
        self.liger_test_inner = module

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("liger_test_inner"), name)

    def forward(self, *args, **kwargs):
        return larger(self.liger_test_inner(*args, **kwargs))


def larger(result):
    if isinstance(result, tuple):
        return (larger(result[0]), *result[1:])
    return 1.5 * result if isinstance(result, torch.Tensor) and result.is_floating_point() else result


def pair(family, kind, apply):
    reference = model_of(family, kind)
    model = copy.deepcopy(reference)
    apply(model, **switches_of(family, rope=False) if "rope" in FAMILIES[family].switches else switches_of(family))
    return model, reference


def parts_of(model):
    """The name of the first replaced module of each class."""
    found = {}
    for name, module in model.named_modules():
        if "liger_part" in vars(type(module)) and not isinstance(module, PreTrainedModel):
            found.setdefault(type(module), name)
    return list(found.values())


def loss_of(model, inputs):
    torch.manual_seed(0)
    return test_families._loss(model(**inputs)).detach()


def assert_same_loss(model, reference, inputs, what):
    """Both give the same loss, or the reference refuses the change."""
    try:
        expected = loss_of(reference, inputs)
    except Exception:  # what the original raises, whatever it is: there is nothing to compare with
        return False
    found = loss_of(model, inputs)
    assert abs(found - expected) <= 4 * TOLERANCE * max(1, abs(expected)) or found.isnan() and expected.isnan(), (
        f"{what}: {found}, and {expected} unpatched"
    )
    return True


def test_submodules(family, kind, apply, inputs):
    """A hook on any submodule of any replaced module, and another module in its place, change what they change in the
    unpatched model."""
    model, reference = pair(family, kind, apply)
    usual, tried, differing = loss_of(reference, inputs), 0, 0
    for path in parts_of(model):
        for name, child in list(model.get_submodule(path).named_children()):
            handles = [
                m.get_submodule(path).get_submodule(name).register_forward_hook(lambda m, a, result: larger(result))
                for m in (model, reference)
            ]
            tried += assert_same_loss(model, reference, inputs, f"hook on {path}.{name}")
            for handle in handles:
                handle.remove()
            if child.__class__ is nn.ModuleList:
                continue
            owners = [m.get_submodule(path) for m in (model, reference)]
            before = [getattr(owner, name) for owner in owners]
            for owner, module in zip(owners, before):
                owner._modules[name] = Larger(module)
            if assert_same_loss(model, reference, inputs, f"another module as {path}.{name}"):
                differing += bool(loss_of(reference, inputs) != usual)
            for owner, module in zip(owners, before):
                owner._modules[name] = module
    assert tried == 0 or differing > 0


def test_plain_attributes(family, kind, apply, inputs):
    """Each number that the original forward of a replaced class reads, set on a patched module, has the effect that it
    has on an unpatched one."""
    model, reference = pair(family, kind, apply)
    differing, usual = 0, loss_of(reference, inputs)
    for path in parts_of(model):
        owners = [m.get_submodule(path) for m in (model, reference)]
        cls = type(owners[1])
        read = names_in(original_forward(cls)).union(
            *(names_in(method) for method in vars(cls).values() if callable(method))
        )
        for name in sorted(read & vars(owners[1]).keys()):
            value = getattr(owners[1], name)
            if name == "training" or type(value) not in (int, float, bool):
                continue
            # transformers 4 writes a causal mask out whatever this says; a patched model needs none.
            if name == "is_causal" and transformers.__version__.startswith("4."):
                continue
            # Eager attention takes the window from the mask, flash attention from the module.
            if name == "sliding_window" and model.config._attn_implementation == IMPLEMENTATION:
                continue
            other = (not value) if type(value) is bool else value * 1.5 if type(value) is float else max(1, value - 1)
            before = [getattr(owner, name) for owner in owners]
            for owner in owners:
                setattr(owner, name, other)
            if assert_same_loss(model, reference, inputs, f"{path}.{name} = {other}"):
                differing += bool(loss_of(reference, inputs) != usual)
            for owner, old in zip(owners, before):
                setattr(owner, name, old)
    replaced = [reference.get_submodule(path) for path in parts_of(model)]
    assert differing or not any("eps" in name for module in replaced for name in vars(module))
