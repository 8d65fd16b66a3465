"""A student's and a teacher's head side by side, a chunk of tokens at a time, for losses written in torch."""

import torch

from liger_kernel._library import ops
from liger_kernel.ops.divergence import JENSEN_SHANNON
from liger_kernel.ops.utils import reduction_code

#: Tokens of a GEMM: from here on it runs at full speed on a GPU. On a CPU smaller chunks stay nearer to the caches.
GPU_CHUNK, CPU_CHUNK, CPU_BYTES = 4096, 512, 64 << 20
#: Tokens whose losses are taken at once: theirs is the memory that a loss takes beside the logits.
ROWS = 512


def jensen_shannon(student_logits, teacher_logits, labels, beta, ignore_index):
    """Σ over the rows whose label is not ignore_index (labels None: all rows) of the divergence in LigerJSDFunction, of
    softmax(logits), both [rows, V]."""
    x, target = (torch.log_softmax(z, -1, dtype=torch.float32) for z in (student_logits, teacher_logits))
    return ops.divergence(
        x, target, labels, JENSEN_SHANNON, float(beta), ignore_index, reduction_code("sum"), torch.float32
    )


def sums_over_tokens(student, teacher, loss_of, results, factor, chunk_tokens=GPU_CHUNK, wanted=(False, False, False)):
    """(Σ of loss_of's results, float [results]; gradients; rest): the gradients, times rest, are those of factor · the
    first sum.

    student and teacher are (hidden [N, H], weight [V, H], bias [V] or None), each of a width of its own.
    loss_of(student_logits, teacher_logits, rows) gives `results` numbers that are sums over these rows, of which the
    first is differentiated, with respect to the student's hidden states, weight and bias where wanted. It computes in
    the student's dtype, or in autocast's; the weight's gradient is summed in float. float16 leaves the gradients in
    float and undivided.
    """
    hidden, weight, bias = student
    device, tokens, needed = hidden.device.type, len(hidden), any(wanted)
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    defer = dtype == torch.float16
    own = lambda t: t.dtype if t.dtype == dtype and not defer else torch.float32
    empty = lambda t, dtype: torch.zeros(t.shape, dtype=dtype, device=hidden.device)

    heads = [[t if t is None else t.detach().to(dtype) for t in head] for head in (student, teacher)]
    widest = max(len(w) for _, w, _ in heads)
    chunk = max(
        1,
        min(
            chunk_tokens,
            tokens,
            max(CPU_CHUNK, CPU_BYTES // (widest * dtype.itemsize)) if device == "cpu" else GPU_CHUNK,
        ),
    )
    d_hidden = empty(hidden, own(hidden)) if wanted[0] else None
    # One chunk needs no accumulator: its GEMM sums in float and rounds once.
    d_weight = empty(weight, own(weight) if chunk >= tokens else torch.float32) if wanted[1] else None
    d_bias = empty(bias, torch.float32) if wanted[2] else None
    buffers = [torch.empty(chunk, len(w), dtype=dtype, device=hidden.device) for _, w, _ in heads]
    totals = torch.zeros(results, device=hidden.device)
    with torch.autocast(device, enabled=False):
        for begin in range(0, tokens, chunk):
            n = min(chunk, tokens - begin)
            z, teacher_z = (_logits(buffer[:n], *head, begin) for buffer, head in zip(buffers, heads))
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
                _accumulate(d_hidden[begin : begin + n], z, heads[0][1])
            if wanted[1]:
                _accumulate(d_weight, z.t(), heads[0][0][begin : begin + n])
            if wanted[2]:
                d_bias += z.sum(0, dtype=torch.float32)
    z = teacher_z = leaf = buffers = None  # before the accumulator is rounded
    d_weight, d_bias = (None if d is None else d.to(own(t)) for d, t in ((d_weight, weight), (d_bias, bias)))
    return totals, (d_hidden, d_weight, d_bias), (factor.float() if defer else torch.ones((), device=hidden.device))


def wanted_gradients(ctx, *tensors):
    """Whether the gradient of each tensor, which may be None, is wanted; for the forward of an autograd.Function, whose
    node has no edges under no_grad."""
    recorded = torch.compiler.is_compiling() or any(
        function for function, _ in ctx.next_functions
    )  # a traced node shows none
    return [recorded and t is not None and t.requires_grad for t in tensors]


def _gradient(loss, leaf):
    return torch.autograd.grad(loss, leaf, materialize_grads=True)[0] if loss.requires_grad else 0


def _logits(out, hidden, weight, bias, begin):
    x = hidden[begin : begin + len(out)]
    return torch.mm(x, weight.t(), out=out) if bias is None else torch.addmm(bias, x, weight.t(), out=out)


def _accumulate(total, a, b):
    """total += a b, summed in total's dtype."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    elif a.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))
