"""Arguments that cannot work are refused by name, and none of them ends the process: tests/bad_inputs.py says how."""

import os
import subprocess
import sys

import pytest
import torch
from conftest import EMULATED


@pytest.mark.skipif(EMULATED, reason="the checks are the same")
def test_bad_inputs(device):
    folder = os.path.dirname(os.path.abspath(__file__))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, os.path.join(folder, "bad_inputs.py"), device], capture_output=True, text=True, env=environment
    )
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and lines[-1] == "done", (lines[-1:], done.stderr[-2000:])
    assert len(lines) > 1000
    assert not [line for line in lines if "ACCEPTED" in line or "UNNAMED" in line]


REFUSED = [
    (
        "ops.fused_linear_cross_entropy(torch.randn(2, 3), torch.randn(0, 3), None, torch.zeros(2, dtype=torch.long), "
        "None, None, None)",
        "ValueError: fused_linear_cross_entropy: there must be at least one class",
    ),
    (
        "ops.cross_entropy(torch.randn(2, 0), torch.zeros(2, dtype=torch.long), None)",
        "ValueError: cross_entropy: there must be at least one class",
    ),
    (
        "ops.layer_norm_backward(torch.randn(2, 3), torch.randn(2, 3), None, None, torch.ones(2), torch.ones(2), "
        "True, True, True)",
        "RuntimeError: layer_norm_backward: with_dw asks for the gradient of weight",
    ),
    (
        "ops.group_norm_backward(torch.randn(2, 4, 3), torch.randn(2, 4, 3), None, None, "
        "torch.ones(2, 2), torch.ones(2, 2), 2, True, True, True)",
        "RuntimeError: group_norm_backward: with_dw asks for the gradient of weight",
    ),
    (
        "ops.rms_norm_backward(torch.randn(2, 3), torch.randn(2, 3), None, torch.ones(2), 0.0, 0, True, True)",
        "RuntimeError: rms_norm_backward: with_dw asks for the gradient of weight",
    ),
    (
        "ops.rms_norm_backward(torch.randn(200, 3), torch.randn(200, 3), None, torch.ones(2), 0.0, 0, True, False)",
        "RuntimeError: rms_norm_backward: rstd must be 200 numbers of float32",
    ),
    (
        "ops.rms_norm_backward(torch.randn(200, 3), torch.randn(200, 3), None, torch.ones(200).half(), "
        "0.0, 0, True, False)",
        "TypeError: rms_norm_backward: rstd must be 200 numbers of float32",
    ),
    (
        "ops.cross_entropy(torch.randn(2, 3), torch.zeros(2, dtype=torch.long), None, reduction=7)",
        "ValueError: cross_entropy: reduction is 0 (none), 1 (mean) or 2 (sum), not 7",
    ),
    (
        "ops.cross_entropy(torch.randn(2, 3), torch.zeros(2, dtype=torch.long), None, softcap=float('nan'))",
        "ValueError: cross_entropy: softcap must be positive",
    ),
    (
        "ops.rms_norm(torch.randn(2, 3).double(), None, 1e-6, 0.0, 0)",
        "TypeError: rms_norm: x must be a tensor of float32, float16 or bfloat16 on cpu, got [2, 3] of float64",
    ),
]


@pytest.mark.skipif(EMULATED, reason="the checks are the same")
@pytest.mark.parametrize("call,text", REFUSED, ids=[f"{call[4:30]}-{i}" for i, (call, _) in enumerate(REFUSED)])
def test_refused(call, text):
    from liger_kernel._library import ops

    with pytest.raises(Exception) as raised:
        eval(call, {"ops": ops, "torch": torch})
    assert f"{raised.type.__name__}: {raised.value}".startswith(text)
