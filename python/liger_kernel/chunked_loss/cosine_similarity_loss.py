"""Distillation by the angle between the logits; see losses.py."""

from liger_kernel.chunked_loss.fused_linear_distillation import LigerFusedLinearDistillationBase
from liger_kernel.chunked_loss.losses import COSINE_SIMILARITY

LigerFusedLinearCosineSimilarityFunction = COSINE_SIMILARITY.function(__name__)
LigerFusedLinearCosineSimilarityLoss = COSINE_SIMILARITY.module(LigerFusedLinearCosineSimilarityFunction)
