from liger_kernel.operators.norm import (
    LigerRMSNorm,
    LigerRMSNormForGemma,
    LigerRMSNormForGemma2,
    LigerRMSNormForGemma3,
    LigerRMSNormForGemma4,
    LigerRMSNormForGlm4,
    LigerRMSNormForOlmo2,
    LigerRMSNormForQwen3Next,
    LigerRMSNormFunction,
    LigerRMSNormWithoutWeight,
)  # fmt: skip

# Muse Glimmer's norms compute what these do.
LigerRMSNormForMuseGlimmer, LigerRMSNormForMuseGlimmerTextCentered = LigerRMSNormForGemma4, LigerRMSNormForGemma2

__all__ = [
    "LigerRMSNorm", "LigerRMSNormForGemma", "LigerRMSNormForGemma2", "LigerRMSNormForGemma3", "LigerRMSNormForGemma4",
    "LigerRMSNormForGlm4", "LigerRMSNormForMuseGlimmer", "LigerRMSNormForMuseGlimmerTextCentered",
    "LigerRMSNormForOlmo2", "LigerRMSNormForQwen3Next", "LigerRMSNormWithoutWeight",
]  # fmt: skip
