"""The operators as functions."""

from dataclasses import dataclass
from typing import Optional

import torch

from liger_kernel._library import ops
from liger_kernel.ops import (
    LigerCrossEntropyFunction,
    LigerDyTFunction,
    LigerFusedAddRMSNormFunction,
    LigerFusedLinearJSDFunction,
    LigerGELUMulFunction,
    LigerGroupNormFunction,
    LigerJSDFunction,
    LigerKLDivLossFunction,
    LigerLayerNormFunction,
    LigerModulatedRMSNormFunction,
    LigerPolyNormFunction,
    LigerQwen2VLMRopeFunction,
    LigerReLUSquaredFunction,
    LigerRMSNormFunction,
    LigerRopeFunction,
    LigerSiLUMulFunction,
    LigerSoftmaxFunction,
    LigerSparsemaxFunction,
    LigerTVDLossFunction,
)
from liger_kernel.ops.cross_entropy import asked_for, loss_options


@dataclass
class CrossEntropyOutput:
    """A loss and what was asked for beside it."""

    loss: torch.Tensor
    z_loss: Optional[torch.Tensor] = None
    token_accuracy: Optional[torch.Tensor] = None
    predicted_tokens: Optional[torch.Tensor] = None


def _output(loss, z_loss, token_accuracy, predicted_tokens):
    return (
        loss
        if z_loss is token_accuracy is predicted_tokens is None
        else CrossEntropyOutput(loss, z_loss, token_accuracy, predicted_tokens)
    )


def liger_rms_norm(X, W, eps, offset: float = 0.0, casting_mode: str = "llama", in_place: bool = True):
    """X / rms(X) · (W + offset) over the last dimension; see LigerRMSNormFunction."""
    return LigerRMSNormFunction.apply(X, W, eps, offset, casting_mode, in_place)


def liger_fused_add_rms_norm(X, R, W, eps, offset: float = 0.0, casting_mode: str = "llama", in_place: bool = True):
    """(rms_norm(X + R), X + R); see LigerFusedAddRMSNormFunction."""
    return LigerFusedAddRMSNormFunction.apply(X, R, W, eps, offset, casting_mode, in_place)


def liger_modulated_rms_norm(
    X, W, scale, shift=None, eps=1e-6, offset: float = 0.0, casting_mode: str = "llama", in_place: bool = True
):
    """rms_norm(X) · (1 + scale) + shift; see LigerModulatedRMSNormFunction."""
    return LigerModulatedRMSNormFunction.apply(X, W, scale, shift, eps, offset, casting_mode, in_place)


def liger_layer_norm(X, W, B, eps):
    """(X − mean) / sqrt(variance + eps) · W + B over the last dimension."""
    return LigerLayerNormFunction.apply(X, W, B, eps)


def liger_group_norm(X, affine_scaling_weight, affine_shifting_bias, num_channels, num_groups, eps):
    """GroupNorm of X [N, num_channels, ...]; see LigerGroupNormFunction."""
    return LigerGroupNormFunction.apply(X, affine_scaling_weight, affine_shifting_bias, num_channels, num_groups, eps)


def liger_poly_norm(X, W, B, eps=1e-6, in_place=True):
    """PolyNorm; see LigerPolyNormFunction."""
    return LigerPolyNormFunction.apply(X, W, B, eps, in_place)


def liger_dyt(x, alpha, gamma, beta):
    """gamma · tanh(alpha · x) + beta."""
    return LigerDyTFunction.apply(x, alpha, gamma, beta)


def liger_swiglu(a, b):
    """silu(a) · b."""
    return LigerSiLUMulFunction.apply(a, b)


def liger_geglu(a, b):
    """gelu(a) · b, gelu in its tanh form."""
    return LigerGELUMulFunction.apply(a, b)


def liger_relu_squared(x):
    """max(x, 0)²."""
    return LigerReLUSquaredFunction.apply(x)


def liger_rope(q, k, cos, sin, position_ids=None, unsqueeze_dim=1, rotary_dim=None):
    """(q, k) rotated; see LigerRopeFunction."""
    return LigerRopeFunction.apply(q, k, cos, sin, position_ids, unsqueeze_dim, rotary_dim)


def liger_qwen2vl_mrope(q, k, cos, sin, mrope_section, unsqueeze_dim=1):
    """(q, k) rotated by three positions a token; see LigerQwen2VLMRopeFunction."""
    return LigerQwen2VLMRopeFunction.apply(q, k, cos, sin, mrope_section, unsqueeze_dim)


def liger_rope_packed(qkv, cos, sin, num_heads: int, num_key_value_heads: int):
    """The result of a fused projection, qkv [batch, seq, (num_heads + 2 num_key_value_heads) · dim], with q and k
    rotated; v is copied."""
    return ops.rope_packed(qkv, cos, sin, num_heads, num_key_value_heads, False)


def liger_cross_entropy(
    input,
    target,
    weight=None,
    size_average=None,
    ignore_index: int = -100,
    reduce=None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0,
    softcap: Optional[float] = None,
    return_z_loss: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
):
    """As torch.nn.functional.cross_entropy for logits [rows, classes]; size_average and reduce are not used.

    Returns the loss, or a CrossEntropyOutput where one of the return flags is set.
    """
    return _output(
        *LigerCrossEntropyFunction.apply(
            input,
            target,
            weight,
            ignore_index,
            lse_square_scale,
            label_smoothing,
            reduction,
            softcap,
            return_z_loss,
            return_token_accuracy,
            return_predicted_tokens,
        )
    )


def liger_fused_linear_cross_entropy(
    input,
    weight,
    target,
    bias=None,
    ce_weight=None,
    ignore_index: int = -100,
    lse_square_scale: float = 0.0,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    softcap: Optional[float] = None,
    return_z_loss: bool = False,
    accum_dtype: Optional[torch.dtype] = None,
    use_token_scaling: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
    valid_count: Optional[int] = None,
    normalizer: Optional[torch.Tensor] = None,
    max_bytes: int = 0,
):
    """Cross entropy of the logits `input @ weight.T + bias`, which are never held in full.

    input [tokens, width], weight [classes, width], target [tokens], bias and ce_weight [classes]. Gradients of the
    weight are always summed in float, so accum_dtype is not used. valid_count is the number of labels that are not
    ignored, where the host knows it already; normalizer a number (on the device) that divides the sum of the losses;
    max_bytes bounds the logits held at once. Returns the float loss, or a CrossEntropyOutput where one of the return
    flags is set.
    """
    flags, scales = loss_options(
        ignore_index,
        lse_square_scale,
        label_smoothing,
        reduction,
        softcap,
        return_z_loss,
        return_token_accuracy,
        return_predicted_tokens,
        use_token_scaling,
    )
    results = ops.fused_linear_cross_entropy(
        input,
        weight,
        bias,
        target,
        ce_weight,
        normalizer,
        flags,
        scales,
        -1 if valid_count is None else valid_count,
        max_bytes,
        None,
    )
    return _output(*asked_for(results, return_z_loss, return_token_accuracy, return_predicted_tokens))


def liger_kl_div(
    input,
    target,
    size_average: bool = True,
    reduce: bool = True,
    reduction: str = "mean",
    log_target: bool = False,
    eps: float = 1e-10,
):
    """As torch.nn.functional.kl_div for log-probabilities [rows, cols], with a float loss; size_average and reduce are
    not used."""
    return LigerKLDivLossFunction.apply(input, target, reduction, log_target, eps)


def liger_jsd(input, target, shift_labels=None, beta: float = 0.5, ignore_index: int = -100):
    """Generalised Jensen-Shannon divergence of logarithms; see LigerJSDFunction."""
    return LigerJSDFunction.apply(input, target, shift_labels, beta, ignore_index)


def liger_fused_linear_jsd(
    student_input,
    student_weight,
    teacher_input,
    teacher_weight,
    shift_labels=None,
    jsd_beta: float = 0.5,
    ignore_index: int = -100,
    temperature: float = 1.0,
    accum_dtype=None,
):
    """Generalised Jensen-Shannon divergence of two heads, without their logits; see LigerFusedLinearJSDFunction."""
    return LigerFusedLinearJSDFunction.apply(
        student_input,
        student_weight,
        teacher_input,
        teacher_weight,
        shift_labels,
        jsd_beta,
        ignore_index,
        temperature,
        accum_dtype,
    )


def liger_tvd(input, target, shift_labels=None, reduction: str = "mean", ignore_index: int = -100):
    """Total variation distance of probabilities; see LigerTVDLossFunction."""
    return LigerTVDLossFunction.apply(input, target, shift_labels, reduction, ignore_index)


def liger_softmax(x):
    """Softmax over the last dimension."""
    return LigerSoftmaxFunction.apply(x)


def liger_sparsemax(input, dim: int = -1):
    """Sparsemax along dim; see LigerSparsemaxFunction."""
    return LigerSparsemaxFunction.apply(input, dim)


def liger_selective_log_softmax(logits, ids, temperature: float = 1.0, ignore_index: int = -100):
    """(ln p at ids, entropy of p) as float [...], p = softmax(logits / temperature), for logits [..., V] and ids [...];
    differentiable.

    0 where the id is ignore_index. An id outside [0, V) that is not raises IndexError on the CPU and is a device
    assertion on CUDA.
    """
    return ops.selective_log_softmax(logits, ids, float(temperature), ignore_index)
