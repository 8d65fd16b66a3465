"""Other sets of kernels, which packages can add by name."""

from liger_kernel.ops.backends.registry import (
    IMPL_REGISTRY,
    LIGER_KERNEL_IMPL_ENV,
    ImplInfo,
    register_impl,
    select_impl,
)

__all__ = ["IMPL_REGISTRY", "ImplInfo", "LIGER_KERNEL_IMPL_ENV", "register_impl", "select_impl"]
