"""Kullback-Leibler divergence as a module."""

from torch import nn

from liger_kernel.ops import LigerKLDivLossFunction
from liger_kernel.ops.utils import reduction_code


class LigerKLDIVLoss(nn.KLDivLoss):
    """As torch.nn.KLDivLoss for log-probabilities [rows, cols]; eps bounds the probabilities whose logarithm is taken.
    The loss is float."""

    def __init__(self, eps=1e-10, *args, **kwargs):
        super().__init__(*args, **kwargs)
        reduction_code(self.reduction)
        self.eps = eps

    def forward(self, y_pred, y_true):
        return LigerKLDivLossFunction.apply(y_pred, y_true, self.reduction, self.log_target, self.eps)
