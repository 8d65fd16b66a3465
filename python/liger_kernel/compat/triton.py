"""What Triton kernels of others, and scripts that train with them, import: block sizes, contiguous arguments, dtypes,
versions (liger_kernel.ops.utils), and the name of a cache manager (liger_kernel.triton)."""

import functools
import importlib
import logging
from collections.abc import Callable
from typing import Any

import torch

from liger_kernel.compat.machine import infer_device

logger = logging.getLogger("liger_kernel.triton.monkey_patch")


def is_hip() -> bool:
    return torch.version.hip is not None


def ensure_contiguous(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `fn(ctx, *args, **kwargs)` so that every tensor argument arrives contiguous."""

    def contiguous(value):
        return value.contiguous() if isinstance(value, torch.Tensor) else value

    @functools.wraps(fn)
    def wrapper(ctx, *args, **kwargs):
        return fn(ctx, *map(contiguous, args), **{name: contiguous(value) for name, value in kwargs.items()})

    return wrapper


def calculate_settings(n: int) -> tuple[int, int]:
    """(BLOCK_SIZE, num_warps) of a Triton kernel with a block per row of n columns; raises RuntimeError above 65536
    columns."""
    block = 1 << max(0, n - 1).bit_length()
    if block > 65536:
        raise RuntimeError(f"a Triton block holds at most 65536 columns, got {n}")
    warps = next((w for least, w in ((32768, 16 if is_hip() else 32), (8192, 16), (2048, 8)) if block >= least), 4)
    return block, warps


def compare_version(package: str, operator: Callable[[Any, Any], bool], target: str) -> bool:
    """operator(version of `package`, target); False where the package cannot be imported."""
    from packaging.version import Version

    try:
        return operator(Version(importlib.import_module(package).__version__), Version(target))
    except ImportError:
        return False


def get_amp_custom_fwd_bwd() -> tuple[Any, ...]:
    """torch.amp's decorators for the forward and backward of an autograd.Function, for the device at hand."""
    device = infer_device()
    return tuple(functools.partial(f, device_type=device) for f in (torch.amp.custom_fwd, torch.amp.custom_bwd))


def __getattr__(name):
    if name in ("amp_custom_fwd", "amp_custom_bwd"):  # asking for the device may import transformers
        return get_amp_custom_fwd_bwd()[name == "amp_custom_bwd"]
    if name == "torch_to_triton_dtype":  # indexed by kernels of others, where Triton is installed
        try:
            import triton.language as tl
        except ImportError as error:
            raise AttributeError(f"{name} needs Triton, which is not installed") from error
        return {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
    raise AttributeError(f"module 'liger_kernel.ops.utils' has no attribute {name!r}")


def apply_liger_triton_cache_manager() -> None:
    """Does nothing. The cache manager of this name keeps processes from writing one file of Triton's cache at a time;
    this library has no Triton kernels, and Triton 3 writes such files atomically itself."""
    logger.info("liger_kernel.triton: nothing to set: this library has no Triton kernels")
