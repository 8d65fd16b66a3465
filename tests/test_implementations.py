"""The names and keywords by which other packages choose an implementation: there is one."""

import inspect
import warnings

import liger_kernel
import pytest
import torch
from liger_kernel.compat import implementations
from liger_kernel.ops import (
    LigerFusedLinearCrossEntropyFunction,
    LigerFusedLinearJSDFunction,
    LigerJSDFunction,
    fused_add_rms_norm_backward,
    fused_add_rms_norm_forward,
    fused_linear_cross_entropy_forward,
    layer_norm_backward,
    layer_norm_forward,
    rms_norm_backward,
    rms_norm_forward,
    rope_backward,
    rope_forward,
)
from liger_kernel.ops.backends import registry
from liger_kernel.transformers import LigerLayerNorm, functional


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(implementations, "_chosen", None)
    monkeypatch.setattr(implementations, "_warned", set())


def test_the_names():
    assert liger_kernel.get_impl() is None and liger_kernel.available_impls("rope") == ["libliger"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        liger_kernel.set_impl("libliger")
    with pytest.warns(liger_kernel.backends.LigerImplFallbackWarning, match="in place of 'triton'"):
        liger_kernel.set_backend("triton")
    assert liger_kernel.get_backend() == "triton"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        liger_kernel.functional.softmax(torch.randn(2, 3), impl="triton")  # warned of once
    with pytest.raises(liger_kernel.backends.NoImplAvailableError, match="no operator 'conv'"):
        liger_kernel.available_backends("conv")


def test_the_registry(monkeypatch):
    """Nothing is in it but what somebody registers."""
    assert liger_kernel.ops.backends.IMPL_REGISTRY is registry.IMPL_REGISTRY and registry.IMPL_REGISTRY == {}
    row = registry.ImplInfo("one", ("cuda", "npu"), ("npu",), "a.b")
    monkeypatch.setitem(registry.IMPL_REGISTRY, "one", None)  # which undoes what register_impl adds
    registry.register_impl(row)
    assert registry.select_impl("cuda") is None
    assert registry.select_impl("npu") is registry.select_impl("cuda", explicit="one") is row


def tensors():
    torch.manual_seed(0)
    x, w, b = torch.randn(6, 8), torch.randn(8), torch.randn(8)
    q, k, cos, sin = torch.randn(2, 3, 5, 8), torch.randn(2, 1, 5, 8), torch.randn(1, 5, 8), torch.randn(1, 5, 8)
    head, labels = torch.randn(11, 8), torch.tensor([1, 2, -100, 4, 0, 10])
    logp, logq = torch.randn(2, 6, 11).log_softmax(-1)
    return {
        "rms_norm": ((x, w), lambda: functional.liger_rms_norm(x, w, 1e-6)),
        "layer_norm": ((x, w, b), lambda: functional.liger_layer_norm(x, w, b, 1e-6)),
        "fused_add_rms_norm": ((x, x, w), lambda: functional.liger_fused_add_rms_norm(x, x, w, 1e-6)),
        "softmax": ((x,), lambda: functional.liger_softmax(x)),
        "swiglu": ((x, x), lambda: functional.liger_swiglu(x, x)),
        "geglu": ((x, x), lambda: functional.liger_geglu(x, x)),
        "rope": ((q, k, cos, sin), lambda: functional.liger_rope(q, k, cos, sin)),
        "cross_entropy": ((x, labels.clamp(max=7)), lambda: functional.liger_cross_entropy(x, labels.clamp(max=7))),
        "kl_div": ((logp, logq.exp()), lambda: functional.liger_kl_div(logp, logq.exp(), reduction="batchmean")),
        "jsd": ((logp, logq), lambda: functional.liger_jsd(logp, logq)),
        "fused_linear_jsd": ((x, head, x, head), lambda: functional.liger_fused_linear_jsd(x, head, x, head)),
        "fused_linear_cross_entropy": (
            (x, head, labels),
            lambda: functional.liger_fused_linear_cross_entropy(x, head, labels),
        ),
    }


@pytest.mark.parametrize("name", implementations.OPERATORS)
def test_functions(name):
    """Each is the operator of the same name, with three keywords more."""
    arguments, expected = tensors()[name]
    function = getattr(liger_kernel.functional, name)
    assert list(inspect.signature(function).parameters)[-3:] == ["impl", "mode", "backend"]
    found, wanted = function(*arguments, impl="libliger", mode="fast", backend=None), expected()
    if "cross_entropy" in name:
        found, wanted = found[0], wanted
    found, wanted = ((t if isinstance(t, tuple) else (t,)) for t in (found, wanted))
    assert all(torch.equal(a, b) for a, b in zip(found, wanted)) and len(found) == len(wanted)


def test_keywords_that_change_nothing():
    torch.manual_seed(0)
    x, head, labels = torch.randn(6, 8, requires_grad=True), torch.randn(11, 8), torch.tensor([1, 2, -100, 4, 0, 10])
    logp, logq = torch.randn(2, 6, 11).log_softmax(-1)
    plain = functional.liger_fused_linear_cross_entropy(x, head, labels)
    assert torch.equal(functional.liger_fused_linear_cross_entropy(x, head, labels, chunk_mem_const=4), plain)
    scales = None, None, -100, 0.0, 0.0, "mean", None, False, None, False, False, False
    loss, *_ = LigerFusedLinearCrossEntropyFunction.apply(x, head, labels, *scales, "quack", "fast", 2)  # by position
    assert torch.equal(loss, plain)
    torch.testing.assert_close(torch.autograd.grad(loss, x), torch.autograd.grad(plain, x), rtol=0, atol=0)
    found = fused_linear_cross_entropy_forward(x, head, labels, ce_impl="quack", ce_mode="fast", chunk_mem_const=2)
    assert torch.equal(found[0], plain)
    jsd = LigerJSDFunction.apply(logp, logq, None, 0.5, -100, "quack", "fast")
    assert torch.equal(jsd, functional.liger_jsd(logp, logq))
    linear = LigerFusedLinearJSDFunction.apply(x, head, x.detach(), head, None, 0.5, -100, 1.0, None, "quack", "fast")
    linear.backward()
    assert LigerLayerNorm(8, impl="quack", mode="fast", backend="cute").weight.shape == (8,)


def test_gradients_that_are_not_needed():
    torch.manual_seed(0)
    x, w, b, dy = torch.randn(6, 8), torch.randn(8), torch.randn(8), torch.randn(6, 8)
    _, X, rstd, *_ = rms_norm_forward(x, w, 1e-6, 0.0, "llama")
    full = rms_norm_backward(dy, X, w, rstd, 0.0, "llama")
    part = rms_norm_backward(dy, X, w, rstd, 0.0, "llama", needs_dw=False)
    assert torch.equal(full[0], part[0]) and part[1] is None
    _, s, rstd, *_ = fused_add_rms_norm_forward(x, x, w, 1e-6, 0.0, "llama")
    assert fused_add_rms_norm_backward(dy, None, s, w, rstd, 0.0, "llama", needs_dw=False)[2] is None
    _, X, mean, rstd, *_ = layer_norm_forward(x, w, b, 1e-6)
    full = layer_norm_backward(dy, X, w, b, mean, rstd)
    part = layer_norm_backward(dy, X, w, b, mean, rstd, needs_dw=False, needs_db=True)
    assert torch.equal(part[0], full[0]) and part[1] is None and torch.equal(part[2], full[2])


@pytest.mark.parametrize("unsqueeze_dim", [1, 2])
@pytest.mark.parametrize("width, rotary_dim", [(8, None), (4, None), (4, 4), (4, 8)])
def test_partial_rope(width, rotary_dim, unsqueeze_dim):
    """Without rotary_dim as many columns are rotated as the tables have."""
    torch.manual_seed(0)
    q, k, cos, sin = torch.randn(2, 3, 5, 8), torch.randn(2, 1, 5, 8), *torch.randn(2, 1, 5, width)
    r = rotary_dim or width

    def rotate(x, sign=1):
        c, s = (torch.cat((t, t), -1) if width < r else torch.cat((t[..., : r // 2],) * 2, -1) for t in (cos, sin))
        part, rest = x[..., :r], x[..., r:]
        turned = torch.cat((-part[..., r // 2 :], part[..., : r // 2]), -1)
        return torch.cat((part * c.unsqueeze(1) + sign * turned * s.unsqueeze(1), rest), -1)

    swapped = lambda t: t.transpose(1, 2) if unsqueeze_dim == 2 else t
    found = rope_forward(swapped(q), swapped(k), cos, sin, None, unsqueeze_dim, rotary_dim)
    public = functional.liger_rope(swapped(q), swapped(k), cos, sin, None, unsqueeze_dim, rotary_dim)
    back = rope_backward(swapped(q), swapped(k), cos, sin, None, unsqueeze_dim, rotary_dim)
    for x, a, b, c in zip((q, k), found, public, back):
        torch.testing.assert_close(swapped(a), rotate(x), rtol=1e-5, atol=1e-5)
        assert torch.equal(a, b)
        torch.testing.assert_close(swapped(c), rotate(x, -1), rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="more than a head"):
        functional.liger_rope(q, k, torch.randn(1, 5, 10), torch.randn(1, 5, 10))
