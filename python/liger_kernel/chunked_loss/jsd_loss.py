"""Distillation by the generalised Jensen-Shannon divergence; see losses.py."""

from liger_kernel.chunked_loss.losses import JSD

LigerFusedLinearJSDFunction = JSD.function(__name__)
LigerFusedLinearJSDLoss = JSD.module(LigerFusedLinearJSDFunction)
