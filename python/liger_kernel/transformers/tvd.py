"""Total variation distance as a module."""

from torch import nn

from liger_kernel.ops import LigerTVDLossFunction
from liger_kernel.ops.utils import reduction_code


class LigerTVDLoss(nn.Module):
    """The distance of probabilities p and q, both [rows, cols]; see LigerTVDLossFunction. Raises ValueError for an
    unknown reduction."""

    def __init__(self, reduction="batchmean", ignore_index=-100):
        super().__init__()
        reduction_code(reduction)
        self.reduction, self.ignore_index = reduction, ignore_index

    def forward(self, p, q, shift_labels=None):
        return LigerTVDLossFunction.apply(p, q, shift_labels, self.reduction, self.ignore_index)
