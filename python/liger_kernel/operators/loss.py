"""Losses on logits and distributions; formulas in liger/ops/loss/cross_entropy.h and liger/core/math.h.

Cross entropy, also of logits whose classes are spread over the ranks of a process group (Shoeybi et al. 2019,
arXiv:1909.08053); the divergences of Kullback & Leibler (1951) and Jensen & Shannon (Lin 1991; generalised by Agarwal
et al. 2024, arXiv:2306.13649), and the total variation distance (Wen et al. 2023, arXiv:2307.15190).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from liger_kernel._library import ops
from liger_kernel.operators.common import IGNORE_INDEX, check_label, first_derivative_only, reduction_code, roots

#: Those of a cross entropy.
REDUCTIONS = ("none", "mean", "sum")
_DEFAULTS = (-100, "mean", 0, 0, None, False, False, False, False)

#: Rows of libliger's table of divergences.
KL, LOG_KL, REVERSE_KL, JENSEN_SHANNON, TOTAL_VARIATION = range(5)

_FORMULAS, _MODES = ("pytorch", "megatron"), ("global", "partition")
#: An id that is no class of this rank: no column is its, but its row counts.
_ELSEWHERE = -1


@dataclass
class CrossEntropyOutput:
    """A loss and what else was asked for."""

    loss: torch.Tensor
    z_loss: Tensor | None = None
    token_accuracy: Tensor | None = None
    predicted_tokens: Tensor | None = None


def loss_options(
    ignore_index: int, lse_square_scale: float, label_smoothing: float, reduction: str, softcap: float | None,
    return_z_loss: bool, return_token_accuracy: bool, return_predicted_tokens: bool, use_token_scaling: bool = False,
) -> tuple[Any, ...]:  # fmt: skip
    """The options of both cross entropies in the order that their schemas have.

    Raises ValueError for an unknown reduction, TypeError where ignore_index is no integer.
    """
    asked = return_z_loss, return_token_accuracy, return_predicted_tokens
    given = (ignore_index, reduction, label_smoothing, lse_square_scale, softcap, use_token_scaling, *asked)
    if given == _DEFAULTS:
        return IGNORE_INDEX, 1, 0.0, 0.0, 0.0, False, False, False, False
    check_label("ignore_index", ignore_index)
    for name, flag in (
        ("return_token_accuracy", return_token_accuracy),
        ("return_predicted_tokens", return_predicted_tokens),
    ):
        if flag not in (True, False):
            raise AssertionError(f"{name} must be True or False, got {flag!r}")
    numbers = float(label_smoothing), float(lse_square_scale), float(softcap or 0)
    return ignore_index, reduction_code(reduction, REDUCTIONS), *numbers, bool(use_token_scaling), *map(bool, asked)


def asked_for(results: Sequence[Tensor], *asked: bool) -> tuple[Any, ...]:
    """(loss, z_loss, token_accuracy, predicted_tokens) with None for what `asked` is false for, which the operators
    return empty."""
    return results[0], *(result if wanted else None for result, wanted in zip(results[1:], asked))


def as_output(
    loss: Tensor, z_loss: Tensor | None, token_accuracy: Tensor | None, predicted_tokens: Tensor | None
) -> Any:
    """The loss, or a CrossEntropyOutput where something else was asked for."""
    if z_loss is token_accuracy is predicted_tokens is None:
        return loss
    return CrossEntropyOutput(loss, z_loss, token_accuracy, predicted_tokens)


class LigerCrossEntropyFunction:
    @staticmethod
    def apply(
        _input: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int = -100, lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0, reduction: str = "mean", softcap: float | None = None,
        return_z_loss: bool = False, return_token_accuracy: bool = False, return_predicted_tokens: bool = False,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        """(loss, z_loss, token_accuracy, predicted_tokens), None where not asked for; only the loss is differentiable.

        _input [..., classes] logits, which are not changed; target [...]; weight [classes] or None. A label that is
        neither a class nor ignore_index raises IndexError on the CPU and is a device assertion on CUDA. Only ignored
        labels: loss 0.
        """
        asked = return_z_loss, return_token_accuracy, return_predicted_tokens
        options = loss_options(ignore_index, lse_square_scale, label_smoothing, reduction, softcap, *asked)
        return asked_for(ops.cross_entropy(_input, target, weight, *options), *asked)


def liger_cross_entropy(
    input: Tensor, target: Tensor, weight: Tensor | None = None, size_average: Any = None, ignore_index: int = -100,
    reduce: Any = None, reduction: str = "mean", label_smoothing: float = 0.0, lse_square_scale: float = 0.0,
    softcap: float | None = None, return_z_loss: bool = False, return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
) -> Any:  # fmt: skip
    """As torch.nn.functional.cross_entropy for logits [rows, classes]; size_average and reduce are not used.

    Returns the loss, or a CrossEntropyOutput where one of the return flags is set.
    """
    asked = return_z_loss, return_token_accuracy, return_predicted_tokens
    options = loss_options(ignore_index, lse_square_scale, label_smoothing, reduction, softcap, *asked)
    return as_output(*asked_for(ops.cross_entropy(input, target, weight, *options), *asked))


def check_options(reduction: str, label_smoothing: float, softcap: float | None) -> None:
    reduction_code(reduction, REDUCTIONS)
    if not 0 <= label_smoothing <= 1:
        raise AssertionError(f"label_smoothing must be in [0, 1], got {label_smoothing}")
    if softcap is not None and not softcap > 0:
        raise AssertionError(f"softcap must be positive, got {softcap}")


def vars_of(module: nn.Module) -> dict[str, Any]:
    """A loss module's options, as the keywords of its function."""
    return {
        name: value for name, value in vars(module).items() if not name.startswith("_") and name != "training"
    } | module._buffers


class LigerCrossEntropyLoss(nn.Module):
    """As torch.nn.CrossEntropyLoss for logits [rows, classes] and labels [rows], with z-loss, softcap, accuracy and
    predictions.

    Raises ValueError for an unknown reduction, AssertionError for label_smoothing outside [0, 1] or softcap <= 0.
    """

    def __init__(
        self, weight: Tensor | None = None, ignore_index: int = -100, lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0, reduction: str = "mean", softcap: float | None = None,
        return_z_loss: bool = False, return_token_accuracy: bool = False, return_predicted_tokens: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        check_options(reduction, label_smoothing, softcap)
        self.register_buffer("weight", weight)
        self.ignore_index, self.lse_square_scale, self.label_smoothing = ignore_index, lse_square_scale, label_smoothing
        self.reduction, self.softcap, self.return_z_loss = reduction, softcap, return_z_loss
        self.return_token_accuracy, self.return_predicted_tokens = return_token_accuracy, return_predicted_tokens

    def forward(self, _input: Tensor, target: Tensor) -> Any:
        return liger_cross_entropy(_input, target, **vars_of(self))


def check_labels(labels: Tensor | None, rows: int, ignore_index: int) -> None:
    check_label("ignore_index", ignore_index)
    if labels is not None and labels.shape != (rows,):
        raise AssertionError(f"shift_labels must be [{rows}], got {list(labels.shape)}")


class LigerKLDivLossFunction:
    @staticmethod
    def apply(
        y_pred: Tensor, y_true: Tensor, reduction: str = "batchmean", log_target: bool = False, eps: float = 1e-10
    ) -> Tensor:
        """t · (ln max(t, eps) − y), or eᵗ · (t − y) with log_target, for log-probabilities y and a target t, both
        [rows, cols].

        The dtypes may differ; the loss is float, a scalar or, with "none", [rows, cols]. The target gets no gradient.
        Raises ValueError for an unknown reduction.
        """
        kind, code = LOG_KL if log_target else KL, reduction_code(reduction)
        return ops.divergence(y_pred, y_true, None, kind, float(eps), IGNORE_INDEX, code, torch.float32)


def liger_kl_div(
    input: Tensor, target: Tensor, size_average: bool = True, reduce: bool = True, reduction: str = "mean",
    log_target: bool = False, eps: float = 1e-10,
) -> Tensor:  # fmt: skip
    """As torch.nn.functional.kl_div for log-probabilities [rows, cols], with a float loss; size_average and reduce are
    not used. See LigerKLDivLossFunction."""
    return LigerKLDivLossFunction.apply(input, target, reduction, log_target, eps)


class LigerKLDIVLoss(nn.KLDivLoss):
    """As torch.nn.KLDivLoss for log-probabilities [rows, cols]; eps bounds the probabilities whose logarithm is taken.
    The loss is float."""

    def __init__(self, eps: float = 1e-10, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        reduction_code(self.reduction)
        self.eps = eps

    def forward(self, y_pred: Tensor, y_true: Tensor) -> Tensor:
        return LigerKLDivLossFunction.apply(y_pred, y_true, self.reduction, self.log_target, self.eps)


class LigerJSDFunction:
    @staticmethod
    def apply(
        _input: Tensor, target: Tensor, shift_labels: Tensor | None = None, beta: float = 0.5, ignore_index: int = -100,
        jsd_impl: str | None = None, jsd_mode: str | None = None,
    ) -> Tensor:  # fmt: skip
        """β KL(P ‖ M) + (1 − β) KL(Q ‖ M), M = β P + (1 − β) Q, for _input = ln Q and target = ln P, both [rows, cols].

        β = 0 is KL(P ‖ Q), β = 1 KL(Q ‖ P). The mean over the rows whose shift_labels [rows] is not ignore_index, in
        _input's dtype; 0 where there is none. The target gets no gradient. Raises AssertionError for labels of another
        shape, ValueError for β outside [0, 1]. jsd_impl and jsd_mode change nothing.
        """
        check_labels(shift_labels, _input.shape[0], ignore_index)
        options = JENSEN_SHANNON, float(beta), ignore_index, reduction_code("batchmean")
        return ops.divergence(_input, target, shift_labels, *options, _input.dtype)


def liger_jsd(
    input: Tensor, target: Tensor, shift_labels: Tensor | None = None, beta: float = 0.5, ignore_index: int = -100
) -> Tensor:
    """Generalised Jensen-Shannon divergence of logarithms; see LigerJSDFunction."""
    return LigerJSDFunction.apply(input, target, shift_labels, beta, ignore_index)


class LigerJSD(nn.Module):
    """The divergence of log_p from log_q, both logarithms [rows, cols]; see LigerJSDFunction."""

    def __init__(self, beta: float = 0.5, ignore_index: int = -100) -> None:
        super().__init__()
        self.beta, self.ignore_index = beta, ignore_index

    def forward(self, log_q: Tensor, log_p: Tensor, shift_labels: Tensor | None = None) -> Tensor:
        return LigerJSDFunction.apply(log_q, log_p, shift_labels, self.beta, self.ignore_index)


class LigerTVDLossFunction:
    @staticmethod
    def apply(
        p: Tensor, q: Tensor, shift_labels: Tensor | None = None, reduction: str = "batchmean", ignore_index: int = -100
    ) -> Tensor:
        """½ |p − q| for probabilities p and q, both [rows, cols], of any dtypes.

        Rows whose shift_labels [rows] is ignore_index do not count; 0 where all are. The loss is float, a scalar or,
        with "none", [rows, cols]. q gets no gradient. Raises AssertionError for labels of another shape, ValueError for
        an unknown reduction.
        """
        check_labels(shift_labels, p.shape[0], ignore_index)
        options = TOTAL_VARIATION, 0.0, ignore_index, reduction_code(reduction)
        return ops.divergence(p, q, shift_labels, *options, torch.float32)


def liger_tvd(
    input: Tensor, target: Tensor, shift_labels: Tensor | None = None, reduction: str = "mean", ignore_index: int = -100
) -> Tensor:
    """Total variation distance of probabilities; see LigerTVDLossFunction."""
    return LigerTVDLossFunction.apply(input, target, shift_labels, reduction, ignore_index)


class LigerTVDLoss(nn.Module):
    """The distance of probabilities p and q, both [rows, cols]; see LigerTVDLossFunction. Raises ValueError for an
    unknown reduction."""

    def __init__(self, reduction: str = "batchmean", ignore_index: int = -100) -> None:
        super().__init__()
        reduction_code(reduction)
        self.reduction, self.ignore_index = reduction, ignore_index

    def forward(self, p: Tensor, q: Tensor, shift_labels: Tensor | None = None) -> Tensor:
        return LigerTVDLossFunction.apply(p, q, shift_labels, self.reduction, self.ignore_index)


def liger_selective_log_softmax(
    logits: Tensor, ids: Tensor, temperature: float = 1.0, ignore_index: int = -100
) -> tuple[Tensor, Tensor]:
    """(ln p at ids, entropy of p) as float [...], p = softmax(logits / temperature), for logits [..., V] and ids [...];
    differentiable.

    0 where the id is ignore_index. An id outside [0, V) that is not raises IndexError on the CPU and is a device
    assertion on CUDA.
    """
    return ops.selective_log_softmax(logits, ids, float(temperature), ignore_index)


def validate_formula_and_mode(label_smoothing_formula: str, label_smoothing_mode: str) -> None:
    """Raises ValueError for an unknown label_smoothing_formula or label_smoothing_mode."""
    for name, value, known in (
        ("label_smoothing_formula", label_smoothing_formula, _FORMULAS),
        ("label_smoothing_mode", label_smoothing_mode, _MODES),
    ):
        if value not in known:
            raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}, got {value!r}")


def check_smoothing(label_smoothing: float) -> None:
    if not 0 <= label_smoothing < 1:
        raise ValueError(f"label_smoothing must be in [0, 1), got {label_smoothing}")


class LigerVocabParallelCEFunction(torch.autograd.Function):
    """(1 − a) (log Σ eˣ − x_y) + a · (−mean of log p) of each token, with the sum over the classes of all ranks.

    The mean is over all classes, or in mode "partition" over this rank's. a is label_smoothing or, in formula
    "megatron", label_smoothing · K / (K − 1) for K classes in that mean.
    """

    @staticmethod
    def forward(
        ctx: Any, vocab_parallel_logits: Tensor, target: Tensor, tp_group: Any, ignore_index: int,
        label_smoothing: float, label_smoothing_formula: str, label_smoothing_mode: str,
    ) -> Tensor:  # fmt: skip
        """Float [S, B] for logits [S, B, V of this rank] and target [S, B] of all ranks' classes; 0, with gradients of
        0, where that is ignore_index.

        Rank r owns the classes [r V, (r + 1) V). tp_group is a process group, or None, or anything whose size() is 1.
        Two collectives in forward, none in backward. A target that is no class has x_y = max x, without a gradient.
        Raises ValueError for logits that are not 3-D, and for a formula, mode or label_smoothing that does not exist.
        """
        if vocab_parallel_logits.ndim != 3:
            raise ValueError(f"the logits must be 3-D, [S, B, V of this rank], got {list(vocab_parallel_logits.shape)}")
        check_smoothing(label_smoothing)
        validate_formula_and_mode(label_smoothing_formula, label_smoothing_mode)
        ranks = 1 if tp_group is None else tp_group.size()
        classes = vocab_parallel_logits.shape[-1]
        x, y = vocab_parallel_logits.detach().reshape(-1, classes), target.reshape(-1).long()
        ignored = y == ignore_index
        local = y - (torch.distributed.get_rank(tp_group) * classes if ranks > 1 else 0)
        owned = (local >= 0) & (local < classes) & ~ignored
        reachable = local.where(owned, 0)
        ids = reachable.masked_fill(ignored, IGNORE_INDEX)
        *_, stats = ops.selective_log_softmax_forward(x, ids, 1.0, IGNORE_INDEX)
        top, total = stats[:, 0].masked_fill(ignored, 0), stats[:, 1].masked_fill(ignored, 1)
        largest = top.clone()
        if ranks > 1:
            torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX, group=tp_group)
        at_target = (x.gather(1, reachable.unsqueeze(1)).squeeze(1).float() - largest).masked_fill(~owned, 0)
        terms = [total * (top - largest).exp(), at_target]
        if label_smoothing:
            mean = x.mean(1, dtype=torch.float32) - largest
            terms.append(mean / ranks)  # the mean over all classes, once it is summed
        sums = torch.stack(terms)
        if ranks > 1:
            torch.distributed.all_reduce(sums, group=tp_group)
        log_total = sums[0].log()
        loss = log_total - sums[1]
        over = classes * (ranks if label_smoothing_mode == "global" else 1)
        a = label_smoothing * (over / (over - 1) if label_smoothing_formula == "megatron" and label_smoothing else 1)
        if label_smoothing:
            loss = (1 - a) * loss + a * (log_total - (sums[2] if label_smoothing_mode == "global" else mean))
        # The statistics of the whole row make the kernel's probabilities those among all classes.
        whole = torch.stack((largest, sums[0], torch.zeros_like(largest)), 1)
        ctx.save_for_backward(x, local.where(owned, _ELSEWHERE).masked_fill(ignored, IGNORE_INDEX), whole)
        ctx.roots = roots(vocab_parallel_logits)
        ctx.smoothing, ctx.over, ctx.shape = a, over, vocab_parallel_logits.shape
        return loss.masked_fill(ignored, 0).view(target.shape)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        x, ids, stats = ctx.saved_tensors
        g = grad_output.reshape(-1).float()
        dx = ops.selective_log_softmax_backward(-g, torch.zeros_like(g), x, ids, stats, 1.0, IGNORE_INDEX)
        if ctx.smoothing:
            g = g.masked_fill(ids == IGNORE_INDEX, 0) * ctx.smoothing
            dx.sub_((g / ctx.over).unsqueeze(1))
            owned = ids >= 0
            dx.scatter_add_(1, ids.where(owned, 0).unsqueeze(1), g.masked_fill(~owned, 0).unsqueeze(1).to(dx.dtype))
        return dx.view(ctx.shape), *[None] * 6


class LigerVocabParallelCrossEntropy(nn.Module):
    """Each token's loss; see LigerVocabParallelCEFunction. Raises ValueError for a reduction other than "none", and
    what that raises."""

    def __init__(
        self, ignore_index: int = -100, label_smoothing: float = 0.0, reduction: str = "none",
        label_smoothing_formula: str = "pytorch", label_smoothing_mode: str = "global",
    ) -> None:  # fmt: skip
        super().__init__()
        if reduction != "none":
            raise ValueError(f"reduction must be 'none', got {reduction!r}")
        check_smoothing(label_smoothing)
        validate_formula_and_mode(label_smoothing_formula, label_smoothing_mode)
        self.ignore_index, self.label_smoothing, self.reduction = ignore_index, label_smoothing, reduction
        self.label_smoothing_formula, self.label_smoothing_mode = label_smoothing_formula, label_smoothing_mode

    def forward(self, vocab_parallel_logits: Tensor, target: Tensor, tp_group: Any = None) -> Tensor:
        options = self.label_smoothing, self.label_smoothing_formula, self.label_smoothing_mode
        return LigerVocabParallelCEFunction.apply(vocab_parallel_logits, target, tp_group, self.ignore_index, *options)

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in vars_of(self).items())
