"""Rotary position embedding under the names that Hugging Face's modules are patched with."""

from liger_kernel._library import ops
from liger_kernel.ops import LigerRopeFunction
from liger_kernel.ops.rope import heads_swapped


def liger_rotary_pos_emb(q, k, cos, sin, position_ids=None, unsqueeze_dim=1, rotary_dim=None):
    """(q, k) rotated; see LigerRopeFunction."""
    return LigerRopeFunction.apply(q, k, cos, sin, position_ids, unsqueeze_dim, rotary_dim)


def liger_partial_rotary_pos_emb(q, k, cos, sin, position_ids=None, unsqueeze_dim=1):
    """(q, k), of each head as many columns rotated as the tables are wide; see LigerRopeFunction."""
    return LigerRopeFunction.apply(q, k, cos, sin, None, unsqueeze_dim, cos.shape[-1])


def liger_half_table_rotary_pos_emb(q, k, cos, sin, position_ids=None, unsqueeze_dim=1):
    """(q, k) rotated by tables half as wide as a head; see LigerRopeFunction. Raises ValueError for tables of another
    width."""
    if 2 * cos.shape[-1] != q.shape[-1]:
        raise ValueError(f"cos must be half as wide as a head, {q.shape[-1]}, and is {cos.shape[-1]} wide")
    return LigerRopeFunction.apply(q, k, cos, sin, None, unsqueeze_dim, q.shape[-1])


def liger_interleaved_rotary_pos_emb(q, k, cos, sin, position_ids=None, unsqueeze_dim=1):
    """(q, k), columns 2i and 2i + 1 of each head rotated by column i of the tables, whose second half does not count.

    q, k as in LigerRopeFunction; cos, sin [batch or 1, seq, r], r at most the width of a head. Raises ValueError for
    another unsqueeze_dim.
    """
    if unsqueeze_dim != 1:
        return heads_swapped(
            unsqueeze_dim, liger_interleaved_rotary_pos_emb(*heads_swapped(unsqueeze_dim, (q, k)), cos, sin)
        )
    rotated = cos.shape[-1]
    return ops.rope(q, k, cos[..., : rotated // 2], sin[..., : rotated // 2], False, True, None, rotated)


def liger_rotary_pos_emb_vision(q, k, cos, sin):
    """(q, k) [seq, heads, dim] rotated by cos, sin [seq, dim]; the arithmetic is in float, as in vision towers."""
    rotated = LigerRopeFunction.apply(*(t.unsqueeze(0).transpose(1, 2) for t in (q, k)), cos, sin)
    return tuple(r.transpose(1, 2).squeeze(0) for r in rotated)
