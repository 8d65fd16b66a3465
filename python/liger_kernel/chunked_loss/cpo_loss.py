"""Contrastive preference optimisation; the formula is in liger/ops/preference/preference.h."""

from torch import nn

from liger_kernel._library import ops
from liger_kernel.chunked_loss.fused_linear_preference import LigerFusedLinearPreferenceBase


class LigerFusedLinearCPOFunction(LigerFusedLinearPreferenceBase):
    @staticmethod
    def preference_loss_fn(chosen_logps, rejected_logps, full_target, beta=0.1, label_smoothing=0.0):
        """(loss, chosen_rewards [n], rejected_rewards [n])."""
        return ops.cpo_loss(chosen_logps, rejected_logps, beta, label_smoothing, 0.0, len(full_target) // 2)

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
        alpha=1.0,
        label_smoothing=0.0,
        compute_nll_loss=True,
        compiled=True,
        average_log_prob=False,
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
            alpha=alpha,
            beta=beta,
            compute_nll_loss=compute_nll_loss,
            compiled=compiled,
            average_log_prob=average_log_prob,
            label_smoothing=label_smoothing,
        )

    @staticmethod
    def backward(ctx, *grad_output):
        return *LigerFusedLinearPreferenceBase.backward(ctx, grad_output)[:4], *[None] * 8


class LigerFusedLinearCPOLoss(nn.Module):
    """CPO of a head `lin_weight` on hidden states of n chosen and n rejected sequences: (loss, aux) with seven entries,
    the last two the rewards.

    alpha multiplies the nll.
    """

    def __init__(
        self,
        ignore_index=-100,
        beta=0.1,
        alpha=1.0,
        label_smoothing=0.0,
        compute_nll_loss=True,
        compiled=True,
        average_log_prob=False,
        chunk_size=1,
    ):
        super().__init__()
        self.ignore_index, self.beta, self.alpha, self.label_smoothing, self.compute_nll_loss = (
            ignore_index,
            beta,
            alpha,
            label_smoothing,
            compute_nll_loss,
        )
        self.compiled, self.average_log_prob, self.chunk_size = compiled, average_log_prob, chunk_size

    def forward(self, lin_weight, _input, target, bias=None):
        return LigerFusedLinearCPOFunction.apply(
            _input,
            lin_weight,
            target,
            bias,
            self.ignore_index,
            self.beta,
            self.alpha,
            self.label_smoothing,
            self.compute_nll_loss,
            self.compiled,
            self.average_log_prob,
            self.chunk_size,
        )
