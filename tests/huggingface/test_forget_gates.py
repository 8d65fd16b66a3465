"""Modules of transformers that make the gates of Kimi delta attention, each against the original; test_mixers.py has
models that hold them."""

import copy
import importlib
import itertools
import pathlib
import re

import pytest
import torch
import transformers
from collect_sources import of_branches
from conftest import Ran, assert_close, assert_rounded_alike
from gate_classes import GATE, GATE_BRANCHES, GATE_CONFIG, WIDTH
from liger_kernel.transformers.patching.apply import ReplacedModule
from liger_kernel.transformers.patching.by_source import swaps_of
from liger_kernel.transformers.patching.families import FORGET_GATE
from liger_kernel.transformers.patching.formulas import find
from liger_kernel.transformers.patching.part import unfit
from liger_kernel.transformers.patching.place import Edits, replace_class
from packaging import version

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
NEWEST = version.parse(transformers.__version__)


def every_gate():
    """The classes of the installed transformers that make such gates."""
    for path in sorted((pathlib.Path(transformers.__file__).parent / "models").glob("*/modeling_*.py")):
        for name in re.findall(r"^class (\w+)\(", path.read_text(), re.M):
            if GATE.search(name):
                yield getattr(importlib.import_module(f"transformers.models.{path.parent.name}.{path.stem}"), name)


GATES = [pytest.param(cls, id=cls.__name__) for cls in every_gate()]
each_gate = pytest.mark.parametrize("cls", GATES)


def pairs(cls):
    """A replaced module and the original, for each branch that the class may take. A_log and dt_bias are as models draw
    them, but for the most negative of dt_bias: of a softplus of less, log(1 + exp(x)) has lost most digits."""
    for original in of_branches(cls, GATE_CONFIG, GATE_BRANCHES):
        torch.manual_seed(0)
        for parameter in original.parameters():
            parameter.data.copy_(torch.randn_like(parameter) / (WIDTH**0.5 if parameter.dim() == 2 else 1))
        original.A_log.data.uniform_(1, 16).log_()
        gate, (swap,) = copy.deepcopy(original), swaps_of(cls, cls.__name__)
        replace_class(gate, ReplacedModule(swap.load(find(cls).targets[0])), Edits())
        yield gate, original


def with_gradients(gate, x):
    """g, the gradients of x and of every parameter, and how many operators ran."""
    gate.zero_grad()
    x = x.clone().requires_grad_()
    with Ran() as ran:
        g = gate(x)
        g.backward(torch.linspace(-1, 1, g.numel()).view(g.shape).to(g.dtype))
    gradients = [x.grad, *(parameter.grad for parameter in gate.parameters())]
    return g.detach(), gradients, (ran.counts["channel_gates_forward"], ran.counts["channel_gates_backward"])


def test_all_are_known():
    classes = [case.values[0] for case in GATES]
    assert len(GATES) >= (3 if NEWEST >= version.parse("5.21") else 0)
    assert {swap for cls in classes for swap in swaps_of(cls, cls.__name__)} <= {FORGET_GATE}
    assert all(find(cls) for cls in classes)


@each_gate
def test_gate(cls):
    """Gates and gradients in float32, and both forms of the gate."""
    forms = set()
    for gate, original in pairs(cls):
        x = torch.randn(2, 7, WIDTH)
        (g, gradients, ran), (expected, theirs, none) = (with_gradients(each, x) for each in (gate, original))
        assert ran == (1, 1) and none == (0, 0) and g.dtype == expected.dtype == torch.float32
        assert_close(g, expected)
        for own, wanted in zip(gradients, theirs, strict=True):
            assert_close(own, wanted)
        forms.add(bool((g > -5.0 - 1e-6).all()))
    assert forms == ({False} if cls.__name__.startswith("Kimi") else {True, False})


@each_gate
def test_every_combination_of_dtypes(cls):
    """Inputs, parameters and autocast: the dtype and the roundings of the original, where it runs. A_log and dt_bias
    stay float32, as models keep them."""
    for (gate, original), of_x, of_weights, autocast in itertools.product(
        pairs(cls), FLOATS, FLOATS, (None, *FLOATS[1:])
    ):
        x = torch.randn(2, 7, WIDTH).to(of_x)
        for module in (gate, original):
            for linear in module.children():
                linear.to(of_weights)
        with torch.autocast("cpu", autocast, enabled=autocast is not None):
            try:
                expected = original(x)
            except RuntimeError:  # a product of two dtypes
                continue
            g = gate(x)
        if expected.dtype == torch.float32:
            assert g.dtype == torch.float32
            assert_close(g, expected)
        else:
            assert_rounded_alike(g, expected, 0.02)


@each_gate
def test_other_dtypes_and_bounds_keep_the_original(cls):
    for gate, original in pairs(cls):
        x = torch.randn(2, 7, WIDTH, dtype=torch.float64)
        assert torch.equal(gate.double()(x), original.double()(x))
        for name in ("lower_bound", "safe_gate_lower_bound"):
            if getattr(original, name, None) is not None and getattr(original, "safe_gate", True):
                setattr(original, name, 0.0)
                setattr(gate, name, 0.0)
                target = FORGET_GATE.load(find(cls).targets[0])
                assert "is not below 0" in unfit(original, target, ())
                assert torch.equal(gate.float()(x.float()), original.float()(x.float()))
