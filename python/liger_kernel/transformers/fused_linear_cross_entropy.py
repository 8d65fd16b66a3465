from liger_kernel.operators.head import LigerFusedLinearCrossEntropyLoss
from liger_kernel.operators.loss import CrossEntropyOutput
from liger_kernel.ops import LigerFusedLinearCrossEntropyFunction

__all__ = ["LigerFusedLinearCrossEntropyLoss"]
