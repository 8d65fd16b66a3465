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


#: The codes of libliger's reductions are their places here.
REDUCTIONS = ("none", "mean", "sum", "batchmean")


def reduction_code(reduction, valid=REDUCTIONS) -> int:
    """The code of a reduction; raises ValueError, which lists the valid ones, for another."""
    if reduction not in valid:
        raise ValueError(f"reduction must be one of {', '.join(map(repr, valid))}, got {reduction!r}")
    return REDUCTIONS.index(reduction)


def check_label(name, label):
    """Raises TypeError where the label is no integer."""
    if not hasattr(type(label), "__index__"):
        raise TypeError(f"{name} must be an integer, got {label!r}")


class _Refusal(torch.autograd.Function):
    """The gradients as they are; their own derivative, with respect to anything they depend on, is an error."""

    @staticmethod
    def forward(ctx, name, count, *tensors):
        ctx.name = name
        return tuple(t.detach() for t in tensors[:count])

    @staticmethod
    def backward(ctx, *ignored):
        raise RuntimeError(f"{ctx.name} has no second derivative")


def first_derivative_only(backward):
    """For the backward of an autograd.Function: a derivative of its gradients is an error.

    torch's once_differentiable knows of the upstream gradient alone: where that is a constant, it gives zeros for a
    derivative with respect to an input. `ctx.roots` are tensors in the graph of inputs that are not saved.
    """

    @functools.wraps(backward)
    def wrapper(ctx, *upstream):
        differentiated = torch.is_grad_enabled() and not torch.compiler.is_compiling()
        saved = ctx.saved_tensors if differentiated else ()
        with torch.no_grad():
            gradients = backward(ctx, *upstream)
        if not differentiated:
            return gradients
        gradients = gradients if isinstance(gradients, tuple) else (gradients,)
        given = [g for g in gradients if g is not None]
        roots = [t for t in (*saved, *getattr(ctx, "roots", ()), *upstream) if t is not None]
        refused = iter(
            _Refusal.apply(type(ctx).__name__.removesuffix("Backward").lstrip("_"), len(given), *given, *roots)
        )
        return tuple(g if g is None else next(refused) for g in gradients)

    return wrapper


def promoted(*tensors):
    """The tensors in the dtype that torch's arithmetic between them has; None stays None."""
    dtype = functools.reduce(torch.promote_types, {t.dtype for t in tensors if t is not None})
    return tuple(t if t is None or t.dtype == dtype else t.to(dtype) for t in tensors)


def beside(x, weight):
    """A weight in a dtype that kernels take beside x: its own, or float32, where it is neither x's nor float32."""
    return weight if weight is None or weight.dtype in (x.dtype, torch.float32) else weight.float()


def roots(*tensors):
    """Numbers in the graph of each tensor, which keep none of its memory."""
    if torch.compiler.is_compiling():  # refuses second derivatives by itself
        return ()
    with torch.enable_grad():
        return [t.expand(0, *t.shape).sum() for t in tensors if t is not None and t.requires_grad]


def calculate_settings(n):
    """(BLOCK_SIZE, num_warps) of a Triton kernel with a block per row of n columns; raises RuntimeError above 65536
    columns."""
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
    return functools.partial(torch.amp.custom_fwd, device_type=device), functools.partial(
        torch.amp.custom_bwd, device_type=device
    )


def is_dtensor(x):
    return isinstance(x, getattr(getattr(torch.distributed, "tensor", None), "DTensor", ()))


def full_tensor(x, *others):
    """The whole value of a DTensor that stands beside plain tensors; anything else as it is."""
    return x.full_tensor() if is_dtensor(x) and not any(is_dtensor(other) for other in others) else x


def placed_as(x, like):
    """A plain tensor, the same on every rank, as a DTensor placed like `like`, if that is one; a DTensor as it is."""
    if not is_dtensor(like) or is_dtensor(x):
        return x
    return torch.distributed.tensor.distribute_tensor(x, like.device_mesh, like.placements, src_data_rank=None)


def __getattr__(name):
    if name in ("amp_custom_fwd", "amp_custom_bwd"):  # asking for the device may import transformers
        return get_amp_custom_fwd_bwd()[name == "amp_custom_bwd"]
    if name == "torch_to_triton_dtype":  # indexed by kernels of others, where Triton is installed
        try:
            import triton.language as tl
        except ImportError as error:
            raise AttributeError(f"{name} needs Triton, which is not installed") from error
        return {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
