"""Distillation by the angle between the logits."""

from torch import Tensor

from liger_kernel._library import ops
from liger_kernel.chunked_loss.fused_linear_distillation import (
    DistillationLoss,
    LigerFusedLinearDistillationBase,
    _DistillationFunction,
    formula,
)
from liger_kernel.operators.distillation import COSINE


class LigerFusedLinearCosineSimilarityFunction(_DistillationFunction):
    """Distillation by the angle between the logits."""

    @staticmethod
    @formula(COSINE, masks_ignored=False)
    def distillation_loss_fn(
        student_logits: Tensor, teacher_logits: Tensor, target: Tensor | None = None, ignore_index: int | None = None,
        beta: float = 1.0,
    ) -> Tensor:  # fmt: skip
        """beta · Σ over all tokens, ignored ones too, of 1 − cos(student_logits, teacher_logits)."""
        return beta * ops.cosine_distance(student_logits, teacher_logits).sum()


class LigerFusedLinearCosineSimilarityLoss(DistillationLoss):
    """weight_hard_loss · cross entropy + weight_soft_loss · beta · (1 − cosine); see
    LigerFusedLinearCosineSimilarityFunction."""

    function = LigerFusedLinearCosineSimilarityFunction
