"""CPO of average log-probabilities with a margin (SimPO: Meng et al. 2024, arXiv:2405.14734)."""

from typing import Any

import torch
from torch import Tensor

from liger_kernel._library import ops
from liger_kernel.chunked_loss.fused_linear_preference import LigerFusedLinearPreferenceBase
from liger_kernel.chunked_loss.gradients import breaks_graph


class LigerFusedLinearSimPOFunction(LigerFusedLinearPreferenceBase):
    """CPO of average log-probabilities with a margin (Meng et al. 2024, arXiv:2405.14734)."""

    @staticmethod
    def preference_loss_fn(
        chosen_logps: Tensor, rejected_logps: Tensor, full_target: Tensor, beta: float = 0.1, gamma: float = 0.5,
        label_smoothing: float = 0.0,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """(loss, chosen_rewards [n], rejected_rewards [n]) of average log-probabilities; gamma is not multiplied by
        beta, nor a part of the rewards."""
        return ops.cpo_loss(chosen_logps, rejected_logps, beta, label_smoothing, gamma, len(full_target) // 2)

    @classmethod
    @breaks_graph
    def forward(
        cls, ctx: Any, _input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None,
        ignore_index: int = -100, beta: float = 0.1, alpha: float = 1.0, label_smoothing: float = 0.0,
        compute_nll_loss: bool = False, compiled: bool = True, gamma: float = 0.5, chunk_size: int = 1,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:  # fmt: skip
        return LigerFusedLinearPreferenceBase.forward(
            cls, ctx, _input, weight, target, bias, chunk_size, ignore_index, alpha, beta, compute_nll_loss,
            label_smoothing=label_smoothing, gamma=gamma,
        )  # fmt: skip


class LigerFusedLinearSimPOLoss(torch.nn.Module):
    """SimPO of a head `lin_weight` on hidden states of n chosen and n rejected sequences: (loss, aux) with seven
    entries, the last two the rewards.

    alpha multiplies the nll, which is a part of the loss by default here, and not in the Function.
    """

    function = LigerFusedLinearSimPOFunction

    def __init__(
        self, ignore_index: int = -100, beta: float = 0.1, alpha: float = 1.0, label_smoothing: float = 0.0,
        compute_nll_loss: bool = True, compiled: bool = True, gamma: float = 0.5, chunk_size: int = 1,
    ) -> None:  # fmt: skip
        super().__init__()
        self.ignore_index, self.beta, self.alpha, self.label_smoothing = ignore_index, beta, alpha, label_smoothing
        self.compute_nll_loss, self.compiled = compute_nll_loss, compiled
        self.gamma, self.chunk_size = gamma, chunk_size

    def forward(
        self, lin_weight: Tensor, _input: Tensor, target: Tensor, bias: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        return self.function.apply(
            _input, lin_weight, target, bias, self.ignore_index, self.beta, self.alpha, self.label_smoothing,
            self.compute_nll_loss, self.compiled, self.gamma, self.chunk_size,
        )  # fmt: skip
