"""Every MLP class computes the activation that its config names, as transformers has it, or refuses it."""

import copy
from types import SimpleNamespace

import pytest
import torch
from liger_kernel.transformers import LigerXIELU, geglu, mlp, swiglu, tiled_mlp
from liger_kernel.transformers.patching.place import or_original
from transformers.activations import ACT2FN, XIELUActivation

HIDDEN, WIDTH, TOKENS = 16, 24, 7
LIMIT = 2.0  # which products of 16 normal numbers reach
SILU = ["silu", "swish"]
GELU = ["gelu", "gelu_python", "gelu_pytorch_tanh", "gelu_python_tanh", "gelu_new", "gelu_accurate", "gelu_fast"]


def gated(m, x, act):
    return m.down_proj(act(m.gate_proj(x)) * m.up_proj(x))


def scaled(m, x, act):
    return m.down_proj(act(0.5 * m.gate_proj(x)) * m.up_proj(x)) * 2


def packed(m, x, act):
    gate, up = m.gate_up_proj(x).chunk(2, -1)
    return m.down_proj(act(gate) * up)


def clamped(m, x, act):
    gate, up = m.gate_proj(x).clamp(max=LIMIT), m.up_proj(x).clamp(-LIMIT, LIMIT)
    return m.down_proj(act(gate) * up)


def clamped_swish(m, x, act):
    gate, up = m.gate_up_proj(x).chunk(2, -1)
    gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
    return m.down_proj(gate * torch.sigmoid(1.7 * gate) * (up + 1))


def mixture(m, x, act):
    """Each token's one expert, whose weight is 1."""
    one = lambda token, e: (
        m.down_proj[e] @ (act(m.gate_up_proj[e, :WIDTH] @ token) * (m.gate_up_proj[e, WIDTH:] @ token))
    )
    return torch.stack([one(token, i % 2) for i, token in enumerate(x)])


def call(m, x):
    if isinstance(m, swiglu.LigerExperts):
        return m(x, torch.arange(TOKENS)[:, None] % 2, torch.ones(TOKENS, 1))
    return m(x)


#: class -> (the names that it takes, its formula)
MLPS = {
    swiglu.LigerSwiGLUMLP: (SILU, gated),
    swiglu.LigerQwen3MoeSwiGLUMLP: (SILU, gated),
    swiglu.LigerHunyuanV1SwiGLUMLP: (SILU, gated),
    swiglu.LigerSeedOssSwiGLUMLP: (SILU, gated),
    swiglu.LigerFalconH1SwiGLUMLP: (SILU, scaled),
    swiglu.LigerBlockSparseTop2MLP: (SILU, lambda m, x, act: m.w2(act(m.w1(x)) * m.w3(x))),
    swiglu.LigerExperts: (SILU, mixture),
    swiglu.LigerPhi3SwiGLUMLP: (SILU, packed),
    swiglu.LigerClampedSwiGLUMLP: (SILU, clamped),
    swiglu.LigerClampedSwishMLP: (SILU, clamped_swish),
    mlp.LigerMLP: (SILU, gated),
    mlp.LigerFalconH1MLP: (SILU, scaled),
    tiled_mlp.LigerTiledSwiGLUMLP: (SILU, gated),
    tiled_mlp.LigerTiledGEGLUMLP: (GELU, gated),
    geglu.LigerGEGLUMLP: (GELU, gated),
    geglu.LigerGEGLUMLPForGemma4: (GELU, gated),
}


def config(**fields):
    return SimpleNamespace(
        hidden_size=HIDDEN,
        intermediate_size=WIDTH,
        num_experts=2,
        mlp_multipliers=(0.5, 2.0),
        residual_dropout=0,
        swiglu_limit=LIMIT,
        swiglu_alpha=1.7,
        **fields,
    )


@pytest.mark.parametrize("field", ["hidden_act", "hidden_activation"])
@pytest.mark.parametrize("cls", MLPS, ids=lambda c: c.__name__)
def test_activation_of_the_config(cls, field):
    accepted, formula = MLPS[cls]
    for name in accepted:
        m, x = cls(config(**{field: name})), torch.randn(TOKENS, HIDDEN, requires_grad=True)
        for p in m.parameters():
            torch.nn.init.normal_(p)
        y, expected, dy = call(m, x), formula(m, x, ACT2FN[name]), torch.randn(TOKENS, HIDDEN)
        for ours, plain in (
            (y, expected),
            (torch.autograd.grad(y, x, dy)[0], torch.autograd.grad(expected, x, dy)[0]),
        ):  # sums of 16 to 48 products of normal numbers; the tanh and the erf form differ by 2e-4 and more
            torch.testing.assert_close(
                ours, plain, rtol=0, atol=2e-6 * plain.abs().max().item(), msg=lambda m: f"{name}: {m}"
            )


@pytest.mark.parametrize("cls", MLPS, ids=lambda c: c.__name__)
def test_other_activations_are_refused(cls):
    for name in [*ACT2FN, "unknown"]:
        if name not in MLPS[cls][0]:
            with pytest.raises(ValueError, match="hidden_act"):
                cls(config(hidden_act=name))


def test_gemma_configs_name_theirs_in_hidden_activation():
    """Which then goes before hidden_act; without both, GEGLU is that of tanh."""
    x = torch.randn(TOKENS, HIDDEN)
    for cls in (geglu.LigerGEGLUMLP, tiled_mlp.LigerTiledGEGLUMLP):
        for fields, name in (
            (dict(hidden_act="silu", hidden_activation="gelu"), "gelu"),
            (dict(hidden_act="gelu", hidden_activation=None), "gelu"),
            ({}, "gelu_pytorch_tanh"),
        ):
            m = cls(config(**fields))
            torch.testing.assert_close(m(x), gated(m, x, ACT2FN[name]), rtol=1e-6, atol=1e-7)


DTYPES = torch.float32, torch.bfloat16, torch.float16


@pytest.mark.parametrize("of_parameters", DTYPES, ids=str)
@pytest.mark.parametrize("of_input", DTYPES, ids=str)
def test_xielu_as_transformers(of_input, of_parameters):
    """In every combination of dtypes a result and gradients of the original's dtypes, as near to float64 as it is."""
    torch.manual_seed(0)
    module = XIELUActivation(dtype=of_parameters)
    with torch.no_grad():
        module.alpha_p.fill_(0.3), module.alpha_n.fill_(-0.7)
    exact, x, dy = copy.deepcopy(module).double(), torch.randn(64, 32).to(of_input), torch.randn(64, 32)
    results = []
    for forward, m in (
        (or_original(LigerXIELU, XIELUActivation.forward), module),
        (XIELUActivation.forward, module),
        (XIELUActivation.forward, exact),
    ):
        leaf = x.clone().to(torch.float64 if m is exact else of_input).requires_grad_()
        y = forward(m, leaf)
        results.append([y, *torch.autograd.grad(y, (leaf, m.alpha_p, m.alpha_n), dy.to(y.dtype))])
    for ours, theirs, true in zip(*results):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
        errors = [(found.double() - true).square().mean().sqrt() for found in (ours, theirs)]
        # A unit of rounding of the narrower dtype is free: of one number both errors are luck. Of a sum, which may
        # cancel, a unit of the norm of its terms.
        unit = max(torch.finfo(of_input).eps, torch.finfo(of_parameters).eps)
        terms = (dy.double() * x.double().square()).norm() if true.numel() == 1 else 0
        assert errors[0] <= 1.1 * errors[1] + unit * max(true.abs().max(), terms)


def test_xielu_keeps_its_parameters():
    """A checkpoint of transformers' is one of ours."""
    theirs, ours = XIELUActivation(dtype=torch.float32), LigerXIELU()
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(3, 8)
    torch.testing.assert_close(ours(x), theirs(x))
    for name, value in LigerXIELU().state_dict().items():
        torch.testing.assert_close(value, getattr(theirs, name), check_stride=False, rtol=1e-6, atol=1e-7)
