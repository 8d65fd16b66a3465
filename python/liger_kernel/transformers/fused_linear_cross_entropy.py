"""Fused linear cross entropy as a module."""

from torch import nn

from liger_kernel.ops import LigerFusedLinearCrossEntropyFunction  # noqa: F401  (imported from here by others)
from liger_kernel.transformers import functional
from liger_kernel.transformers.cross_entropy import check_options, vars_of


class LigerFusedLinearCrossEntropyLoss(nn.Module):
    """Cross entropy of `_input @ lin_weight.T + bias` without the logits; see
    functional.liger_fused_linear_cross_entropy.

    Raises ValueError for an unknown reduction, AssertionError for label_smoothing outside [0, 1] or softcap <= 0.
    """

    def __init__(
        self,
        ce_weight=None,
        ignore_index=-100,
        lse_square_scale=0.0,
        label_smoothing=0.0,
        reduction="mean",
        softcap=None,
        return_z_loss=False,
        accum_dtype=None,
        use_token_scaling=False,
        return_token_accuracy=False,
        return_predicted_tokens=False,
    ):
        super().__init__()
        check_options(reduction, label_smoothing, softcap)
        self.register_buffer("ce_weight", ce_weight)
        self.ignore_index, self.lse_square_scale, self.label_smoothing = ignore_index, lse_square_scale, label_smoothing
        self.reduction, self.softcap, self.return_z_loss, self.accum_dtype = (
            reduction,
            softcap,
            return_z_loss,
            accum_dtype,
        )
        self.use_token_scaling = use_token_scaling
        self.return_token_accuracy, self.return_predicted_tokens = return_token_accuracy, return_predicted_tokens

    def forward(self, lin_weight, _input, target, bias=None):
        return functional.liger_fused_linear_cross_entropy(_input, lin_weight, target, bias, **vars_of(self))
