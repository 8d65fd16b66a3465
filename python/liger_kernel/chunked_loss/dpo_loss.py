"""Direct preference optimisation (Rafailov et al. 2023, arXiv:2305.18290) and its relatives."""

from typing import Any

import torch
from torch import Tensor

from liger_kernel._library import ops
from liger_kernel.chunked_loss.fused_linear_preference import LigerFusedLinearPreferenceBase
from liger_kernel.chunked_loss.gradients import breaks_graph


class LigerFusedLinearDPOFunction(LigerFusedLinearPreferenceBase):
    """Direct preference optimisation and its relatives, of which loss_type names one (Rafailov et al. 2023,
    arXiv:2305.18290)."""

    @staticmethod
    def preference_loss_fn(
        chosen_logps: Tensor, rejected_logps: Tensor, full_target: Tensor, ref_chosen_logps: Tensor | None = None,
        ref_rejected_logps: Tensor | None = None, beta: float = 0.1, loss_type: str = "sigmoid",
        label_smoothing: float = 0.0, discopop_tau: float = 0.05,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """(loss, chosen_rewards [n], rejected_rewards [n]); a reference that is not given counts as 0.

        Raises ValueError for an unknown loss_type or a label_smoothing that it cannot have, NotImplementedError for
        ipo.
        """
        return ops.dpo_loss(
            chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps, beta=beta, loss_type=loss_type,
            label_smoothing=label_smoothing, discopop_tau=discopop_tau, pairs=len(full_target) // 2,
        )  # fmt: skip

    @classmethod
    @breaks_graph
    def forward(
        cls, ctx: Any, _input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None,
        ref_input: Tensor | None = None, ref_weight: Tensor | None = None, ref_bias: Tensor | None = None,
        ignore_index: int = -100, beta: float = 0.1, compute_nll_loss: bool = False, compiled: bool = True,
        use_ref_model: bool = True, average_log_prob: bool = False, chunk_size: int = 1, loss_type: str = "sigmoid",
        label_smoothing: float = 0.0, discopop_tau: float = 0.05, alpha: float = 1.0,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:  # fmt: skip
        return LigerFusedLinearPreferenceBase.forward(
            cls, ctx, _input, weight, target, bias, chunk_size, ignore_index, alpha, beta, compute_nll_loss,
            use_ref_model=use_ref_model, ref_input=ref_input, ref_weight=ref_weight, ref_bias=ref_bias,
            average_log_prob=average_log_prob, loss_type=loss_type, label_smoothing=label_smoothing,
            discopop_tau=discopop_tau,
        )  # fmt: skip


class LigerFusedLinearDPOLoss(torch.nn.Module):
    """DPO of a head `lin_weight` on hidden states of n chosen and n rejected sequences: (loss, aux) with seven entries,
    the last two the rewards.

    Raises ValueError for an unknown loss_type or a label_smoothing that it cannot have.
    """

    function = LigerFusedLinearDPOFunction
    _SUPPORTED_LOSS_TYPES = set(
        "sigmoid hinge exo_pair nca_pair robust bco_pair sppo_hard apo_zero apo_down discopop".split()
    )

    def __init__(
        self, ignore_index: int = -100, beta: float = 0.1, alpha: float = 1.0, compute_nll_loss: bool = False,
        compiled: bool = True, use_ref_model: bool = True, average_log_prob: bool = False, chunk_size: int = 1,
        loss_type: str = "sigmoid", label_smoothing: float = 0.0, discopop_tau: float = 0.05,
    ) -> None:  # fmt: skip
        super().__init__()
        if loss_type not in self._SUPPORTED_LOSS_TYPES:
            known = ", ".join(sorted(self._SUPPORTED_LOSS_TYPES))
            raise ValueError(f"Unsupported loss_type {loss_type!r}: it is one of {known}")
        nothing = torch.empty(0, device="cpu")
        self.function.preference_loss_fn(
            nothing, nothing, nothing, loss_type=loss_type, label_smoothing=label_smoothing
        )
        self.ignore_index, self.beta, self.alpha, self.compute_nll_loss = ignore_index, beta, alpha, compute_nll_loss
        self.compiled, self.use_ref_model, self.average_log_prob = compiled, use_ref_model, average_log_prob
        self.chunk_size, self.loss_type = chunk_size, loss_type
        self.label_smoothing, self.discopop_tau = label_smoothing, discopop_tau

    def forward(
        self, lin_weight: Tensor, _input: Tensor, target: Tensor, bias: Tensor | None = None,
        ref_input: Tensor | None = None, ref_weight: Tensor | None = None, ref_bias: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:  # fmt: skip
        return self.function.apply(
            _input, lin_weight, target, bias, ref_input, ref_weight, ref_bias, self.ignore_index, self.beta,
            self.compute_nll_loss, self.compiled, self.use_ref_model, self.average_log_prob, self.chunk_size,
            self.loss_type, self.label_smoothing, self.discopop_tau, self.alpha,
        )  # fmt: skip
