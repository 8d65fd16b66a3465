"""What several parts of the package ask of tensors, of processes and of the log."""

import functools
import importlib.util
import logging
import sys

import torch

from liger_kernel import _lazy

#: Whether PEFT can be imported.
PEFT_AVAILABLE = importlib.util.find_spec("peft") is not None


logger = logging.getLogger(__name__)


@functools.cache
def warn_once(message: str) -> None:
    """Log a warning, unless the same was logged before."""
    logger.warning(message)


def in_float_under_autocast(device: torch.device) -> bool:
    """Whether autocast is on for a device and runs layer_norm and pow, among others, in float32: the CPU's does not."""
    # is_autocast_available would tell that meta has none, but breaks the graph of torch 2.11's compiler.
    return device.type not in ("cpu", "meta") and torch.is_autocast_enabled(device.type)


def is_dtensor(t: torch.Tensor) -> bool:
    """Whether a tensor is a DTensor. Where there are none their module, which takes seconds, is not imported."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(t, module.DTensor)


def world_size() -> int:
    """How many processes train together; 1 where nothing is distributed."""
    dist = torch.distributed
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


__getattr__ = _lazy.lookup(
    __name__,
    {
        "liger_kernel.compat.machine": (
            "infer_comm_backend infer_device infer_device_arch get_total_gpu_memory is_npu_available is_peft_available "
            "transformers_version_dispatch"
        )
    },
)
