from liger_kernel.operators.experts import (
    LigerClampedExperts,
    LigerClampedSwishExperts,
    LigerGEGLUExperts,
    LigerGptOssExperts,
    LigerTransposedExperts,
)

__all__ = [
    "LigerClampedExperts", "LigerClampedSwishExperts", "LigerGEGLUExperts", "LigerGptOssExperts",
    "LigerTransposedExperts",
]  # fmt: skip
