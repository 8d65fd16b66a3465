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


_OF_BACKENDS = ("available_backends", "available_impls", "get_backend", "get_impl", "set_backend", "set_impl")


def __getattr__(name):
    import importlib

    if name == "functional":
        return importlib.import_module("liger_kernel.functional")
    if name in _OF_BACKENDS:
        return getattr(importlib.import_module("liger_kernel.backends"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _check_distribution():
    """Names another distribution that has written into this package's folder, which would mix two libraries."""
    import re
    import warnings
    from importlib import metadata

    here = {os.path.realpath(folder) for folder in __path__}
    for distribution in metadata.distributions():
        name = distribution.metadata["Name"] or ""
        # Sources that come before an installed package on the path share no folder with it.
        if (
            not name.lower().startswith("liger")
            or os.path.realpath(distribution.locate_file("liger_kernel")) not in here
        ):
            continue
        same = re.sub(r"[-_.]+", "-", name).lower() == "liger-kernel"
        files = "" if same else distribution.read_text("RECORD") or ""
        if (same and distribution.version != __version__) or any(
            line.startswith("liger_kernel/") for line in files.splitlines()
        ):
            warnings.warn(
                f"{name} {distribution.version} has installed its own liger_kernel in the folder of liger-kernel "
                f"{__version__}; the two overwrite each other's files. Run: pip uninstall -y {name} liger-kernel, "
                "then install the one that you want.",
                stacklevel=3,
            )


_check_distribution()
