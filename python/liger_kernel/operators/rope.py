"""Rotary position embeddings; formulas in liger/ops/rope/rope.h.

In Hugging Face's layout of two halves (Su et al. 2021, arXiv:2104.09864), with three positions per token (Qwen2-VL,
Wang et al. 2024, arXiv:2409.12191), and of neighbouring columns, as Llama 4 multiplies complex numbers. The functions
bear the names that Hugging Face's modules are patched with.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from liger_kernel._library import ops
from liger_kernel._recompute import run
from liger_kernel.operators.common import beside
from liger_kernel.operators.norm import casting_code


def rotated(dim: int, width: int, rotary_dim: int | None = None) -> int:
    """How many columns of a head `dim` wide tables `width` wide rotate, -1 for all: as many as the tables have where it
    is not said. Raises ValueError for tables that do not fit."""
    if rotary_dim is None:
        if width > dim:
            raise ValueError(f"cos is {width} wide, which is more than a head, {dim}")
        return -1 if width == dim else width
    if rotary_dim not in (width, 2 * width):
        raise ValueError(f"cos must be as wide as rotary_dim, {rotary_dim}, or half as wide, and is {width} wide")
    return rotary_dim


def heads_swapped(unsqueeze_dim: int, tensors: Iterable[Tensor]) -> Any:
    """Of tensors [batch, seq, heads, dim], as unsqueeze_dim=2 says, views [batch, heads, seq, dim]; the same the other
    way round."""
    if unsqueeze_dim != 2:
        raise ValueError(
            "unsqueeze_dim must be 1, for q and k [batch, heads, seq, dim], or 2, for [batch, seq, heads, dim], got "
            f"{unsqueeze_dim!r}"
        )
    return tuple(t.transpose(1, 2) for t in tensors)


def liger_rotary_pos_emb(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor | None = None, unsqueeze_dim: int = 1,
    rotary_dim: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(q, k), each head x[:r] · cos + [−x[r/2:r], x[:r/2]] · sin, its columns from r on as they are; fresh tensors
    laid out as [batch, seq, heads, dim].

    q [batch, heads, seq, dim], k [batch, k_heads, seq, dim], or with unsqueeze_dim=2 [batch, seq, heads, dim], any
    strides; cos, sin [seq, r], [1, seq, r] or [batch, seq, r] for r = rotary_dim <= dim, of which the first r/2
    columns count, or r/2 wide. Without rotary_dim r is the tables' width. Raises ValueError for tables of another
    width and for another unsqueeze_dim. position_ids is not used.
    """
    if unsqueeze_dim != 1:
        q, k = heads_swapped(unsqueeze_dim, (q, k))
        return heads_swapped(unsqueeze_dim, liger_rotary_pos_emb(q, k, cos, sin, rotary_dim=rotary_dim))
    columns = rotated(q.size(-1), cos.size(-1), rotary_dim)
    return run(ops.rope, q, k, cos, sin, False, False, None, columns, needs_recipes=True)


def liger_qk_norm_rope(
    q: Tensor, k: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, cos: Tensor, sin: Tensor, eps: float,
    offset: float = 0.0, casting_mode: str | int = "llama", rotary_dim: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(q, k), each head's row normalised and rotated: liger_rotary_pos_emb of x / rms(x) · (weight + offset), rounded
    to x's dtype in between, with the bits of liger_rms_norm and liger_rotary_pos_emb one after the other.

    q [batch, heads, seq, dim], k [batch, k_heads, seq, dim], any strides; q_weight, k_weight [dim] in q's dtype or
    float, or None for 1; cos, sin and rotary_dim as in liger_rotary_pos_emb, casting_mode as in LigerRMSNorm. Fresh
    tensors laid out as [batch, seq, heads, dim]. Raises ValueError for tables of another width.
    """
    columns = rotated(q.size(-1), cos.size(-1), rotary_dim)
    options = float(eps), float(offset), casting_code(casting_mode)
    return run(ops.qk_norm_rope, q, k, beside(q, q_weight), beside(k, k_weight), cos, sin, *options, columns)


class LigerQKNormRopeFunction:
    apply = staticmethod(liger_qk_norm_rope)


liger_rope = liger_rotary_pos_emb
"""(q, k) rotated; see liger_rotary_pos_emb."""


class LigerRopeFunction:
    apply = staticmethod(liger_rotary_pos_emb)


def liger_half_table_rotary_pos_emb(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor | None = None, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """(q, k) rotated by tables half as wide as a head; see liger_rotary_pos_emb. Raises ValueError for tables of
    another width."""
    if 2 * cos.shape[-1] != q.shape[-1]:
        raise ValueError(f"cos must be half as wide as a head, {q.shape[-1]}, and is {cos.shape[-1]} wide")
    return liger_rotary_pos_emb(q, k, cos, sin, None, unsqueeze_dim, q.shape[-1])


def liger_interleaved_rotary_pos_emb(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor | None = None, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """(q, k), columns 2i and 2i + 1 of each head rotated by column i of the tables, whose second half does not count.

    q, k as in liger_rotary_pos_emb; cos, sin [batch or 1, seq, r], r at most the width of a head. Raises ValueError for
    another unsqueeze_dim.
    """
    if unsqueeze_dim != 1:
        q, k = heads_swapped(unsqueeze_dim, (q, k))
        return heads_swapped(unsqueeze_dim, liger_interleaved_rotary_pos_emb(q, k, cos, sin))
    width = cos.shape[-1]
    return ops.rope(q, k, cos[..., : width // 2], sin[..., : width // 2], False, True, None, width)


def liger_paired_table_rotary_pos_emb(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor | None = None, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """(q, k), columns 2i and 2i + 1 of each head rotated by column 2i of the tables, which column 2i + 1 repeats, as in
    Cohere's models; as many columns as the tables are wide. See liger_interleaved_rotary_pos_emb."""
    if unsqueeze_dim != 1:
        q, k = heads_swapped(unsqueeze_dim, (q, k))
        return heads_swapped(unsqueeze_dim, liger_paired_table_rotary_pos_emb(q, k, cos, sin))
    return ops.rope(q, k, cos[..., ::2], sin[..., ::2], False, True, None, cos.shape[-1])


def liger_deinterleaving_rotary_pos_emb(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor | None = None, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """(q, k), the even columns of each head before the odd ones and then rotated as two halves, as in multi-head latent
    attention (DeepSeek-AI 2024, arXiv:2405.04434); see liger_rotary_pos_emb."""
    q, k = (t.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) for t in (q, k))
    return liger_rotary_pos_emb(q, k, cos, sin, None, unsqueeze_dim)


def liger_rotary_pos_emb_vision(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """(q, k) [seq, heads, dim] rotated by cos, sin [seq, dim]; the arithmetic is in float, as in vision towers."""
    q, k = liger_rotary_pos_emb(q.unsqueeze(0).transpose(1, 2), k.unsqueeze(0).transpose(1, 2), cos, sin)
    return q.transpose(1, 2).squeeze(0), k.transpose(1, 2).squeeze(0)


def liger_rope_packed(qkv: Tensor, cos: Tensor, sin: Tensor, num_heads: int, num_key_value_heads: int) -> Tensor:
    """The result of a fused projection, qkv [batch, seq, (num_heads + 2 num_key_value_heads) · dim], with q and k
    rotated; v is copied."""
    return ops.rope_packed(qkv, cos, sin, num_heads, num_key_value_heads, False)


def liger_multimodal_rotary_pos_emb(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, mrope_section: Sequence[int], unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """(q, k) rotated; fresh tensors laid out as [batch, seq, heads, dim].

    q [batch, heads, seq, dim], k [batch, k_heads, seq, dim], or with unsqueeze_dim=2 [batch, seq, heads, dim], any
    strides; cos, sin [3, batch or 1, seq, dim]. mrope_section (t, h, w), whose sum is dim/2: pair i turns by plane 0
    where i < t, by plane 1 where i < t + h, else by plane 2. Raises ValueError for other sections and for another
    unsqueeze_dim.
    """
    if unsqueeze_dim != 1:
        q, k = heads_swapped(unsqueeze_dim, (q, k))
        return heads_swapped(unsqueeze_dim, liger_multimodal_rotary_pos_emb(q, k, cos, sin, mrope_section))
    return ops.rope(q, k, cos, sin, False, False, list(mrope_section))


liger_qwen2vl_mrope = liger_multimodal_rotary_pos_emb
"""(q, k) rotated by three positions per token; see liger_multimodal_rotary_pos_emb."""


class LigerQwen2VLMRopeFunction:
    apply = staticmethod(liger_multimodal_rotary_pos_emb)


def _parts(freqs_cis, batch, seq):
    """Cosines and sines [seq, dim/2] or [batch or 1, seq, dim/2]: views of the complex tensor, which is not copied."""
    parts = torch.view_as_real(freqs_cis)
    if parts.dim() != 4 or parts.shape[0] not in (1, batch):
        parts = parts.reshape(-1, *parts.shape[-2:])
    return parts[..., :seq, :, 0], parts[..., :seq, :, 1]


def llama4_rope_forward(
    q: Tensor, k: Tensor, freqs_cis: Tensor, BLOCK_SIZE: int | None = None, imag_sign: float = 1.0
) -> tuple[Tensor, Tensor]:
    """(q, k) [batch, seq, heads, dim] times freqs_cis; with imag_sign=-1 times its conjugate, which is the gradient."""
    q, k, tables = q.transpose(1, 2), k.to(q.dtype).transpose(1, 2), _parts(freqs_cis, q.shape[0], q.shape[1])
    return tuple(t.transpose(1, 2) for t in ops.rope(q, k, *tables, imag_sign < 0, True))


class LigerLlama4RopeFunction:
    @staticmethod
    def apply(q: Tensor, k: Tensor, freqs_cis: Tensor, BLOCK_SIZE: int | None = None) -> tuple[Tensor, Tensor]:
        """(q, k), columns 2i and 2i + 1 of each head multiplied as a complex number by freqs_cis[..., i]; fresh tensors
        in q's dtype.

        q [batch, seq, heads, dim], k [batch, seq, k_heads, dim], any strides; freqs_cis complex [seq or more, dim/2] or
        [batch, seq, dim/2]. BLOCK_SIZE is accepted and not used.
        """
        return llama4_rope_forward(q, k, freqs_cis)


def liger_llama4_text_rotary_pos_emb(xq: Tensor, xk: Tensor, freqs_cis: Tensor) -> tuple[Tensor, Tensor]:
    """(xq, xk) [batch, seq, heads, dim] times freqs_cis; see LigerLlama4RopeFunction."""
    return llama4_rope_forward(xq, xk, freqs_cis)


def liger_complex_rotary_pos_emb(xq: Tensor, xk: Tensor, freqs_cis: Tensor) -> tuple[Tensor, Tensor]:
    """(xq, xk) [batch, heads, seq, dim] times freqs_cis, as DeepSeek-V2 does; see LigerLlama4RopeFunction."""
    q, k = heads_swapped(2, (xq, xk))
    return heads_swapped(2, llama4_rope_forward(q, k, freqs_cis))


def _scaled(x, freqs):
    pairs = x.float().unflatten(-1, (-1, 2))
    shape = [n if i in (1, x.dim() - 1) else 1 for i, n in enumerate(pairs.shape[:-1])]
    return (pairs * freqs.view(*shape, 1)).flatten(-2).to(x.dtype)


def liger_llama4_vision_rotary_pos_emb(query: Tensor, key: Tensor, freqs_ci: Tensor) -> tuple[Tensor, Tensor]:
    """(query, key) [batch, seq, heads, dim] times freqs_ci, complex [seq, dim/2], [seq, 1, dim/2] or [batch, seq, 1,
    dim/2].

    Real freqs_ci scale the pairs of columns. Raises ValueError for complex freqs_ci of another shape.
    """
    if not freqs_ci.is_complex():
        return _scaled(query, freqs_ci), _scaled(key, freqs_ci)
    if freqs_ci.dim() not in (2, 3, 4):
        raise ValueError(f"freqs_ci must have 2, 3 or 4 dimensions, got {tuple(freqs_ci.shape)}")
    return llama4_rope_forward(query, key, freqs_ci if freqs_ci.dim() == 2 else freqs_ci.squeeze(-2))


def apply_liger_llama4_rope_full(modeling_module: Any) -> None:
    """Rebinds both rotary functions of a Llama 4 modeling module."""
    modeling_module.apply_rotary_emb = liger_llama4_text_rotary_pos_emb
    modeling_module.vision_apply_rotary_emb = liger_llama4_vision_rotary_pos_emb
