"""Loads libliger, once, and registers its operators as torch.ops.liger.*."""

import os

import torch

from liger_kernel import __version__


def _path() -> str:
    # The variable serves the project's tests: another build of the same operators.
    return os.environ.get("LIGER_LIBRARY") or os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib", "libliger.so")


def _load() -> None:
    path = _path()
    if not os.path.exists(path):
        raise ImportError(f"liger_kernel {__version__}: {path} is missing; install the package (pip install .) instead of importing its sources.")
    try:
        from liger_kernel._build import TORCH_VERSION
    except ImportError:
        TORCH_VERSION = None
    running = torch.__version__.split("+")[0]
    if TORCH_VERSION and running.split(".")[:2] != TORCH_VERSION.split(".")[:2]:
        raise ImportError(
            f"liger_kernel {__version__} was built for torch {TORCH_VERSION}, and torch {running} is installed: "
            f"rebuild it with `pip install --no-build-isolation --force-reinstall --no-deps .`, or install torch {TORCH_VERSION}."
        )
    torch.ops.load_library(path)


_load()

#: The operators. Every use of libliger in this package goes through here.
ops = torch.ops.liger
