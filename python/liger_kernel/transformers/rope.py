"""Rotary position embedding under the names that Hugging Face's modules are patched with."""

from liger_kernel.ops import LigerRopeFunction


def liger_rotary_pos_emb(q, k, cos, sin, position_ids=None, unsqueeze_dim=1, rotary_dim=None):
    """(q, k) rotated; see LigerRopeFunction."""
    return LigerRopeFunction.apply(q, k, cos, sin, position_ids, unsqueeze_dim, rotary_dim)


def liger_rotary_pos_emb_vision(q, k, cos, sin):
    """(q, k) [seq, heads, dim] rotated by cos, sin [seq, dim]; the arithmetic is in float, as in vision towers."""
    rotated = LigerRopeFunction.apply(*(t.unsqueeze(0).transpose(1, 2) for t in (q, k)), cos, sin)
    return tuple(r.transpose(1, 2).squeeze(0) for r in rotated)
