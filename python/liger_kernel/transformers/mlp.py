"""SwiGLU MLPs that keep their input alone for backward."""

import torch
from torch import nn

from liger_kernel.ops import LigerMLPFunction
from liger_kernel.transformers.coverage import is_bare
from liger_kernel.transformers.swiglu import LigerFalconH1SwiGLUMLP, LigerSwiGLUMLP


def weights(mlp):
    """The weights of gate_proj, up_proj and down_proj; None where a call is more than its weight: a bias, an adapter, a
    hook, offloading."""
    projections = mlp.gate_proj, mlp.up_proj, mlp.down_proj
    if not all(type(p) is nn.Linear and p.bias is None and is_bare(p) for p in projections):
        return None
    found = tuple(p.weight for p in projections)
    return found if all(type(w) in (nn.Parameter, torch.Tensor) for w in found) else None


class LigerMLP(LigerSwiGLUMLP):
    """down_proj(silu(gate_proj(x)) · up_proj(x)); where a projection is no plain Linear, as LigerSwiGLUMLP."""

    def forward(self, x):
        found = weights(self)
        return LigerMLPFunction.apply(x, *found) if found else super().forward(x)


class LigerFalconH1MLP(LigerFalconH1SwiGLUMLP):
    """LigerMLP with config.mlp_multipliers on the gate and on the result. Raises ValueError where config.mlp_bias is
    set."""

    def __init__(self, config):
        if getattr(config, "mlp_bias", False):
            raise ValueError("LigerFalconH1MLP has no biases, and config.mlp_bias asks for them")
        super().__init__(config)

    def forward(self, x):
        found = weights(self)
        return (
            LigerMLPFunction.apply(x, *found, self.gate_multiplier, self.down_multiplier)
            if found
            else super().forward(x)
        )
