"""What the Python layer accepts, refuses and says: options, widths, tables, derivatives."""

import importlib.util
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from liger_kernel import ops
from liger_kernel.ops import fused_linear_cross_entropy as flce
from liger_kernel.ops.swiglu import LigerFusedGateUpSiLUMulFunction
from liger_kernel.transformers import (
    LigerCrossEntropyLoss,
    LigerFusedLinearCrossEntropyLoss,
    LigerGroupNorm,
    LigerJSD,
    LigerKLDIVLoss,
    LigerTiledSwiGLUMLP,
    LigerTVDLoss,
    liger_multimodal_rotary_pos_emb,
    liger_rotary_pos_emb,
)
from liger_kernel.transformers import functional as LF
from liger_kernel.transformers.experimental import LigerEmbedding

X, W, Y = torch.randn(6, 4), torch.randn(9, 4), torch.tensor([0, 8, -100, 3, 3, 1])
LOGITS = torch.randn(6, 9)


def test_the_function_that_others_derive_from():
    """A real autograd.Function: subclasses override forward and backward and call those of the base."""
    base = ops.LigerFusedLinearCrossEntropyFunction
    assert issubclass(base, torch.autograd.Function)

    class Doubled(base):
        @staticmethod
        def forward(ctx, x, weight, target):
            return base.forward(ctx, x, weight, target)[0] * 2

        @staticmethod
        def backward(ctx, dy):
            return base.backward(ctx, 2 * dy)[:3]

    x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
    loss = Doubled.apply(x, w, Y)
    loss.backward()
    px, pw = X.clone().requires_grad_(), W.clone().requires_grad_()
    plain = 2 * F.cross_entropy(px @ pw.T, Y)
    plain.backward()
    torch.testing.assert_close((loss, x.grad, w.grad), (plain, px.grad, pw.grad))


def test_a_name_that_needs_triton_is_missing_without_it():
    from liger_kernel.ops import utils

    assert hasattr(utils, "torch_to_triton_dtype") == (importlib.util.find_spec("triton") is not None)


# Each with the reductions that it has.
LOSSES = {
    "cross_entropy": (lambda r: LF.liger_cross_entropy(LOGITS, Y, reduction=r), 3),
    "CrossEntropyFunction": (lambda r: ops.LigerCrossEntropyFunction.apply(LOGITS, Y, None, -100, 0.0, 0.0, r), 3),
    "cross_entropy_forward": (lambda r: ops.cross_entropy_forward(LOGITS, Y, None, -100, 0.0, 0.0, r, None), 3),
    "CrossEntropyLoss": (lambda r: LigerCrossEntropyLoss(reduction=r), 3),
    "fused_linear": (lambda r: LF.liger_fused_linear_cross_entropy(X, W, Y, reduction=r), 3),
    "fused_linear_forward": (lambda r: flce.fused_linear_cross_entropy_forward(X, W, Y, reduction=r), 3),
    "FusedLinearFunction": (
        lambda r: ops.LigerFusedLinearCrossEntropyFunction.apply(X, W, Y, None, None, -100, 0.0, 0.0, r),
        3,
    ),
    "FusedLinearLoss": (lambda r: LigerFusedLinearCrossEntropyLoss(reduction=r), 3),
    "kl_div": (lambda r: LF.liger_kl_div(LOGITS.log_softmax(-1), LOGITS.softmax(-1), reduction=r), 4),
    "KLDIVLoss": (lambda r: LigerKLDIVLoss(reduction=r), 4),
    "tvd": (lambda r: LF.liger_tvd(LOGITS.softmax(-1), LOGITS.softmax(-1), reduction=r), 4),
    "TVDLoss": (lambda r: LigerTVDLoss(reduction=r), 4),
}


@pytest.mark.parametrize("name", LOSSES)
def test_reductions(name):
    call, count = LOSSES[name]
    reductions = ("none", "mean", "sum", "batchmean")
    for valid in reductions[:count]:
        call(valid)
    for wrong in ("Mean", "avg", "", None, 1, *reductions[count:]):
        with pytest.raises(ValueError) as error:
            call(wrong)
        assert all(f"'{valid}'" in str(error.value) for valid in reductions[:count]) and str(error.value).endswith(
            f"got {wrong!r}"
        )


@pytest.mark.parametrize("wrong", [None, 1.5, "0"])
def test_ignore_index_is_an_integer(wrong):
    p = LOGITS.softmax(-1)
    for call in (
        lambda i: LF.liger_cross_entropy(LOGITS, Y, ignore_index=i),
        lambda i: LF.liger_fused_linear_cross_entropy(X, W, Y, ignore_index=i),
        lambda i: LigerJSD(ignore_index=i)(p.log(), p.log(), Y),
        lambda i: LigerTVDLoss(ignore_index=i)(p, p, Y),
    ):
        call(-100)
        with pytest.raises(TypeError, match=f"ignore_index must be an integer, got {wrong!r}"):
            call(wrong)


@pytest.mark.parametrize(
    "cls, name", [(LigerCrossEntropyLoss, "weight"), (LigerFusedLinearCrossEntropyLoss, "ce_weight")]
)
def test_class_weights_are_buffers(cls, name):
    """As torch.nn.CrossEntropyLoss has it: .to() moves them, state_dict holds them."""
    weights = torch.rand(9)
    loss, plain = cls(**{name: weights}), torch.nn.CrossEntropyLoss(weight=weights)
    call = (lambda m: m(LOGITS, Y)) if name == "weight" else (lambda m: m(W, X, Y))
    expected = plain(LOGITS if name == "weight" else X @ W.T, Y)
    torch.testing.assert_close(call(loss), expected)
    assert (
        [*loss.state_dict()] == [name]
        and not loss.state_dict(prefix="x.").keys() - {"x." + name}
        and not cls().state_dict()
    )
    other = cls(**{name: torch.ones(9)})
    other.load_state_dict(loss.state_dict())
    torch.testing.assert_close(call(other), expected)
    assert getattr(loss.to("meta"), name).is_meta and getattr(other.half(), name).dtype == torch.half
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(call, backend="eager", fullgraph=True)(cls(**{name: weights})), expected)


def test_widths_of_zero():
    empty, config = torch.randn(2, 3, 0), SimpleNamespace(hidden_size=0, intermediate_size=8, hidden_act="silu")
    assert (
        LF.liger_modulated_rms_norm(empty, torch.randn(0), torch.randn(2, 1, 0), torch.randn(2, 1, 0)).shape
        == empty.shape
    )
    assert (
        ops.modulated_rms_norm_forward(empty, torch.randn(0), empty, None, 1e-6, 0.0, "llama")[0].shape == empty.shape
    )
    with pytest.warns(UserWarning, match="zero-element"):
        mlp = LigerTiledSwiGLUMLP(config)
    assert mlp(empty).shape == empty.shape
    assert ops.apply_tiled_mlp(lambda m, x: m(x), torch.nn.Identity(), empty).shape == empty.shape


def test_options_that_cannot_be():
    for call, error, message in (
        (lambda: LigerGroupNorm(4, 0), AssertionError, "0 groups do not divide 4"),
        (lambda: LigerEmbedding(10, 8, -11), AssertionError, "padding_idx.*10.*-11"),
        (lambda: LigerEmbedding(10, 8, 10), AssertionError, "padding_idx.*10.*10"),
        (
            lambda: ops.apply_tiled_mlp(lambda m, x: m(x), torch.nn.Identity(), torch.randn(4)),
            ValueError,
            "tokens, width",
        ),
    ):
        with pytest.raises(error, match=message):
            call()
    assert not LigerEmbedding(10, 8, -10).weight[0].any()


def rotated(x, cos, sin):
    """x [batch, heads, seq, dim] by an angle for each pair of columns i and i + r/2 of the first r; cos, sin [batch, 1,
    seq, r/2]."""
    half = cos.shape[-1]
    a, b, rest = x.double()[..., :half], x.double()[..., half : 2 * half], x.double()[..., 2 * half :]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1).float()


@pytest.mark.parametrize("function", [liger_rotary_pos_emb, LF.liger_rope, ops.LigerRopeFunction.apply])
@pytest.mark.parametrize("rotary", [8, 4])
@pytest.mark.parametrize("width", ["whole", "half"])
@pytest.mark.parametrize("unsqueeze_dim", [1, 2])
def test_rope_tables_and_layouts(function, rotary, width, unsqueeze_dim):
    q, k, angles = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 3, 8), torch.rand(2, 3, rotary // 2) * 6
    expected = [rotated(x, angles.double().cos()[:, None], angles.double().sin()[:, None]) for x in (q, k)]
    tables = [t if width == "half" else torch.cat((t, t), -1) for t in (angles.cos(), angles.sin())]
    flip = (lambda x: x) if unsqueeze_dim == 1 else (lambda x: x.transpose(1, 2))
    arguments = (flip(q).clone().requires_grad_(), flip(k).clone().requires_grad_(), *tables, None, unsqueeze_dim)
    turned = function(*arguments, rotary)
    for ours, plain in zip(turned, expected):
        torch.testing.assert_close(flip(ours), plain)
    # The gradient is the rotation back: of the rotated the original.
    torch.autograd.backward(turned, [t.detach() for t in turned])
    for leaf in arguments[:2]:
        torch.testing.assert_close(leaf.grad, leaf.detach())
    # Without the number of columns it is the width of the tables, of which the first half counts.
    half = tables[0].shape[-1] // 2
    for ours, x in zip(function(*arguments), (q, k)):
        cos, sin = (t.double()[:, None, :, :half] for t in tables)
        torch.testing.assert_close(flip(ours), rotated(x, cos, sin))


def test_rope_refusals():
    q, cos = torch.randn(1, 2, 3, 8), torch.randn(1, 3, 8)
    with pytest.raises(ValueError, match="rotary_dim, 6, or half as wide, and is 8"):
        liger_rotary_pos_emb(q, q, cos, cos, rotary_dim=6)
    for wrong in (0, 3, -1, None):
        with pytest.raises(ValueError, match=f"unsqueeze_dim must be 1.*got {wrong}"):
            liger_rotary_pos_emb(q, q, cos, cos, unsqueeze_dim=wrong)
    for function in (liger_rotary_pos_emb, ops.rope_forward, ops.rope_backward):
        with pytest.raises(ValueError, match="cos is 8 wide, which is more than a head, 4"):
            function(q[..., :4], q[..., :4], cos, cos)


def test_multimodal_rope_with_heads_last():
    q, k, angles = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 3, 8), torch.rand(3, 2, 3, 8)
    expected = liger_multimodal_rotary_pos_emb(q, k, angles.cos(), angles.sin(), [1, 1, 2])
    turned = liger_multimodal_rotary_pos_emb(
        q.transpose(1, 2), k.transpose(1, 2), angles.cos(), angles.sin(), [1, 1, 2], 2
    )
    for ours, plain in zip(turned, expected):
        assert torch.equal(ours.transpose(1, 2), plain)
    with pytest.raises(ValueError, match="unsqueeze_dim"):
        liger_multimodal_rotary_pos_emb(q, k, angles.cos(), angles.sin(), [1, 1, 2], 3)


def tiled(x, module=torch.nn.Linear(4, 4)):
    return ops.apply_tiled_mlp(lambda m, t: m(t).square(), module, x, 2)


ONCE = {
    "tiled_mlp": tiled,
    "gate_up": lambda x: LigerFusedGateUpSiLUMulFunction.apply(x * 1, True),
    "fused_linear": lambda x: ops.LigerFusedLinearCrossEntropyFunction.apply(x, W.requires_grad_(), Y)[0],
    "fused_linear_single": lambda x: ops.LigerFusedLinearCrossEntropyFunction.apply(
        x, W.requires_grad_(), Y, None, None, -100, 0.0, 0.0, "none"
    )[0],
}


@pytest.mark.parametrize("name", ONCE)
def test_a_second_derivative_is_an_error(name):
    """Also where the upstream gradient is a constant, and where x comes in elsewhere too."""
    f, x = ONCE[name], torch.randn(6, 4, requires_grad=True)
    (plain,) = torch.autograd.grad(f(x).sum(), x)
    (dx,) = torch.autograd.grad(f(x).sum(), x, create_graph=True)
    assert torch.equal(dx, plain)
    for second in (dx.sum(), dx.sum() + x.square().sum()):
        with pytest.raises(RuntimeError, match="no second derivative"):
            torch.autograd.grad(second, x, allow_unused=True, retain_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.functional.hessian(lambda t: f(t).sum(), x.detach())
    scale = torch.ones((), requires_grad=True)
    (dx,) = torch.autograd.grad(f(x).sum() * scale, x, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(dx.sum(), scale)


def test_a_derivative_of_a_tiled_mlps_weight_gradient_is_an_error():
    m, x = torch.nn.Linear(4, 4), torch.randn(6, 4)
    (dw,) = torch.autograd.grad(tiled(x, m).sum(), m.weight, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(dw.sum() + m.weight.sum(), m.weight)


def test_the_empty_handles_keep_no_memory():
    """Only the gradients are kept from forward to backward, not the hidden states."""
    x, kept = torch.randn(6, 4, requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        ONCE["fused_linear"](x)
    assert not any(t.data_ptr() == x.data_ptr() for t in kept)


@pytest.mark.parametrize("name", [*ONCE])
def test_functions_are_traced(name):
    x = torch.randn(6, 4, requires_grad=True)
    expected = torch.autograd.grad(ONCE[name](x).sum(), x)
    torch._dynamo.reset()
    traced = torch.compile(ONCE[name], backend="aot_eager")
    torch.testing.assert_close(torch.autograd.grad(traced(x).sum(), x), expected)
