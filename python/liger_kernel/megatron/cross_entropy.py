"""The loss of tokens whose classes are spread over tensor-parallel ranks, as Megatron-LM calls it."""

import sys
from typing import Any

from torch import Tensor

from liger_kernel.operators.loss import LigerVocabParallelCrossEntropy


class LigerMegatronCrossEntropy(LigerVocabParallelCrossEntropy):
    """LigerVocabParallelCrossEntropy with the label smoothing of Megatron-LM.

    forward takes logits [S, B, V of this rank] and targets [S, B] of all ranks' classes and returns each token's loss,
    float [S, B]. Without a tp_group it is computed over Megatron's tensor-parallel group, where there is one.
    """

    def __init__(
        self, ignore_index: int = -100, label_smoothing: float = 0.0, reduction: str = "none",
        label_smoothing_formula: str = "megatron", label_smoothing_mode: str = "partition",
    ) -> None:  # fmt: skip
        super().__init__(ignore_index, label_smoothing, reduction, label_smoothing_formula, label_smoothing_mode)

    def forward(self, vocab_parallel_logits: Tensor, target: Tensor, tp_group: Any = None) -> Tensor:
        return super().forward(vocab_parallel_logits, target, _default_group() if tp_group is None else tp_group)


def _default_group():
    """Megatron-LM's tensor-parallel group; its functions before 0.17 take no group."""
    parallel_state = sys.modules.get("megatron.core.parallel_state")
    if parallel_state is None or not parallel_state.model_parallel_is_initialized():
        return None
    return parallel_state.get_tensor_model_parallel_group()
