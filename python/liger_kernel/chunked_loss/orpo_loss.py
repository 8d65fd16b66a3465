"""Odds ratio preference optimisation; the formula is in liger/ops/preference/preference.h."""

from torch import nn

from liger_kernel._library import ops
from liger_kernel.chunked_loss.fused_linear_preference import LigerFusedLinearPreferenceBase


class LigerFusedLinearORPOFunction(LigerFusedLinearPreferenceBase):
    @staticmethod
    def preference_loss_fn(chosen_logps, rejected_logps, full_target, beta=0.1):
        """(loss, chosen_rewards [n], rejected_rewards [n], log_odds_ratio, log_odds_chosen) of average
        log-probabilities."""
        return ops.orpo_loss(chosen_logps, rejected_logps, beta, len(full_target) // 2)

    @classmethod
    def forward(
        cls,
        ctx,
        _input,
        weight,
        target,
        bias=None,
        ignore_index=-100,
        beta=0.1,
        compute_nll_loss=True,
        nll_target=None,
        compiled=True,
        chunk_size=1,
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
            beta=beta,
            compute_nll_loss=compute_nll_loss,
            nll_target=nll_target,
            compiled=compiled,
        )

    @staticmethod
    def backward(ctx, *grad_output):
        return *LigerFusedLinearPreferenceBase.backward(ctx, grad_output)[:4], *[None] * 6


class LigerFusedLinearORPOLoss(nn.Module):
    """ORPO of a head `lin_weight` on hidden states of n chosen and n rejected sequences: (loss, aux) with nine entries.

    nll_target [2n, T] holds the labels of the nll, of which the first half counts, by default target.
    """

    def __init__(self, ignore_index=-100, beta=0.1, compute_nll_loss=True, compiled=True, chunk_size=1):
        super().__init__()
        self.ignore_index, self.beta, self.compute_nll_loss, self.compiled, self.chunk_size = (
            ignore_index,
            beta,
            compute_nll_loss,
            compiled,
            chunk_size,
        )

    def forward(self, lin_weight, _input, target, bias=None, nll_target=None):
        return LigerFusedLinearORPOFunction.apply(
            _input,
            lin_weight,
            target,
            bias,
            self.ignore_index,
            self.beta,
            self.compute_nll_loss,
            nll_target,
            self.compiled,
            self.chunk_size,
        )
