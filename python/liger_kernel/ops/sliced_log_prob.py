"""Log-probabilities under a head whose classes come in slices: over the ranks of a process group, or dequantised one
after another."""

import torch

from liger_kernel.ops.linear_log_prob import linear_log_prob
from liger_kernel.ops.utils import first_derivative_only

IGNORE_INDEX = -100


class _SumOverRanks(torch.autograd.Function):
    """Σ over the ranks, of which each goes on with the same numbers: so the gradient of the sum is every term's."""

    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        torch.distributed.all_reduce(x, group=group)
        return x

    @staticmethod
    @first_derivative_only
    def backward(ctx, g):
        return g, None


class _SumGradientOverRanks(torch.autograd.Function):
    """x, which all ranks have: its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @first_derivative_only
    def backward(ctx, g):
        g = g.contiguous().clone()
        torch.distributed.all_reduce(g, group=ctx.group)
        return g, None


def _combined(slices, ids, ignore_index, entropy, group):
    """(logp, entropy or None) of all classes; slices: (logp at the slice's own ids, lse, entropy, whether the id is the
    slice's) of each."""
    sum_over = (lambda x: x) if group is None else lambda x: _SumOverRanks.apply(x, group)
    top = torch.stack([lse.detach() for _, lse, _, _ in slices]).amax(0)
    if group is not None:
        torch.distributed.all_reduce(top, torch.distributed.ReduceOp.MAX, group=group)
    parts = [[], [], []]
    for logp, lse, of_slice, owned in slices:
        weight = (lse - top).exp()  # of the slice's classes together
        parts[0].append(weight)
        parts[1].append(torch.where(owned, logp + lse, 0))
        parts[2].append(weight * (lse - of_slice) if entropy else torch.zeros_like(weight))
    total, at_id, mean = sum_over(torch.stack([torch.stack(part).sum(0) for part in parts])).unbind()
    lse = top + total.log()
    zeroed = lambda t: torch.where(ids == ignore_index, 0, t)
    return zeroed(at_id - lse), zeroed(lse - mean / total) if entropy else None


def _of_slice(hidden, weight, bias, ids, first, ignore_index, options):
    local = ids - first
    owned = (local >= 0) & (local < len(weight)) & (ids != ignore_index)
    found = linear_log_prob(
        hidden,
        weight,
        torch.where(owned, local, 0).masked_fill(ids == ignore_index, ignore_index),
        bias,
        ignore_index=ignore_index,
        outputs=("lse", "entropy"),
        **options,
    )
    return *found, owned


def vocab_parallel_linear_log_prob(
    hidden, weight, ids, group, first=None, bias=None, entropy=False, ignore_index=IGNORE_INDEX, **options
):
    """linear_log_prob under a head whose classes are spread over the ranks of a process group (Shoeybi et al. 2019,
    arXiv:1909.08053).

    weight [V of this rank, H] and bias [V of this rank] are those of classes first, first + 1, ... (by default all
    ranks have as many, in their order); hidden [..., H] and ids [...] are the same on all ranks, and so are the
    results: logp, or (logp, entropy) with entropy=True, float. The gradient of hidden is the sum over the ranks. Two
    collectives of [...] numbers in forward, one of hidden's size in backward. options: temperature, softcap,
    logit_scale, max_bytes, batch_invariant. An id that no rank has gets −lse, as if its logit were 0; it is not
    checked.
    """
    if first is None:
        first = torch.distributed.get_rank(group) * len(weight)
    hidden = _SumGradientOverRanks.apply(hidden, group)
    logp, entropies = _combined(
        [_of_slice(hidden, weight, bias, ids, first, ignore_index, options)], ids, ignore_index, entropy, group
    )
    return (logp, entropies) if entropy else logp


def quantised_linear_log_prob(
    hidden, weight, ids, bias=None, entropy=False, ignore_index=IGNORE_INDEX, classes_at_once=32768, **options
):
    """linear_log_prob under a frozen head that bitsandbytes has quantised: int8, nf4 or fp4, of which classes_at_once
    are dequantised at a time, in both passes.

    weight is a Params4bit that has been quantised, or an Int8Params; results as of linear_log_prob with entropy or
    without. Only hidden and bias get gradients. options: temperature, softcap, logit_scale, max_bytes. Raises TypeError
    for another weight.
    """
    classes, dequantise = _dequantiser(weight, hidden.shape[-1])
    slices = []
    for first in range(0, classes, classes_at_once):
        rows = slice(first, min(first + classes_at_once, classes))
        make = lambda rows=rows: dequantise(rows).to(hidden.dtype)
        dense = make()
        # What the operator keeps for backward is the quantised slice: the dense one is made again there.
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, of=dense.data_ptr(), make=make: make if t.data_ptr() == of else t,
            lambda t: t() if callable(t) else t,
        ):
            slices.append(
                _of_slice(hidden, dense, None if bias is None else bias[rows], ids, first, ignore_index, options)
            )
        del dense
    logp, entropies = _combined(slices, ids, ignore_index, entropy, None)
    return (logp, entropies) if entropy else logp


def _dequantiser(weight, width):
    """(number of classes, function of a slice of them that makes their rows)."""
    if getattr(weight, "quant_state", None) is not None:
        from bitsandbytes.functional import QuantState, dequantize_4bit, dequantize_blockwise

        state = weight.quant_state
        absmax = dequantize_blockwise(state.absmax, state.state2) + state.offset if state.nested else state.absmax
        packed, a_row = weight.data.reshape(-1), width // state.blocksize
        if width % state.blocksize:
            raise TypeError(
                f"a row of the quantised weight, of {width} numbers, must be made of whole blocks of {state.blocksize}"
            )

        def rows_of(rows):
            count = rows.stop - rows.start
            part = QuantState(
                absmax[rows.start * a_row : rows.stop * a_row].float().contiguous(),
                torch.Size((count, width)),
                state.code,
                state.blocksize,
                state.quant_type,
                state.dtype,
            )
            bytes_a_row = packed.numel() * packed.element_size() // state.shape[0]
            data = packed.view(torch.uint8)[rows.start * bytes_a_row : rows.stop * bytes_a_row].reshape(-1, 1)
            return dequantize_4bit(data.contiguous(), part)

        return state.shape[0], rows_of
    scale = getattr(weight, "SCB", None)
    if scale is not None and weight.dtype == torch.int8:
        return len(weight), lambda rows: weight.data[rows].float() * (scale[rows] / 127).unsqueeze(1)
    raise TypeError(f"no weight that bitsandbytes has quantised: {type(weight).__name__}")
