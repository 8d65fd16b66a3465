"""Multimodal rotary position embedding under the name that Hugging Face's modules are patched with."""

from liger_kernel.ops import LigerQwen2VLMRopeFunction


def liger_multimodal_rotary_pos_emb(q, k, cos, sin, mrope_section, unsqueeze_dim=1):
    """(q, k) rotated; see LigerQwen2VLMRopeFunction."""
    return LigerQwen2VLMRopeFunction.apply(q, k, cos, sin, mrope_section, unsqueeze_dim)
