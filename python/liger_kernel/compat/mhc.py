"""The steps of a manifold-constrained hyper-connection by themselves, as others call them: nothing in this package
does.

Each has the arguments and results of liger-kernel's: float rows, of any dtype, and a tensor for each result that it may
be written into. Block sizes are not used.
"""

from typing import Any

import torch
from torch import Tensor

import liger_kernel.research  # raises where its operators are not built
from liger_kernel._library import ops


def _into(out: Tensor | None, result: Tensor) -> Tensor:
    return result if out is None else out.copy_(result)


def mhc_mm_norm_fwd(
    x: Tensor, phi: Tensor, eps: float, *, out_mix: Tensor | None = None, out_invr: Tensor | None = None, **blocks: Any
) -> tuple[Tensor, Tensor]:
    """(mix, invr) = ((x phi) / rms(x), 1 / rms(x)), float, of rows x [N, K] and phi [K, M]."""
    x = x.float()
    invr = torch.rsqrt(x.square().mean(1) + eps)
    return _into(out_mix, x @ phi.float() * invr[:, None]), _into(out_invr, invr)


def mhc_mm_norm_bwd(
    x: Tensor, phi: Tensor, mix: Tensor, invr: Tensor, grad_mix: Tensor, *, out_grad_x: Tensor | None = None,
    out_grad_phi: Tensor | None = None, **blocks: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gradients of x and phi, in their dtypes, from what mhc_mm_norm_fwd returned."""
    rows, g = x.float(), grad_mix * invr[:, None]
    through_rms = (grad_mix * mix).sum(1, keepdim=True) * invr.square()[:, None] / x.shape[1]
    dx, dphi = g @ phi.float().t() - rows * through_rms, rows.t() @ g
    return _into(out_grad_x, dx.to(x.dtype)), _into(out_grad_phi, dphi.to(phi.dtype))


def _sinkhorn(logits, tmax, eps):
    """(the matrices, and those of each iteration after its division of columns)."""
    p, history = logits.softmax(-1) + eps, []
    for i in range(tmax):
        p = p if i == 0 else p / (p.sum(-1, keepdim=True) + eps)
        p = p / (p.sum(-2, keepdim=True) + eps)
        history.append(p)
    return p, history


def _split(mix, b):
    streams = round((mix.shape[1] + 1) ** 0.5) - 1  # M = streams² + 2 streams
    sizes = streams, streams, streams**2
    return streams, mix.float().split(sizes, 1), b.float().split(sizes)


def mhc_split_sinkhorn_fwd(
    mix: Tensor, b: Tensor, alpha_pre: Tensor, alpha_post: Tensor, alpha_res: Tensor, *, tmax: int, pre_eps: float,
    sinkhorn_eps: float, post_mult: float, out_hpre: Tensor | None = None, out_hpost: Tensor | None = None,
    out_hres: Tensor | None = None, out_hist: Tensor | None = None, return_hist: bool = False, **blocks: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """(h_pre [N, HC], h_post [N, HC], h_res [N, HC, HC]) of mix; see LigerMHCCoeffsFunction. return_hist adds the
    matrices after the division of columns in each iteration, [N, tmax, HC, HC]."""
    streams, (pre, post, res), (b_pre, b_post, b_res) = _split(mix, b)
    h_res, history = _sinkhorn((res * alpha_res + b_res).unflatten(1, (streams, streams)), tmax, sinkhorn_eps)
    h_pre = (pre * alpha_pre + b_pre).sigmoid() + pre_eps
    h_post = (post * alpha_post + b_post).sigmoid() * post_mult
    results = _into(out_hpre, h_pre), _into(out_hpost, h_post), _into(out_hres, h_res)
    return (*results, _into(out_hist, torch.stack(history, 1))) if return_hist else results


def mhc_sinkhorn_bwd(
    mix: Tensor, b: Tensor, alpha_res: Tensor, grad_hres: Tensor, *, tmax: int, sinkhorn_eps: float,
    hist: Tensor | None = None, out_grad_logits: Tensor | None = None, **blocks: Any,
) -> Tensor:  # fmt: skip
    """The gradient of alpha_res · mix + b, what Sinkhorn's algorithm is given, [N, HC, HC]; hist is not used."""
    streams, (*_, res), (*_, b_res) = _split(mix, b)
    with torch.enable_grad():
        logits = (res * alpha_res + b_res).detach().unflatten(1, (streams, streams)).requires_grad_()
        (gradient,) = torch.autograd.grad(_sinkhorn(logits, tmax, sinkhorn_eps)[0], logits, grad_hres)
    return _into(out_grad_logits, gradient)


def mhc_pre_fwd(x: Tensor, h_pre: Tensor, *, out: Tensor | None = None, **blocks: Any) -> Tensor:
    """Σ_i h_pre_i · x_i, float [N, C], of x [N, HC, C]."""
    return _into(out, ops.mhc_pre_forward(x.float(), h_pre.float()))


def mhc_pre_bwd(
    x: Tensor, h_pre: Tensor, grad_out: Tensor, *, out_grad_x: Tensor | None = None, out_grad_h: Tensor | None = None,
    **blocks: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gradients of x and h_pre, float."""
    dx, dh = ops.mhc_pre_backward(grad_out.float(), x.float(), h_pre.float(), True, True)
    return _into(out_grad_x, dx), _into(out_grad_h, dh)


def mhc_post_res_fwd(
    x: Tensor, f_out: Tensor, h_post: Tensor, h_res: Tensor, *, out: Tensor | None = None, **blocks: Any
) -> Tensor:
    """Σ_i h_res[o, i] · x_i + h_post_o · f_out, float [N, HC, C]."""
    return _into(out, ops.mhc_post_res_forward(x.float(), f_out.float(), h_post.float(), h_res.float()))


def mhc_post_res_bwd(
    x: Tensor, f_out: Tensor, h_post: Tensor, h_res: Tensor, grad_out: Tensor, *, out_grad_x: Tensor | None = None,
    out_grad_f: Tensor | None = None, out_grad_hpost: Tensor | None = None, out_grad_hres: Tensor | None = None,
    **blocks: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of the four, float."""
    given = grad_out, x, f_out, h_post, h_res
    made = ops.mhc_post_res_backward(*(t.float() for t in given), True, True, True, True)
    dx, df, dpost, dres = map(_into, (out_grad_x, out_grad_f, out_grad_hpost, out_grad_hres), made)
    return dx, df, dpost, dres
