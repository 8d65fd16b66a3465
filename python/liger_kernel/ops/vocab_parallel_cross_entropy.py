"""Cross entropy of logits whose classes are spread over the ranks of a process group (Shoeybi et al. 2019,
arXiv:1909.08053)."""

import torch

from liger_kernel._library import ops
from liger_kernel.ops.divergence import IGNORE_INDEX
from liger_kernel.ops.utils import first_derivative_only, roots

_FORMULAS, _MODES = ("pytorch", "megatron"), ("global", "partition")
#: An id that is no class of this rank: no column is its, but its row counts.
_ELSEWHERE = -1


def validate_formula_and_mode(formula, mode):
    """Raises ValueError for an unknown label_smoothing_formula or label_smoothing_mode."""
    for name, value, known in (("label_smoothing_formula", formula, _FORMULAS), ("label_smoothing_mode", mode, _MODES)):
        if value not in known:
            raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}, got {value!r}")


class LigerVocabParallelCEFunction(torch.autograd.Function):
    """(1 − a) (log Σ eˣ − x_y) + a · (−mean of log p) of each token, with the sum over the classes of all ranks.

    The mean is over all classes, or in mode "partition" over this rank's. a is label_smoothing or, in formula
    "megatron", label_smoothing · K / (K − 1) for K classes in that mean.
    """

    @staticmethod
    def forward(
        ctx,
        vocab_parallel_logits,
        target,
        tp_group,
        ignore_index,
        label_smoothing,
        label_smoothing_formula,
        label_smoothing_mode,
    ):
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
        *_, stats = ops.selective_log_softmax_forward(
            x, reachable.masked_fill(ignored, IGNORE_INDEX), 1.0, IGNORE_INDEX
        )
        top, total = stats[:, 0].masked_fill(ignored, 0), stats[:, 1].masked_fill(ignored, 1)
        largest = top.clone()
        if ranks > 1:
            torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX, group=tp_group)
        at_target = (x.gather(1, reachable.unsqueeze(1)).squeeze(1).float() - largest).masked_fill(~owned, 0)
        sums = [total * (top - largest).exp(), at_target]
        if label_smoothing:
            mean = x.mean(1, dtype=torch.float32) - largest
            sums.append(mean / ranks)  # the mean over all classes, once it is summed
        sums = torch.stack(sums)
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
    def backward(ctx, grad_output):
        x, ids, stats = ctx.saved_tensors
        g = grad_output.reshape(-1).float()
        dx = ops.selective_log_softmax_backward(-g, torch.zeros_like(g), x, ids, stats, 1.0, IGNORE_INDEX)
        if ctx.smoothing:
            g = g.masked_fill(ids == IGNORE_INDEX, 0) * ctx.smoothing
            dx.sub_((g / ctx.over).unsqueeze(1))
            owned = ids >= 0
            dx.scatter_add_(1, ids.where(owned, 0).unsqueeze(1), g.masked_fill(~owned, 0).unsqueeze(1).to(dx.dtype))
        return dx.view(ctx.shape), *[None] * 6


def check_smoothing(label_smoothing):
    if not 0 <= label_smoothing < 1:
        raise ValueError(f"label_smoothing must be in [0, 1), got {label_smoothing}")
