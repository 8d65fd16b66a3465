"""GeGLU MLP. Its forward uses its projections alone: it is also bound to other models' modules."""

from torch import nn

from liger_kernel.ops import LigerGELUMulFunction
from liger_kernel.ops.activations import GELU_ERF, GELU_TANH, activation_of
from liger_kernel.transformers.coverage import GATED_KERNELS


class LigerGEGLUMLP(nn.Module):
    """down_proj(gelu(gate_proj(x)) · up_proj(x)), gelu in the form that config.hidden_act names, by default and in
    other models' modules that of tanh. Raises ValueError where it names no gelu."""

    kernels = GATED_KERNELS

    def __init__(self, config, intermediate_size=None):
        super().__init__()
        if activation_of(config, GELU_TANH, GELU_ERF, default=GELU_TANH) == GELU_ERF:
            self.approximate = "none"
        self.config = config
        self.hidden_size = config.hidden_size
        self.intermediate_size = config.intermediate_size if intermediate_size is None else intermediate_size
        self.gate_proj = nn.Linear(self.hidden_size, self.intermediate_size, bias=False)
        self.up_proj = nn.Linear(self.hidden_size, self.intermediate_size, bias=False)
        self.down_proj = nn.Linear(self.intermediate_size, self.hidden_size, bias=False)

    def forward(self, x):
        approximate = getattr(self, "approximate", "tanh")
        return self.down_proj(LigerGELUMulFunction.apply(self.gate_proj(x), self.up_proj(x), approximate))


class LigerGEGLUMLPForGemma4(LigerGEGLUMLP):
    """LigerGEGLUMLP, twice as wide in layers that share keys and values where config.use_double_wide_mlp says so."""

    def __init__(self, config, layer_idx=None):
        shared = getattr(config, "num_kv_shared_layers", 0) or 0
        wide = getattr(config, "use_double_wide_mlp", False) and shared > 0 and layer_idx is not None
        twice = wide and layer_idx >= config.num_hidden_layers - shared
        super().__init__(config, config.intermediate_size * (2 if twice else 1))
