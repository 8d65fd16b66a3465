"""Losses of preferences, distillation and reinforcement learning on hidden states and a head's weight: the logits are
never kept."""

from liger_kernel.chunked_loss.cosine_similarity_loss import LigerFusedLinearCosineSimilarityLoss
from liger_kernel.chunked_loss.cpo_loss import LigerFusedLinearCPOLoss
from liger_kernel.chunked_loss.dpo_loss import LigerFusedLinearDPOLoss
from liger_kernel.chunked_loss.grpo_loss import LigerFusedLinearGRPOLoss
from liger_kernel.chunked_loss.jsd_loss import LigerFusedLinearJSDLoss
from liger_kernel.chunked_loss.kto_loss import LigerFusedLinearKTOLoss
from liger_kernel.chunked_loss.orpo_loss import LigerFusedLinearORPOLoss
from liger_kernel.chunked_loss.simpo_loss import LigerFusedLinearSimPOLoss
from liger_kernel.chunked_loss.topk_distillation_loss import LigerFusedLinearTopKDistillationLoss

__all__ = [
    "LigerFusedLinearCosineSimilarityLoss",
    "LigerFusedLinearCPOLoss",
    "LigerFusedLinearDPOLoss",
    "LigerFusedLinearGRPOLoss",
    "LigerFusedLinearJSDLoss",
    "LigerFusedLinearKTOLoss",
    "LigerFusedLinearORPOLoss",
    "LigerFusedLinearSimPOLoss",
    "LigerFusedLinearTopKDistillationLoss",
]
