"""Kahneman-Tversky optimisation; see losses.py."""

from liger_kernel.chunked_loss.fused_linear_unpaired_preference import LigerFusedLinearUnpairedPreferenceBase
from liger_kernel.chunked_loss.losses import KTO

LigerFusedLinearKTOFunction = KTO.function(__name__)
LigerFusedLinearKTOLoss = KTO.module(LigerFusedLinearKTOFunction)
