"""`python -m liger_kernel.env_report`: what it prints, and its exit status."""

import dataclasses
import os
import subprocess
import sys

import pytest
import torch
from liger_kernel import _library, _self_test, env_report
from torch.utils._python_dispatch import TorchDispatchMode


def run(*arguments, **environment):
    command = [sys.executable, "-m", "liger_kernel.env_report", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, timeout=300)


def test_report():
    report = run("--device", "cpu")
    assert report.returncode == 0, report.stdout + report.stderr
    assert f"torch         {torch.__version__}" in report.stdout
    for name in (
        *env_report.PACKAGES,
        "built for  CPU: DEFAULT",
        "CUDA: ",
        "runs on    CPU: ",
        "use_kernels=True",
        _library._path(),
    ):
        assert name in report.stdout
    assert "not known" not in report.stdout
    assert "all operators agree with plain torch" in report.stdout and "FAILED" not in report.stdout


def test_a_library_that_cannot_be_loaded():
    report = run(LIGER_LIBRARY="/nowhere/libliger.so")
    assert report.returncode == 1
    assert (
        "cannot be loaded" in report.stdout
        and "/nowhere/libliger.so" in report.stdout
        and "transformers" in report.stdout
    )


def test_every_operator_is_tested():
    """The checks run the forward kernel of every operator that is registered, and every loss."""
    registered = {
        name.partition(".")[0] for name in torch._C._dispatch_get_all_op_names() if name.startswith("liger::")
    }
    wanted = {name for name in registered if name.endswith(("_forward", "_loss"))}

    class Mode(TorchDispatchMode):
        """Where one looks on, a node calls the functions below autograd through the dispatcher."""

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            return function(*args, **kwargs or {})

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile, Mode():
        for check in _self_test.CHECKS:
            _self_test.error_of(check, "cpu", torch.float32)
    assert len(wanted) > 20 and wanted <= {event.name for event in profile.events()}


@pytest.mark.parametrize("check", _self_test.CHECKS, ids=lambda check: check.operator)
def test_operators_on_this_machine(check, device):
    for dtype in check.dtypes:
        assert _self_test.error_of(check, device, dtype) <= _self_test.TOLERANCES[dtype]


def wrong(check):
    """The check of an operator that is off by a hundredth in float: in its result, in its gradient, and where it is
    NaN; and of one that raises."""

    class OffInBackward(torch.autograd.Function):
        forward = staticmethod(lambda ctx, x: x.clone())
        backward = staticmethod(lambda ctx, g: 1.01 * g)

    def raising(*arguments):
        raise RuntimeError("no kernel image")

    yield dataclasses.replace(check, ours=lambda *a: 1.01 * check.ours(*a)), "off by 0.01"
    yield dataclasses.replace(check, ours=lambda *a: OffInBackward.apply(check.ours(*a))), "off by 0.01"
    yield dataclasses.replace(check, ours=lambda *a: check.ours(*a) * float("nan")), "off by inf"
    yield dataclasses.replace(check, ours=raising), "RuntimeError: no kernel image"


@pytest.mark.parametrize("case", range(4))
def test_a_wrong_operator_is_told(case, monkeypatch, capsys):
    broken, text = list(wrong(_self_test.CHECKS[0]))[case]
    monkeypatch.setattr(
        _self_test, "CHECKS", (dataclasses.replace(broken, dtypes=(torch.float32,)), _self_test.CHECKS[1])
    )
    assert env_report.main(["--device", "cpu"]) == 1
    printed = capsys.readouterr().out
    assert text in printed and printed.count("FAILED") == 2 and "  ok" in printed


def test_the_status_is_zero_where_all_agree(monkeypatch, capsys):
    monkeypatch.setattr(_self_test, "CHECKS", _self_test.CHECKS[:2])
    assert env_report.main(["--device", "cpu"]) == 0


def test_a_transformers_that_cannot_be_imported_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert "transformers" in env_report.hub() and "Error" in env_report.hub()
