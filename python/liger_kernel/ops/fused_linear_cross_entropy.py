"""LigerFusedLinearCrossEntropyFunction, by way of two functions of this module, which others replace in it.

liger_kernel.operators.head calls libliger's operator itself.
"""

from typing import Any

import torch
from torch import Tensor

from liger_kernel._library import ops
from liger_kernel.operators.common import autocast_dtype, first_derivative_only, roots, unscaled_gradient
from liger_kernel.operators.loss import asked_for, loss_options


def fused_linear_cross_entropy_forward(
    _input: Tensor, weight: Tensor, target: Tensor, ce_weight: Tensor | None = None, bias: Tensor | None = None,
    ignore_index: int = -100, lse_square_scale: float = 0.0, label_smoothing: float = 0.0, reduction: str = "mean",
    softcap: float | None = None, return_z_loss: bool = False, accum_dtype: torch.dtype | None = None,
    use_token_scaling: bool = False, return_token_accuracy: bool = False, return_predicted_tokens: bool = False,
    ce_impl: str | None = None, ce_mode: str | None = None, token_grad_output: Tensor | None = None,
    compute_gradients: bool | None = None, weight_requires_grad: bool | None = None, chunk_mem_const: int = 1,
) -> tuple[Any, ...]:  # fmt: skip
    """(loss, z_loss, token_accuracy, predicted_tokens, grad_input, grad_weight, grad_bias), without autograd; None for
    what is not wanted. ce_impl, ce_mode and chunk_mem_const change nothing.

    The gradients are made here for a mean or a sum, and for single losses where token_grad_output [tokens] is given.
    Where it computes in float16 they are float: in 16 bits sums overflow, and a mean's terms vanish before a loss scale
    reaches them.
    """
    asked = return_z_loss, return_token_accuracy, return_predicted_tokens
    options = loss_options(
        ignore_index, lse_square_scale, label_smoothing, reduction, softcap, *asked, use_token_scaling
    )
    wants = [t is not None and t.requires_grad for t in (_input, weight, bias)]
    if weight_requires_grad is not None:
        wants[1] = weight_requires_grad
    if compute_gradients is False or (compute_gradients is None and reduction == "none"):
        wants = [False] * 3
    deferred = token_grad_output is not None
    tensors = [t if t is None else t.detach() for t in (_input, weight, bias)]
    arguments = *tensors, target, ce_weight, None, autocast_dtype(_input)
    *results, grad_input, grad_weight, grad_bias, grad_scale = ops.fused_linear_cross_entropy_forward(
        *arguments, *([False] * 3 if deferred else wants), *options
    )
    gradients = [grad_input, grad_weight, grad_bias]
    if deferred:
        gradients = ops.fused_linear_cross_entropy_backward(token_grad_output, *arguments, *wants, *options)
    else:
        gradients = [unscaled_gradient(g, grad_scale) for g in gradients]
    return *asked_for(results, *asked), *(g if wanted else None for g, wanted in zip(gradients, wants))


def fused_linear_cross_entropy_backward(
    grad_output: Tensor, grad_input: Tensor | None, grad_weight: Tensor | None, grad_bias: Tensor | None
) -> tuple[Tensor | None, ...]:
    """The three gradients times the scalar grad_output, in fresh memory."""
    return tuple(g if g is None else (g * grad_output).to(g.dtype) for g in (grad_input, grad_weight, grad_bias))


class LigerFusedLinearCrossEntropyFunction(torch.autograd.Function):
    """The cross entropy of `_input @ weight.T + bias` and what else is asked for, as a Function to derive from."""

    @staticmethod
    def forward(
        ctx: Any, _input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None,
        ce_weight: Tensor | None = None, ignore_index: int = -100, lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0, reduction: str = "mean", softcap: float | None = None,
        return_z_loss: bool = False, accum_dtype: torch.dtype | None = None, use_token_scaling: bool = False,
        return_token_accuracy: bool = False, return_predicted_tokens: bool = False, ce_impl: str | None = None,
        ce_mode: str | None = None, chunk_mem_const: int = 1,
    ) -> tuple[Any, ...]:  # fmt: skip
        ctx.options = dict(
            ce_weight=ce_weight, ignore_index=ignore_index, lse_square_scale=lse_square_scale,
            label_smoothing=label_smoothing, reduction=reduction, softcap=softcap, accum_dtype=accum_dtype,
            use_token_scaling=use_token_scaling,
        )  # fmt: skip
        *results, grad_input, grad_weight, grad_bias = fused_linear_cross_entropy_forward(
            _input, weight, target, bias=bias, **ctx.options, return_z_loss=return_z_loss,
            return_token_accuracy=return_token_accuracy, return_predicted_tokens=return_predicted_tokens,
        )  # fmt: skip
        ctx.deferred, ctx.autocast = reduction == "none", autocast_dtype(_input)
        kept = (_input, weight, target, bias) if ctx.deferred else (grad_input, grad_weight, grad_bias)
        ctx.save_for_backward(*kept)
        ctx.roots = () if ctx.deferred else roots(_input, weight, bias)
        ctx.mark_non_differentiable(*(r for r in results[1:] if r is not None))
        return tuple(results)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad_output: Tensor, *ignored: Any) -> tuple[Tensor | None, ...]:
        if ctx.deferred:
            _input, weight, target, bias = ctx.saved_tensors
            given = dict(bias=bias, **ctx.options, token_grad_output=grad_output, compute_gradients=True)
            with torch.autocast(_input.device.type, dtype=ctx.autocast, enabled=ctx.autocast is not None):
                *_, grad_input, grad_weight, grad_bias = fused_linear_cross_entropy_forward(
                    _input, weight, target, **given
                )
        else:
            grad_input, grad_weight, grad_bias = fused_linear_cross_entropy_backward(grad_output, *ctx.saved_tensors)
        return grad_input, grad_weight, None, grad_bias, *[None] * 14
