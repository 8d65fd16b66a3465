"""The gates of gated delta nets and of Mamba-2 are one operator in patched models: the same numbers, and no operator of
torch's beside it."""

import inspect
import linecache

import liger_kernel
import pytest
import torch
import torch.nn.functional as F
from conftest import run
from liger_kernel.transformers.patching import gates
from test_mixers import DELTA, SCANS, assert_same_step, batch, made
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode


class Calls(TorchDispatchMode):
    """Counts the operators that run, forward and backward."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.__name__.split(".")[0])
        return function(*args, **kwargs or {})


def mixers(model):
    return [module for module in model.modules() if hasattr(module, "A_log")]


@pytest.mark.parametrize("kind", DELTA + SCANS[:2])
def test_one_operator(kind):
    model, count = made(kind), len(mixers(made(kind)))
    report = liger_kernel.patch(model)
    with Calls() as calls:
        run(model, **batch())
    assert count and calls.names.count("delta_gates_forward") == calls.names.count("delta_gates_backward") == count
    assert not {"softplus", "softplus_backward"} & set(calls.names)
    assert_same_step(model, made(kind), **batch())
    report.undo()
    with Calls() as calls:
        run(model, **batch())
    assert "delta_gates_forward" not in calls.names and "softplus" in calls.names


@pytest.mark.parametrize("kind", DELTA)
def test_forward_is_the_models_own(kind):
    """But for one line, which tracebacks show, and for the statements that it stands for."""
    model = made(kind)
    plain = inspect.getsource(inspect.unwrap(type(mixers(model)[0]).forward))
    liger_kernel.patch(model)
    forward = type(mixers(model)[0]).forward
    ours = inspect.getsource(inspect.unwrap(forward))
    assert "_liger_gates(self, " in ours and "_liger_gates" not in plain
    assert ours.count(".sigmoid()") == plain.count(".sigmoid()") - 1 and "softplus" not in ours
    code = inspect.unwrap(forward).__code__
    assert "def forward" in linecache.getline(code.co_filename, code.co_firstlineno)
    assert str(inspect.signature(forward)) == str(inspect.signature(type(mixers(made(kind))[0]).forward))


def test_16_bits():
    """Both gates are as near to those of float64 as float32 is, where transformers rounds beta to 16 bits."""
    torch.manual_seed(0)
    a, b = torch.randn(2, 9, 12, dtype=torch.bfloat16), torch.randn(2, 9, 12, dtype=torch.bfloat16)
    net = nn.Module()
    net.A_log, net.dt_bias = nn.Parameter(torch.rand(12).mul(16).log()), nn.Parameter(torch.randn(12))
    g, beta = gates.liger_gates(net, b, a)
    exact = -net.A_log.double().exp() * F.softplus(a.double() + net.dt_bias.double()), b.double().sigmoid()
    assert g.dtype == beta.dtype == torch.float32
    for got, want in zip((g, beta), exact):  # some roundings of float32, of products of three numbers
        assert ((got - want).abs() <= 8 * 2.0**-24 * want.abs()).all()


def test_where_there_is_no_kernel():
    """transformers' own formula: in float64, and where a and b differ in dtype."""
    net = nn.Module()
    net.A_log, net.dt_bias = nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(3))
    a, b = torch.randn(2, 5, 3), torch.randn(2, 5, 3)
    for of_a, of_b in ((a.double(), b.double()), (a, b.bfloat16())):
        g, beta = gates.liger_gates(net, of_b, of_a)
        assert torch.equal(beta, of_b.sigmoid())
        assert torch.equal(g, -net.A_log.exp() * F.softplus(of_a.float() + net.dt_bias))


def test_other_sources_are_left_alone():
    class Negative(nn.Module):
        def forward(self, a, b):
            beta = b.sigmoid()
            a = a * 2
            g = -self.A_log.float().exp() * F.softplus(a.float() + self.dt_bias)
            return g, beta

    class Twice(nn.Module):
        def forward(self, a, b):
            beta = b.sigmoid()
            g = -self.A_log.float().exp() * F.softplus(a.float() + self.dt_bias)
            g = -self.A_log.float().exp() * F.softplus(g.float() + self.dt_bias)
            return g, beta

    class Scaled(nn.Module):
        def forward(self, a, b):
            beta = b.sigmoid()
            g = -self.A_log.float().exp() * F.softplus(a.float() + self.dt_bias) * 2
            return g, beta

    class Plain(nn.Module):
        def forward(self, a, b):
            beta = b.sigmoid()
            g = -self.A_log.float().exp() * F.softplus(a.float() + self.dt_bias)
            return g, beta

    assert [gates.gates_forward(cls) for cls in (Negative, Twice, Scaled)] == [None] * 3
    assert gates.gates_forward(Plain) is not None
