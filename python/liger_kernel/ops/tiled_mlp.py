"""MLPs a shard of tokens at a time, so that their activations do not grow with the sequence."""

import torch

from liger_kernel.ops.utils import first_derivative_only


def _grad_dtype(t):
    return torch.float32 if t.dtype in (torch.bfloat16, torch.float16) else t.dtype


class _TiledMLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx, fn, module, x, shards, *parameters):
        ctx.fn, ctx.module, ctx.shards = fn, module, shards
        ctx.save_for_backward(x, *parameters)
        device = x.device.type
        ctx.autocast = device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
        return torch.cat([fn(module, shard) for shard in x.chunk(shards, -2)], -2)

    @staticmethod
    @first_derivative_only
    def backward(ctx, dy):
        """The shards run again, and their gradients are summed in float, in order."""
        x, *parameters = ctx.saved_tensors
        device, dtype, enabled = ctx.autocast
        needed = [p for p, needs in zip(parameters, ctx.needs_input_grad[4:]) if needs]
        sums = [torch.zeros_like(p, dtype=_grad_dtype(p)) for p in needed]
        dx = torch.empty_like(x) if ctx.needs_input_grad[2] else None
        tiles = [t.chunk(ctx.shards, -2) for t in (x, dy)] + [
            dx.chunk(ctx.shards, -2) if dx is not None else [None] * ctx.shards
        ]
        for shard, upstream, out in zip(*tiles):
            with torch.enable_grad(), torch.autocast(device, dtype=dtype, enabled=enabled):
                shard = shard.detach().requires_grad_(dx is not None)
                y = ctx.fn(ctx.module, shard)
            wanted = needed if dx is None else [shard, *needed]
            gradients = list(torch.autograd.grad(y, wanted, upstream, allow_unused=True))
            if dx is not None:
                out.copy_(gradients.pop(0))
            for total, gradient in zip(sums, gradients):
                if gradient is not None:
                    total += gradient
        found = iter([s.to(p.dtype) for s, p in zip(sums, needed)])
        return None, None, dx, None, *(next(found) if needs else None for needs in ctx.needs_input_grad[4:])


class LigerTiledMLPFunction:
    @staticmethod
    def apply(fn, mlp_module, x, shards, compute_params=None):
        """fn(mlp_module, x) in `shards` tiles along x [..., S, H]'s tokens; backward runs each tile again.

        The module's parameters get their gradients from autograd, once, summed in float over the tiles. compute_params
        is not used.
        """
        return _TiledMLP.apply(fn, mlp_module, x, shards, *(p for p in mlp_module.parameters() if p.requires_grad))


def shards_of(x, num_shards=None) -> int:
    """num_shards or, unless given, ceil(S / H) for x [..., S, H]; at least 1. Raises ValueError where x has one
    dimension."""
    if x.dim() < 2:
        raise ValueError(f"x must be [..., tokens, width], got {list(x.shape)}")
    return max(1, num_shards or -(-x.shape[-2] // max(1, x.shape[-1])))


def apply_tiled_mlp(fn, mlp_module, x, num_shards=None, compute_params=None):
    """LigerTiledMLPFunction with ceil(S / H) shards unless num_shards is given."""
    return LigerTiledMLPFunction.apply(fn, mlp_module, x, shards_of(x, num_shards), compute_params)
