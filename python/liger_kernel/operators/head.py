"""What is computed of a language model's logits without the logits; see liger/ops.h.

Cross entropy, and log-probabilities of given tokens, also under a head whose classes come in slices: over the ranks of
a process group, or dequantised one after another.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from liger_kernel._library import ops
from liger_kernel.operators.common import IGNORE_INDEX, first_derivative_only
from liger_kernel.operators.loss import as_output, asked_for, check_options, loss_options, vars_of

#: What there is beside the log-probabilities, with the operator's options.
OUTPUTS = {
    "entropy": "entropy",
    "lse": "lse",
    "mean_logits": "mean_logit",
    "log_sum_sq_probs": "log_sum_squares",
    "is_top1": "is_top1",
    "argmax": "argmax",
}
#: The operator's results after the log-probabilities.
RESULTS = (
    *("entropy", "lse", "mean_logits", "class_logp", "log_tail", "log_sum_sq_probs", "is_top1", "argmax"),
    *("top_logp", "top_ids"),
)


def liger_fused_linear_cross_entropy(
    input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, ce_weight: Tensor | None = None,
    ignore_index: int = -100, lse_square_scale: float = 0.0, label_smoothing: float = 0.0, reduction: str = "mean",
    softcap: float | None = None, return_z_loss: bool = False, accum_dtype: torch.dtype | None = None,
    use_token_scaling: bool = False, return_token_accuracy: bool = False, return_predicted_tokens: bool = False,
    chunk_mem_const: int = 1, valid_count: int | None = None, normalizer: Tensor | None = None, max_bytes: int = 0,
) -> Any:  # fmt: skip
    """Cross entropy of the logits `input @ weight.T + bias`, which are never held in full.

    input [tokens, width], weight [classes, width], target [tokens], bias and ce_weight [classes]. Gradients of the
    weight are always summed in float, so accum_dtype is not used, and neither is chunk_mem_const. valid_count is the
    number of labels that are not ignored, where the host knows it already; normalizer a number (on the device) that
    divides the sum of the losses; max_bytes bounds the logits held at once. Returns the float loss, or a
    CrossEntropyOutput where one of the return flags is set.
    """
    asked = return_z_loss, return_token_accuracy, return_predicted_tokens
    options = loss_options(
        ignore_index, lse_square_scale, label_smoothing, reduction, softcap, *asked, use_token_scaling
    )
    count = -1 if valid_count is None else valid_count
    results = ops.fused_linear_cross_entropy(
        input, weight, bias, target, ce_weight, normalizer, None, *options, valid_count=count, max_bytes=max_bytes
    )
    return as_output(*asked_for(results, *asked))


class LigerFusedLinearCrossEntropyLoss(nn.Module):
    """Cross entropy of `_input @ lin_weight.T + bias` without the logits; see
    functional.liger_fused_linear_cross_entropy.

    Raises ValueError for an unknown reduction, AssertionError for label_smoothing outside [0, 1] or softcap <= 0.
    """

    def __init__(
        self, ce_weight: Tensor | None = None, ignore_index: int = -100, lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0, reduction: str = "mean", softcap: float | None = None,
        return_z_loss: bool = False, accum_dtype: torch.dtype | None = None, use_token_scaling: bool = False,
        return_token_accuracy: bool = False, return_predicted_tokens: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        check_options(reduction, label_smoothing, softcap)
        self.register_buffer("ce_weight", ce_weight)
        self.ignore_index, self.lse_square_scale, self.label_smoothing = ignore_index, lse_square_scale, label_smoothing
        self.reduction, self.softcap, self.return_z_loss = reduction, softcap, return_z_loss
        self.accum_dtype, self.use_token_scaling = accum_dtype, use_token_scaling
        self.return_token_accuracy, self.return_predicted_tokens = return_token_accuracy, return_predicted_tokens

    def forward(self, lin_weight: Tensor, _input: Tensor, target: Tensor, bias: Tensor | None = None) -> Any:
        return liger_fused_linear_cross_entropy(_input, lin_weight, target, bias, **vars_of(self))


def linear_log_prob(
    hidden: Tensor, weight: Tensor, ids: Tensor | None, bias: Tensor | None = None, temperature: float = 1.0,
    ignore_index: int = -100, entropy: bool = False, max_bytes: int = 0, valid_count: int | None = None,
    softcap: float | None = None, logit_scale: float = 1.0, outputs: Sequence[str] = (), top_k: int = 0,
    lora: tuple[Tensor, Tensor, float] | None = None, main_grad: Tensor | None = None, batch_invariant: bool = False,
    class_ids: Tensor | None = None, log_tail: bool = False,
) -> Any:  # fmt: skip
    """log_softmax(z) at ids, float [...], for z = y · logit_scale / temperature, or softcap · tanh(y · logit_scale /
    softcap) / temperature, y = hidden weightᵀ + bias.

    With entropy=True the pair (logp, −Σ p ln p); with outputs, names of OUTPUTS, the tuple (logp, *those) in the order
    given: also "lse" ln Σ exp z, "mean_logits" the mean of z, "log_sum_sq_probs" ln Σ p², "is_top1" whether the id is
    the first of the largest z, "argmax" which class is. Then the tuple has, where they are requested,

    - with class_ids [..., K], integers, -1 for none: ln p of these classes [..., K], 0 where there is none;
    - with log_tail: ln Σ p [...] of all other classes, summed by itself, so that it is exact where it is small;
    - with top_k: the largest log-probabilities [..., top_k] and their classes.

    ids may be None beside class_ids: then all tokens count, and logp is that of class 0. Label smoothing ε is (1 − ε)
    logp + ε (mean_logits − lse), a z-loss λ lse², a class's weight a factor of logp.

    hidden [..., H] of any strides, weight [V, H], ids [...] integers, bias [V]. 0 where the id is ignore_index: such
    tokens cost nothing. logp, entropy, lse, mean_logits, those of class_ids and log_tail are differentiable with
    respect to hidden, weight and bias, with any upstream gradient. Logits of up to max_bytes (0: as in
    memory.set_memory_budget) wait for backward, others are recomputed; valid_count is the number of ids that are not
    ignored, where the host knows it; the weight's gradient is summed in float. Mixed dtypes compute in hidden's.

    lora: (a [rank, H], b [V, rank], scale), of which the weight is weight + scale · b a; a and b get gradients, and a
    frozen weight none. main_grad [V, H], float: backward adds the weight's gradient to it instead of weight.grad,
    as Megatron has it. batch_invariant: a token's results have the same bits whatever else is in the batch.

    Another id raises IndexError on the CPU and is a device assertion on CUDA; an unknown output raises KeyError.
    """
    names = ("entropy",) if entropy else tuple(outputs)
    low_hidden = low_weight = None
    if lora is not None:
        a, low_weight, scale = lora
        low_hidden = torch.nn.functional.linear(hidden, a.to(hidden.dtype)) * scale
    if ids is None:
        if class_ids is None:
            raise TypeError("linear_log_prob: give ids, class_ids or both")
        ids = class_ids.new_zeros(class_ids.shape[:-1])
        valid_count = ids.numel()
    logp, *rest = ops.linear_log_prob(
        hidden, weight, bias, ids, low_hidden, low_weight, class_ids, main_grad, None, temperature=float(temperature),
        softcap=float(softcap or 0), logit_scale=float(logit_scale), ignore_index=ignore_index,
        top_k=top_k, log_tail=log_tail, valid_count=-1 if valid_count is None else valid_count, max_bytes=max_bytes,
        batch_invariant=batch_invariant, **{OUTPUTS[name]: True for name in names},
    )  # fmt: skip
    found = dict(zip(RESULTS, rest))
    names += ("class_logp",) * (class_ids is not None) + ("log_tail",) * log_tail
    names += ("top_logp", "top_ids") if top_k else ()
    return (logp, *(found[name] for name in names)) if names else logp


def class_logits(
    hidden: Tensor, weight: Tensor, class_ids: Tensor, bias: Tensor | None = None, temperature: float = 1.0,
    softcap: float | None = None, logit_scale: float = 1.0,
) -> Tensor:  # fmt: skip
    """The logits z of linear_log_prob, float [..., K], at class_ids [..., K] alone: K rows of the weight per token are
    read, and no other class is computed.

    hidden [..., H], weight [V, H], bias [V] of one dtype; class_ids integers, -1 for none, whose z is 0. Differentiable
    in hidden, weight and bias; a class's gradient is summed in float over its tokens, in their order. A class outside
    [-1, V) raises IndexError on the CPU and is a device assertion on CUDA.
    """
    y = ops.class_logits(hidden, weight, bias, class_ids) * logit_scale
    return (softcap * torch.tanh(y / softcap) if softcap else y) / temperature


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


class _Slice(NamedTuple):
    """What the classes of a slice give: logp and class_logp at ids that are its own, where `owned` and
    `classes_owned` say so, and its own lse, entropy and log_tail."""

    logp: Tensor
    lse: Tensor
    entropy: Tensor
    owned: Tensor
    class_logp: Tensor | None = None
    classes_owned: Tensor | None = None
    log_tail: Tensor | None = None


def _combined(slices, ids, ignore_index, entropy, class_ids=None, log_tail=False, group=None):
    """The results of all classes as linear_log_prob returns them."""
    top = torch.stack([part.lse.detach() for part in slices]).amax(0)
    if group is not None:
        torch.distributed.all_reduce(top, torch.distributed.ReduceOp.MAX, group=group)
    sums = []
    for part in slices:
        weight = (part.lse - top).exp()  # of the slice's classes together
        numbers = [weight, torch.where(part.owned, part.logp + part.lse, 0)]
        numbers += [weight * (part.lse - part.entropy)] if entropy else []
        numbers += [(part.log_tail + part.lse - top).exp()] if log_tail else []
        sums.append(torch.stack(numbers, -1))
        if class_ids is not None:
            at_classes = torch.where(part.classes_owned, part.class_logp + part.lse.unsqueeze(-1), 0)
            sums[-1] = torch.cat([sums[-1], at_classes], -1)
    whole = torch.stack(sums).sum(0)
    if group is not None:
        whole = _SumOverRanks.apply(whole, group)
    total, at_id, *others = whole[..., : 2 + entropy + log_tail].unbind(-1)
    lse = top + total.log()
    zeroed = lambda t: torch.where(ids == ignore_index, 0, t)
    results = [zeroed(at_id - lse)]
    if entropy:
        results.append(zeroed(lse - others[0] / total))
    if class_ids is not None:
        counts = (ids != ignore_index).unsqueeze(-1) & (class_ids >= 0)
        results.append(torch.where(counts, whole[..., 2 + entropy + log_tail :] - lse.unsqueeze(-1), 0))
    if log_tail:
        least = torch.finfo(torch.float32).tiny  # of no mass at all the logarithm has no gradient
        results.append(zeroed(others[-1].clamp_min(least).log() + top - lse))
    return tuple(results) if len(results) > 1 else results[0]


def _of_slice(hidden, weight, bias, ids, first, ignore_index, class_ids=None, log_tail=False, **options):
    def own(ids):
        local = ids - first
        return local, (local >= 0) & (local < len(weight))

    local, owned = own(ids)
    owned &= ids != ignore_index
    own_ids = torch.where(owned, local, 0).masked_fill(ids == ignore_index, ignore_index)
    classes_owned = None
    if class_ids is not None:
        local, classes_owned = own(class_ids)
        class_ids = torch.where(classes_owned, local, -1)
    logp, lse, entropy, *of_classes = linear_log_prob(
        hidden, weight, own_ids, bias, ignore_index=ignore_index, outputs=("lse", "entropy"), class_ids=class_ids,
        log_tail=log_tail, **options,
    )  # fmt: skip
    of_classes += [None] * (2 - len(of_classes))
    return _Slice(logp, lse, entropy, owned, of_classes[0], classes_owned, of_classes[1])


def vocab_parallel_linear_log_prob(
    hidden: Tensor, weight: Tensor, ids: Tensor, group: Any, first: int | None = None, bias: Tensor | None = None,
    entropy: bool = False, ignore_index: int = IGNORE_INDEX, class_ids: Tensor | None = None, log_tail: bool = False,
    **options: Any,
) -> Any:  # fmt: skip
    """linear_log_prob under a head whose classes are spread over the ranks of a process group (Shoeybi et al. 2019,
    arXiv:1909.08053).

    weight [V of this rank, H] and bias [V of this rank] are those of classes first, first + 1, ... (by default all
    ranks have as many, in their order); hidden [..., H], ids [...] and class_ids [..., K] are the same on all ranks,
    and so are the results: logp, entropy with entropy=True, those of class_ids, and log_tail, float. The gradient of
    hidden is the sum over the ranks. Two collectives of [..., 2 to 4 + K] numbers in forward, one of hidden's size in
    backward. options: temperature, softcap, logit_scale, max_bytes, batch_invariant. An id that no rank has gets −lse,
    as if its logit were 0; it is not checked.
    """
    if first is None:
        first = torch.distributed.get_rank(group) * len(weight)
    hidden = _SumGradientOverRanks.apply(hidden, group)
    found = _of_slice(hidden, weight, bias, ids, first, ignore_index, class_ids, log_tail, **options)
    return _combined([found], ids, ignore_index, entropy, class_ids, log_tail, group)


def quantised_linear_log_prob(
    hidden: Tensor, weight: Any, ids: Tensor, bias: Tensor | None = None, entropy: bool = False,
    ignore_index: int = IGNORE_INDEX, classes_at_once: int = 32768, class_ids: Tensor | None = None,
    log_tail: bool = False, **options: Any,
) -> Any:  # fmt: skip
    """linear_log_prob under a frozen head that bitsandbytes has quantised: int8, nf4 or fp4, of which classes_at_once
    are dequantised at a time, in both passes.

    weight is a Params4bit that has been quantised, or an Int8Params; results as of vocab_parallel_linear_log_prob. Only
    hidden and bias get gradients. options: temperature, softcap, logit_scale, max_bytes. Raises TypeError for another
    weight.
    """
    classes, dequantise = _dequantiser(weight, hidden.shape[-1])
    slices = []
    for first in range(0, classes, classes_at_once):
        rows = slice(first, min(first + classes_at_once, classes))
        make = lambda rows=rows: dequantise(rows).to(hidden.dtype)
        dense, own_bias = make(), None if bias is None else bias[rows]
        # What the operator keeps for backward is the quantised slice: the dense one is recomputed there.
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, of=dense.data_ptr(), make=make: make if t.data_ptr() == of else t,
            lambda t: t() if callable(t) else t,
        ):
            slices.append(_of_slice(hidden, dense, own_bias, ids, first, ignore_index, class_ids, log_tail, **options))
        del dense
    return _combined(slices, ids, ignore_index, entropy, class_ids, log_tail)


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
            part = QuantState(
                absmax[rows.start * a_row : rows.stop * a_row].float().contiguous(),
                torch.Size((rows.stop - rows.start, width)), state.code, state.blocksize, state.quant_type, state.dtype,
            )  # fmt: skip
            bytes_a_row = packed.numel() * packed.element_size() // state.shape[0]
            data = packed.view(torch.uint8)[rows.start * bytes_a_row : rows.stop * bytes_a_row].reshape(-1, 1)
            return dequantize_4bit(data.contiguous(), part)

        return state.shape[0], rows_of
    scale = getattr(weight, "SCB", None)
    if scale is not None and weight.dtype == torch.int8:
        return len(weight), lambda rows: weight.data[rows].float() * (scale[rows] / 127).unsqueeze(1)
    raise TypeError(f"no weight that bitsandbytes has quantised: {type(weight).__name__}")
