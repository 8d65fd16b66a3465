"""What the environment offers: devices, communication back ends, PEFT."""

import functools
import importlib.util
import logging
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch

#: Whether PEFT can be imported.
PEFT_AVAILABLE = importlib.util.find_spec("peft") is not None


logger = logging.getLogger(__name__)


@functools.cache
def warn_once(message: str) -> None:
    """Log a warning, unless the same was logged before."""
    logger.warning(message)


def is_peft_available() -> bool:
    return PEFT_AVAILABLE


def is_npu_available() -> bool:
    """Whether transformers sees an Ascend NPU; False where it cannot tell."""
    try:
        from transformers.utils import is_torch_npu_available

        return is_torch_npu_available()
    except Exception:
        return False


def infer_device() -> str:
    """The kind of device that work goes to by default: "cuda", "npu", "xpu" or "cpu"."""
    if torch.cuda.is_available():
        return "cuda"
    if is_npu_available():
        return "npu"
    if hasattr(torch, "xpu") and torch.xpu.is_available():
        return "xpu"
    return "cpu"


def in_float_under_autocast(device: torch.device) -> bool:
    """Whether autocast is on for a device and runs layer_norm and pow, among others, in float32: the CPU's does not."""
    kind = device.type
    return kind != "cpu" and torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)


def is_dtensor(t: torch.Tensor) -> bool:
    """Whether a tensor is a DTensor. Where there are none their module, which takes seconds, is not imported."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(t, module.DTensor)


def world_size() -> int:
    """How many processes train together; 1 where nothing is distributed."""
    dist = torch.distributed
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def infer_comm_backend() -> str:
    """The first communication back end that torch was built with; raises RuntimeError where there is none."""
    dist = torch.distributed
    if dist.is_nccl_available():
        return "nccl"
    if is_npu_available():
        return "ascend"
    for name in ("xccl", "mpi", "gloo"):
        if getattr(dist, f"is_{name}_available", lambda: False)():
            return name
    raise RuntimeError("torch was built without a communication back end (NCCL, XCCL, MPI or Gloo)")


_NVIDIA = {
    (7, 0): "volta_turing",
    (7, 5): "volta_turing",
    (8, 0): "ampere_ada",
    (8, 6): "ampere_ada",
    (8, 9): "ampere_ada",
    (9, 0): "hopper",
    (10, 0): "blackwell",
    (10, 3): "blackwell_ultra",
    (12, 0): "blackwell_consumer",
}


def _infer_nvidia_arch(device_id: int) -> str:
    major, minor = torch.cuda.get_device_capability(device_id)
    return _NVIDIA.get((major, minor), f"sm_{major}{minor}")


@functools.lru_cache
def infer_device_arch(device_id: int = 0) -> str:
    """A coarse name of the device's architecture ("hopper", "ampere_ada", ...); the device's kind where it is not
    known."""
    device = infer_device()
    try:
        return _infer_nvidia_arch(device_id) if device == "cuda" and not torch.version.hip else device
    except Exception:
        return device


def get_total_gpu_memory() -> int:
    """Memory of device 0 in whole GiB; raises RuntimeError on a machine without a GPU."""
    device = infer_device()
    if device == "cpu":
        raise RuntimeError("there is no GPU whose memory could be told")
    return getattr(torch, device).get_device_properties(0).total_memory // 2**30


def transformers_version_dispatch(
    required_version: str, before_fn: Callable[..., Any], after_fn: Callable[..., Any], before_args: Iterable[Any] = (),
    after_args: Iterable[Any] = (), before_kwargs: dict[str, Any] | None = None,
    after_kwargs: dict[str, Any] | None = None,
) -> Any:  # fmt: skip
    """Calls `before_fn` where the installed transformers is older than `required_version`, else `after_fn`."""
    import transformers
    from packaging.version import Version

    if Version(transformers.__version__) < Version(required_version):
        return before_fn(*before_args, **(before_kwargs or {}))
    return after_fn(*after_args, **(after_kwargs or {}))
