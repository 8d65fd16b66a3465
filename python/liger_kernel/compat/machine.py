"""What scripts of others ask liger_kernel.utils about the machine and its packages."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch

from liger_kernel.utils import PEFT_AVAILABLE


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
