"""How the process makes products while liger_kernel.batch_invariant is on, and that backward is deterministic."""

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from liger_kernel._library import ops


class Way(NamedTuple):
    """Products in blocks of `block` rows, or whole (0), but of `least` rows at least; rows that are missing are 0."""

    block: int
    least: int
    words: str


#: docs/decisions/0014 has the measurements of these numbers.
ON_CPU = Way(512, 0, "products of 512 rows each")
IN_16_BITS_ON_HOPPER = Way(0, 128, "cuBLASLt without split-K, 128 rows at least")
ON_GPU = Way(2048, 0, "products of 2048 rows each")


def ways() -> tuple[Way, Way, Way]:
    """The way of products on CPUs, on GPUs in 16 bits, and on GPUs in float."""
    hopper = torch.cuda.is_available() and all(
        torch.cuda.get_device_capability(device)[0] == 9 for device in range(torch.cuda.device_count())
    )
    without_split = hopper and torch.version.hip is None
    return ON_CPU, IN_16_BITS_ON_HOPPER if without_split else ON_GPU, ON_GPU


def way_of(tensor: torch.Tensor) -> Way:
    """That of products of a tensor."""
    on_cpu, in_16_bits, in_float = ways()
    if not tensor.is_cuda:
        return on_cpu
    return in_16_bits if tensor.element_size() == 2 else in_float


_users = 0
_undo: list[Callable[[], Any]] = []


def enter() -> None:
    """Switch on, unless somebody has."""
    global _users
    _users += 1
    if _users > 1:
        return
    try:
        blocks, least, _ = zip(*ways())
        ops.set_batch_invariant(blocks, least)
        _undo.append(lambda: ops.set_batch_invariant((), ()))
        if torch.cuda.is_available():
            _set_blas()
        _set_deterministic()
    except BaseException:
        leave()
        raise


def leave() -> None:
    """Switch off, if nobody else has switched on."""
    global _users
    _users -= 1
    while _users == 0 and _undo:
        _undo.pop()()


def _set_blas():
    if torch.version.hip is None:
        matmul = torch.backends.cuda.matmul
        for name in ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction"):
            before = getattr(matmul, name), getattr(matmul, f"{name}_split_k", True)
            setattr(matmul, name, (False, False))  # no sums in 16 bits, no split-K
            _undo.append(lambda name=name, before=before: setattr(matmul, name, before))
        library = torch.backends.cuda.preferred_blas_library()
        torch.backends.cuda.preferred_blas_library("cublaslt")
        _undo.append(lambda: torch.backends.cuda.preferred_blas_library(library))
    if "CUBLAS_WORKSPACE_CONFIG" not in os.environ:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # which torch asks for before a deterministic product
        _undo.append(lambda: os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None))


def _set_deterministic():
    enabled, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fills = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)  # with warn_only, flash attention's backward keeps its atomic sums
    torch.utils.deterministic.fill_uninitialized_memory = fills and enabled  # type: ignore[assignment]

    def undo():
        torch.use_deterministic_algorithms(enabled, warn_only=warns)
        torch.utils.deterministic.fill_uninitialized_memory = fills  # type: ignore[assignment]

    _undo.append(undo)
