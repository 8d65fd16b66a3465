"""Distillation by the generalised Jensen-Shannon divergence (Agarwal et al. 2024, arXiv:2306.13649)."""

from torch import Tensor

from liger_kernel.chunked_loss.fused_linear_distillation import (
    DistillationLoss,
    LigerFusedLinearDistillationBase,
    _DistillationFunction,
    formula,
)
from liger_kernel.operators.distillation import JENSEN_SHANNON, jensen_shannon


class LigerFusedLinearJSDFunction(_DistillationFunction):
    """Distillation by the generalised Jensen-Shannon divergence (Agarwal et al. 2024, arXiv:2306.13649)."""

    @staticmethod
    @formula(JENSEN_SHANNON, masks_ignored=True)
    def distillation_loss_fn(
        student_logits: Tensor, teacher_logits: Tensor, beta: float = 0.5, target: Tensor | None = None,
        ignore_index: int = -100,
    ) -> Tensor:  # fmt: skip
        """Σ over the tokens whose target is not ignore_index (None: all) of β KL(T ‖ M) + (1 − β) KL(S ‖ M), M = β T +
        (1 − β) S; β = 0 is KL(T ‖ S), β = 1 KL(S ‖ T)."""
        student, teacher = (z.reshape(-1, z.shape[-1]) for z in (student_logits, teacher_logits))
        labels = None if target is None else target.reshape(-1)
        return jensen_shannon(student, teacher, labels, beta, ignore_index)


class LigerFusedLinearJSDLoss(DistillationLoss):
    """weight_hard_loss · cross entropy + weight_soft_loss · divergence; see LigerFusedLinearJSDFunction."""

    function = LigerFusedLinearJSDFunction
