"""Where the library lacks kernels for a device, a patched model runs its own code: no build for the device, or a
backend that has some of them."""

import copy
import ctypes
import pathlib
import re

import pytest
import torch
from conftest import assert_same_step, batch, make, run
from liger_kernel import _library
from liger_kernel.operators import coverage
from liger_kernel.transformers.rms_norm import LigerRMSNorm
from liger_kernel.transformers.swiglu import LigerSwiGLUMLP


class Slot(ctypes.Structure):
    """liger/core/kernel.h's."""

    _fields_ = [("run", ctypes.c_void_p), ("rank", ctypes.c_int)]


@pytest.fixture
def without(monkeypatch):
    """Empties the CPU's slots of some kernels until the end of the test, as in a build that has none."""
    find = ctypes.CDLL(_library._path())["_ZN5liger11find_kernelEPKc"]
    find.restype = ctypes.POINTER(Slot)
    emptied = []

    def without(*kernels):
        monkeypatch.setattr(coverage, "_covered", set())
        for name in kernels:
            slot = find(name.encode())[0]
            emptied.append((slot, slot.run))
            slot.run = None

    yield without
    for slot, run_ in emptied:
        slot.run = run_


def test_has_kernels(without):
    cpu, has = torch.device("cpu"), torch.ops.liger.has_kernels
    assert has(cpu, []) and has(cpu, ["norm_forward", "rope"])
    without("rope")
    assert has(cpu, []) and has(cpu, ["norm_forward"]) and not has(cpu, ["norm_forward", "rope"])
    assert not has(torch.device("xpu", 0), [])
    with pytest.raises(RuntimeError, match="no kernel nothing"):
        has(cpu, ["nothing"])
    # Names that a build without CUDA has no kernel for: a backend that is plugged in may.
    for name in ("mhc_projection_backward", "grouped_gated", "has_grouped", "grouped_rows", "grouped_outer_products"):
        assert not has(cpu, [name])


def test_a_model_without_some_kernels(without, patched):
    """Made on a device that has all of them, and moved: what lacks kernels there runs the original, the rest ours."""
    reference = make("llama")
    model = copy.deepcopy(reference)
    patched("llama", model, rope=False)
    calls = []
    without("norm_backward", "cross_entropy")
    with pytest.MonkeyPatch.context() as patch:
        for owner in (LigerRMSNorm, LigerSwiGLUMLP):
            patch.setattr(owner, "forward", lambda *a, m=owner.forward, o=owner: calls.append(o) or m(*a))
        output = assert_same_step(model, reference, **batch())
    assert output.logits is not None
    assert LigerSwiGLUMLP in calls and LigerRMSNorm not in calls


def test_a_model_without_kernels(without, patched):
    """All is the original's, to the bit, and the report says why."""
    reference = make("llama")
    model, late = copy.deepcopy(reference), copy.deepcopy(reference)
    patched("llama", late, rope=False)
    headers = (pathlib.Path(__file__).parents[2] / "liger").rglob("*.h")
    text = "".join(header.read_text() for header in headers)
    without(*re.findall(r'constinit Kernel<\w+> \w+\{\s*"(\w+)"\}', text))
    report = patched("llama", model)
    assert not report.replaced and "there are no kernels for torch.float32 on cpu" in str(report)
    expected, gradients = run(reference, **batch())
    for each in (model, late):
        output, ours = run(each, **batch())
        assert torch.equal(output.loss, expected.loss) and torch.equal(output.logits, expected.logits)
        assert all(torch.equal(ours[name], gradient) for name, gradient in gradients.items())
