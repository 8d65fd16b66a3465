"""Rotary position embedding under the names that Hugging Face's modules are patched with."""

import torch

from liger_kernel.ops import LigerRopeFunction


def liger_rotary_pos_emb(q, k, cos, sin, position_ids=None, unsqueeze_dim=1):
    """(q, k) rotated; see LigerRopeFunction."""
    return LigerRopeFunction.apply(q, k, cos, sin, position_ids, unsqueeze_dim)


def liger_rotary_pos_emb_vision(q, k, cos, sin):
    """(q, k) [seq, heads, dim] rotated by cos, sin [seq, dim], in float, as vision towers do."""
    heads_first = [t.to(torch.float32).unsqueeze(0).transpose(1, 2) for t in (q, k)]
    rotated = LigerRopeFunction.apply(*heads_first, cos.float(), sin.float())
    return tuple(r.transpose(1, 2).squeeze(0).to(t.dtype) for r, t in zip(rotated, (q, k)))
