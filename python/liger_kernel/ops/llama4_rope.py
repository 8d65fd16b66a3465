"""Rotary position embedding of neighbouring columns, as Llama 4 multiplies complex numbers; formula in
liger/ops/rope/rope.h."""

import torch

from liger_kernel._library import ops


def _parts(freqs_cis, batch, seq):
    """Cosines and sines [seq, dim/2] or [batch or 1, seq, dim/2]: views of the complex tensor, which is not copied."""
    parts = torch.view_as_real(freqs_cis)
    if parts.dim() != 4 or parts.shape[0] not in (1, batch):
        parts = parts.reshape(-1, *parts.shape[-2:])
    return parts[..., :seq, :, 0], parts[..., :seq, :, 1]


def llama4_rope_forward(q, k, freqs_cis, BLOCK_SIZE=None, imag_sign=1.0):
    """(q, k) [batch, seq, heads, dim] times freqs_cis; with imag_sign=-1 times its conjugate, which is the gradient."""
    turned = ops.rope(
        q.transpose(1, 2),
        k.to(q.dtype).transpose(1, 2),
        *_parts(freqs_cis, q.shape[0], q.shape[1]),
        imag_sign < 0,
        True,
    )
    return tuple(t.transpose(1, 2) for t in turned)


class LigerLlama4RopeFunction:
    @staticmethod
    def apply(q, k, freqs_cis, BLOCK_SIZE=None):
        """(q, k), columns 2i and 2i + 1 of each head multiplied as a complex number by freqs_cis[..., i]; fresh tensors
        in q's dtype.

        q [batch, seq, heads, dim], k [batch, seq, k_heads, dim], any strides; freqs_cis complex [seq or more, dim/2] or
        [batch, seq, dim/2]. BLOCK_SIZE is accepted and not used.
        """
        return llama4_rope_forward(q, k, freqs_cis)
