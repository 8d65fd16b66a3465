"""Contrastive preference optimisation; see losses.py."""

from liger_kernel.chunked_loss.fused_linear_preference import LigerFusedLinearPreferenceBase
from liger_kernel.chunked_loss.losses import CPO

LigerFusedLinearCPOFunction = CPO.function(__name__)
LigerFusedLinearCPOLoss = CPO.module(LigerFusedLinearCPOFunction)
