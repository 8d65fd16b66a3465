"""Running code inside an FSDP1 module's forward, where its parameters are whole."""

from torch.distributed.fsdp import FullyShardedDataParallel


class _FSDPForwardRedirection:
    """Call `method(*args, **kwargs)` between the hooks of `wrapper_module`'s forward.

    Raises AssertionError unless `wrapper_module` is a FullyShardedDataParallel.
    """

    def __call__(self, wrapper_module, method, *args, **kwargs):
        assert isinstance(wrapper_module, FullyShardedDataParallel), (
            f"expected a FullyShardedDataParallel module, got {type(wrapper_module).__name__}"
        )
        inner = wrapper_module._fsdp_wrapped_module
        own = vars(inner).get("forward")

        def restore():
            if own is None:
                vars(inner).pop("forward", None)
            else:
                inner.forward = own

        def once(*args, **kwargs):
            # The method may call the module itself.
            restore()
            return method(*args, **kwargs)

        inner.forward = once
        try:
            return wrapper_module(*args, **kwargs)
        finally:
            restore()
