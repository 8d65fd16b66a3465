"""Generalised Jensen-Shannon divergence of two language models' heads, without their logits (Agarwal et al. 2024,
arXiv:2306.13649)."""

import torch

from liger_kernel.ops.divergence import check_labels
from liger_kernel.ops.linear_distillation import JENSEN_SHANNON, forward_with_gradients
from liger_kernel.ops.two_heads import wanted_gradients
from liger_kernel.ops.utils import first_derivative_only, roots


def fused_linear_jsd_forward(
    student_input,
    student_weight,
    teacher_input,
    teacher_weight,
    shift_labels,
    jsd_beta,
    ignore_index,
    has_label,
    temperature,
    accum_dtype=None,
):
    """(loss, grad_input, grad_weight), without autograd; None where the tensor requires no gradient. Where it computes
    in float16 they are float."""
    loss, (grad_input, grad_weight, _), rest = _forward(
        student_input,
        student_weight,
        teacher_input,
        teacher_weight,
        shift_labels if has_label else None,
        jsd_beta,
        ignore_index,
        temperature,
        (student_input.requires_grad, student_weight.requires_grad),
    )
    return loss, *(None if g is None else g * rest for g in (grad_input, grad_weight))


def fused_linear_jsd_backward(grad_output, grad_input, grad_weight):
    """Both gradients times the scalar grad_output, in fresh memory."""
    return tuple(g if g is None else g * grad_output for g in (grad_input, grad_weight))


class LigerFusedLinearJSDFunction(torch.autograd.Function):
    """β KL(P ‖ M) + (1 − β) KL(Q ‖ M), M = β P + (1 − β) Q, of a student's softmax Q and a teacher's P; β = 0 is KL(P ‖
    Q), β = 1 KL(Q ‖ P)."""

    @staticmethod
    def forward(
        ctx,
        student_input,
        student_weight,
        teacher_input,
        teacher_weight,
        shift_labels=None,
        jsd_beta=0.5,
        ignore_index=-100,
        temperature=1.0,
        accum_dtype=None,
    ):
        """The mean over the tokens whose shift_labels [tokens] is not ignore_index (None: all), float; 0 where there is
        none.

        student_input [tokens, H], student_weight [V, H], teacher_input [tokens, H'], teacher_weight [V, H']; both
        logits are divided by the temperature. Only the student's tensors get gradients; the weight's is summed in
        float, whatever accum_dtype. Raises AssertionError for labels of another shape.
        """
        loss, (grad_input, grad_weight, _), rest = _forward(
            student_input,
            student_weight,
            teacher_input,
            teacher_weight,
            shift_labels,
            jsd_beta,
            ignore_index,
            temperature,
            wanted_gradients(ctx, student_input, student_weight),
        )
        ctx.save_for_backward(grad_input, grad_weight, rest)
        ctx.roots = roots(student_input, student_weight)
        return loss

    @staticmethod
    @first_derivative_only
    def backward(ctx, grad_output):
        *gradients, rest = ctx.saved_tensors
        return *fused_linear_jsd_backward(grad_output * rest, *gradients), *[None] * 7


def _forward(
    student_input, student_weight, teacher_input, teacher_weight, labels, beta, ignore_index, temperature, wanted
):
    check_labels(labels, len(student_input), ignore_index)
    counts = (
        torch.ones(len(student_input), device=student_input.device)
        if labels is None
        else labels.ne(ignore_index).float()
    )
    loss, *_, gradients, rest = forward_with_gradients(
        (student_input, student_weight, None),
        (teacher_input, teacher_weight, None),
        labels,
        counts / counts.sum().clamp(min=1),
        None,
        JENSEN_SHANNON,
        beta,
        temperature,
        ignore_index,
        wanted=(*wanted, False),
    )
    return loss, gradients, rest
