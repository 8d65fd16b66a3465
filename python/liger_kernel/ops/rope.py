"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864) in Hugging Face's layout of two halves."""

import torch

from liger_kernel._library import ops


def tables(dim, cos, sin, rotary_dim=None):
    """cos and sin as wide as what they rotate; raises ValueError where that is not said."""
    width = cos.size(-1)
    if rotary_dim is None and width != dim:
        raise ValueError(
            f"cos is {width} wide and a head {dim}, which leaves open what it rotates: rotary_dim={width} for the first {width} columns of a head, "
            f"rotary_dim={2 * width} for the first {2 * width}, with an angle for each pair of columns"
        )
    if rotary_dim in (None, width):
        return cos, sin
    if rotary_dim == 2 * width:
        return torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)
    raise ValueError(f"cos must be as wide as rotary_dim, {rotary_dim}, or half as wide, and is {width} wide")


def heads_swapped(unsqueeze_dim, tensors):
    """Of tensors [batch, seq, heads, dim], as unsqueeze_dim=2 says, views [batch, heads, seq, dim]; the same the other way round."""
    if unsqueeze_dim != 2:
        raise ValueError(f"unsqueeze_dim must be 1, for q and k [batch, heads, seq, dim], or 2, for [batch, seq, heads, dim], got {unsqueeze_dim!r}")
    return tuple(t.transpose(1, 2) for t in tensors)


class LigerRopeFunction:
    @staticmethod
    def apply(q, k, cos, sin, position_ids=None, unsqueeze_dim=1, rotary_dim=None):
        """(q, k), each head x[:r] · cos + [−x[r/2:r], x[:r/2]] · sin, its columns from r on as they are; fresh tensors laid out as [batch, seq, heads, dim].

        q [batch, heads, seq, dim], k [batch, k_heads, seq, dim], or with unsqueeze_dim=2 [batch, seq, heads, dim], any strides; cos, sin
        [seq, r], [1, seq, r] or [batch, seq, r] for r = rotary_dim <= dim, of which the first r/2 columns count, or r/2 wide. Raises ValueError
        for tables of another width than the head's where rotary_dim is not given, and for another unsqueeze_dim. position_ids is not used.
        """
        if unsqueeze_dim != 1:
            return heads_swapped(unsqueeze_dim, LigerRopeFunction.apply(*heads_swapped(unsqueeze_dim, (q, k)), cos, sin, rotary_dim=rotary_dim))
        return ops.rope(q, k, *tables(q.size(-1), cos, sin, rotary_dim), False)


def rope_forward(q, k, cos, sin):
    """(q rotated, k rotated, cos, sin), without autograd."""
    return *ops.rope_forward(q, k, *tables(q.shape[-1], cos, sin), False), cos, sin


def rope_backward(dq, dk, cos, sin):
    """(dq, dk) rotated back."""
    return ops.rope_forward(dq, dk, *tables(dq.shape[-1], cos, sin), True)
