"""The names that choose among sets of kernels, for other people's code alone: libliger's operators choose their kernels
by device.

- The registry is for packages that add a set of kernels by name. Nothing stands in it unless somebody registers it.
- set_impl, the keyword `impl` of liger_kernel.functional and the variables LIGER_KERNEL_BACKEND and
  LIGER_KERNEL_IMPL_<OPERATOR> choose among Triton, CuTe DSL and others where an operator has several implementations.
  Here each has one, IMPLEMENTATION: another name is accepted, and warned of once.
"""

import warnings
from dataclasses import dataclass
from typing import Any

IMPLEMENTATION = "libliger"
#: The operators of liger_kernel.functional.
OPERATORS = (
    "rms_norm", "layer_norm", "jsd", "softmax", "swiglu", "rope", "cross_entropy", "fused_add_rms_norm", "geglu",
    "kl_div", "fused_linear_jsd", "fused_linear_cross_entropy",
)  # fmt: skip


class ImplNotAvailableError(RuntimeError):
    """For code that catches it; no choice of an implementation raises it here."""


class NoImplAvailableError(RuntimeError):
    """An operator that liger_kernel.functional does not have."""


class LigerImplFallbackWarning(UserWarning):
    """An implementation was asked for that does not exist here."""


_chosen: str | None = None
_warned: set[str] = set()


def check_impl(name: str | None) -> None:
    """Warns once of each name of an implementation other than the one there is."""
    if name is not None and name != IMPLEMENTATION and name not in _warned:
        _warned.add(name)
        text = f"there is one implementation, {IMPLEMENTATION}, and it runs in place of {name!r}"
        warnings.warn(text, LigerImplFallbackWarning, stacklevel=3)


def set_impl(name: str | None) -> None:
    """Accepts the name of an implementation; the one there is runs."""
    global _chosen
    check_impl(name)
    _chosen = name


def get_impl() -> str | None:
    """What set_impl was given last."""
    return _chosen


def available_impls(op_name: str, device: Any = None) -> list[str]:
    """The implementations of an operator of liger_kernel.functional. Raises NoImplAvailableError for another name."""
    if op_name not in OPERATORS:
        raise NoImplAvailableError(f"there is no operator {op_name!r}, only {', '.join(OPERATORS)}")
    return [IMPLEMENTATION]


all_impls = available_impls
available_backends = available_impls
set_backend, get_backend = set_impl, get_impl


def clear_available_cache() -> None:
    """There is no cache."""


# Nothing stands in the table of sets of kernels unless somebody registers it.
LIGER_KERNEL_IMPL_ENV = "LIGER_KERNEL_IMPL"


@dataclass(frozen=True)
class ImplInfo:
    """A set of kernels: the types of device that it serves, those where it is the default, and its module."""

    name: str
    devices: tuple
    default_devices: tuple = ()
    module_path: str = ""


IMPL_REGISTRY: dict[str, ImplInfo] = {}


def register_impl(info: ImplInfo) -> None:
    """Adds a set of kernels, in place of one of the same name. None of it is ever run."""
    IMPL_REGISTRY[info.name] = info


def select_impl(device: str, explicit: str | None = None) -> ImplInfo | None:
    """The set named `explicit`, or else the first that is the default on this type of device, or None.

    Raises KeyError where no set has that name.
    """
    if explicit is not None:
        return IMPL_REGISTRY[explicit]
    return next((info for info in IMPL_REGISTRY.values() if device in info.default_devices), None)
