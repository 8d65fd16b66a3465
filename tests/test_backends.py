"""The registry of other sets of kernels, which is empty."""

import pytest
from liger_kernel.ops import backends
from liger_kernel.ops.backends.registry import (
    IMPL_REGISTRY,
    LIGER_KERNEL_IMPL_ENV,
    ImplInfo,
    register_impl,
    select_impl,
)


def test_registry(monkeypatch):
    assert (
        backends.IMPL_REGISTRY is IMPL_REGISTRY and IMPL_REGISTRY == {} and LIGER_KERNEL_IMPL_ENV == "LIGER_KERNEL_IMPL"
    )
    for row in (ImplInfo("one", ("cuda", "npu"), ("npu",), "a.b"), ImplInfo("two", ("npu",), ("npu",), "c.d")):
        monkeypatch.setitem(IMPL_REGISTRY, row.name, None)  # which undoes what register_impl adds
        register_impl(row)
    assert (
        select_impl("cuda") is None
        and select_impl("npu").name == "one"
        and select_impl("cuda", explicit="one").module_path == "a.b"
    )
    for arguments, message in (
        (("cuda", "three"), "'three'.*one, two"),
        (("cuda", "two"), "two does not serve cuda, only npu"),
    ):
        with pytest.raises(RuntimeError, match=message):
            select_impl(*arguments)
    for wrong in (
        dict(devices=(), module_path="a"),
        dict(devices=("cuda",)),
        dict(devices=("cuda",), default_devices=("npu",), module_path="a"),
    ):
        with pytest.raises(ValueError):
            ImplInfo("wrong", **wrong)
