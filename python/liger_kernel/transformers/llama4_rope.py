"""Llama 4's rotary position embeddings under the names that Hugging Face's modules are patched with."""

from liger_kernel.ops import LigerLlama4RopeFunction


def liger_llama4_text_rotary_pos_emb(xq, xk, freqs_cis):
    """(xq, xk) [batch, seq, heads, dim] times freqs_cis; see LigerLlama4RopeFunction."""
    return LigerLlama4RopeFunction.apply(xq, xk, freqs_cis)


def _scaled(x, freqs):
    pairs = x.float().unflatten(-1, (-1, 2))
    shape = [n if i in (1, x.dim() - 1) else 1 for i, n in enumerate(pairs.shape[:-1])]
    return (pairs * freqs.view(*shape, 1)).flatten(-2).to(x.dtype)


def liger_llama4_vision_rotary_pos_emb(query, key, freqs_ci):
    """(query, key) [batch, seq, heads, dim] times freqs_ci, complex [seq, dim/2], [seq, 1, dim/2] or [batch, seq, 1,
    dim/2].

    Real freqs_ci scale the pairs of columns. Raises ValueError for complex freqs_ci of another shape.
    """
    if not freqs_ci.is_complex():
        return _scaled(query, freqs_ci), _scaled(key, freqs_ci)
    if freqs_ci.dim() not in (2, 3, 4):
        raise ValueError(f"freqs_ci must have 2, 3 or 4 dimensions, got {tuple(freqs_ci.shape)}")
    return LigerLlama4RopeFunction.apply(query, key, freqs_ci if freqs_ci.dim() == 2 else freqs_ci.squeeze(-2))


def apply_liger_llama4_rope_full(modeling_module):
    """Rebinds both rotary functions of a Llama 4 modeling module."""
    modeling_module.apply_rotary_emb = liger_llama4_text_rotary_pos_emb
    modeling_module.vision_apply_rotary_emb = liger_llama4_vision_rotary_pos_emb
