"""The name by which training scripts ask for a cache manager of Triton's kernels."""

from liger_kernel.triton.monkey_patch import apply_liger_triton_cache_manager

__all__ = ["apply_liger_triton_cache_manager"]
