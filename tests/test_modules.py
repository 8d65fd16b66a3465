"""Modules, Function classes and their helper functions, against plain torch."""

import copy
import itertools
import pickle
import types
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from liger_kernel import ops
from liger_kernel.ops import fused_linear_cross_entropy as flce
from liger_kernel.ops import llama4_rope
from liger_kernel.ops.swiglu import (
    LigerFusedGateUpSiLUMulFunction,
    swiglu_fused_gate_up_backward,
    swiglu_fused_gate_up_forward,
)
from liger_kernel.transformers import (
    functional,
    fused_add_rms_norm,
    geglu,
    layer_norm,
    mlp,
    modulated_rms_norm,
    relu_squared,
    rms_norm,
    swiglu,
    tiled_mlp,
)
from liger_kernel.transformers.cross_entropy import LigerCrossEntropyLoss
from liger_kernel.transformers.experimental import LigerEmbedding
from liger_kernel.transformers.functional import CrossEntropyOutput
from liger_kernel.transformers.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyLoss
from liger_kernel.transformers.llama4_rope import liger_llama4_text_rotary_pos_emb, liger_llama4_vision_rotary_pos_emb
from liger_kernel.transformers.qwen2vl_mrope import liger_multimodal_rotary_pos_emb
from liger_kernel.transformers.rope import liger_rotary_pos_emb_vision

CONFIG = SimpleNamespace(
    hidden_size=16, intermediate_size=24, hidden_act="silu", mlp_bias=False, mlp_multipliers=(0.5, 2.0)
)
close = torch.testing.assert_close  # float: 1.3e-6 of the value, 1e-5


def glu(act):
    return lambda m, x: m.down_proj(act(m.gate_proj(x)) * m.up_proj(x))


MLPS = {
    swiglu.LigerSwiGLUMLP: glu(F.silu),
    swiglu.LigerQwen3MoeSwiGLUMLP: glu(F.silu),
    swiglu.LigerHunyuanV1SwiGLUMLP: glu(F.silu),
    geglu.LigerGEGLUMLP: glu(lambda x: F.gelu(x, approximate="tanh")),
    tiled_mlp.LigerTiledGEGLUMLP: glu(lambda x: F.gelu(x, approximate="tanh")),
    swiglu.LigerFalconH1SwiGLUMLP: lambda m, x: m.down_proj(F.silu(m.gate_proj(x) * 0.5) * m.up_proj(x)) * 2,
    mlp.LigerMLP: glu(F.silu),
    mlp.LigerFalconH1MLP: lambda m, x: m.down_proj(F.silu(m.gate_proj(x) * 0.5) * m.up_proj(x)) * 2,
    tiled_mlp.LigerTiledSwiGLUMLP: glu(F.silu),
    swiglu.LigerBlockSparseTop2MLP: lambda m, x: m.w2(F.silu(m.w1(x)) * m.w3(x)),
    swiglu.LigerPhi3SwiGLUMLP: lambda m, x: m.down_proj(
        F.silu(m.gate_up_proj(x)[..., :24]) * m.gate_up_proj(x)[..., 24:]
    ),
}


@pytest.mark.parametrize("cls", MLPS, ids=lambda c: c.__name__)
def test_mlp(cls):
    hidden_act = "gelu_pytorch_tanh" if "GEGLU" in cls.__name__ else "silu"
    m, x = cls(SimpleNamespace(**{**vars(CONFIG), "hidden_act": hidden_act})), torch.randn(2, 3, 16)
    close(m(x), MLPS[cls](m, x))
    for other in (copy.deepcopy(m), pickle.loads(pickle.dumps(m))):
        close(other(x), m(x))


@pytest.mark.parametrize(
    "cls",
    [cls for cls in MLPS if cls.__module__.endswith("operators.mlp") and "Tiled" not in cls.__name__],
    ids=lambda c: c.__name__,
)
def test_the_forward_of_an_mlp_on_another_module(cls):
    """As patches of models that this package does not know bind it."""
    hidden_act = "gelu_pytorch_tanh" if "GEGLU" in cls.__name__ else "silu"
    made = cls(SimpleNamespace(**{**vars(CONFIG), "hidden_act": hidden_act}))
    other = torch.nn.Module()
    vars(other).update(vars(made))
    x = torch.randn(2, 3, 16, requires_grad=True)
    y = types.MethodType(cls.forward, other)(x)
    close(y, MLPS[cls](made, x))
    dy = torch.randn_like(y)
    close(*(torch.autograd.grad(result, x, dy)[0] for result in (y, MLPS[cls](made, x))))


def test_mlp_options():
    assert swiglu.LigerSwiGLUMLP(SimpleNamespace(**{**vars(CONFIG), "mlp_bias": True})).down_proj.bias is not None
    assert swiglu.LigerQwen3MoeSwiGLUMLP(CONFIG, intermediate_size=8).up_proj.out_features == 8
    with pytest.raises(ValueError, match="hidden_act"):
        swiglu.LigerSwiGLUMLP(SimpleNamespace(**{**vars(CONFIG), "hidden_act": "gelu"}))


def llama_norm(x, w, eps):
    f = x.float()
    return w * (f * torch.rsqrt(f.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def gemma_norm(x, w, eps):
    f = x.float()
    return (f * torch.rsqrt(f.square().mean(-1, keepdim=True) + eps) * w.float()).to(x.dtype)


# Where the model that a preset is for rounds, and what its weight is added to.
PRESETS = {
    "": (llama_norm, 0),
    "ForGemma": (gemma_norm, 1),
    "ForGemma2": (gemma_norm, 1),
    "ForGemma3": (gemma_norm, 1),
    "ForOlmo2": (gemma_norm, 0),
    "ForGlm4": (llama_norm, 0),
    "ForQwen3Next": (gemma_norm, 1),
}


@pytest.mark.parametrize("name", PRESETS)
def test_rms_norm(name):
    formula, offset = PRESETS[name]
    m, x = getattr(rms_norm, f"LigerRMSNorm{name}")(16, 0.3), torch.randn(300, 16)
    assert "weight_shape=(16,)" in repr(m) and "eps=0.3" in repr(m)
    close(m(x), F.rms_norm(x, (16,), eps=0.3))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        m, t = m.to(dtype), x.to(dtype)
        m.weight.data.copy_(torch.randn(16))
        expected = formula(
            t, m.weight.float().add(offset).to(dtype) if formula is llama_norm else m.weight.float() + offset, 0.3
        )
        assert (m(t) != expected).float().mean() < (1 if dtype == torch.float32 else 0.01)
        close(m(t).float(), expected.float(), rtol=4 * torch.finfo(dtype).eps, atol=1e-6)
    with torch.device("meta"):
        assert type(m)(16).weight.is_meta


def test_rms_norm_options():
    x = torch.randn(3, 16)
    plain = rms_norm.LigerRMSNorm(16, elementwise_affine=False)
    assert not list(plain.parameters()) and "weight_shape=None" in repr(plain)
    close(plain(x), F.rms_norm(x, (16,), eps=1e-6))
    with pytest.raises(AssertionError, match="init_fn"):
        rms_norm.LigerRMSNorm(16, init_fn="twos")


MIXED = list(itertools.permutations((torch.float32, torch.bfloat16, torch.float16), 2))


@pytest.mark.parametrize("x_dtype, w_dtype", MIXED)
def test_mixed_dtypes(x_dtype, w_dtype):
    """A norm gives its input's dtype, whatever its weight has; sums and products have that of torch's."""
    torch.manual_seed(0)
    x, other = torch.randn(6, 32).to(x_dtype), torch.randn(6, 32).to(w_dtype)
    w, b = (torch.randn(32).to(w_dtype).requires_grad_() for _ in range(2))
    both = torch.promote_types(x_dtype, w_dtype)

    def rms(x, eps=1e-5):
        return x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + eps)

    tolerance = 4 * max(torch.finfo(dtype).eps for dtype in (x_dtype, w_dtype))
    checks = (
        (functional.liger_rms_norm(x, w, 1e-5), rms(x) * w, x_dtype),
        (functional.liger_layer_norm(x, w, b, 1e-5), F.layer_norm(x.double(), (32,), w.double(), b.double()), x_dtype),
        (functional.liger_modulated_rms_norm(x, w, other, eps=1e-5), rms(x) * w * (1 + other), x_dtype),
        (functional.liger_fused_add_rms_norm(x, other, w, 1e-5)[0], rms(x.to(both) + other) * w, both),
        (functional.liger_fused_add_rms_norm(x, other, w, 1e-5)[1], x.double() + other, both),
        (functional.liger_swiglu(x, other), F.silu(x.double()) * other, both),
        (functional.liger_geglu(x, other), F.gelu(x.double(), approximate="tanh") * other, both),
    )
    for i, (result, expected, dtype) in enumerate(checks):
        assert result.dtype == dtype, i
        torch.testing.assert_close(result.double(), expected.double(), rtol=tolerance, atol=tolerance)
    functional.liger_rms_norm(x, w, 1e-5).sum().backward()
    assert w.grad.dtype == w_dtype


def test_norm_modules():
    x, residual = torch.randn(3, 4, 16), torch.randn(3, 4, 16)
    scale, shift = torch.randn(3, 1, 16), torch.randn(3, 1, 16)
    normed = F.rms_norm(x, (16,), eps=1e-6)
    close(
        fused_add_rms_norm.LigerFusedAddRMSNorm(16)(x, residual),
        (F.rms_norm(x + residual, (16,), eps=1e-6), x + residual),
    )
    modulated = modulated_rms_norm.LigerModulatedRMSNorm(16)
    close(modulated(x, scale, shift), normed * (1 + scale) + shift)
    close(modulated(x, scale[:1]), normed * (1 + scale[:1]))
    assert not list(modulated_rms_norm.LigerModulatedRMSNorm(16, elementwise_affine=False).parameters())
    layer = layer_norm.LigerLayerNorm(16, bias=True)
    close(layer(x), F.layer_norm(x, (16,), layer.weight, layer.bias, 1e-6))
    assert (
        layer.bias.abs().sum() > 0 and not layer_norm.LigerLayerNorm(16).bias.any() and "16, eps=1e-06" in repr(layer)
    )
    with pytest.raises(AssertionError):
        layer_norm.LigerLayerNorm(4, init_fn="twos")


def test_norm_helpers():
    """Forward and backward of the norms as functions, without autograd, against torch's gradients."""
    x, r, w, b, dy, ds = (torch.randn(s) for s in ((2, 4, 16), (2, 4, 16), (16,), (16,), (2, 4, 16), (2, 4, 16)))
    scale, shift = torch.randn(2, 1, 16), torch.randn(2, 1, 16)

    def gradients(f, *inputs):
        leaves = [t.clone().requires_grad_() for t in inputs]
        return torch.autograd.grad(f(*leaves), leaves, dy)

    y, rows, mean, rstd, _, _ = ops.layer_norm_forward(x, w, b, 1e-6)
    close(
        ops.layer_norm_backward(dy, rows.view(x.shape), w, b, mean, rstd),
        gradients(lambda x, w, b: F.layer_norm(x, (16,), w, b, 1e-6), x, w, b),
    )
    y, s, rstd, *_, code = ops.fused_add_rms_norm_forward(x, r, w, 1e-6, 0.0, "llama")
    dx, dr, dw = ops.fused_add_rms_norm_backward(dy, ds, s, w, rstd, 0.0, code)
    plain = gradients(lambda x, w: F.rms_norm(x, (16,), w, 1e-6), x + r, w)
    close((dx, dw), (plain[0] + ds, plain[1]))
    assert dx is dr
    y, rstd, *_, code, each = ops.modulated_rms_norm_forward(x, w, scale, shift, 1e-6, 0.0, "llama")
    assert each == 4
    close(
        ops.modulated_rms_norm_backward(dy, x, w, scale, shift, rstd, 0.0, code),
        gradients(lambda x, w, scale, shift: F.rms_norm(x, (16,), w, 1e-6) * (1 + scale) + shift, x, w, scale, shift),
    )


def test_losses():
    logits, hidden, weight, y = (
        torch.randn(6, 9),
        torch.randn(6, 4),
        torch.randn(9, 4),
        torch.tensor([0, 8, -100, 3, 3, 1]),
    )
    close(LigerCrossEntropyLoss(label_smoothing=0.1)(logits, y), F.cross_entropy(logits, y, label_smoothing=0.1))
    close(
        LigerFusedLinearCrossEntropyLoss(reduction="sum")(weight, hidden, y),
        F.cross_entropy(hidden @ weight.T, y, reduction="sum"),
    )
    out = LigerFusedLinearCrossEntropyLoss(return_token_accuracy=True)(weight, hidden, y)
    assert isinstance(out, CrossEntropyOutput) and out.z_loss is None and out.token_accuracy.dim() == 0
    for wrong in (dict(label_smoothing=2), dict(softcap=0)):
        for cls in (LigerCrossEntropyLoss, LigerFusedLinearCrossEntropyLoss):
            with pytest.raises(AssertionError, match=next(iter(wrong))):
                cls(**wrong)


def head_inputs():
    torch.manual_seed(0)
    inputs = [torch.randn(6, 4), torch.randn(9, 4), torch.randn(9)]
    return [t.requires_grad_() for t in inputs], torch.tensor([0, 8, -100, 3, 3, 1])


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_fused_linear_function(reduction, monkeypatch):
    """The Function goes through the module's two helpers, which others replace."""
    (hidden, weight, bias), y = head_inputs()
    calls = []
    forward = flce.fused_linear_cross_entropy_forward
    monkeypatch.setattr(flce, "fused_linear_cross_entropy_forward", lambda *a, **k: calls.append(1) or forward(*a, **k))
    loss, *others = ops.LigerFusedLinearCrossEntropyFunction.apply(
        hidden, weight, y, bias, None, -100, 0.0, 0.0, reduction
    )
    assert calls and others == [None] * 3
    (plain_inputs, _) = head_inputs()
    plain = F.cross_entropy(F.linear(*plain_inputs), y, reduction=reduction)
    close(loss, plain)
    upstream = torch.rand_like(plain)
    loss.backward(upstream)
    plain.backward(upstream)
    for a, b in zip((hidden, weight, bias), plain_inputs):
        close(a.grad, b.grad)


def test_helpers():
    """The forward and backward of each operator as functions, without autograd."""
    x, w, dy = torch.randn(2, 3, 16), torch.randn(16), torch.randn(2, 3, 16)
    leaf, weight = x.clone().requires_grad_(), w.clone().requires_grad_()
    F.rms_norm(leaf, (16,), weight, 1e-6).backward(dy)
    y, rows, rstd, _, _, code = ops.rms_norm_forward(x, w, 1e-6, 0.0, "llama", None)
    dx, dw = ops.rms_norm_backward(dy, rows.view(x.shape), w, rstd, 0.0, code)
    close((dx, dw), (leaf.grad, weight.grad))
    for act, forward, backward in (
        (F.silu, ops.swiglu_forward, ops.swiglu_backward),
        (lambda t: F.gelu(t, approximate="tanh"), ops.geglu_forward, ops.geglu_backward),
    ):
        a, b = torch.randn(2, 3, 16).requires_grad_(), torch.randn(2, 3, 16).requires_grad_()
        plain = act(a) * b
        plain.backward(dy)
        ra, rb, c = forward(a.detach(), b.detach())
        close(c.view(plain.shape), plain)
        close(backward(ra, rb, dy), (a.grad, b.grad))
    q, k = torch.randn(1, 2, 3, 8), torch.randn(1, 1, 3, 8)
    angles = torch.rand(1, 3, 8)
    turned = ops.rope_forward(q, k, angles.cos(), angles.sin())
    close(ops.rope_backward(*turned[:2], *turned[2:]), (q, k))
    logits, labels = torch.randn(4, 7, requires_grad=True), torch.tensor([1, 2, -100, 6])
    loss, z_loss, accuracy, predicted, gradient = ops.cross_entropy_forward(
        logits, labels, None, -100, 0.0, 0.0, "mean", None
    )
    F.cross_entropy(logits, labels).backward()
    assert (z_loss, accuracy, predicted) == (None, None, None)
    close(ops.cross_entropy_backward(gradient, torch.tensor(1.0)), logits.grad)


def test_gate_up_in_place():
    """The gradient is written over the input, with the values of the other path, and only once."""
    y = torch.randn(5, 16)
    kept, dc = y.clone(), torch.randn(5, 8)
    expected = swiglu_fused_gate_up_backward(swiglu_fused_gate_up_forward(y)[0], dc)
    leaf = y.requires_grad_()
    c = LigerFusedGateUpSiLUMulFunction.apply(leaf * 1, True)
    close(c, F.silu(kept[:, :8]) * kept[:, 8:])
    c.backward(dc, retain_graph=True)
    assert torch.equal(leaf.grad, expected)
    with pytest.raises(RuntimeError, match="in_place=True"):
        c.backward(dc)


def test_vision_rope():
    q, k = torch.randn(5, 2, 8).half(), torch.randn(5, 2, 8).half()
    half = torch.rand(5, 4)
    angles = torch.cat((half, half), -1)
    for ours, x in zip(liger_rotary_pos_emb_vision(q, k, angles.cos(), angles.sin()), (q, k)):
        f = x.float()
        plain = f * angles.cos()[:, None] + torch.cat((-f[..., 4:], f[..., :4]), -1) * angles.sin()[:, None]
        assert ours.dtype == torch.half and torch.equal(ours, plain.half())


def test_mlp_of_wrapped_projections():
    """An adapter on a projection is not lost to the fused path."""
    x = torch.randn(2, 3, 16)
    for cls in (mlp.LigerMLP, mlp.LigerFalconH1MLP, tiled_mlp.LigerTiledSwiGLUMLP):
        m = cls(CONFIG)
        before = m(x)
        m.up_proj = torch.nn.Sequential(m.up_proj, torch.nn.Linear(24, 24))
        assert not torch.allclose(m(x), before)
        close(m(x), MLPS[cls](m, x))
    with pytest.raises(ValueError, match="mlp_bias"):
        mlp.LigerFalconH1MLP(SimpleNamespace(**{**vars(CONFIG), "mlp_bias": True}))
    with pytest.raises(ValueError, match="hidden_act"):
        tiled_mlp.LigerTiledGEGLUMLP(CONFIG)


@pytest.mark.parametrize("shards", [None, 1, 3, 100])
@pytest.mark.parametrize("wrapped", [False, True])
def test_tiled_mlp(shards, wrapped):
    """Values and gradients of the whole, also of a frozen parameter's neighbours; gradients reach autograd, not .grad
    alone."""
    m, x = tiled_mlp.LigerTiledSwiGLUMLP(CONFIG, shards), torch.randn(2, 37, 16, requires_grad=True)
    if wrapped:
        m.gate_proj.register_forward_hook(lambda *_: None)
    m.down_proj.weight.requires_grad_(False)
    wanted, dy = [x, m.gate_proj.weight, m.up_proj.weight], torch.randn(2, 37, 16)
    y = m(x)
    close(y, MLPS[type(m)](m, x))
    for ours, plain in zip(torch.autograd.grad(y, wanted, dy), torch.autograd.grad(MLPS[type(m)](m, x), wanted, dy)):
        close(ours, plain, rtol=1e-5, atol=2e-5)
    assert m.up_proj.weight.grad is None
    m.requires_grad_(False)
    (dx,) = torch.autograd.grad(m(x), x, dy)
    close(dx, torch.autograd.grad(MLPS[type(m)](m, x), x, dy)[0], rtol=1e-5, atol=2e-5)


def test_tiled_mlp_memory():
    """What backward keeps does not grow with the sequence: the input alone."""
    m = tiled_mlp.LigerTiledSwiGLUMLP(CONFIG)
    for seq in (16, 640):
        x, kept = torch.randn(1, seq, 16, requires_grad=True), []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            m(x)
        assert sum(t.numel() for t in kept) == x.numel() + sum(p.numel() for p in m.parameters())


def test_apply_tiled_mlp_under_autocast():
    m, x = torch.nn.Linear(16, 16), torch.randn(5, 16, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, plain = ops.apply_tiled_mlp(lambda module, t: module(t), m, x, 2), m(x)
    assert y.dtype == torch.bfloat16
    close(y, plain)
    for ours, expected in zip(
        torch.autograd.grad(y, [x, m.weight], torch.ones_like(y)),
        torch.autograd.grad(plain, [x, m.weight], torch.ones_like(y)),
    ):
        assert ours.dtype == torch.float32
        close(ours, expected, rtol=1e-2, atol=1e-2)


def test_recomputed_mlp_under_autocast():
    m, x = mlp.LigerMLP(CONFIG), torch.randn(5, 16, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, plain = m(x), MLPS[mlp.LigerMLP](m, x)
    assert y.dtype == torch.bfloat16
    close(y, plain)
    y.backward(torch.ones_like(y))
    assert x.grad.dtype == m.up_proj.weight.grad.dtype == torch.float32


@pytest.mark.parametrize("padding", [None, 0, -1])
def test_embedding(padding):
    ours, plain, ids = (
        LigerEmbedding(7, 12, padding),
        torch.nn.Embedding(7, 12, padding),
        torch.tensor([[6, 0, 3], [3, 3, 0]], dtype=torch.int32),
    )
    assert padding is None or not ours.weight[padding].any()
    plain.weight.data.copy_(ours.weight)
    close(ours(ids), plain(ids))
    ours(ids).square().sum().backward(), plain(ids).square().sum().backward()
    close(ours.weight.grad, plain.weight.grad)


def test_relu_squared():
    x, dy = torch.randn(2, 3, 16, requires_grad=True), torch.randn(2, 3, 16)
    F.relu(x).square().backward(dy)
    close(relu_squared.LigerReLUSquared()(x), F.relu(x).square())
    close(ops.relu_squared_forward(x.detach()), F.relu(x).square())
    close(ops.relu_squared_backward(x.detach(), dy), x.grad)
    odd = torch.tensor([float("nan"), float("inf"), -float("inf")])
    close(ops.relu_squared_forward(odd), F.relu(odd).square(), equal_nan=True)


@pytest.mark.parametrize("batch", [None, 1, 2])
def test_llama4_rope(batch):
    """Hugging Face's complex product; rows of freqs_cis beyond the sequence are not used."""
    q, k = torch.randn(2, 5, 4, 8).bfloat16(), torch.randn(2, 5, 2, 8).bfloat16()
    angles = torch.rand(*(() if batch is None else (batch,)), 7 if batch is None else 5, 4)
    freqs = torch.polar(torch.ones_like(angles), angles)

    def plain(x):
        return (
            torch.view_as_real(torch.view_as_complex(x.float().unflatten(-1, (4, 2))) * freqs[..., :5, None, :])
            .flatten(-2)
            .to(x.dtype)
        )

    for function in (liger_llama4_text_rotary_pos_emb, lambda *t: llama4_rope.LigerLlama4RopeFunction.apply(*t, 64)):
        for ours, x in zip(function(q, k, freqs), (q, k)):
            assert ours.shape == x.shape and ours.is_contiguous()
            close(ours, plain(x))
    if batch != 2:
        vision = freqs[..., :5, :].reshape(5, 1, 4)
        close(liger_llama4_vision_rotary_pos_emb(q, k, vision), (plain(q), plain(k)))
    back = llama4_rope.llama4_rope_forward(
        *liger_llama4_text_rotary_pos_emb(q.float(), k.float(), freqs), freqs, imag_sign=-1.0
    )
    close(back, (q.float(), k.float()))


def test_mrope_helpers():
    q, k, angles = torch.randn(1, 2, 3, 16), torch.randn(1, 1, 3, 16), torch.rand(3, 1, 3, 16)
    turned = ops.qwen2vl_mrope_forward(q, k, angles.cos(), angles.sin(), [2, 3, 3])
    close(turned[:2], liger_multimodal_rotary_pos_emb(q, k, angles.cos(), angles.sin(), [2, 3, 3]))
    close(ops.qwen2vl_mrope_backward(*turned, [2, 3, 3]), (q, k))


def test_autocast():
    """GEMMs in the autocast dtype, gradients in the parameters'."""
    (hidden, weight, _), y = head_inputs()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = LigerFusedLinearCrossEntropyLoss()(weight, hidden, y)
    loss.backward()
    exact = F.cross_entropy(hidden @ weight.T, y)
    assert loss.dtype == hidden.grad.dtype == weight.grad.dtype == torch.float32
    assert 0 < (loss - exact).abs() < 2e-2 * exact  # bfloat16's 2^-8 an operand, and no float GEMM in its place
