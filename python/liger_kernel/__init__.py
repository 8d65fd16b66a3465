"""Fused training operators for large language models: a thin layer over libliger, a C++20/CUDA library.

Importing this package imports no torch; importing an operator (`liger_kernel.ops`, `liger_kernel.transformers`) does.
"""

import os

from liger_kernel._installed import others as _others

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
    "quantise": "_quantise",
    "batch_invariant": "_batch_invariant",
    **dict.fromkeys(
        ("available_backends", "available_impls", "get_backend", "get_impl", "set_backend", "set_impl"), "backends"
    ),
}

#: Modules that need no import of their own: `import liger_kernel; liger_kernel.routing.record(model)`.
_MODULES = ("functional", "graphs", "memory", "optim", "routing", "trl")


def __getattr__(name):
    import importlib

    if name in _MODULES:
        return importlib.import_module(f"liger_kernel.{name}")
    if name in _LAZY:
        return getattr(importlib.import_module(f"liger_kernel.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


for _said in _others(__path__, __version__):
    import warnings

    warnings.warn(_said, stacklevel=2)
