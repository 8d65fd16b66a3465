"""SimPO, which is CPO of average log-probabilities with a margin; formula in liger/ops/preference/preference.h."""

from torch import nn

from liger_kernel._library import ops
from liger_kernel.chunked_loss.fused_linear_preference import LigerFusedLinearPreferenceBase


class LigerFusedLinearSimPOFunction(LigerFusedLinearPreferenceBase):
    @staticmethod
    def preference_loss_fn(chosen_logps, rejected_logps, full_target, beta=0.1, gamma=0.5, label_smoothing=0.0):
        """(loss, chosen_rewards [n], rejected_rewards [n]) of average log-probabilities; gamma is not multiplied by
        beta, nor a part of the rewards."""
        return ops.cpo_loss(chosen_logps, rejected_logps, beta, label_smoothing, gamma, len(full_target) // 2)

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
        compute_nll_loss=False,
        compiled=True,
        gamma=0.5,
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
            label_smoothing=label_smoothing,
            gamma=gamma,
        )

    @staticmethod
    def backward(ctx, *grad_output):
        return *LigerFusedLinearPreferenceBase.backward(ctx, grad_output)[:4], *[None] * 8


class LigerFusedLinearSimPOLoss(nn.Module):
    """SimPO of a head `lin_weight` on hidden states of n chosen and n rejected sequences: (loss, aux) with seven
    entries, the last two the rewards.

    alpha multiplies the nll, which is a part of the loss by default here, and not in the Function.
    """

    def __init__(
        self,
        ignore_index=-100,
        beta=0.1,
        alpha=1.0,
        label_smoothing=0.0,
        compute_nll_loss=True,
        compiled=True,
        gamma=0.5,
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
        self.compiled, self.gamma, self.chunk_size = compiled, gamma, chunk_size

    def forward(self, lin_weight, _input, target, bias=None):
        return LigerFusedLinearSimPOFunction.apply(
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
            self.gamma,
            self.chunk_size,
        )
