"""Contrastive preference optimisation (Xu et al. 2024, arXiv:2401.08417)."""

from typing import Any

import torch
from torch import Tensor

from liger_kernel._library import ops
from liger_kernel.chunked_loss.fused_linear_preference import LigerFusedLinearPreferenceBase
from liger_kernel.chunked_loss.gradients import breaks_graph


class LigerFusedLinearCPOFunction(LigerFusedLinearPreferenceBase):
    """Contrastive preference optimisation (Xu et al. 2024, arXiv:2401.08417)."""

    @staticmethod
    def preference_loss_fn(
        chosen_logps: Tensor, rejected_logps: Tensor, full_target: Tensor, beta: float = 0.1,
        label_smoothing: float = 0.0,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """(loss, chosen_rewards [n], rejected_rewards [n])."""
        return ops.cpo_loss(chosen_logps, rejected_logps, beta, label_smoothing, 0.0, len(full_target) // 2)

    @classmethod
    @breaks_graph
    def forward(
        cls, ctx: Any, _input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None,
        ignore_index: int = -100, beta: float = 0.1, alpha: float = 1.0, label_smoothing: float = 0.0,
        compute_nll_loss: bool = True, compiled: bool = True, average_log_prob: bool = False, chunk_size: int = 1,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:  # fmt: skip
        return LigerFusedLinearPreferenceBase.forward(
            cls, ctx, _input, weight, target, bias, chunk_size, ignore_index, alpha, beta, compute_nll_loss,
            average_log_prob=average_log_prob, label_smoothing=label_smoothing,
        )  # fmt: skip


class LigerFusedLinearCPOLoss(torch.nn.Module):
    """CPO of a head `lin_weight` on hidden states of n chosen and n rejected sequences: (loss, aux) with seven entries,
    the last two the rewards.

    alpha multiplies the nll.
    """

    function = LigerFusedLinearCPOFunction

    def __init__(
        self, ignore_index: int = -100, beta: float = 0.1, alpha: float = 1.0, label_smoothing: float = 0.0,
        compute_nll_loss: bool = True, compiled: bool = True, average_log_prob: bool = False, chunk_size: int = 1,
    ) -> None:  # fmt: skip
        super().__init__()
        self.ignore_index, self.beta, self.alpha, self.label_smoothing = ignore_index, beta, alpha, label_smoothing
        self.compute_nll_loss, self.compiled = compute_nll_loss, compiled
        self.average_log_prob, self.chunk_size = average_log_prob, chunk_size

    def forward(
        self, lin_weight: Tensor, _input: Tensor, target: Tensor, bias: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        return self.function.apply(
            _input, lin_weight, target, bias, self.ignore_index, self.beta, self.alpha, self.label_smoothing,
            self.compute_nll_loss, self.compiled, self.average_log_prob, self.chunk_size,
        )  # fmt: skip
