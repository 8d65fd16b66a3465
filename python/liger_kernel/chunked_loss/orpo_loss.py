"""Odds ratio preference optimisation; see losses.py."""

from liger_kernel.chunked_loss.fused_linear_preference import LigerFusedLinearPreferenceBase
from liger_kernel.chunked_loss.losses import ORPO

LigerFusedLinearORPOFunction = ORPO.function(__name__)
LigerFusedLinearORPOLoss = ORPO.module(LigerFusedLinearORPOFunction)
