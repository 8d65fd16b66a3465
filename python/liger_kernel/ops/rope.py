"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864) in Hugging Face's layout of two halves."""

from liger_kernel._library import ops


def rotated(dim, width, rotary_dim=None):
    """How many columns of a head `dim` wide tables `width` wide rotate; raises ValueError where that is not said."""
    if rotary_dim is None and width != dim:
        raise ValueError(
            f"cos is {width} wide and a head {dim}, which leaves open what it rotates: rotary_dim={width} for the "
            f"first {width} columns of a head, rotary_dim={2 * width} for the first {2 * width}, with an angle for "
            "each pair of columns"
        )
    if rotary_dim not in (None, width, 2 * width):
        raise ValueError(f"cos must be as wide as rotary_dim, {rotary_dim}, or half as wide, and is {width} wide")
    return -1 if rotary_dim is None else rotary_dim


def heads_swapped(unsqueeze_dim, tensors):
    """Of tensors [batch, seq, heads, dim], as unsqueeze_dim=2 says, views [batch, heads, seq, dim]; the same the other
    way round."""
    if unsqueeze_dim != 2:
        raise ValueError(
            "unsqueeze_dim must be 1, for q and k [batch, heads, seq, dim], or 2, for [batch, seq, heads, dim], got "
            f"{unsqueeze_dim!r}"
        )
    return tuple(t.transpose(1, 2) for t in tensors)


class LigerRopeFunction:
    @staticmethod
    def apply(q, k, cos, sin, position_ids=None, unsqueeze_dim=1, rotary_dim=None):
        """(q, k), each head x[:r] · cos + [−x[r/2:r], x[:r/2]] · sin, its columns from r on as they are; fresh tensors
        laid out as [batch, seq, heads, dim].

        q [batch, heads, seq, dim], k [batch, k_heads, seq, dim], or with unsqueeze_dim=2 [batch, seq, heads, dim], any
        strides; cos, sin [seq, r], [1, seq, r] or [batch, seq, r] for r = rotary_dim <= dim, of which the first r/2
        columns count, or r/2 wide. Raises ValueError for tables of another width than the head's where rotary_dim is
        not given, and for another unsqueeze_dim. position_ids is not used.
        """
        if unsqueeze_dim != 1:
            return heads_swapped(
                unsqueeze_dim,
                LigerRopeFunction.apply(*heads_swapped(unsqueeze_dim, (q, k)), cos, sin, rotary_dim=rotary_dim),
            )
        return ops.rope(q, k, cos, sin, False, False, None, rotated(q.size(-1), cos.size(-1), rotary_dim))


def rope_forward(q, k, cos, sin):
    """(q rotated, k rotated, cos, sin), without autograd."""
    rotated(q.shape[-1], cos.shape[-1])
    return *ops.rope_forward(q, k, cos, sin, False), cos, sin


def rope_backward(dq, dk, cos, sin):
    """(dq, dk) rotated back."""
    rotated(dq.shape[-1], cos.shape[-1])
    return ops.rope_forward(dq, dk, cos, sin, True)
