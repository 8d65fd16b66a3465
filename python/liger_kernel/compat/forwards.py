"""The plain `*_forward` and `*_backward` of liger_kernel.ops, for Functions that others write on top of Liger's
functions of these names, whose arguments and results they have, block sizes among them. They run the operators without
autograd."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from liger_kernel._library import ops
from liger_kernel.compat.triton import calculate_settings
from liger_kernel.operators import norm
from liger_kernel.operators.activation import GELU_TANH, RELU_SQUARED, SILU, SOFTMAX
from liger_kernel.operators.common import IGNORE_INDEX, full_tensor, reduction_code, unscaled_gradient
from liger_kernel.operators.distillation import linear_jsd_with_gradients
from liger_kernel.operators.loss import (
    JENSEN_SHANNON,
    KL,
    LOG_KL,
    TOTAL_VARIATION,
    LigerKLDivLossFunction,
    asked_for,
    loss_options,
)
from liger_kernel.operators.rope import heads_swapped, rotated


def settings(x: Tensor) -> tuple[int, int]:
    """(BLOCK_SIZE, num_warps) for the last dimension of x."""
    return calculate_settings(min(x.shape[-1], 65536))


def as_rows(x: Tensor) -> Tensor:
    """x as [rows, columns]."""
    return x.reshape(-1, x.shape[-1])


def rms_norm_forward(
    X: Tensor, W: Tensor | None, eps: float, offset: float, casting_mode: str | int, row_mode: bool | None = None
) -> tuple[Any, ...]:
    """(y, X [rows, H], rstd [rows], BLOCK_SIZE, num_warps, code of casting_mode), without autograd."""
    norm.check_width(X, W)
    code = norm.casting_code(casting_mode)
    y, rstd = ops.rms_norm_forward(X, W, float(eps), float(offset), code)
    return y, as_rows(X), rstd.reshape(-1), *settings(X), code


def rms_norm_backward(
    dY: Tensor, X: Tensor, W: Tensor | None, RSTD: Tensor, offset: float, casting_mode: str | int,
    BLOCK_SIZE: int | None = None, num_warps: int | None = None, in_place: bool = False, row_mode: bool | None = None,
    needs_dw: bool | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """(dX, dW or None) from what rms_norm_forward returned."""
    code, weighted = norm.casting_code(casting_mode), W is not None and needs_dw is not False
    dX, dW = ops.rms_norm_backward(dY.reshape(X.shape), X, W, RSTD, float(offset), code, True, weighted)
    return dX.reshape(dY.shape), dW if weighted else None


def fused_add_rms_norm_forward(
    X: Tensor, R: Tensor, W: Tensor | None, eps: float, offset: float, casting_mode: str | int
) -> tuple[Any, ...]:
    """(y, S, rstd [rows], BLOCK_SIZE, num_warps, num_stages, code of casting_mode), without autograd."""
    norm.check_width(X, W)
    code = norm.casting_code(casting_mode)
    y, s, rstd = ops.fused_add_rms_norm_forward(X, R, W, float(eps), float(offset), code)
    return y, s, rstd.reshape(-1), *settings(X), 1, code


def fused_add_rms_norm_backward(
    dY: Tensor, dS_out: Tensor | None, S: Tensor, W: Tensor | None, RSTD: Tensor, offset: float,
    casting_mode: str | int, BLOCK_SIZE: int | None = None, num_warps: int | None = None, num_stages: int | None = None,
    in_place: bool = False, needs_dw: bool | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """(dX, dR, dW) from what fused_add_rms_norm_forward returned; dX and dR are one tensor."""
    dS = None if dS_out is None else dS_out.reshape(S.shape)
    code, weighted = norm.casting_code(casting_mode), W is not None and needs_dw is not False
    dX, dW = ops.fused_add_rms_norm_backward(dY.reshape(S.shape), dS, S, W, RSTD, float(offset), code, True, weighted)
    dX = dX.reshape(dY.shape)
    return dX, dX, dW if weighted else None


def modulated_rms_norm_forward(
    X: Tensor, W: Tensor | None, scale: Tensor, shift: Tensor | None, eps: float, offset: float, casting_mode: str | int
) -> tuple[Any, ...]:
    """(y, rstd [rows], BLOCK_SIZE, num_warps, code of casting_mode, rows for each row of scale), without autograd."""
    norm.check_modulation(X, W, scale, shift)
    code, modulation = norm.casting_code(casting_mode), [norm.as_rows(t, X.shape[-1]) for t in (scale, shift)]
    y, rstd = ops.modulated_rms_norm_forward(X, W, *modulation, float(eps), float(offset), code)
    return y, rstd.reshape(-1), *settings(X), code, X.numel() // max(1, scale.numel())


def modulated_rms_norm_backward(
    dY: Tensor, X: Tensor, W: Tensor | None, scale: Tensor, shift: Tensor | None, RSTD: Tensor, offset: float,
    casting_mode: str | int, BLOCK_SIZE: int | None = None, num_warps: int | None = None,
    rows_per_modulation: int | None = None, in_place: bool = False,
) -> tuple[Any, ...]:  # fmt: skip
    """(dX, dW or None, dScale, dShift or None) from what modulated_rms_norm_forward returned."""
    wanted = (True, W is not None, True, shift is not None)
    tensors: Any = full_tensor(dY).reshape(X.shape), X, W, *(norm.as_rows(t, X.shape[-1]) for t in (scale, shift)), RSTD
    gradients = ops.modulated_rms_norm_backward(*tensors, float(offset), norm.casting_code(casting_mode), *wanted)
    like: tuple[Any, ...] = dY, W, scale, shift
    return tuple(g.reshape(t.shape) if w else None for g, t, w in zip(gradients, like, wanted))


def layer_norm_forward(X: Tensor, W: Tensor | None, B: Tensor | None, eps: float) -> tuple[Any, ...]:
    """(y, X [rows, H], mean [rows], rstd [rows], BLOCK_SIZE, num_warps), without autograd."""
    norm.check_widths(X, W, B)
    y, mean, rstd = ops.layer_norm_forward(X, W, B, float(eps))
    return y, as_rows(X), mean.reshape(-1), rstd.reshape(-1), *settings(X)


def layer_norm_backward(
    dY: Tensor, X: Tensor, W: Tensor | None, B: Tensor | None, Mean: Tensor, RSTD: Tensor, needs_dw: bool | None = None,
    needs_db: bool | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """(dX, dW, dB) from what layer_norm_forward returned; None for what is not needed."""
    with_dw, with_db = needs_dw is not False, needs_db is not False
    dX, dW, dB = ops.layer_norm_backward(dY.reshape(X.shape), X, W, B, Mean, RSTD, True, with_dw, with_db)
    return dX.reshape(dY.shape), dW if with_dw else None, dB if with_db else None


def _gated_forward(a, b, activation, gate_multiplier=1.0):
    a, b = as_rows(a), as_rows(b)
    return a, b, ops.gated_forward(a, b, activation, float(gate_multiplier))


def _gated_backward(a, b, dc, activation, gate_multiplier=1.0):
    gradients = ops.gated_backward(dc.reshape(a.shape), a, b, activation, float(gate_multiplier))
    return tuple(g.reshape(dc.shape) for g in gradients)


def swiglu_forward(a: Tensor, b: Tensor, gate_multiplier: float = 1.0) -> tuple[Any, ...]:
    """(a, b, c) with a and b as rows, without autograd."""
    return _gated_forward(a, b, SILU, gate_multiplier)


def swiglu_backward(a: Tensor, b: Tensor, dc: Tensor, gate_multiplier: float = 1.0) -> tuple[Tensor, Tensor]:
    """(da, db), in fresh memory, in dc's shape."""
    return _gated_backward(a, b, dc, SILU, gate_multiplier)


def geglu_forward(a: Tensor, b: Tensor) -> tuple[Any, ...]:
    """(a, b, c) with a and b as rows, without autograd."""
    return _gated_forward(a, b, GELU_TANH)


def geglu_backward(a: Tensor, b: Tensor, dc: Tensor) -> tuple[Tensor, Tensor]:
    """(da, db), in fresh memory, in dc's shape."""
    return _gated_backward(a, b, dc, GELU_TANH)


def swiglu_fused_gate_up_forward(y: Tensor) -> tuple[Any, ...]:
    """(y as rows, c), without autograd; raises ValueError for an odd width."""
    y = as_rows(y)
    return y, ops.gated_packed_forward(y, SILU, 1.0)


def swiglu_fused_gate_up_backward(y: Tensor, dc: Tensor, in_place: bool = False) -> Tensor:
    """dy as rows; with in_place=True it is written over y."""
    if not in_place:
        return ops.gated_packed_backward(as_rows(dc), y, SILU, 1.0)
    ops.gated_packed_backward_(as_rows(dc), y, SILU, 1.0)
    return y


def relu_squared_forward(X: Tensor) -> Tensor:
    """max(X, 0)², without autograd."""
    return ops.activate_forward(X, RELU_SQUARED)


def relu_squared_backward(X: Tensor, dY: Tensor) -> Tensor:
    """2 · dY · max(X, 0)."""
    return ops.activate_backward(dY.reshape(X.shape), X, RELU_SQUARED)


def _softmax_forward(x):
    """(y, BLOCK_SIZE, num_warps, whether a row takes several blocks), without autograd."""
    block, warps = settings(x)
    return ops.softmax_forward(x, SOFTMAX), block, warps, x.shape[-1] > block


def _softmax_backward(dy, y, BLOCK_SIZE=None, num_warps=None, multi_block_launch=None):
    return ops.softmax_backward(dy, y, SOFTMAX)


#: Rows of a tile of compute_routing_metadata.
BLOCK_M_TOKEN = 64


def compute_routing_metadata(topk_indices: Tensor, E: int, block_m_token: int = BLOCK_M_TOKEN) -> tuple[Tensor, ...]:
    """How tokens are sorted by expert: (counts [E], starts [E + 1], token of each sorted pair, pair of each, place of
    each pair, row and expert of each tile), all int32.

    topk_indices [tokens, k]; pairs are (token, slot), numbered by rows, sorted stably by expert. A tile is at most
    block_m_token rows of one expert.
    """
    k, flat = topk_indices.shape[1], topk_indices.reshape(-1).long()
    counts = torch.bincount(flat, minlength=E)
    starts = torch.cat((counts.new_zeros(1), counts.cumsum(0)))
    order = torch.sort(flat, stable=True).indices
    place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    tiles = (counts + block_m_token - 1) // block_m_token
    experts = torch.repeat_interleave(torch.arange(E, device=flat.device), tiles)
    within = torch.arange(len(experts), device=flat.device) - (tiles.cumsum(0) - tiles)[experts]
    found = counts, starts, order // k, order, place, starts[experts] + within * block_m_token, experts
    return tuple(t.int() for t in found)


def _rope(q, k, cos, sin, position_ids, unsqueeze_dim, rotary_dim, inverse):
    if unsqueeze_dim != 1:
        q, k = heads_swapped(unsqueeze_dim, (q, k))
        return heads_swapped(unsqueeze_dim, _rope(q, k, cos, sin, position_ids, 1, rotary_dim, inverse))
    columns = rotated(q.shape[-1], cos.shape[-1], rotary_dim)
    return ops.rope_forward(q, k, cos, sin, inverse, False, None, columns)


def rope_forward(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor | None = None, unsqueeze_dim: int = 1,
    rotary_dim: int | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """(q rotated, k rotated, cos, sin), without autograd; arguments as of liger_rotary_pos_emb."""
    return *_rope(q, k, cos, sin, position_ids, unsqueeze_dim, rotary_dim, False), cos, sin


def rope_backward(
    dq: Tensor, dk: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor | None = None, unsqueeze_dim: int = 1,
    rotary_dim: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(dq, dk) rotated back."""
    return _rope(dq, dk, cos, sin, position_ids, unsqueeze_dim, rotary_dim, True)


def qwen2vl_mrope_forward(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, mrope_section: Sequence[int]
) -> tuple[Any, ...]:
    """(q rotated, k rotated, cos, sin), without autograd."""
    return *ops.rope_forward(q, k, cos, sin, False, False, list(mrope_section)), cos, sin


def qwen2vl_mrope_backward(
    dq: Tensor, dk: Tensor, cos: Tensor, sin: Tensor, mrope_section: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """(dq, dk) rotated back."""
    return ops.rope_forward(dq, dk, cos, sin, True, False, list(mrope_section))


def cross_entropy_forward(
    _input: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, lse_square_scale: float,
    label_smoothing: float, reduction: str, softcap: float | None, return_z_loss: bool = False,
    return_token_accuracy: bool = False, return_predicted_tokens: bool = False,
) -> tuple[Any, ...]:  # fmt: skip
    """The results and the gradient of the logits (the logits themselves where they want none), without autograd.

    The gradient of float16 logits is float: in 16 bits a mean's would vanish before a loss scale reaches it.
    """
    asked, wanted = (return_z_loss, return_token_accuracy, return_predicted_tokens), _input.requires_grad
    options = loss_options(ignore_index, lse_square_scale, label_smoothing, reduction, softcap, *asked)
    *results, gradient, grad_scale = ops.cross_entropy_forward(_input.detach(), target, weight, wanted, *options)
    return *asked_for(results, *asked), unscaled_gradient(gradient, grad_scale) if wanted else _input


def cross_entropy_backward(_input: Tensor, grad_output: Tensor) -> Tensor:
    """The gradient that cross_entropy_forward returned, times the upstream gradient."""
    return _input * (grad_output.unsqueeze(-1) if grad_output.ndim > 0 else grad_output)


def _divergence_gradient(x, target, kind, parameter=0.0, labels=None, ignore_index=IGNORE_INDEX):
    """The elements' own gradients, not divided by anything."""
    ones = torch.ones((), device=x.device).expand(x.shape)
    return ops.divergence_backward(ones, x, target, labels, kind, parameter, ignore_index)


def _divergence(x, target, labels, kind, parameter, ignore_index, reduction, dtype):
    """The loss and the gradient in one pass; single losses come with their elements' own gradients."""
    x, target, code = x.detach(), target.detach(), reduction_code(reduction)
    loss, dx, grad_scale = ops.divergence_forward(x, target, labels, kind, parameter, ignore_index, code, dtype, True)
    if reduction == "none":
        return loss, _divergence_gradient(x, target, kind, parameter, labels, ignore_index)
    return loss, unscaled_gradient(dx, grad_scale)


def kldiv_forward_triton(y_pred: Tensor, y_true: Tensor, log_target: bool, reduction: str, eps: float) -> Tensor:
    """The loss, without autograd."""
    return LigerKLDivLossFunction.apply(y_pred.detach(), y_true.detach(), reduction, log_target, eps)


def kldiv_backward_triton(target: Tensor, grad_output: Tensor, new_grads: Tensor, log_target: bool) -> Tensor:
    """The gradient of the elements' losses times grad_output, written to new_grads."""
    gradient = _divergence_gradient(target, target, LOG_KL if log_target else KL)
    return new_grads.copy_(gradient).mul_(grad_output)


def jsd_forward(
    _input: Tensor, target: Tensor, shift_labels: Tensor | None, beta: float, ignore_index: int, has_label: bool,
    jsd_impl: str | None = None, jsd_mode: str | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """(loss, gradient of _input), without autograd."""
    labels, options = shift_labels if has_label else None, (JENSEN_SHANNON, float(beta), ignore_index)
    return _divergence(_input, target, labels, *options, "batchmean", _input.dtype)


def jsd_backward(dX: Tensor, grad_output: Tensor) -> Tensor:
    return dX * grad_output


def tv_distance_forward_triton(
    p: Tensor, q: Tensor, shift_labels: Tensor | None, reduction: str, ignore_index: int, has_label: bool
) -> tuple[Any, ...]:
    """(loss, gradient of p), without autograd."""
    labels, options = shift_labels if has_label else None, (TOTAL_VARIATION, 0.0, ignore_index)
    return _divergence(p, q, labels, *options, reduction, torch.float32)


def tvd_backward_triton(grad_output: Tensor, grads: Tensor) -> Tensor:
    return grads * grad_output


def fused_linear_jsd_forward(
    student_input: Tensor, student_weight: Tensor, teacher_input: Tensor, teacher_weight: Tensor,
    shift_labels: Tensor | None, jsd_beta: float, ignore_index: int, has_label: bool, temperature: float,
    jsd_impl: str | None = None, jsd_mode: str | None = None, accum_dtype: torch.dtype | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """(loss, grad_input, grad_weight), without autograd; None where the tensor requires no gradient. Where it computes
    in float16 they are float."""
    labels = shift_labels if has_label else None
    loss, gradients, grad_scale = linear_jsd_with_gradients(
        student_input, student_weight, teacher_input, teacher_weight, labels, jsd_beta, ignore_index, temperature,
        (student_input.requires_grad, student_weight.requires_grad),
    )  # fmt: skip
    return loss, *(None if g is None else unscaled_gradient(g, grad_scale) for g in gradients)


def fused_linear_jsd_backward(
    grad_output: Tensor, grad_input: Tensor | None, grad_weight: Tensor | None
) -> tuple[Any, ...]:
    """Both gradients times the scalar grad_output, in fresh memory."""
    return tuple(g if g is None else g * grad_output for g in (grad_input, grad_weight))
