"""Twelve operators as functions, with the keywords by which other packages choose an implementation. There is one: impl
and backend change nothing, and nor does mode."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from liger_kernel.compat.implementations import check_impl
from liger_kernel.operators import activation, distillation, loss, norm
from liger_kernel.operators.rope import liger_rotary_pos_emb
from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

_KEYWORDS = [
    inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=str | None)
    for name in ("impl", "mode", "backend")
]


def _with_keywords(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args, impl=None, mode=None, backend=None, **kwargs):
        check_impl(impl)
        check_impl(backend)
        return function(*args, **kwargs)

    signature = inspect.signature(function)
    parameters = [*signature.parameters.values(), *_KEYWORDS]
    call.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return call


@_with_keywords
def rms_norm(
    x: Tensor, weight: Tensor | None, eps: float = 1e-6, *, offset: float = 0.0, casting_mode: str = "llama",
    in_place: bool = False, row_mode: bool | None = None,
) -> Tensor:  # fmt: skip
    """x / rms(x) · (weight + offset); see LigerRMSNormFunction."""
    return norm.LigerRMSNormFunction.apply(x, weight, eps, offset, casting_mode, in_place, row_mode)


@_with_keywords
def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """(x − mean) / sqrt(variance + eps) · weight + bias; see LigerLayerNormFunction."""
    return norm.LigerLayerNormFunction.apply(x, weight, bias, eps)


@_with_keywords
def fused_add_rms_norm(
    X: Tensor, R: Tensor, W: Tensor | None, eps: float = 1e-6, offset: float = 0.0, casting_mode: str = "llama",
    in_place: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(the norm of X + R, X + R); see LigerFusedAddRMSNormFunction."""
    return norm.LigerFusedAddRMSNormFunction.apply(X, R, W, eps, offset, casting_mode, in_place)


@_with_keywords
def softmax(x: Tensor) -> Tensor:
    """exp(x) / Σ exp(x) over the last dimension; see LigerSoftmaxFunction."""
    return activation.LigerSoftmaxFunction.apply(x)


@_with_keywords
def swiglu(a: Tensor, b: Tensor, gate_multiplier: float = 1.0, down_multiplier: float = 1.0) -> Tensor:
    """silu(gate_multiplier · a) · b · down_multiplier; see LigerSiLUMulFunction."""
    return activation.LigerSiLUMulFunction.apply(a, b, gate_multiplier, down_multiplier)


@_with_keywords
def geglu(a: Tensor, b: Tensor) -> Tensor:
    """gelu(a) · b with the tanh formula; see LigerGELUMulFunction."""
    return activation.LigerGELUMulFunction.apply(a, b)


@_with_keywords
def rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor | None = None, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """(q, k) rotated; see liger_rotary_pos_emb."""
    return liger_rotary_pos_emb(q, k, cos, sin, position_ids, unsqueeze_dim)


@_with_keywords
def cross_entropy(
    input: Tensor, target: Tensor, weight: Tensor | None = None, ignore_index: int = -100,
    lse_square_scale: float = 0.0, label_smoothing: float = 0.0, reduction: str = "mean", softcap: float | None = None,
    return_z_loss: bool = False, return_token_accuracy: bool = False, return_predicted_tokens: bool = False,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """(loss, z_loss, token_accuracy, predicted_tokens), None where not asked for; see LigerCrossEntropyFunction."""
    asked = return_z_loss, return_token_accuracy, return_predicted_tokens
    options = ignore_index, lse_square_scale, label_smoothing, reduction, softcap
    return loss.LigerCrossEntropyFunction.apply(input, target, weight, *options, *asked)


@_with_keywords
def kl_div(
    y_pred: Tensor, y_true: Tensor, reduction: str = "batchmean", log_target: bool = False, eps: float = 1e-10
) -> Tensor:
    """Kullback-Leibler divergence of log-probabilities; see LigerKLDivLossFunction."""
    return loss.LigerKLDivLossFunction.apply(y_pred, y_true, reduction, log_target, eps)


@_with_keywords
def jsd(
    _input: Tensor, target: Tensor, shift_labels: Tensor | None = None, beta: float = 0.5, ignore_index: int = -100
) -> Tensor:
    """Generalised Jensen-Shannon divergence of logarithms; see LigerJSDFunction."""
    return loss.LigerJSDFunction.apply(_input, target, shift_labels, beta, ignore_index)


@_with_keywords
def fused_linear_jsd(
    student_input: Tensor, student_weight: Tensor, teacher_input: Tensor, teacher_weight: Tensor,
    shift_labels: Tensor | None = None, jsd_beta: float = 0.5, ignore_index: int = -100, temperature: float = 1.0,
) -> Tensor:  # fmt: skip
    """The same of two heads, without their logits; see LigerFusedLinearJSDFunction."""
    heads = student_input, student_weight, teacher_input, teacher_weight
    return distillation.LigerFusedLinearJSDFunction.apply(*heads, shift_labels, jsd_beta, ignore_index, temperature)


@_with_keywords
def fused_linear_cross_entropy(
    _input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, ce_weight: Tensor | None = None,
    ignore_index: int = -100, lse_square_scale: float = 0.0, label_smoothing: float = 0.0, reduction: str = "mean",
    softcap: float | None = None, return_z_loss: bool = False, accum_dtype: torch.dtype | None = None,
    use_token_scaling: bool = False, return_token_accuracy: bool = False, return_predicted_tokens: bool = False,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """(loss, z_loss, token_accuracy, predicted_tokens) of a head, None where not asked for; see
    LigerFusedLinearCrossEntropyFunction."""
    scales = ignore_index, lse_square_scale, label_smoothing, reduction, softcap
    asked = return_z_loss, accum_dtype, use_token_scaling, return_token_accuracy, return_predicted_tokens
    return LigerFusedLinearCrossEntropyFunction.apply(_input, weight, target, bias, ce_weight, *scales, *asked)
