"""Whatever wraps or hooks a projection works in the fused MLPs as it does in the plain one."""

import copy
from types import SimpleNamespace

import pytest
import torch
from liger_kernel.transformers import LigerFalconH1MLP, LigerMLP, LigerTiledGEGLUMLP, LigerTiledSwiGLUMLP
from torch import nn
from torch.nn.modules import module as nn_module
from torch.nn.utils import parametrize

CONFIG = SimpleNamespace(hidden_size=16, intermediate_size=24, mlp_bias=False, mlp_multipliers=(0.5, 2.0))
MLPS = {
    LigerMLP: "silu",
    LigerFalconH1MLP: "silu",
    LigerTiledSwiGLUMLP: "silu",
    LigerTiledGEGLUMLP: "gelu_pytorch_tanh",
}


class Plain(nn.Module):
    """The same MLP, of the same projections, in plain torch."""

    def __init__(self, mlp):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (
            copy.deepcopy(p) for p in (mlp.gate_proj, mlp.up_proj, mlp.down_proj)
        )
        self.gelu = isinstance(mlp, LigerTiledGEGLUMLP)
        self.multipliers = getattr(mlp, "gate_multiplier", 1), getattr(mlp, "down_multiplier", 1)

    def forward(self, x):
        gate = self.gate_proj(x) * self.multipliers[0]
        gate = nn.functional.gelu(gate, approximate="tanh") if self.gelu else nn.functional.silu(gate)
        return self.down_proj(gate * self.up_proj(x)) * self.multipliers[1]


class Triple(nn.Module):
    def forward(self, x):
        return 3 * x


class Scaled(torch.Tensor):
    """A weight with a product of its own, as quantised ones have."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is nn.functional.linear:
            return 3 * nn.functional.linear(args[0], args[1].as_subclass(torch.Tensor), *args[2:])
        return super().__torch_function__(function, types, args, kwargs or {})


def subclassed(p):
    p.weight = nn.Parameter(p.weight.detach().as_subclass(Scaled))


def replaced_forward(p):
    forward = p.forward
    p.forward = lambda x: 3 * forward(x)


def offloaded(p):
    """As accelerate does: the weight is on the meta device except in the module's call."""
    weight, forward = p.weight, p.forward
    p.weight = nn.Parameter(weight.detach().to("meta"))

    def fetching(x):
        kept, p.weight = p.weight, weight
        try:
            return forward(x)
        finally:
            p.weight = kept

    p._old_forward, p.forward = forward, fetching


def only_linear(hook):
    return lambda m, *args: hook(*args) if type(m) is nn.Linear else None


INTERCEPTED = {
    "forward": replaced_forward,
    "offload": offloaded,
    "forward_hook": lambda p: p.register_forward_hook(lambda m, x, y: 3 * y),
    "forward_pre_hook": lambda p: p.register_forward_pre_hook(lambda m, x: (3 * x[0],)),
    "backward_hook": lambda p: p.register_full_backward_hook(lambda m, dx, dy: (3 * dx[0],)),
    "backward_pre_hook": lambda p: p.register_full_backward_pre_hook(lambda m, dy: (3 * dy[0],)),
    "parametrization": lambda p: parametrize.register_parametrization(p, "weight", Triple()),
    "subclass": subclassed,
    "weight_norm": lambda p: nn.utils.weight_norm(p),
}
GLOBAL = {
    "forward_hook": (nn_module.register_module_forward_hook, only_linear(lambda x, y: 3 * y)),
    "forward_pre_hook": (nn_module.register_module_forward_pre_hook, only_linear(lambda x: (3 * x[0],))),
    "backward_hook": (nn_module.register_module_full_backward_hook, only_linear(lambda dx, dy: (3 * dx[0],))),
    "backward_pre_hook": (nn_module.register_module_full_backward_pre_hook, only_linear(lambda dy: (3 * dy[0],))),
}


def made(cls):
    config = SimpleNamespace(**vars(CONFIG), hidden_act=MLPS[cls])
    mlp = cls(config)
    return mlp, Plain(mlp)


def step(mlp, x, dy):
    x = x.clone().requires_grad_()
    y = mlp(x)
    y.backward(dy)
    return y, x.grad, *(p.grad for p in mlp.parameters() if not p.is_meta)


def assert_same(mlp, plain):
    x, dy = torch.randn(2, 37, 16), torch.randn(2, 37, 16)
    for ours, expected in zip(step(mlp, x, dy), step(plain, x, dy), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("which", ["gate_proj", "up_proj", "down_proj"])
@pytest.mark.parametrize("kind", INTERCEPTED)
@pytest.mark.parametrize("cls", MLPS, ids=lambda c: c.__name__)
def test_a_projection_that_is_intercepted(cls, kind, which):
    mlp, plain = made(cls)
    for each in (mlp, plain):
        INTERCEPTED[kind](getattr(each, which))
    assert_same(mlp, plain)


@pytest.mark.parametrize("kind", GLOBAL)
@pytest.mark.parametrize("cls", MLPS, ids=lambda c: c.__name__)
def test_hooks_of_all_modules(cls, kind):
    register, hook = GLOBAL[kind]
    handle = register(hook)
    try:
        assert_same(*made(cls))
    finally:
        handle.remove()


@pytest.mark.parametrize("cls", MLPS, ids=lambda c: c.__name__)
def test_a_projection_that_is_compiled(cls):
    mlp, plain = made(cls)
    called = []
    mlp.up_proj._compiled_call_impl = lambda x: called.append(1) or plain.up_proj(x)  # what Module.compile sets
    x = torch.randn(2, 3, 16)
    torch.testing.assert_close(mlp(x), plain(x), rtol=1e-5, atol=1e-5)
    assert called


@pytest.mark.parametrize("cls", MLPS, ids=lambda c: c.__name__)
def test_plain_projections_are_fused_in_one_graph(cls):
    mlp, plain = made(cls)
    names = []

    def backend(graph, _):
        names.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    x = torch.randn(2, 37, 16)
    torch._dynamo.reset()
    y = torch.compile(mlp, backend=backend, fullgraph=True)(x)
    torch.testing.assert_close(y, plain(x), rtol=1e-5, atol=1e-5)
    assert "liger.gated_mlp.default" in names or "liger.gated_mlp" in names, names
