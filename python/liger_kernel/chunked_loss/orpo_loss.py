"""Odds ratio preference optimisation (Hong et al. 2024, arXiv:2403.07691)."""

from typing import Any

import torch
from torch import Tensor

from liger_kernel._library import ops
from liger_kernel.chunked_loss.fused_linear_preference import LigerFusedLinearPreferenceBase
from liger_kernel.chunked_loss.gradients import breaks_graph


class LigerFusedLinearORPOFunction(LigerFusedLinearPreferenceBase):
    """Odds ratio preference optimisation (Hong et al. 2024, arXiv:2403.07691)."""

    @staticmethod
    def preference_loss_fn(
        chosen_logps: Tensor, rejected_logps: Tensor, full_target: Tensor, beta: float = 0.1
    ) -> tuple[Tensor, ...]:
        """(loss, chosen_rewards [n], rejected_rewards [n], log_odds_ratio, log_odds_chosen) of average
        log-probabilities."""
        return ops.orpo_loss(chosen_logps, rejected_logps, beta, len(full_target) // 2)

    @classmethod
    @breaks_graph
    def forward(
        cls, ctx: Any, _input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None,
        ignore_index: int = -100, beta: float = 0.1, compute_nll_loss: bool = True, nll_target: Tensor | None = None,
        compiled: bool = True, chunk_size: int = 1,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:  # fmt: skip
        return LigerFusedLinearPreferenceBase.forward(
            cls, ctx, _input, weight, target, bias, ignore_index=ignore_index, beta=beta,
            compute_nll_loss=compute_nll_loss, nll_target=nll_target,
        )  # fmt: skip


class LigerFusedLinearORPOLoss(torch.nn.Module):
    """ORPO of a head `lin_weight` on hidden states of n chosen and n rejected sequences: (loss, aux) with nine entries.

    nll_target [2n, T] holds the labels of the nll, of which the first half counts, by default target.
    """

    function = LigerFusedLinearORPOFunction

    def __init__(
        self, ignore_index: int = -100, beta: float = 0.1, compute_nll_loss: bool = True, compiled: bool = True,
        chunk_size: int = 1,
    ) -> None:  # fmt: skip
        super().__init__()
        self.ignore_index, self.beta, self.compute_nll_loss = ignore_index, beta, compute_nll_loss
        self.compiled, self.chunk_size = compiled, chunk_size

    def forward(
        self, lin_weight: Tensor, _input: Tensor, target: Tensor, bias: Tensor | None = None,
        nll_target: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:  # fmt: skip
        return self.function.apply(
            _input, lin_weight, target, bias, self.ignore_index, self.beta, self.compute_nll_loss, nll_target,
            self.compiled, self.chunk_size,
        )  # fmt: skip
