"""The plain `*_forward` and `*_backward` of the research operators; see forwards.py."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from liger_kernel._library import ops
from liger_kernel.compat.forwards import as_rows, settings
from liger_kernel.compat.triton import calculate_settings
from liger_kernel.operators.activation import SPARSEMAX
from liger_kernel.operators.common import beside
from liger_kernel.research import norm


def group_norm_forward(
    X: Tensor, num_channels: int, num_groups: int, W: Tensor | None, B: Tensor | None, eps: float
) -> tuple[Any, ...]:
    """(y, X, mean [N, groups], rstd [N, groups], BLOCK_SIZE), without autograd."""
    y, mean, rstd = ops.group_norm_forward(X, W, B, num_groups, float(eps))
    return y, X, mean, rstd, calculate_settings(min(X[0].numel() // num_groups, 65536))[0]


def group_norm_backward(
    dY: Tensor, X: Tensor, W: Tensor | None, B: Tensor | None, Mean: Tensor, RSTD: Tensor, num_channels: int,
    num_groups: int,
) -> tuple[Any, ...]:  # fmt: skip
    """(dX, dW, dB) from what group_norm_forward returned."""
    return ops.group_norm_backward(dY, X, W, B, Mean, RSTD, num_groups, True, True, True)


def poly_norm_forward(X: Tensor, W: Tensor, B: Tensor, eps: float = 1e-6) -> tuple[Any, ...]:
    """(y, X [rows, H], rstd [rows, 3], BLOCK_SIZE, num_warps), without autograd."""
    norm.check_poly_norm(W, B)
    y, rstd = ops.poly_norm_forward(X, W, B, float(eps))
    return y, as_rows(X), rstd.reshape(-1, 3), *settings(X)


def poly_norm_backward(
    dY: Tensor, X: Tensor, W: Tensor, RSTD: Tensor, BLOCK_SIZE: int | None = None, num_warps: int | None = None,
    in_place: bool = False,
) -> tuple[Any, ...]:  # fmt: skip
    """(dX, dW, dB) from what poly_norm_forward returned."""
    dX, dW, dB = ops.poly_norm_backward(dY.reshape(X.shape), X, W, W.new_zeros(()), RSTD, True, True, True)
    return dX.reshape(dY.shape), dW, dB


def attn_res_forward(
    blocks: Tensor | Sequence[Tensor], w_query: Tensor, w_norm: Tensor, eps: float = 1e-6
) -> tuple[Any, ...]:
    """(h, blocks [N, M, D], alpha [M, N], rstd [M, N]), without autograd."""
    V = blocks if isinstance(blocks, Tensor) else torch.stack(tuple(blocks))
    h, alpha, rstd = ops.attention_residuals_forward(V, beside(V, w_query), beside(V, w_norm), float(eps))
    return h, V.flatten(1, -2), as_rows(alpha), as_rows(rstd)


def attn_res_backward(
    dh: Tensor, V: Tensor, w_query: Tensor, w_norm: Tensor, alpha: Tensor, rstd: Tensor, eps: float = 1e-6
) -> tuple[Any, ...]:
    """(dV [N, M, D], dw_query, dw_norm) from what attn_res_forward returned."""
    query, weight = beside(V, w_query), beside(V, w_norm)
    dV, dquery, dweight = ops.attention_residuals_backward(as_rows(dh), V, query, weight, alpha, rstd, True, True, True)
    return dV, dquery.to(w_query.dtype), dweight.to(w_norm.dtype)


def liger_dyt_fwd(x: Tensor, alpha: Tensor, gamma: Tensor, beta: Tensor | None) -> Tensor:
    """y, without autograd."""
    return ops.dyt_forward(x, alpha, gamma, beta)


def liger_dyt_bwd(dy: Tensor, x: Tensor, alpha: Tensor, gamma: Tensor, beta: Tensor | None) -> tuple[Any, ...]:
    """(dx, dalpha, dgamma, dbeta or None)."""
    dx, dalpha, dgamma, dbeta = ops.dyt_backward(dy, x, alpha, gamma, beta, True, True, True, beta is not None)
    return dx, dalpha, dgamma, dbeta if beta is not None else None


def _sparsemax_forward(x, dim):
    """(y, y with dim last as rows), without autograd."""
    y = ops.softmax_forward(x.transpose(dim, -1), SPARSEMAX)
    return y.transpose(dim, -1), as_rows(y)


def _sparsemax_backward(grad_out, out_flat, dim):
    dy = grad_out.transpose(dim, -1)
    return ops.softmax_backward(dy, out_flat.reshape(dy.shape), SPARSEMAX).transpose(dim, -1)
