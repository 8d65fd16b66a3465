"""Loads libliger, once, and registers its operators as torch.ops.liger.*."""

import ctypes
import os
import sys

import torch

from liger_kernel import __version__, cmake_prefix_path


def _path() -> str:
    # The variable serves the project's tests: another build of the same operators.
    file = {"darwin": "libliger.dylib", "win32": "liger.dll"}.get(sys.platform, "libliger.so")
    return os.environ.get("LIGER_LIBRARY") or os.path.join(cmake_prefix_path, "lib", file)


def _loaded():
    """The file and the version of the libliger that this process holds already; None where it holds none."""
    if not torch._C._jit_get_schemas_for_operator("liger::rms_norm"):
        return None
    mapped = []
    with open("/proc/self/maps" if sys.platform == "linux" else os.devnull) as maps:
        for line in maps:
            addresses, *_, file = line.rstrip("\n").split(maxsplit=5)
            if file.startswith("/"):
                mapped.append((*(int(address, 16) for address in addresses.split("-")), file))
    for file in dict.fromkeys(file for _, _, file in mapped):
        try:
            version = ctypes.CDLL(file, mode=os.RTLD_NOLOAD).liger_version
        except (OSError, AttributeError):
            continue  # no library, or another
        version.restype = ctypes.c_char_p
        address = ctypes.cast(
            version, ctypes.c_void_p
        ).value  # it may be found through a library that was linked with libliger
        return next(file for begin, end, file in mapped if begin <= address < end), version().decode()
    return "a file that cannot be told", "of a version before 1.0"


def _load() -> None:
    path = _path()
    loaded = _loaded()
    if loaded:
        file, version = loaded
        if __version__ not in (version, version.split("+")[0]):  # sources where they stand know the first part only
            raise ImportError(
                f"liger_kernel {__version__} would load {path}, but this process holds libliger {version} already "
                f"({file}), and a second one's operators would end the process. Build both from one version, for one "
                "torch."
            )
        return
    if not os.path.exists(path):
        raise ImportError(
            f"liger_kernel {__version__}: {path} is missing; install the package (pip install .) instead of importing "
            "its sources."
        )
    try:
        from liger_kernel._build import TORCH_VERSION
    except ImportError:
        TORCH_VERSION = None
    running = torch.__version__.split("+")[0]
    if TORCH_VERSION and running.split(".")[:2] != TORCH_VERSION.split(".")[:2]:
        raise ImportError(
            f"liger_kernel {__version__} was built for torch {TORCH_VERSION}, and torch {running} is installed: "
            f"rebuild it with `pip install --force-reinstall --no-deps .`, or install torch {TORCH_VERSION}."
        )
    torch.ops.load_library(path)


_load()

#: The operators. Every use of libliger in this package goes through here.
ops = torch.ops.liger

if torch.distributed.is_available():
    from liger_kernel import _dtensor

    _dtensor.register(ops)
