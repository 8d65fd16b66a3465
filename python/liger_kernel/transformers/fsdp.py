"""Running code inside the forward of a wrapper: of FSDP1, where a module's parameters are whole, or of DDP, which then
sums the gradients."""

from torch.distributed.fsdp import FullyShardedDataParallel


class _FSDPForwardRedirection:
    """Call `method(*args, **kwargs)` between the hooks of `wrapper_module`'s forward.

    Raises AssertionError unless `wrapper_module` is a FullyShardedDataParallel.
    """

    def __call__(self, wrapper_module, method, *args, **kwargs):
        if not isinstance(wrapper_module, FullyShardedDataParallel):
            raise AssertionError(f"expected a FullyShardedDataParallel module, got {type(wrapper_module).__name__}")
        return run_inside(wrapper_module, wrapper_module._fsdp_wrapped_module, method, *args, **kwargs)


def run_inside(wrapper, inner, method, *args, **kwargs):
    """`method(*args, **kwargs)` in place of the forward of `inner`, which `wrapper` calls between its own hooks."""
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
        return wrapper(*args, **kwargs)
    finally:
        restore()
