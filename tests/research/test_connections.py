"""Attention residuals and manifold-constrained hyper-connections, as functions and modules, against plain torch."""

import pytest
import torch
from cases.attention_residuals import reference as residuals_reference
from cases.mhc import coefficients_reference
from liger_kernel import ops
from liger_kernel.ops import mhc
from liger_kernel.transformers import LigerMHC, functional
from torch import nn

close = torch.testing.assert_close  # float: 1.3e-6 of the value, 1e-5


def gradients(f, *inputs, unused=False):
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    y = f(*leaves)
    return y, torch.autograd.grad(y, leaves, torch.ones_like(y).cumsum(-1), materialize_grads=unused)


def test_attention_residuals():
    """A list of blocks is as a stack of them, and the functions without autograd give what autograd does."""
    v, query, weight = torch.randn(3, 2, 4, 16), torch.randn(16) / 4, torch.randn(16)
    h, expected = gradients(lambda *t: residuals_reference(*t), v, query, weight)
    ours, found = gradients(lambda *t: functional.liger_attn_res(list(t[0]), *t[1:]), v, query, weight)
    close((ours, *found), (h, *expected))
    y, rows, alpha, rstd = ops.attn_res_forward(list(v), query, weight)
    assert rows.shape == (3, 8, 16) and alpha.shape == rstd.shape == (8, 3)
    close(y, h)
    close(alpha.sum(-1), torch.ones(8))
    dv, *of_weights = ops.attn_res_backward(torch.ones_like(h).cumsum(-1), rows, query, weight, alpha, rstd)
    close((dv.view(v.shape), *of_weights), tuple(expected))
    half = query.half()
    assert functional.liger_attn_res(v.bfloat16(), half, weight).dtype == torch.bfloat16
    assert gradients(lambda q: functional.liger_attn_res(v.bfloat16(), q, weight), half)[1][0].dtype == torch.float16


@pytest.mark.parametrize("blocks", [3, 32])
def test_equal_blocks(blocks):
    """Whatever their weights are rounded by, they add up to one: query and weight have no gradient."""
    v = 30 * torch.randn(5, 257).expand(blocks, 5, 257)
    _, (_, *of_weights) = gradients(functional.liger_attn_res, v, torch.randn(257), torch.randn(257))
    assert not any(d.any() for d in of_weights)


@pytest.mark.parametrize("streams", [1, 4, 5, 16])
def test_mhc(streams):
    """The module is its layer between streams that coefficients mix, which are doubly stochastic."""
    layer = nn.Linear(24, 24)
    module = LigerMHC(layer, hc=streams, c=24, phi_dtype=torch.float32, allow_fp32=True)
    assert {p.dtype for p in module.parameters()} == {torch.float32} and not module.b.any() and module.alpha_pre == 1
    with torch.no_grad():
        module.phi.normal_(), module.b.normal_()
    inputs = (module.phi, module.b, module.alpha_pre, module.alpha_post, module.alpha_res)
    x = torch.randn(2, 3, streams, 24, requires_grad=True)
    out, (pre, post, res) = functional.liger_mhc_forward(x, layer, *inputs, allow_fp32=True, return_coeffs=True)
    close((pre, post, res), coefficients_reference(x, *inputs))
    close(res.sum(-2), torch.ones(2, 3, streams))
    x_in = (pre[..., None] * x).sum(-2)
    close(out, res @ x + post[..., None] * layer(x_in)[..., None, :])
    assert torch.equal(module(x), out)
    plain, both = (functional.liger_mhc_apply(x, layer(x_in), pre, post, res, return_x_in=r) for r in (False, True))
    close((both[0], both[1]), (plain, x_in))
    out.square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in (x, *module.parameters()))


def test_mhc_steps():
    """The steps of liger-kernel's, one after the other, are the operator; their gradients are autograd's in float64."""
    streams, tmax, eps = 3, 4, 1e-4
    x, phi, b = torch.randn(5, streams, 8), torch.randn(24, 15) / 5, torch.randn(15)
    alphas = torch.rand(3).unbind()
    rows, options = x.flatten(1), dict(tmax=tmax, pre_eps=0.01, sinkhorn_eps=eps, post_mult=2.0)
    mix, invr = mhc.mhc_mm_norm_fwd(rows, phi, 1e-6, block_n=16)
    *split, history = mhc.mhc_split_sinkhorn_fwd(mix, b, *alphas, return_hist=True, **options)
    close(tuple(split), functional.liger_mhc_coeffs(x, phi, b, *alphas, allow_fp32=True, **options))
    assert torch.equal(history[:, -1], split[2]) and history.shape == (5, tmax, streams, streams)
    pre, post, res = split
    f, out = torch.randn(5, 8), torch.empty(5, 8)
    assert mhc.mhc_pre_fwd(x, pre, out=out) is out and torch.equal(out, functional.liger_mhc_pre(x, pre))
    close(mhc.mhc_post_res_fwd(x, f, post, res), functional.liger_mhc_post_res(x, f, post, res))
    assert mhc.mhc_pre_fwd(x.bfloat16(), pre).dtype == torch.float32

    def backward(function, given, dy):
        leaves = [t.double().requires_grad_() for t in given]
        return tuple(g.float() for g in torch.autograd.grad(function(*leaves), leaves, dy.double()))

    normed = lambda x, phi: x @ phi * torch.rsqrt(x.square().mean(1, keepdim=True) + 1e-6)
    dmix = torch.randn_like(mix)
    close(mhc.mhc_mm_norm_bwd(rows, phi, mix, invr, dmix), backward(normed, (rows, phi), dmix))
    dres, logits = torch.randn(5, 3, 3), (mix[:, 6:] * alphas[2] + b[6:]).view(5, 3, 3)
    (expected,) = backward(lambda t: sinkhorn(t, tmax, eps), (logits,), dres)
    close(mhc.mhc_sinkhorn_bwd(mix, b, alphas[2], dres, tmax=tmax, sinkhorn_eps=eps), expected)
    dx_in, dy = torch.randn(5, 8), torch.randn(5, 3, 8)
    close(mhc.mhc_pre_bwd(x, pre, dx_in), backward(lambda x, pre: (pre[..., None] * x).sum(1), (x, pre), dx_in))
    mixed = lambda x, f, post, res: res @ x + post[..., None] * f[:, None]
    close(mhc.mhc_post_res_bwd(x, f, post, res, dy), backward(mixed, (x, f, post, res), dy))


def sinkhorn(logits, iterations, eps):
    p = logits.softmax(-1) + eps
    for i in range(iterations):
        p = p if i == 0 else p / (p.sum(-1, keepdim=True) + eps)
        p = p / (p.sum(-2, keepdim=True) + eps)
    return p


def test_mhc_unused_results():
    """Each of the three results alone gives every input a gradient, that of the others a zero."""
    inputs = torch.randn(5, 4, 6), torch.randn(24, 24) / 5, torch.randn(24), *[torch.tensor(0.7)] * 3
    for which in range(3):
        ours = gradients(lambda *t: functional.liger_mhc_coeffs(*t, allow_fp32=True)[which], *inputs)
        close(ours, gradients(lambda *t: coefficients_reference(*t)[which], *inputs, unused=True))


def test_mhc_dtypes():
    """phi may have another dtype than x, and the layer another than both."""
    layer = nn.Linear(8, 8)
    module = LigerMHC(layer, hc=4, c=8)
    assert module.phi.dtype == torch.float16
    x = torch.randn(3, 4, 8).bfloat16().requires_grad_()
    y = module(x)
    y.sum().backward()
    assert y.dtype == x.grad.dtype == torch.bfloat16 and module.phi.grad.dtype == torch.float16
    assert module.b.grad.dtype == module.alpha_res.grad.dtype == layer.weight.grad.dtype == torch.float32
    for wrong, error in ((x.float(), AssertionError), (x[:, :2], ValueError)):
        with pytest.raises(error):
            module(wrong)
    with pytest.raises(ValueError, match="at most 16"):
        LigerMHC(layer, hc=17, c=8)
