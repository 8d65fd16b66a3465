"""Distillation by the generalised Jensen-Shannon divergence (Agarwal et al. 2024, arXiv:2306.13649)."""

from liger_kernel.chunked_loss.fused_linear_distillation import (
    DistillationLoss,
    LigerFusedLinearDistillationBase,
    formula,
)
from liger_kernel.ops.linear_distillation import JENSEN_SHANNON
from liger_kernel.ops.two_heads import jensen_shannon


class LigerFusedLinearJSDFunction(LigerFusedLinearDistillationBase):
    @staticmethod
    @formula(JENSEN_SHANNON, masks_ignored=True)
    def distillation_loss_fn(student_logits, teacher_logits, beta=0.5, target=None, ignore_index=-100):
        """Σ over the tokens whose target is not ignore_index (None: all) of β KL(T ‖ M) + (1 − β) KL(S ‖ M), M = β T +
        (1 − β) S; β = 0 is KL(T ‖ S), β = 1 KL(S ‖ T)."""
        flat = lambda z: z.reshape(-1, z.shape[-1])
        return jensen_shannon(
            flat(student_logits),
            flat(teacher_logits),
            None if target is None else target.reshape(-1),
            beta,
            ignore_index,
        )

    @classmethod
    def forward(
        cls,
        ctx,
        student_input,
        student_weight,
        teacher_input,
        teacher_weight,
        true_labels,
        student_bias,
        teacher_bias,
        weight_hard_loss=0.5,
        weight_soft_loss=0.5,
        beta=0.5,
        ignore_index=-100,
        temperature=1.0,
        compiled=True,
        chunk_size=1024,
        return_soft_hard_loss=False,
    ):
        """See LigerFusedLinearDistillationBase.forward."""
        return LigerFusedLinearDistillationBase.forward(  # by its name: torch.compile cannot trace super()
            cls,
            ctx,
            student_input=student_input,
            student_weight=student_weight,
            teacher_input=teacher_input,
            teacher_weight=teacher_weight,
            target=true_labels,
            student_bias=student_bias,
            teacher_bias=teacher_bias,
            chunk_size=chunk_size,
            ignore_index=ignore_index,
            weight_hard_loss=weight_hard_loss,
            weight_soft_loss=weight_soft_loss,
            beta=beta,
            temperature=temperature,
            compiled=compiled,
            return_soft_hard_loss=return_soft_hard_loss,
        )

    @staticmethod
    def backward(ctx, grad_output, *args):
        return *LigerFusedLinearDistillationBase.backward(ctx, grad_output, *args)[:6], *[None] * 9


class LigerFusedLinearJSDLoss(DistillationLoss):
    """weight_hard_loss · cross entropy + weight_soft_loss · divergence; see LigerFusedLinearJSDFunction."""

    function = LigerFusedLinearJSDFunction
