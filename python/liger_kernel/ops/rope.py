"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864) in Hugging Face's layout of two halves."""

from liger_kernel._library import ops


class LigerRopeFunction:
    @staticmethod
    def apply(q, k, cos, sin, position_ids=None, unsqueeze_dim=1):
        """(q, k) rotated; fresh tensors laid out as [batch, seq, heads, dim].

        q [batch, heads, seq, dim], k [batch, k_heads, seq, dim], any strides; cos, sin [seq, d], [1, seq, d] or [batch, seq, d] with
        d <= dim, of which the first d/2 columns count. Columns beyond d pass through. position_ids and unsqueeze_dim are not used.
        """
        return ops.rope(q, k, cos, sin, False)


def rope_forward(q, k, cos, sin):
    """(q rotated, k rotated, cos, sin), without autograd."""
    return *ops.rope_forward(q, k, cos, sin, False), cos, sin


def rope_backward(dq, dk, cos, sin):
    """(dq, dk) rotated back."""
    return ops.rope_forward(dq, dk, cos, sin, True)
