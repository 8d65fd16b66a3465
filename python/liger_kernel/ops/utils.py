"""Helpers that third-party kernels import beside the operators."""

import functools
import importlib

import torch

from liger_kernel.utils import infer_device


def is_hip() -> bool:
    return torch.version.hip is not None


def ensure_contiguous(fn):
    """Wraps `fn(ctx, *args, **kwargs)` so that every tensor argument arrives contiguous."""

    def contiguous(value):
        return value.contiguous() if isinstance(value, torch.Tensor) else value

    @functools.wraps(fn)
    def wrapper(ctx, *args, **kwargs):
        return fn(ctx, *map(contiguous, args), **{name: contiguous(value) for name, value in kwargs.items()})

    return wrapper


def calculate_settings(n):
    """(BLOCK_SIZE, num_warps) of a Triton kernel with a block per row of n columns; raises RuntimeError above 65536 columns."""
    block = 1 << max(0, n - 1).bit_length()
    if block > 65536:
        raise RuntimeError(f"a Triton block holds at most 65536 columns, got {n}")
    warps = next((w for least, w in ((32768, 16 if is_hip() else 32), (8192, 16), (2048, 8)) if block >= least), 4)
    return block, warps


def compare_version(package: str, operator, target: str) -> bool:
    """operator(version of `package`, target); False where the package cannot be imported."""
    from packaging.version import Version

    try:
        return operator(Version(importlib.import_module(package).__version__), Version(target))
    except ImportError:
        return False


def get_amp_custom_fwd_bwd():
    """torch.amp's decorators for the forward and backward of an autograd.Function, for the device at hand."""
    device = infer_device()
    return functools.partial(torch.amp.custom_fwd, device_type=device), functools.partial(torch.amp.custom_bwd, device_type=device)


def full_tensor(x):
    """A DTensor's whole value; anything else as it is."""
    dtensor = getattr(getattr(torch.distributed, "tensor", None), "DTensor", None)
    return x.full_tensor() if dtensor is not None and isinstance(x, dtensor) else x


def __getattr__(name):
    if name in ("amp_custom_fwd", "amp_custom_bwd"):  # asking for the device may import transformers
        return get_amp_custom_fwd_bwd()[name == "amp_custom_bwd"]
    if name == "torch_to_triton_dtype":  # indexed by kernels of others, where Triton is installed
        import triton.language as tl

        return {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
