"""Cross entropy of logits whose classes are spread over ranks, as a module."""

from torch import nn

from liger_kernel.ops import LigerVocabParallelCEFunction
from liger_kernel.ops.vocab_parallel_cross_entropy import check_smoothing, validate_formula_and_mode


class LigerVocabParallelCrossEntropy(nn.Module):
    """Each token's loss; see LigerVocabParallelCEFunction. Raises ValueError for a reduction other than "none", and
    what that raises."""

    def __init__(
        self,
        ignore_index=-100,
        label_smoothing=0.0,
        reduction="none",
        label_smoothing_formula="pytorch",
        label_smoothing_mode="global",
    ):
        super().__init__()
        if reduction != "none":
            raise ValueError(f"reduction must be 'none', got {reduction!r}")
        check_smoothing(label_smoothing)
        validate_formula_and_mode(label_smoothing_formula, label_smoothing_mode)
        self.ignore_index, self.label_smoothing, self.reduction = ignore_index, label_smoothing, reduction
        self.label_smoothing_formula, self.label_smoothing_mode = label_smoothing_formula, label_smoothing_mode

    def forward(self, vocab_parallel_logits, target, tp_group=None):
        return LigerVocabParallelCEFunction.apply(
            vocab_parallel_logits,
            target,
            tp_group,
            self.ignore_index,
            self.label_smoothing,
            self.label_smoothing_formula,
            self.label_smoothing_mode,
        )

    def extra_repr(self):
        return (
            f"ignore_index={self.ignore_index}, label_smoothing={self.label_smoothing}, reduction={self.reduction!r}, "
            f"label_smoothing_formula={self.label_smoothing_formula!r}, "
            f"label_smoothing_mode={self.label_smoothing_mode!r}"
        )
