"""Loads libliger, once, and registers its operators as torch.ops.liger.*."""

import ctypes
import glob
import os
import sys

import torch

from liger_kernel import __version__, cmake_prefix_path

_LIBRARIES = os.path.join(cmake_prefix_path, "lib")


def _path() -> str:
    """The library for the minor version of the torch that is installed."""
    # The variable serves the project's tests: another build of the same operators.
    file = {"darwin": "libliger.dylib", "win32": "liger.dll"}.get(sys.platform, "libliger.so")
    minor = ".".join(torch.__version__.split(".")[:2])
    return os.environ.get("LIGER_LIBRARY") or os.path.join(_LIBRARIES, f"torch-{minor}", file)


def _missing(path) -> str:
    """Why there is no library at this path, and what to do."""
    built = glob.glob("torch-*", root_dir=_LIBRARIES)
    if not built or os.environ.get("LIGER_LIBRARY"):
        return f"{path} is missing; install the package (pip install .) instead of importing its sources."
    versions = ", ".join(sorted(folder.removeprefix("torch-") for folder in built))
    return (
        f"it was built for torch {versions}, and torch {torch.__version__} is installed: install one of these, or "
        "rebuild it for yours (pip install --force-reinstall --no-deps . in a clone)."
    )


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
        raise ImportError(f"liger_kernel {__version__}: {_missing(path)}")
    torch.ops.load_library(path)


_load()

#: The operators. Every use of libliger in this package goes through here.
ops = torch.ops.liger
#: Whether they include those of liger_kernel.research: the option LIGER_RESEARCH of the build.
RESEARCH = hasattr(ops, "dyt")

if torch.distributed.is_available():
    from liger_kernel import _dtensor

    _dtensor.register(ops)
