"""Nothing is patched: this library compiles no Triton kernels."""

from liger_kernel.compat.triton import apply_liger_triton_cache_manager, logger
