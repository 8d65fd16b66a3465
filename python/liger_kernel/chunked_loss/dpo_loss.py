"""Direct preference optimisation and its relatives; see losses.py."""

from liger_kernel.chunked_loss.fused_linear_preference import LigerFusedLinearPreferenceBase
from liger_kernel.chunked_loss.losses import DPO

LigerFusedLinearDPOFunction = DPO.function(__name__)
LigerFusedLinearDPOLoss = DPO.module(LigerFusedLinearDPOFunction)
