"""Nothing is patched: this library compiles no Triton kernels."""

import logging

logger = logging.getLogger(__name__)


def apply_liger_triton_cache_manager() -> None:
    """Does nothing. The cache manager of this name keeps processes from writing one file of Triton's cache at a time;
    this library has no Triton kernels, and Triton 3 writes such files atomically itself."""
    logger.info("liger_kernel.triton: nothing to set: this library has no Triton kernels")
