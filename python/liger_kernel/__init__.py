"""Fused training operators for large language models: a thin layer over libliger, a C++20/CUDA library.

Importing this package imports no torch; importing an operator (`liger_kernel.ops`, `liger_kernel.transformers`) does.
"""

import os

__version__ = "1.0.0"
try:
    # And what it was built for: 1.0.0+pt213cu130.
    from liger_kernel._build import VERSION as __version__  # type: ignore[no-redef]
except ImportError:
    pass  # the sources where they stand

#: Where lib/ and include/ are: `find_package(liger)` works with this on CMAKE_PREFIX_PATH.
#: An editable install has a folder for them.
cmake_prefix_path = next((folder for folder in __path__ if os.path.isdir(os.path.join(folder, "lib"))), __path__[0])


_LAZY = {
    **dict.fromkeys(("patch", "report"), "_patch"),
    **dict.fromkeys(
        ("available_backends", "available_impls", "get_backend", "get_impl", "set_backend", "set_impl"), "backends"
    ),
}


def __getattr__(name):
    import importlib

    if name == "functional":
        return importlib.import_module("liger_kernel.functional")
    if name in _LAZY:
        return getattr(importlib.import_module(f"liger_kernel.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _others():
    """What to say of each other distribution that has written into this package's folder, which mixes two libraries.

    importlib.metadata, which reads what every installed package says of itself, takes longer than all of this import.
    """
    for parent in {os.path.dirname(os.path.abspath(folder)) for folder in __path__}:
        for entry in os.listdir(parent):
            if not (entry.lower().startswith("liger") and entry.endswith(".dist-info")):
                continue
            name, _, version = entry.removesuffix(".dist-info").rpartition("-")
            ours = name.lower().replace("-", "_") == "liger_kernel"
            if version != __version__ if ours else _writes_here(os.path.join(parent, entry, "RECORD")):
                name = name.replace("_", "-")
                yield (
                    f"{name} {version} has installed its own liger_kernel in the folder of liger-kernel "
                    f"{__version__}; the two overwrite each other's files. Run: pip uninstall -y {name} liger-kernel, "
                    "then install the one that you want."
                )


def _writes_here(record):
    """Whether a list of installed files names some of this package."""
    if not os.path.exists(record):
        return False
    with open(record, encoding="utf-8") as files:
        return any(line.startswith("liger_kernel/") for line in files)


for _said in _others():
    import warnings

    warnings.warn(_said, stacklevel=2)
