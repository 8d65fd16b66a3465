"""Gated MLPs a shard of tokens at a time: memory for activations that does not grow with the sequence."""

from torch import nn

from liger_kernel._library import ops
from liger_kernel.ops import apply_tiled_mlp
from liger_kernel.ops.activations import GELU_ERF, GELU_TANH, SILU, activation_of
from liger_kernel.ops.tiled_mlp import shards_of
from liger_kernel.transformers.mlp import weights


class _TiledGatedMLP(nn.Module):
    """down_proj(act(gate_proj(x)) · up_proj(x)) in num_shards tiles, ceil(S / H) unless given; act is
    config.hidden_act. Raises ValueError for another one than `activations`, of which the first is the default."""

    activations = ()

    def __init__(self, config, num_shards=None):
        super().__init__()
        self.activation = activation_of(config, *self.activations, default=self.activations[0])
        self.config, self.num_shards = config, num_shards
        self.hidden_size, self.intermediate_size = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(self.hidden_size, self.intermediate_size, bias=False)
        self.up_proj = nn.Linear(self.hidden_size, self.intermediate_size, bias=False)
        self.down_proj = nn.Linear(self.intermediate_size, self.hidden_size, bias=False)

    def _whole(self, x):
        return self.down_proj(ops.gated(self.gate_proj(x), self.up_proj(x), self.activation, 1.0))

    def forward(self, x):
        found = weights(self)
        if not found:
            return apply_tiled_mlp(type(self)._whole, self, x, self.num_shards)
        tokens = x.shape[:-1].numel()
        return ops.fused_mlp(
            x, *found, None, None, None, self.activation, 1.0, 1.0, max(1, -(-tokens // shards_of(x, self.num_shards)))
        )


class LigerTiledSwiGLUMLP(_TiledGatedMLP):
    __doc__ = _TiledGatedMLP.__doc__
    activations = (SILU,)


class LigerTiledGEGLUMLP(_TiledGatedMLP):
    __doc__ = _TiledGatedMLP.__doc__
    activations = (GELU_TANH, GELU_ERF)
