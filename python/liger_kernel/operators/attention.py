"""Attention within documents, with a sink per head, on the attention kernels that torch has.

With q [Hq, D], scores z_j = scale q k_j over the keys that a token sees, and a sink s per head (one more column of the
softmax whose value is zero),

    y = sum_j exp(z_j) v_j / (exp(s) + sum_j exp(z_j)) = o exp(l - l'),   l' = log(exp(l) + exp(s))

where o and l are the result and the log-sum-exp of attention without the sink. Given y and l' in place of o and l, the
backward pass of any such kernel computes the exact dq, dk, dv, because it forms the probabilities as exp(z - l') and
needs delta = sum(dy * y) otherwise; and ds = -sum over tokens of exp(s - l') delta.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

_aten: Any = torch.ops.aten


def rows(batch: int, length: int, device: Any) -> Tensor:
    """The boundaries [batch + 1], int32, of documents that are whole rows of a batch."""
    return torch.arange(0, batch * length + 1, length, dtype=torch.int32, device=device)


def obstacle(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Why `attention_with_sinks` does not take q, k and v; None where it does."""
    width = q.shape[-1]
    if k.shape[-1] != width or v.shape[-1] != width or k.shape[-2] != v.shape[-2] or q.shape[-2] % k.shape[-2]:
        return "q, k and v differ in width, or their heads do not divide"
    if len({q.dtype, k.dtype, v.dtype}) > 1 or len({q.device.type, k.device.type, v.device.type}) > 1:
        return "q, k and v differ in dtype or device"
    if q.is_cuda and (q.dtype not in (torch.float16, torch.bfloat16) or width % 8 or width > 256):
        return "flash attention takes float16 and bfloat16, and heads of 8 to 256 columns that 8 divides"
    return None if q.is_cuda or q.is_cpu else f"there is no kernel for {q.device.type}"


def attention_with_sinks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    boundaries: Tensor | None,
    longest: int,
    window: int | None = None,
    scale: float | None = None,
    causal: bool = True,
) -> Tensor:
    """Attention [tokens, Hq, D] within documents, with a sink per head.

    Args:
        q: [tokens, Hq, D].
        k, v: [tokens, Hk, D]; Hk divides Hq.
        sinks: [Hq]; None for none.
        boundaries: [documents + 1] int32, increasing from 0 to tokens: where documents begin, and the end. None where
            every document has `longest` tokens.
        longest: an upper bound of the number of tokens of a document.
        window: how many keys a token sees before it, its own included, and as many after it where attention is not
            causal; None for all.
        scale: of the scores, 1 / sqrt(D) by default.
        causal: whether a token sees no key after it.

    Raises ValueError for tensors that `obstacle` names. The second derivative raises RuntimeError. On CUDA, backward
    is as deterministic as torch's flash attention: sums of dq are made by atomics unless
    `torch.use_deterministic_algorithms(True)`.
    """
    if reason := obstacle(q, k, v):
        raise ValueError(f"attention_with_sinks: {reason}")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return _Attention.apply(q, k, v, sinks, boundaries, longest, window, scale, causal)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, sinks, boundaries, longest, window, scale, causal):  # type: ignore[override]
        forward, ctx.kernel = _kernel(q, k, v, boundaries, longest, window, scale, causal)
        if boundaries is None and forward is not _cudnn:
            boundaries = rows(q.shape[0] // longest, longest, q.device)
        out, lse, *state = forward(q, k, v, sinks, boundaries, longest, window, scale, causal)
        ctx.save_for_backward(q, k, v, sinks, boundaries, out, lse, *state)
        ctx.options = longest, window, scale, causal
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout):  # type: ignore[override]
        q, k, v, sinks, boundaries, out, lse, *state = ctx.saved_tensors
        dsinks = None
        if ctx.needs_input_grad[3]:
            delta = (dout.to(lse.dtype) * out).sum(-1).t()
            probability = (sinks.to(lse.dtype)[:, None] - lse).exp_()
            dsinks = (probability * delta).sum(-1).neg_().to(sinks.dtype)
        grads = ctx.kernel(dout, q, k, v, out, lse, boundaries, *ctx.options, *state)
        return *grads, dsinks, None, None, None, None, None


def _kernel(q, k, v, boundaries, longest, window, scale, causal):
    """The forward and the backward to run: cuDNN's, without windows and documents, where torch prefers it."""
    if q.is_cpu:
        return _on_cpu, _on_cpu_backward
    whole = boundaries is None and (window is None or window >= longest) and longest > 1
    if whole and not torch.compiler.is_compiling():  # which does not follow a choice
        operands = (_batch(x, longest) for x in (q, k, v))
        choice = torch._fused_sdp_choice(*operands, None, 0.0, causal, scale=scale, enable_gqa=True)
        if choice == SDPBackend.CUDNN_ATTENTION.value:
            return _cudnn, _cudnn_backward
    return _flash, _flash_backward


def _with_sinks(out, lse, sinks):
    """y and l' of o, which becomes y, and l [Hq, tokens]."""
    if sinks is None:
        return out, lse
    total = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
    return out.mul_((lse - total).exp_().t().unsqueeze(-1)), total  # the product is computed in lse's dtype


def _batch(x, longest):
    """[batch, heads, longest, D] of [tokens, heads, D], without a copy."""
    return x.unflatten(0, (-1, longest)).transpose(1, 2)


def _cudnn(q, k, v, sinks, boundaries, longest, window, scale, causal):
    operands = (_batch(x, longest) for x in (q, k, v))
    out, lse, *_, seed, offset, _ = _aten._scaled_dot_product_cudnn_attention(
        *operands, None, True, 0.0, causal, False, scale=scale
    )
    by_head = lse.squeeze(-1).transpose(0, 1).flatten(1)
    return *_with_sinks(out.transpose(1, 2).flatten(0, 1), by_head, sinks), seed, offset


def _cudnn_backward(dout, q, k, v, out, lse, boundaries, longest, window, scale, causal, seed, offset):
    operands = (_batch(x, longest) for x in (dout, q, k, v, out))
    by_row = lse.unflatten(1, (-1, longest)).transpose(0, 1).contiguous().unsqueeze(-1)
    grads = _aten._scaled_dot_product_cudnn_attention_backward(
        *operands, by_row, seed, offset, None, None, None, longest, longest, 0.0, causal, scale=scale
    )
    return tuple(grad.transpose(1, 2).flatten(0, 1) for grad in grads)


def _sides(window, causal):
    """Flash attention's window: the numbers of keys before and after a token's own, None for all."""
    side = None if window is None else window - 1
    return {"window_size_left": side, "window_size_right": 0 if causal else side}


def _flash(q, k, v, sinks, boundaries, longest, window, scale, causal):
    # With one query per document the kernel would exchange heads and queries, in lse too.
    longest = max(longest, 2)
    places = boundaries, boundaries, longest, longest, 0.0, causal
    sides = _sides(window, causal)
    out, lse, seed, offset, _ = _aten._flash_attention_forward(q, k, v, *places, False, scale=scale, **sides)
    return *_with_sinks(out, lse, sinks), seed, offset


def _flash_backward(dout, q, k, v, out, lse, boundaries, longest, window, scale, causal, seed, offset):
    longest = max(longest, 2)
    places = boundaries, boundaries, longest, longest, 0.0, causal
    return _aten._flash_attention_backward(
        dout.contiguous(), q, k, v, out, lse, *places, seed, offset, scale=scale, **_sides(window, causal)
    )


def _documents(boundaries):
    ends = boundaries.tolist()
    return [slice(begin, end) for begin, end in zip(ends[:-1], ends[1:], strict=True) if end > begin]


def _heads_first(x, heads):
    """[1, heads, tokens, D] of [tokens, H, D], each head repeated."""
    return x.repeat_interleave(heads // x.shape[1], 1).transpose(0, 1).unsqueeze(0)


def _window_mask(tokens, window, causal, like):
    """0 where a query sees a key and -inf elsewhere; None where the window holds all."""
    if window is None or window >= tokens:
        return None
    seen = torch.ones(tokens, tokens, dtype=torch.bool, device=like.device)
    seen = seen.tril_(0 if causal else window - 1).triu_(1 - window)
    return torch.zeros_like(seen, dtype=like.dtype).masked_fill_(~seen, float("-inf"))


def _on_cpu(q, k, v, sinks, boundaries, longest, window, scale, causal):
    heads = q.shape[1]
    sums = torch.float64 if q.dtype is torch.float64 else torch.float32
    out, lse = torch.empty_like(q), q.new_empty(heads, q.shape[0], dtype=sums)
    for tokens in _documents(boundaries):
        mask = _window_mask(tokens.stop - tokens.start, window, causal, q)
        operands = (_heads_first(x[tokens], heads) for x in (q, k, v))
        y, total = _aten._scaled_dot_product_flash_attention_for_cpu(
            *operands, 0.0, causal and mask is None, attn_mask=mask, scale=scale
        )
        # Each document by itself: its bits are those that it has alone, as vectors and remainders differ in exp.
        out[tokens], lse[:, tokens] = _with_sinks(y[0].transpose(0, 1), total[0].contiguous(), sinks)
    return out, lse


def _on_cpu_backward(dout, q, k, v, out, lse, boundaries, longest, window, scale, causal):
    heads = q.shape[1]
    grads = tuple(torch.empty_like(x) for x in (q, k, v))
    for tokens in _documents(boundaries):
        mask = _window_mask(tokens.stop - tokens.start, window, causal, q)
        operands = (_heads_first(x[tokens], heads) for x in (dout, q, k, v, out))
        parts = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *operands, lse[None, :, tokens], 0.0, causal and mask is None, attn_mask=mask, scale=scale
        )
        for grad, part in zip(grads, parts, strict=True):
            # A key's head collects the gradients of the queries' heads that share it.
            grad[tokens] = part[0].unflatten(0, (grad.shape[1], -1)).sum(1).transpose(0, 1)
    return grads
