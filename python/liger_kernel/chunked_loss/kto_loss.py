"""Kahneman-Tversky optimisation (Ethayarajh et al. 2024, arXiv:2402.01306)."""

from typing import Any

import torch
from torch import Tensor

from liger_kernel._library import ops
from liger_kernel.chunked_loss.fused_linear_unpaired_preference import LigerFusedLinearUnpairedPreferenceBase
from liger_kernel.chunked_loss.gradients import breaks_graph


class LigerFusedLinearKTOFunction(LigerFusedLinearUnpairedPreferenceBase):
    """Kahneman-Tversky optimisation (Ethayarajh et al. 2024, arXiv:2402.01306)."""

    @staticmethod
    def preference_loss_fn(
        log_prob_chunk: Tensor, preference_labels_chunk: Tensor, full_target: Tensor,
        ref_log_prob_chunk: Tensor | None = None, beta: float = 0.1, kl: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """(loss, chosen_rewards_sum, rejected_rewards_sum); a reference that is not given counts as 0, and so does kl,
        one number.

        Raises ValueError where kl holds more than one.
        """
        return ops.kto_loss(
            log_prob_chunk, preference_labels_chunk, ref_log_prob_chunk, kl, beta, len(full_target)
        )  # fmt: skip

    @classmethod
    @breaks_graph
    def forward(
        cls, ctx: Any, _input: Tensor, weight: Tensor, target: Tensor, preference_labels: Tensor,
        bias: Tensor | None = None, ref_input: Tensor | None = None, ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None, kl: Tensor | None = None, ignore_index: int = -100, beta: float = 0.1,
        compiled: bool = True, use_ref_model: bool = True, average_log_prob: bool = False, chunk_size: int = 1,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:  # fmt: skip
        return LigerFusedLinearUnpairedPreferenceBase.forward(
            cls, ctx, _input, weight, target, preference_labels, bias, chunk_size, ignore_index, compiled,
            use_ref_model, ref_input, ref_weight, ref_bias, average_log_prob, beta=beta, kl=kl,
        )  # fmt: skip


class LigerFusedLinearKTOLoss(torch.nn.Module):
    """KTO of a head `lin_weight` on hidden states of sequences that are liked or not: (loss, aux) with six sums.

    The reference counts only with use_ref_model=True, which is the default of the Function, and not here. kl is one
    number.
    """

    function = LigerFusedLinearKTOFunction

    def __init__(
        self, ignore_index: int = -100, beta: float = 0.1, compiled: bool = True, use_ref_model: bool = False,
        average_log_prob: bool = False, chunk_size: int = 1,
    ) -> None:  # fmt: skip
        super().__init__()
        self.ignore_index, self.beta, self.compiled = ignore_index, beta, compiled
        self.use_ref_model, self.average_log_prob, self.chunk_size = use_ref_model, average_log_prob, chunk_size

    def forward(
        self, _input: Tensor, lin_weight: Tensor, target: Tensor, bias: Tensor | None = None,
        preference_labels: Tensor | None = None, ref_input: Tensor | None = None, ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None, kl: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:  # fmt: skip
        return self.function.apply(
            _input, lin_weight, target, preference_labels, bias, ref_input, ref_weight, ref_bias, kl,
            self.ignore_index, self.beta, self.compiled, self.use_ref_model, self.average_log_prob, self.chunk_size,
        )  # fmt: skip
