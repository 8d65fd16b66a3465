"""Rotary position embedding with three positions a token: time, height and width (Qwen2-VL, Wang et al. 2024,
arXiv:2409.12191)."""

from liger_kernel._library import ops
from liger_kernel.ops.rope import heads_swapped


class LigerQwen2VLMRopeFunction:
    @staticmethod
    def apply(q, k, cos, sin, mrope_section, unsqueeze_dim=1):
        """(q, k) rotated; fresh tensors laid out as [batch, seq, heads, dim].

        q [batch, heads, seq, dim], k [batch, k_heads, seq, dim], or with unsqueeze_dim=2 [batch, seq, heads, dim], any
        strides; cos, sin [3, batch or 1, seq, dim]. mrope_section (t, h, w), whose sum is dim/2: pair i turns by plane
        0 where i < t, by plane 1 where i < t + h, else by plane 2. Raises ValueError for other sections and for another
        unsqueeze_dim.
        """
        if unsqueeze_dim != 1:
            return heads_swapped(
                unsqueeze_dim,
                LigerQwen2VLMRopeFunction.apply(*heads_swapped(unsqueeze_dim, (q, k)), cos, sin, mrope_section),
            )
        return ops.rope(q, k, cos, sin, False, False, list(mrope_section))


def qwen2vl_mrope_forward(q, k, cos, sin, mrope_section):
    """(q rotated, k rotated, cos, sin), without autograd."""
    return *ops.rope_forward(q, k, cos, sin, False, False, list(mrope_section)), cos, sin


def qwen2vl_mrope_backward(dq, dk, cos, sin, mrope_section):
    """(dq, dk) rotated back."""
    return ops.rope_forward(dq, dk, cos, sin, True, False, list(mrope_section))
