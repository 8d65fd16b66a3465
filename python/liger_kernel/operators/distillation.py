"""Losses between a student's and a teacher's head without their logits; see liger/ops.h.

By one operator, and for losses written in torch a chunk of tokens at a time. The generalised Jensen-Shannon divergence
is that of Agarwal et al. 2024, arXiv:2306.13649.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from liger_kernel._library import ops
from liger_kernel.operators.common import (
    accumulate,
    autocast_dtype,
    first_derivative_only,
    reduction_code,
    roots,
    unscaled,
    unscaled_gradient,
    wanted_gradients,
)
from liger_kernel.operators.loss import JENSEN_SHANNON as LOG_JENSEN_SHANNON
from liger_kernel.operators.loss import check_labels

#: What is between the two distributions of a token, S and T, by the operator's numbers.
FORWARD_KL, REVERSE_KL, JENSEN_SHANNON, TOTAL_VARIATION, COSINE = range(5)
KINDS = dict(forward_kl=FORWARD_KL, reverse_kl=REVERSE_KL, jsd=JENSEN_SHANNON, tvd=TOTAL_VARIATION, cosine=COSINE)

#: Tokens of a GEMM: from here on it runs at full speed on a GPU. On a CPU smaller chunks stay nearer to the caches.
GPU_CHUNK, CPU_CHUNK, CPU_BYTES = 4096, 512, 64 << 20
#: Tokens whose losses are taken at once: theirs is the memory that a loss takes besides the logits.
ROWS = 512


def _shares(tokens, labels, ignore_index, device, reduction="mean", num_items=None):
    """The share of each token in the mean over those whose label is not ignored, or in the sum, float [tokens]."""
    counts = torch.ones(tokens, device=device) if labels is None else labels.ne(ignore_index).float()
    if reduction == "sum":
        return counts
    return counts / (counts.sum().clamp(min=1) if num_items is None else num_items)


def linear_distillation(
    student: Tensor, student_weight: Tensor, teacher: Tensor, teacher_weight: Tensor, labels: Tensor | None = None,
    kind: str = "jsd", beta: float = 0.5, temperature: float = 1.0, soft_weight: float = 1.0, hard_weight: float = 0.0,
    ignore_index: int = -100, student_bias: Tensor | None = None, teacher_bias: Tensor | None = None,
    student_scale: float = 1.0, student_softcap: float | None = None, teacher_scale: float = 1.0,
    teacher_softcap: float | None = None, max_bytes: int = 0, token_weight: Tensor | None = None,
    num_items: Tensor | float | None = None, reduction: str = "mean",
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(loss, soft, hard): loss = soft_weight · soft + hard_weight · hard, float, of which only the loss is
    differentiable.

    soft is the mean over tokens, or with reduction="sum" the sum, of token_weight [...] (None: 1) times the divergence
    of softmax(z / temperature) of student and teacher, kind: "forward_kl" KL(T ‖ S), "reverse_kl" KL(S ‖ T), "jsd" β
    KL(T ‖ M) + (1 − β) KL(S ‖ M) with M = β T + (1 − β) S, "tvd" ½ Σ |S − T|, "cosine" 1 − cos z; hard is that of −ln
    softmax(z)_label of the student, 0 without labels. z = softcap · tanh(scale · y / softcap), or scale · y, of y = x
    weightᵀ + bias.

    student [..., H], student_weight [V, H], teacher [..., H'], teacher_weight [V, H'], labels [...] integers or None;
    tokens of ignore_index do not count and cost nothing. Forward makes the gradients of the student's tensors, the
    weight's summed in float. Logits of max_bytes are worked on at once (0: what is fastest). num_items: the divisor of
    the mean in place of the number of tokens that count, such as that of all tokens. reduction="none": each token's
    numbers [...], the loss with any upstream gradient; backward then recomputes the logits. Raises KeyError for an
    unknown kind, ValueError for an unknown reduction and for hard_weight without labels, IndexError on the CPU for a
    label outside [0, V).
    """
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"linear_distillation: reduction must be mean, sum or none, got {reduction!r}")
    if labels is None and hard_weight != 0:
        raise ValueError("linear_distillation: hard_weight needs labels")
    x, y = student.reshape(-1, student.shape[-1]), teacher.reshape(-1, teacher.shape[-1])
    ids = None if labels is None else labels.reshape(-1)
    maps = float(student_scale), float(student_softcap or 0), float(teacher_scale), float(teacher_softcap or 0)
    if reduction == "none":
        options = TokenOptions(
            KINDS[kind], float(beta), float(temperature), maps, soft_weight, hard_weight, ignore_index, max_bytes
        )
        heads = x, student_weight, student_bias, y, teacher_weight, teacher_bias
        found = LinearTokenDistillation.apply(options, ids, *heads)[:3]
        factor = 1 if token_weight is None else token_weight
        loss, divergence, nll = (t.view(student.shape[:-1]) * factor for t in found)
        return loss, divergence, nll
    each = _shares(len(x), ids, ignore_index, x.device, reduction, num_items)
    if token_weight is not None:
        each = each * token_weight.detach().reshape(-1)
    soft, hard = (each * weight if weight != 0 else None for weight in (soft_weight, hard_weight))
    loss, divergence, nll, _ = ops.linear_distillation(
        x, student_weight, student_bias, y, teacher_weight, teacher_bias, ids, soft, hard, None, kind=KINDS[kind],
        beta=float(beta), temperature=float(temperature), student_scale=maps[0], student_softcap=maps[1],
        teacher_scale=maps[2], teacher_softcap=maps[3], ignore_index=ignore_index, max_bytes=max_bytes,
    )  # fmt: skip
    return loss, each @ divergence, each @ nll


def forward_with_gradients(
    student: Sequence[Any], teacher: Sequence[Any], labels: Tensor | None, soft: Tensor | None, hard: Tensor | None,
    kind: int, beta: float = 0.5, temperature: float = 1.0, ignore_index: int = -100, skip_ignored: bool = True,
    max_bytes: int = 0, wanted: Sequence[bool] = (False, False, False), maps: Sequence[float] = (1.0, 0.0, 1.0, 0.0),
    entropy: bool = False, float_logits: bool = False, dtype: torch.dtype | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """(loss, divergence, nll, entropy, gradients, grad_scale) without autograd, for Functions that save the gradients
    (`unscaled`).

    student and teacher are (hidden [N, H], weight [V, H], bias [V] or None); soft and hard [N] or None, the
    coefficients of divergence and nll [N] in the loss. A gradient that is not wanted is None; in float16 they are
    float. maps: scale and softcap of the student's logits, and of the teacher's.
    """
    dtype = dtype or autocast_dtype(student[0])
    numbers = float(beta), float(temperature), *maps
    device = student[0].device.type
    with nullcontext() if device == "meta" else torch.autocast(device, enabled=False):
        loss, divergence, nll, entropies, *gradients, grad_scale = ops.linear_distillation_forward(
            *student, *teacher, labels, soft, hard, dtype, *wanted, kind, *numbers, ignore_index, skip_ignored, entropy,
            float_logits, max_bytes,
        )  # fmt: skip
    return loss, divergence, nll, entropies, [g if w else None for g, w in zip(gradients, wanted)], grad_scale


class TokenOptions(NamedTuple):
    """Of LinearTokenDistillation: what linear_distillation takes, and what forward_with_gradients does."""

    kind: int = JENSEN_SHANNON
    beta: float = 0.5
    temperature: float = 1.0
    maps: tuple[float, ...] = (1.0, 0.0, 1.0, 0.0)
    soft_weight: float = 1.0
    hard_weight: float = 0.0
    ignore_index: int = -100
    max_bytes: int = 0
    entropy: bool = False
    float_logits: bool = False
    around: Callable[..., Any] = lambda weight, bias: nullcontext()  # within which a head's tensors are there


class LinearTokenDistillation(torch.autograd.Function):
    """(loss, divergence, nll, entropy or an empty tensor), float [tokens], loss = soft_weight · divergence +
    hard_weight · nll, which alone is differentiable, with any upstream gradient: backward makes the logits of both
    heads again."""

    @staticmethod
    def forward(ctx: Any, options: TokenOptions, labels: Tensor | None, *heads: Tensor | None) -> tuple[Tensor, ...]:
        ctx.save_for_backward(labels, *heads)
        ctx.options, ctx.autocast = options, autocast_dtype(heads[0])
        ctx.set_materialize_grads(False)
        _, divergence, nll, entropy, *_ = _token_pass(heads, labels, None, None, options, ctx.autocast)
        loss = options.soft_weight * divergence
        if options.hard_weight != 0:
            loss = loss + options.hard_weight * nll
        ctx.mark_non_differentiable(divergence, nll, entropy)
        return loss, divergence, nll, entropy

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, upstream: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        if upstream is None:
            return (None,) * 8
        (labels, *heads), o = ctx.saved_tensors, ctx.options
        soft, hard = (upstream * weight if weight != 0 else None for weight in (o.soft_weight, o.hard_weight))
        *_, gradients, grad_scale = _token_pass(heads, labels, soft, hard, o, ctx.autocast, ctx.needs_input_grad[2:5])
        made = (None if g is None else unscaled_gradient(g, grad_scale) for g in gradients)
        return None, None, *made, None, None, None


def _token_pass(heads, labels, soft, hard, o, dtype, wanted=(False,) * 3):
    with o.around(*heads[1:3]), o.around(*heads[4:]):
        return forward_with_gradients(
            heads[:3], heads[3:], labels, soft, hard, o.kind, o.beta, o.temperature, o.ignore_index,
            max_bytes=o.max_bytes, wanted=wanted, maps=o.maps, entropy=o.entropy, float_logits=o.float_logits,
            dtype=dtype,
        )  # fmt: skip


def linear_jsd_with_gradients(
    student: Tensor, student_weight: Tensor, teacher: Tensor, teacher_weight: Tensor, labels: Tensor | None,
    beta: float, ignore_index: int, temperature: float, wanted: Sequence[bool],
) -> tuple[Any, ...]:  # fmt: skip
    """(loss, (gradient of student, of student_weight), their grad_scale) of LigerFusedLinearJSDFunction."""
    check_labels(labels, len(student), ignore_index)
    shares, heads = _shares(len(student), labels, ignore_index, student.device), (student, student_weight, None)
    loss, *_, gradients, grad_scale = forward_with_gradients(
        heads, (teacher, teacher_weight, None), labels, shares, None, JENSEN_SHANNON, beta, temperature, ignore_index,
        wanted=(*wanted, False),
    )  # fmt: skip
    return loss, gradients[:2], grad_scale


class LigerFusedLinearJSDFunction(torch.autograd.Function):
    """β KL(P ‖ M) + (1 − β) KL(Q ‖ M), M = β P + (1 − β) Q, of a student's softmax Q and a teacher's P; β = 0 is KL(P ‖
    Q), β = 1 KL(Q ‖ P)."""

    @staticmethod
    def forward(
        ctx: Any, student_input: Tensor, student_weight: Tensor, teacher_input: Tensor, teacher_weight: Tensor,
        shift_labels: Tensor | None = None, jsd_beta: float = 0.5, ignore_index: int = -100, temperature: float = 1.0,
        accum_dtype: torch.dtype | None = None, jsd_impl: str | None = None, jsd_mode: str | None = None,
    ) -> Tensor:  # fmt: skip
        """The mean over the tokens whose shift_labels [tokens] is not ignore_index (None: all), float; 0 where there is
        none.

        student_input [tokens, H], student_weight [V, H], teacher_input [tokens, H'], teacher_weight [V, H']; both
        logits are divided by the temperature. Only the student's tensors get gradients; the weight's is summed in
        float, whatever accum_dtype; jsd_impl and jsd_mode change nothing. Raises AssertionError for labels of another
        shape.
        """
        wanted = wanted_gradients(ctx, student_input, student_weight)
        loss, gradients, grad_scale = linear_jsd_with_gradients(
            student_input, student_weight, teacher_input, teacher_weight, shift_labels, jsd_beta, ignore_index,
            temperature, wanted,
        )  # fmt: skip
        ctx.save_for_backward(*gradients, grad_scale)
        ctx.roots = roots(student_input, student_weight)
        return loss

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        *gradients, grad_scale = ctx.saved_tensors
        factor = unscaled(grad_output, grad_scale)
        return *(g if g is None else g * factor for g in gradients), *[None] * 9


def liger_fused_linear_jsd(
    student_input: Tensor, student_weight: Tensor, teacher_input: Tensor, teacher_weight: Tensor,
    shift_labels: Tensor | None = None, jsd_beta: float = 0.5, ignore_index: int = -100, temperature: float = 1.0,
    accum_dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """Generalised Jensen-Shannon divergence of two heads, without their logits; see LigerFusedLinearJSDFunction."""
    return LigerFusedLinearJSDFunction.apply(
        student_input, student_weight, teacher_input, teacher_weight, shift_labels, jsd_beta, ignore_index, temperature
    )


class LigerFusedLinearJSD(nn.Module):
    """The divergence of a teacher's head from a student's; see LigerFusedLinearJSDFunction. Raises AssertionError where
    the temperature is 0."""

    def __init__(
        self, jsd_beta: float = 0.5, ignore_index: int = -100, temperature: float = 1.0,
        accum_dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        if temperature == 0:
            raise AssertionError("temperature must not be 0")
        self.jsd_beta, self.ignore_index, self.temperature = jsd_beta, ignore_index, temperature
        self.accum_dtype = accum_dtype

    def forward(
        self, student_input: Tensor, student_weight: Tensor, teacher_input: Tensor, teacher_weight: Tensor,
        shift_labels: Tensor | None,
    ) -> Tensor:  # fmt: skip
        heads = student_input, student_weight, teacher_input, teacher_weight
        options = self.jsd_beta, self.ignore_index, self.temperature
        return LigerFusedLinearJSDFunction.apply(*heads, shift_labels, *options)


def jensen_shannon(
    student_logits: Tensor, teacher_logits: Tensor, labels: Tensor | None, beta: float, ignore_index: int
) -> Tensor:
    """Σ over the rows whose label is not ignore_index (labels None: all rows) of the divergence in LigerJSDFunction, of
    softmax(logits), both [rows, V]."""
    x, target = (torch.log_softmax(z, -1, dtype=torch.float32) for z in (student_logits, teacher_logits))
    options = LOG_JENSEN_SHANNON, float(beta), ignore_index, reduction_code("sum")
    return ops.divergence(x, target, labels, *options, torch.float32)


def sums_over_tokens(
    student: Sequence[Any], teacher: Sequence[Any], loss_of: Callable[..., Any], results: int, factor: Tensor,
    chunk_tokens: int = GPU_CHUNK, wanted: Sequence[bool] = (False, False, False),
) -> tuple[Any, ...]:  # fmt: skip
    """(Σ of loss_of's results, float [results]; the gradients of factor · the first sum, and their grad_scale).

    student and teacher are (hidden [N, H], weight [V, H], bias [V] or None); their widths H may differ.
    loss_of(student_logits, teacher_logits, rows) gives `results` numbers that are sums over these rows, of which the
    first is differentiated, with respect to the student's hidden states, weight and bias where wanted. It computes in
    the student's dtype, or in autocast's; the weight's gradient is summed in float. float16 leaves the gradients in
    float, without the factor.
    """
    hidden, weight, bias = student
    device, tokens, needed = hidden.device.type, len(hidden), any(wanted)
    dtype = autocast_dtype(hidden) or hidden.dtype
    defer = dtype == torch.float16
    own = lambda t: t.dtype if t.dtype == dtype and not defer else torch.float32
    empty = lambda t, dtype: torch.zeros(t.shape, dtype=dtype, device=hidden.device)

    heads: list[Any] = [[t if t is None else t.detach().to(dtype) for t in head] for head in (student, teacher)]
    widest = max(len(w) for _, w, _ in heads)
    most = max(CPU_CHUNK, CPU_BYTES // (widest * dtype.itemsize)) if device == "cpu" else GPU_CHUNK
    chunk = max(1, min(chunk_tokens, tokens, most))
    d_hidden: Any = empty(hidden, own(hidden)) if wanted[0] else None
    # One chunk needs no accumulator: its GEMM sums in float and rounds once.
    d_weight = empty(weight, own(weight) if chunk >= tokens else torch.float32) if wanted[1] else None
    d_bias = empty(bias, torch.float32) if wanted[2] else None
    buffers: Any = [torch.empty(chunk, len(w), dtype=dtype, device=hidden.device) for _, w, _ in heads]
    totals = torch.zeros(results, device=hidden.device)
    with torch.autocast(device, enabled=False):
        for begin in range(0, tokens, chunk):
            n = min(chunk, tokens - begin)
            z, teacher_z = (_logits(buffer[:n], begin, *head) for buffer, head in zip(buffers, heads))
            for first in range(0, n, ROWS):
                rows = slice(first, min(first + ROWS, n))
                leaf = z[rows].detach().requires_grad_(needed)
                with torch.set_grad_enabled(needed):
                    sums = loss_of(leaf, teacher_z[rows], slice(begin + rows.start, begin + rows.stop))
                    loss = sums[0] if defer else sums[0] * factor
                if needed:
                    z[rows] = _gradient(loss, leaf)
                totals += torch.stack([s.detach().float() for s in sums])
            if wanted[0]:
                accumulate(d_hidden[begin : begin + n], z, heads[0][1])
            if wanted[1]:
                accumulate(d_weight, z.t(), heads[0][0][begin : begin + n])
            if wanted[2]:
                d_bias += z.sum(0, dtype=torch.float32)
    z = teacher_z = leaf = buffers = None  # before the accumulator is rounded
    d_weight, d_bias = (None if d is None else d.to(own(t)) for d, t in ((d_weight, weight), (d_bias, bias)))
    return totals, (d_hidden, d_weight, d_bias), 1 / factor.float() if defer else None


def _gradient(loss, leaf):
    return torch.autograd.grad(loss, leaf, materialize_grads=True)[0] if loss.requires_grad else 0


def _logits(out, begin, hidden, weight, bias):
    x = hidden[begin : begin + len(out)]
    return torch.mm(x, weight.t(), out=out) if bias is None else torch.addmm(bias, x, weight.t(), out=out)
