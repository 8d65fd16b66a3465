from liger_kernel.operators.norm import (
    LigerRMSNorm,
    LigerRMSNormForGemma,
    LigerRMSNormForGemma2,
    LigerRMSNormForGemma3,
    LigerRMSNormForGemma4,
    LigerRMSNormForGlm4,
    LigerRMSNormForOlmo2,
    LigerRMSNormForQwen3Next,
    LigerRMSNormWithoutWeight,
)  # fmt: skip

__all__ = [
    "LigerRMSNorm", "LigerRMSNormForGemma", "LigerRMSNormForGemma2", "LigerRMSNormForGemma3", "LigerRMSNormForGemma4",
    "LigerRMSNormForGlm4", "LigerRMSNormForOlmo2", "LigerRMSNormForQwen3Next", "LigerRMSNormWithoutWeight",
]  # fmt: skip
