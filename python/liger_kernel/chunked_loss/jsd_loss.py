"""Distillation by the generalised Jensen-Shannon divergence; see losses.py."""

from liger_kernel.chunked_loss.fused_linear_distillation import LigerFusedLinearDistillationBase
from liger_kernel.chunked_loss.losses import JSD

LigerFusedLinearJSDFunction = JSD.function(__name__)
LigerFusedLinearJSDLoss = JSD.module(LigerFusedLinearJSDFunction)
