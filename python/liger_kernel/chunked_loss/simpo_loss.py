"""SimPO, which is CPO of average log-probabilities with a margin; see losses.py."""

from liger_kernel.chunked_loss.fused_linear_preference import LigerFusedLinearPreferenceBase
from liger_kernel.chunked_loss.losses import SIMPO

LigerFusedLinearSimPOFunction = SIMPO.function(__name__)
LigerFusedLinearSimPOLoss = SIMPO.module(LigerFusedLinearSimPOFunction)
