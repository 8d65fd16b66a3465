"""Cross entropy as a module."""

from torch import nn

from liger_kernel.ops import LigerCrossEntropyFunction  # noqa: F401  (imported from here by others)
from liger_kernel.ops.cross_entropy import REDUCTIONS
from liger_kernel.ops.utils import reduction_code
from liger_kernel.transformers import functional


def check_options(reduction, label_smoothing, softcap):
    reduction_code(reduction, REDUCTIONS)
    if not 0 <= label_smoothing <= 1:
        raise AssertionError(f"label_smoothing must be in [0, 1], got {label_smoothing}")
    if softcap is not None and not softcap > 0:
        raise AssertionError(f"softcap must be positive, got {softcap}")


class LigerCrossEntropyLoss(nn.Module):
    """As torch.nn.CrossEntropyLoss for logits [rows, classes] and labels [rows], with z-loss, softcap, accuracy and
    predictions.

    Raises ValueError for an unknown reduction, AssertionError for label_smoothing outside [0, 1] or softcap <= 0.
    """

    def __init__(
        self,
        weight=None,
        ignore_index=-100,
        lse_square_scale=0.0,
        label_smoothing=0.0,
        reduction="mean",
        softcap=None,
        return_z_loss=False,
        return_token_accuracy=False,
        return_predicted_tokens=False,
    ):
        super().__init__()
        check_options(reduction, label_smoothing, softcap)
        self.register_buffer("weight", weight)
        self.ignore_index, self.lse_square_scale, self.label_smoothing = ignore_index, lse_square_scale, label_smoothing
        self.reduction, self.softcap, self.return_z_loss = reduction, softcap, return_z_loss
        self.return_token_accuracy, self.return_predicted_tokens = return_token_accuracy, return_predicted_tokens

    def forward(self, _input, target):
        return functional.liger_cross_entropy(_input, target, **vars_of(self))


def vars_of(module):
    """A loss module's options, as the keywords of its function."""
    return {
        name: value for name, value in vars(module).items() if not name.startswith("_") and name != "training"
    } | module._buffers
