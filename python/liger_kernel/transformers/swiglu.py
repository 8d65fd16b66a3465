"""SwiGLU MLPs. A forward uses its projections alone: it is also bound to other models' modules."""

import torch
from torch import nn

from liger_kernel.ops import LigerFusedGateUpSiLUMulFunction, LigerSiLUMulFunction
from liger_kernel.ops.activations import SILU, activation_of
from liger_kernel.transformers.coverage import EXPERTS_KERNELS, GATED_KERNELS
from liger_kernel.transformers.experts import computed, reason_to_keep


class LigerSwiGLUMLP(nn.Module):
    """down_proj(silu(gate_proj(x)) · up_proj(x)). Raises ValueError where config.hidden_act is not silu."""

    kernels = GATED_KERNELS

    def __init__(self, config, intermediate_size=None):
        super().__init__()
        activation_of(config, SILU)
        self.config = config
        self.hidden_size = config.hidden_size
        self.intermediate_size = config.intermediate_size if intermediate_size is None else intermediate_size
        bias = getattr(config, "mlp_bias", False)
        self.gate_proj = nn.Linear(self.hidden_size, self.intermediate_size, bias=bias)
        self.up_proj = nn.Linear(self.hidden_size, self.intermediate_size, bias=bias)
        self.down_proj = nn.Linear(self.intermediate_size, self.hidden_size, bias=bias)

    def forward(self, x):
        return self.down_proj(LigerSiLUMulFunction.apply(self.gate_proj(x), self.up_proj(x)))


class LigerQwen3MoeSwiGLUMLP(LigerSwiGLUMLP):
    """LigerSwiGLUMLP, whose width may differ from the config's."""


class LigerHunyuanV1SwiGLUMLP(LigerSwiGLUMLP):
    """LigerSwiGLUMLP that knows its layer."""

    def __init__(self, config, layer_idx=None, is_shared_mlp=False):
        super().__init__(config)
        self.layer_idx = layer_idx


class LigerFalconH1SwiGLUMLP(LigerSwiGLUMLP):
    """LigerSwiGLUMLP with config.mlp_multipliers on the gate and on the result."""

    def __init__(self, config):
        super().__init__(config)
        self.gate_multiplier, self.down_multiplier = config.mlp_multipliers

    def forward(self, x):
        y = LigerSiLUMulFunction.apply(self.gate_proj(x), self.up_proj(x), self.gate_multiplier)
        return self.down_proj(y) * self.down_multiplier


class LigerSeedOssSwiGLUMLP(LigerSwiGLUMLP):
    """LigerSwiGLUMLP with a dropout of config.residual_dropout on the result."""

    def __init__(self, config):
        super().__init__(config)
        self.residual_dropout = config.residual_dropout

    def forward(self, x):
        return nn.functional.dropout(LigerSwiGLUMLP.forward(self, x), self.residual_dropout, self.training)


class LigerBlockSparseTop2MLP(nn.Module):
    """An expert: w2(silu(w1(x)) · w3(x)). Raises ValueError where config.hidden_act is not silu."""

    kernels = GATED_KERNELS

    def __init__(self, config):
        super().__init__()
        activation_of(config, SILU)
        self.ffn_dim, self.hidden_dim = config.intermediate_size, config.hidden_size
        self.w1 = nn.Linear(self.hidden_dim, self.ffn_dim, bias=False)
        self.w2 = nn.Linear(self.ffn_dim, self.hidden_dim, bias=False)
        self.w3 = nn.Linear(self.hidden_dim, self.ffn_dim, bias=False)

    def forward(self, x):
        return self.w2(LigerSiLUMulFunction.apply(self.w1(x), self.w3(x)))


class LigerExperts(nn.Module):
    """The SwiGLU experts of a mixture, as one operator; see ops.fused_moe.fused_experts. Raises ValueError where
    config.hidden_act is not silu.

    gate_up_proj [E, 2 I, H] and down_proj [E, H, I] are not initialised; E is config.num_experts or num_local_experts,
    I moe_intermediate_size or intermediate_size.
    """

    kernels, reason_to_keep = EXPERTS_KERNELS, staticmethod(reason_to_keep)

    def __init__(self, config):
        super().__init__()
        activation_of(config, SILU)
        first = lambda *names: next(getattr(config, name) for name in names if getattr(config, name, None) is not None)
        self.num_experts = first("num_experts", "num_local_experts")
        self.hidden_dim, self.intermediate_dim = config.hidden_size, first("moe_intermediate_size", "intermediate_size")
        self.gate_up_proj = nn.Parameter(torch.empty(self.num_experts, 2 * self.intermediate_dim, self.hidden_dim))
        self.down_proj = nn.Parameter(torch.empty(self.num_experts, self.hidden_dim, self.intermediate_dim))

    def forward(self, hidden_states, top_k_index, top_k_weights):
        """[..., H] for hidden_states [..., H] and the experts [..., K] of each token with their weights."""
        return computed(self, hidden_states, top_k_index, top_k_weights)


class LigerPhi3SwiGLUMLP(nn.Module):
    """down_proj(silu(gate) · up) with gate and up the halves of one projection. Raises ValueError where
    config.hidden_act is not silu."""

    kernels = GATED_KERNELS

    def __init__(self, config):
        super().__init__()
        activation_of(config, SILU)
        self.config = config
        self.hidden_size, self.intermediate_size = config.hidden_size, config.intermediate_size
        self.gate_up_proj = nn.Linear(self.hidden_size, 2 * self.intermediate_size, bias=False)
        self.down_proj = nn.Linear(self.intermediate_size, self.hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(LigerFusedGateUpSiLUMulFunction.apply(self.gate_up_proj(x)))
