"""The fields of _self_test.Check for each research operator."""

import torch
import torch.nn.functional as F

from liger_kernel._library import ops
from liger_kernel.research import attention, connections, norm
from liger_kernel.research.sparsemax import liger_sparsemax

EPS = 1e-6


def _rms(x, w, eps=EPS):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * w


def _sparsemax(x):
    z = x.sort(-1, descending=True).values
    rank = torch.arange(1, x.shape[-1] + 1, device=x.device)
    size = (1 + rank * z > z.cumsum(-1)).sum(-1, keepdim=True)
    return (x - (z.cumsum(-1).gather(-1, size - 1) - 1) / size).clamp_min(0)


def _poly(x, w, b):
    return sum(w[i] * _rms(x ** (3 - i), 1) for i in range(3)) + b


def _mhc(x, phi, b, alpha):
    rows = x.flatten(-2)
    mix = alpha * (rows @ phi) * torch.rsqrt(rows.square().mean(-1, keepdim=True) + EPS) + b
    pre, post, res = mix.split((2, 2, 4), -1)
    res = res.unflatten(-1, (2, 2)).softmax(-1) + EPS
    for step in range(39):
        res = res / (res.sum(-2 + step % 2, keepdim=True) + EPS)
    return pre.sigmoid(), 2 * post.sigmoid(), res


def _attention_residuals(v, query, weight):
    return (v * (_rms(v, weight) * query).sum(-1, keepdim=True).softmax(0)).sum(0)


def _multi_token(scores, weight, bias):
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    maps = F.conv2d(scores.masked_fill(future, -1e9).softmax(-1), weight, bias, padding=1)
    return maps.masked_fill(future, 0)


def _neighborhood(q, k, v):
    place = torch.arange(q.shape[-2], device=q.device)
    scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill((place[:, None] - place).abs() > 3, -torch.inf)
    return scores.softmax(-1) @ v


def _int2(a, b):
    codes = torch.cat([b >> 2 * i & 3 for i in range(4)])
    return (a.double() @ (codes.double() - 1)).int()


CHECKS = (
    (
        "group_norm",
        lambda x, w, b: norm.liger_group_norm(x, w, b, 8, 2, EPS),
        lambda x, w, b: F.group_norm(x, 2, w, b, EPS),
        ((2, 8, 5), (8,), (8,)),
    ),
    ("dyt", norm.liger_dyt, lambda x, alpha, w, b: torch.tanh(alpha * x) * w + b, ((6, 40), (1,), (40,), (40,))),
    ("poly_norm", norm.liger_poly_norm, _poly, ((6, 40), (3,), (1,))),
    ("attention_residuals", connections.liger_attn_res, _attention_residuals, ((3, 6, 40), (40,), (40,))),
    (
        "mhc_coefficients",
        lambda x, phi, b, alpha: connections.liger_mhc_coeffs(x, phi, b, alpha, alpha, alpha, allow_fp32=True),
        _mhc,
        ((6, 2, 20), (40, 8), (8,), ()),
    ),
    ("mhc_pre", connections.liger_mhc_pre, lambda x, pre: (x * pre[..., None]).sum(-2), ((6, 2, 40), (6, 2))),
    (
        "mhc_post_res",
        connections.liger_mhc_post_res,
        lambda x, f, post, res: res @ x + post[..., None] * f[..., None, :],
        ((6, 2, 40), (6, 40), (6, 2), (6, 2, 2)),
    ),
    (
        "multi_token_attention",
        lambda scores, w, b: attention.liger_multi_token_attention(scores, w, b, padding=1),
        _multi_token,
        ((2, 2, 12, 12), (3, 2, 3, 3), (3,)),
    ),
    ("neighborhood_attention", attention.liger_fused_neighborhood_attention, _neighborhood, ((2, 2, 9, 8),) * 3),
    ("softmax, sparse", liger_sparsemax, _sparsemax, ((6, 40),)),
    (
        "int2_matmul",
        ops.int2_matmul,
        _int2,
        (),
        (torch.arange(48).view(6, 8).to(torch.int8), torch.arange(80).view(2, 40).to(torch.uint8)),
        (torch.float32,),
    ),
)
