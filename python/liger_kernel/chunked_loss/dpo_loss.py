"""Direct preference optimisation and its relatives; their table is in liger/ops/preference/preference.h."""

import torch
from torch import nn

from liger_kernel._library import ops
from liger_kernel.chunked_loss.fused_linear_preference import LigerFusedLinearPreferenceBase


class LigerFusedLinearDPOFunction(LigerFusedLinearPreferenceBase):
    @staticmethod
    def preference_loss_fn(
        chosen_logps,
        rejected_logps,
        full_target,
        ref_chosen_logps=None,
        ref_rejected_logps=None,
        beta=0.1,
        loss_type="sigmoid",
        label_smoothing=0.0,
        discopop_tau=0.05,
    ):
        """(loss, chosen_rewards [n], rejected_rewards [n]); a reference that is not given counts as 0.

        Raises ValueError for an unknown loss_type or a label_smoothing that it cannot have, NotImplementedError for
        ipo.
        """
        return ops.dpo_loss(
            chosen_logps,
            rejected_logps,
            ref_chosen_logps,
            ref_rejected_logps,
            loss_type,
            beta,
            label_smoothing,
            discopop_tau,
            len(full_target) // 2,
        )

    @classmethod
    def forward(
        cls,
        ctx,
        _input,
        weight,
        target,
        bias=None,
        ref_input=None,
        ref_weight=None,
        ref_bias=None,
        ignore_index=-100,
        beta=0.1,
        compute_nll_loss=False,
        compiled=True,
        use_ref_model=True,
        average_log_prob=False,
        chunk_size=1,
        loss_type="sigmoid",
        label_smoothing=0.0,
        discopop_tau=0.05,
        alpha=1.0,
    ):
        return LigerFusedLinearPreferenceBase.forward(
            cls,
            ctx,
            _input,
            weight,
            target,
            bias=bias,
            chunk_size=chunk_size,
            ignore_index=ignore_index,
            alpha=alpha,
            beta=beta,
            compute_nll_loss=compute_nll_loss,
            compiled=compiled,
            use_ref_model=use_ref_model,
            ref_input=ref_input,
            ref_weight=ref_weight,
            ref_bias=ref_bias,
            average_log_prob=average_log_prob,
            loss_type=loss_type,
            label_smoothing=label_smoothing,
            discopop_tau=discopop_tau,
        )

    @staticmethod
    def backward(ctx, *grad_output):
        return *LigerFusedLinearPreferenceBase.backward(ctx, grad_output)[:4], *[None] * 14


class LigerFusedLinearDPOLoss(nn.Module):
    """DPO of a head `lin_weight` on hidden states of n chosen and n rejected sequences: (loss, aux) with seven entries,
    the last two the rewards.

    Raises ValueError for an unknown loss_type or a label_smoothing that it cannot have.
    """

    _SUPPORTED_LOSS_TYPES = {
        "sigmoid",
        "hinge",
        "exo_pair",
        "nca_pair",
        "robust",
        "bco_pair",
        "sppo_hard",
        "apo_zero",
        "apo_down",
        "discopop",
    }

    def __init__(
        self,
        ignore_index=-100,
        beta=0.1,
        alpha=1.0,
        compute_nll_loss=False,
        compiled=True,
        use_ref_model=True,
        average_log_prob=False,
        chunk_size=1,
        loss_type="sigmoid",
        label_smoothing=0.0,
        discopop_tau=0.05,
    ):
        super().__init__()
        if loss_type not in self._SUPPORTED_LOSS_TYPES:
            raise ValueError(
                f"Unsupported loss_type {loss_type!r}: it is one of {', '.join(sorted(self._SUPPORTED_LOSS_TYPES))}"
            )
        nothing = torch.empty(0, device="cpu")
        LigerFusedLinearDPOFunction.preference_loss_fn(
            nothing, nothing, nothing, loss_type=loss_type, label_smoothing=label_smoothing
        )  # checks them
        self.ignore_index, self.beta, self.alpha, self.compute_nll_loss, self.compiled = (
            ignore_index,
            beta,
            alpha,
            compute_nll_loss,
            compiled,
        )
        self.use_ref_model, self.average_log_prob, self.chunk_size = use_ref_model, average_log_prob, chunk_size
        self.loss_type, self.label_smoothing, self.discopop_tau = loss_type, label_smoothing, discopop_tau

    def forward(self, lin_weight, _input, target, bias=None, ref_input=None, ref_weight=None, ref_bias=None):
        return LigerFusedLinearDPOFunction.apply(
            _input,
            lin_weight,
            target,
            bias,
            ref_input,
            ref_weight,
            ref_bias,
            self.ignore_index,
            self.beta,
            self.compute_nll_loss,
            self.compiled,
            self.use_ref_model,
            self.average_log_prob,
            self.chunk_size,
            self.loss_type,
            self.label_smoothing,
            self.discopop_tau,
            self.alpha,
        )
