"""Kahneman-Tversky optimisation; the formula is in liger/ops/preference/preference.h."""

from torch import nn

from liger_kernel._library import ops
from liger_kernel.chunked_loss.fused_linear_unpaired_preference import LigerFusedLinearUnpairedPreferenceBase


class LigerFusedLinearKTOFunction(LigerFusedLinearUnpairedPreferenceBase):
    @staticmethod
    def preference_loss_fn(
        log_prob_chunk, preference_labels_chunk, full_target, ref_log_prob_chunk=None, beta=0.1, kl=None
    ):
        """(loss, chosen_rewards_sum, rejected_rewards_sum); a reference that is not given counts as 0, and so does kl,
        one number.

        Raises ValueError where kl holds more than one.
        """
        return ops.kto_loss(log_prob_chunk, preference_labels_chunk, ref_log_prob_chunk, kl, beta, len(full_target))

    @classmethod
    def forward(
        cls,
        ctx,
        _input,
        weight,
        target,
        preference_labels,
        bias=None,
        ref_input=None,
        ref_weight=None,
        ref_bias=None,
        kl=None,
        ignore_index=-100,
        beta=0.1,
        compiled=True,
        use_ref_model=True,
        average_log_prob=False,
        chunk_size=1,
    ):
        return LigerFusedLinearUnpairedPreferenceBase.forward(
            cls,
            ctx,
            _input,
            weight,
            target,
            preference_labels=preference_labels,
            bias=bias,
            chunk_size=chunk_size,
            ignore_index=ignore_index,
            compiled=compiled,
            use_ref_model=use_ref_model,
            ref_input=ref_input,
            ref_weight=ref_weight,
            ref_bias=ref_bias,
            average_log_prob=average_log_prob,
            beta=beta,
            kl=kl,
        )

    @staticmethod
    def backward(ctx, *grad_output):
        return *LigerFusedLinearUnpairedPreferenceBase.backward(ctx, grad_output)[:5], *[None] * 10


class LigerFusedLinearKTOLoss(nn.Module):
    """KTO of a head `lin_weight` on hidden states of sequences that are liked or not: (loss, aux) with six sums.

    The reference counts only with use_ref_model=True, which is the default of the Function, and not here. kl is one
    number.
    """

    def __init__(
        self, ignore_index=-100, beta=0.1, compiled=True, use_ref_model=False, average_log_prob=False, chunk_size=1
    ):
        super().__init__()
        self.ignore_index, self.beta, self.compiled, self.use_ref_model = ignore_index, beta, compiled, use_ref_model
        self.average_log_prob, self.chunk_size = average_log_prob, chunk_size

    def forward(
        self,
        _input,
        lin_weight,
        target,
        bias=None,
        preference_labels=None,
        ref_input=None,
        ref_weight=None,
        ref_bias=None,
        kl=None,
    ):
        return LigerFusedLinearKTOFunction.apply(
            _input,
            lin_weight,
            target,
            preference_labels,
            bias,
            ref_input,
            ref_weight,
            ref_bias,
            kl,
            self.ignore_index,
            self.beta,
            self.compiled,
            self.use_ref_model,
            self.average_log_prob,
            self.chunk_size,
        )
