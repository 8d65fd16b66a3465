from liger_kernel.operators.experts import (
    LigerClampedExperts,
    LigerClampedSwishExperts,
    LigerGEGLUExperts,
    LigerGptOssExperts,
    LigerTransposedExperts,
    LigerUngatedExperts,
)

__all__ = [
    "LigerClampedExperts", "LigerClampedSwishExperts", "LigerGEGLUExperts", "LigerGptOssExperts",
    "LigerTransposedExperts", "LigerUngatedExperts",
]  # fmt: skip
