from liger_kernel.compat.implementations import (
    IMPL_REGISTRY,
    LIGER_KERNEL_IMPL_ENV,
    ImplInfo,
    register_impl,
    select_impl,
)
