"""What the losses have in common: forward makes the gradients, backward multiplies them and needs no weight, which FSDP or ZeRO may have taken away."""

import torch

from liger_kernel._library import ops
from liger_kernel.ops.utils import first_derivative_only, roots


class FusedLossFunction(torch.autograd.Function):
    """A Function whose forward makes gradients, unless nothing is recorded."""

    @classmethod
    def apply(cls, *args):
        # What forward sees does not tell whether its caller records.
        if not torch.is_grad_enabled():
            args = [a.detach() if isinstance(a, torch.Tensor) else a for a in args]
        return super().apply(*args)


def loss_with_gradients(ctx, loss_of, *tensors):
    """(loss, aux) of loss_of(*tensors), without autograd; ctx gets the loss's gradients for those tensors that require one, for `scaled_gradients`."""
    wanted = [t is not None and t.requires_grad for t in tensors]
    leaves = [t if t is None else t.detach().requires_grad_(w) for t, w in zip(tensors, wanted)]
    with torch.set_grad_enabled(any(wanted)):
        loss, aux = loss_of(*leaves)
    gradients = [None] * len(leaves)
    if any(wanted):
        inputs = [t for t, w in zip(leaves, wanted) if w]
        made = iter(torch.autograd.grad(loss, inputs, materialize_grads=True) if loss.requires_grad else [torch.zeros_like(t) for t in inputs])
        gradients = [next(made) if w else None for w in wanted]
    ctx.save_for_backward(*gradients)
    ctx.roots = roots(*tensors)
    return loss.detach().float(), tuple(a.detach() if a.ndim else a.detach().float() for a in aux)


@first_derivative_only
def _scaled(ctx, upstream):
    return tuple(None if t is None else ops.scale_backward(t, upstream) for t in ctx.saved_tensors)


def scaled_gradients(ctx, grad_output):
    """The gradients that forward made times the loss's, in fresh memory. grad_output is what backward was called with, or a tuple of that: both
    are how subclasses hand it on."""
    upstream = grad_output[0]
    return _scaled(ctx, upstream[0] if isinstance(upstream, tuple) else upstream)
