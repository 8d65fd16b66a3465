"""Distillation by the angle between the logits."""

from liger_kernel._library import ops
from liger_kernel.chunked_loss.fused_linear_distillation import DistillationLoss, formula
from liger_kernel.chunked_loss.jsd_loss import LigerFusedLinearJSDFunction
from liger_kernel.ops.linear_distillation import COSINE


class LigerFusedLinearCosineSimilarityFunction(LigerFusedLinearJSDFunction):
    @staticmethod
    @formula(COSINE, masks_ignored=False)
    def distillation_loss_fn(student_logits, teacher_logits, target=None, ignore_index=None, beta=1.0):
        """beta · Σ over all tokens, ignored ones too, of 1 − cos(student_logits, teacher_logits)."""
        return beta * ops.cosine_distance(student_logits, teacher_logits).sum()


class LigerFusedLinearCosineSimilarityLoss(DistillationLoss):
    """weight_hard_loss · cross entropy + weight_soft_loss · beta · (1 − cosine); see
    LigerFusedLinearCosineSimilarityFunction."""

    function = LigerFusedLinearCosineSimilarityFunction
