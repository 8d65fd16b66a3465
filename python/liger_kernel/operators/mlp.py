"""MLPs, with a gate or none. A forward uses its layers alone: it is also bound to other models' modules.

As they are, with projections that keep their input alone for backward (formula in liger/ops.h), and a shard of tokens
at a time, so that their activations do not grow with the sequence.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from liger_kernel._library import ops
from liger_kernel._recompute import run
from liger_kernel.operators.activation import (
    GELU_ERF,
    GELU_TANH,
    SILU,
    LigerGELUMulFunction,
    LigerSiLUMulFunction,
    activation_of,
)
from liger_kernel.operators.common import first_derivative_only
from liger_kernel.operators.coverage import GATED_KERNELS, activations_in
from liger_kernel.operators.linear import activated_linear, gated_linear, gated_mlp


def limit_of(module: Any) -> float:
    """Where a module of transformers clamps its gate."""
    return module.limit if hasattr(module, "limit") else module.swiglu_limit


class GatedMLP(nn.Module):
    """The three projections of down_proj(act(gate_proj(x)) · up_proj(x))."""

    liger_whole = True  # whether forward is this operator where the projections are plain matrices
    liger_operator = "gated_mlp"

    def __init__(self, config: Any, intermediate_size: int | None = None, bias: bool = False) -> None:
        super().__init__()
        self.config, self.hidden_size = config, config.hidden_size
        self.intermediate_size = config.intermediate_size if intermediate_size is None else intermediate_size
        self.gate_proj = nn.Linear(self.hidden_size, self.intermediate_size, bias=bias)
        self.up_proj = nn.Linear(self.hidden_size, self.intermediate_size, bias=bias)
        self.down_proj = nn.Linear(self.intermediate_size, self.hidden_size, bias=bias)


class LigerSwiGLUMLP(GatedMLP):
    """down_proj(silu(gate_proj(x)) · up_proj(x)). Raises ValueError where config.hidden_act is not silu."""

    def __init__(self, config: Any, intermediate_size: int | None = None) -> None:
        activation_of(config, SILU)
        super().__init__(config, intermediate_size, getattr(config, "mlp_bias", False))

    def forward(self, x: Tensor) -> Tensor:
        y = gated_mlp(self, x, SILU)
        return self.down_proj(LigerSiLUMulFunction.apply(self.gate_proj(x), self.up_proj(x))) if y is None else y


class LigerQwen3MoeSwiGLUMLP(LigerSwiGLUMLP):
    """LigerSwiGLUMLP, whose width may differ from the config's."""


class LigerHunyuanV1SwiGLUMLP(LigerSwiGLUMLP):
    """LigerSwiGLUMLP that knows its layer."""

    def __init__(self, config: Any, layer_idx: int | None = None, is_shared_mlp: bool = False) -> None:
        super().__init__(config)
        self.layer_idx = layer_idx


class LigerFalconH1SwiGLUMLP(LigerSwiGLUMLP):
    """LigerSwiGLUMLP with config.mlp_multipliers on the gate and on the result."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.gate_multiplier, self.down_multiplier = config.mlp_multipliers

    def forward(self, x: Tensor) -> Tensor:
        y = gated_mlp(self, x, SILU, float(self.gate_multiplier), float(self.down_multiplier))
        if y is not None:
            return y
        y = LigerSiLUMulFunction.apply(self.gate_proj(x), self.up_proj(x), self.gate_multiplier)
        return self.down_proj(y) * self.down_multiplier


class LigerSeedOssSwiGLUMLP(LigerSwiGLUMLP):
    """LigerSwiGLUMLP with a dropout of config.residual_dropout on the result."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.residual_dropout = config.residual_dropout

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(LigerSwiGLUMLP.forward(self, x), self.residual_dropout, self.training)


class LigerClampedSwiGLUMLP(LigerSwiGLUMLP):
    """LigerSwiGLUMLP whose gate is at most config.swiglu_limit, and whose up is clamped to ± that (DeepSeek-V4)."""

    liger_whole = False

    def __init__(self, config: Any, intermediate_size: int | None = None) -> None:
        super().__init__(config, intermediate_size)
        self.limit = config.swiglu_limit

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(run(ops.gated, self.gate_proj(x), self.up_proj(x), SILU, 1.0, float(limit_of(self))))


class LigerGEGLUMLP(GatedMLP):
    """down_proj(gelu(gate_proj(x)) · up_proj(x)), gelu in the form that config.hidden_act names, by default and in
    other models' modules that of tanh. Raises ValueError where it names no gelu."""

    def __init__(self, config: Any, intermediate_size: int | None = None) -> None:
        activation = activation_of(config, GELU_TANH, GELU_ERF, default=GELU_TANH)
        super().__init__(config, intermediate_size)
        if activation == GELU_ERF:
            self.approximate = "none"

    def forward(self, x: Tensor) -> Tensor:
        approximate = getattr(self, "approximate", "tanh")
        y = gated_mlp(self, x, GELU_TANH if approximate == "tanh" else GELU_ERF)
        if y is not None:
            return y
        return self.down_proj(LigerGELUMulFunction.apply(self.gate_proj(x), self.up_proj(x), approximate))


class LigerGEGLUMLPForGemma4(LigerGEGLUMLP):
    """LigerGEGLUMLP, twice as wide in layers that share keys and values where config.use_double_wide_mlp says so."""

    def __init__(self, config: Any, layer_idx: int | None = None) -> None:
        shared = getattr(config, "num_kv_shared_layers", 0) or 0
        wide = getattr(config, "use_double_wide_mlp", False) and shared > 0 and layer_idx is not None
        twice = wide and layer_idx >= config.num_hidden_layers - shared
        super().__init__(config, config.intermediate_size * (2 if twice else 1))


#: The names that others give to gate, up and down.
TOP2 = ("w1", "w3", "w2")


class LigerBlockSparseTop2MLP(nn.Module):
    """w2(silu(w1(x)) · w3(x)), an expert or the MLP of a layer. Raises ValueError where config.hidden_act is not
    silu."""

    liger_whole = True  # as in GatedMLP
    liger_operator = "gated_mlp"

    def __init__(self, config: Any) -> None:
        super().__init__()
        activation_of(config, SILU)
        self.ffn_dim, self.hidden_dim = config.intermediate_size, config.hidden_size
        self.w1 = nn.Linear(self.hidden_dim, self.ffn_dim, bias=False)
        self.w2 = nn.Linear(self.ffn_dim, self.hidden_dim, bias=False)
        self.w3 = nn.Linear(self.hidden_dim, self.ffn_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = gated_mlp(self, x, SILU, names=TOP2)
        return self.w2(LigerSiLUMulFunction.apply(self.w1(x), self.w3(x))) if y is None else y


def _after_product(mlp, name, y, *clamps, activation=SILU):
    """layer(act(gate) · up) for the layer `name` and y [..., 2F] = [gate, up]."""
    z = gated_linear(mlp, name, y, activation, *clamps)
    return getattr(mlp, name)(run(ops.gated_packed, y, activation, 1.0, False, *clamps)) if z is None else z


class LigerPhi3SwiGLUMLP(nn.Module):
    """down_proj(silu(gate) · up) with gate and up the halves of one projection. Raises ValueError where
    config.hidden_act is not silu."""

    liger_whole = True  # whether what comes after gate_up_proj is this operator where down_proj is a plain matrix
    liger_operator = "gated_linear"

    def __init__(self, config: Any) -> None:
        super().__init__()
        activation_of(config, SILU)
        self.config = config
        self.hidden_size, self.intermediate_size = config.hidden_size, config.intermediate_size
        self.gate_up_proj = nn.Linear(self.hidden_size, 2 * self.intermediate_size, bias=False)
        self.down_proj = nn.Linear(self.intermediate_size, self.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return _after_product(self, "down_proj", self.gate_up_proj(x))


class LigerClampedSwishMLP(LigerPhi3SwiGLUMLP):
    """down_proj(gate · σ(config.swiglu_alpha · gate) · (up + 1)), clamped as in LigerClampedSwiGLUMLP (MiniMax-M3)."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.swiglu_alpha, self.swiglu_limit = config.swiglu_alpha, config.swiglu_limit

    def forward(self, hidden_states: Tensor) -> Tensor:
        clamps = float(limit_of(self)), float(self.swiglu_alpha), 1.0
        return _after_product(self, "down_proj", self.gate_up_proj(hidden_states), *clamps)


class LigerGraniteSwiGLUMLP(LigerPhi3SwiGLUMLP):
    """LigerPhi3SwiGLUMLP whose projections are called input_linear and output_linear: a forward for MLPs of
    transformers."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return _after_product(self, "output_linear", self.input_linear(hidden_states))


class LigerModernBertMLP(LigerPhi3SwiGLUMLP):
    """Wo(drop(act(gate) · up)) with gate and up the halves of Wi's result, and act SiLU or either form of GELU: a
    forward for MLPs of transformers."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        y, activation = self.Wi(hidden_states), self.liger_activation
        if self.training and self.drop.p:
            return self.Wo(self.drop(run(ops.gated_packed, y, activation, 1.0, False)))
        return _after_product(self, "Wo", y, activation=activation)


#: The names that models give to the two layers of an MLP without a gate.
UNGATED = (
    ("up_proj", "down_proj"), ("fc1", "fc2"), ("linear_fc1", "linear_fc2"), ("dense_h_to_4h", "dense_4h_to_h")
)  # fmt: skip


class LigerUngatedMLP(nn.Module):
    """last(act(first(x))) for two layers with one of the pairs of names of UNGATED, act one of the table's activations:
    a forward for MLPs of transformers. Backward keeps what the first layer gives, but not its activation."""

    liger_operator = "activated_linear"
    liger_layers: tuple[str, str]
    liger_activation: int

    def forward(self, x: Tensor) -> Tensor:
        first, last = self.liger_layers
        x = getattr(self, first)(x)
        y = activated_linear(self, last, x, self.liger_activation)
        if y is not None:
            return y
        if torch.compiler.is_compiling():  # which fuses torch's activation, and recomputes it in backward
            return getattr(self, last)(activations_in(self)[0](x))
        return getattr(self, last)(run(ops.activate, x, self.liger_activation))


class LigerMLPFunction:
    @staticmethod
    def apply(
        input: Tensor, gate_weight: Tensor, up_weight: Tensor, down_weight: Tensor, gate_multiplier: float = 1.0,
        down_multiplier: float = 1.0,
    ) -> Tensor:  # fmt: skip
        """(silu(gate_multiplier · input gate_weightᵀ) · input up_weightᵀ) down_weightᵀ · down_multiplier.

        input [..., D]; gate_weight and up_weight [I, D], down_weight [D, I], in input's dtype or under autocast; any
        strides. backward recomputes gate and up. Raises TypeError where dtypes differ.
        """
        weights = (gate_weight, None, None, None, up_weight, None, None, None, down_weight, None, None, None)
        options = SILU, float(gate_multiplier), float(down_multiplier), 0, True
        return ops.gated_mlp(input, *weights, None, None, None, 1.0, 1.0, 1.0, *options)


class LigerMLP(LigerSwiGLUMLP):
    """down_proj(silu(gate_proj(x)) · up_proj(x)); where a projection is more than a matrix, a bias and an adapter, as
    LigerSwiGLUMLP."""

    def forward(self, x: Tensor) -> Tensor:
        y = gated_mlp(self, x, SILU, recompute=True)
        return super().forward(x) if y is None else y


class LigerFalconH1MLP(LigerFalconH1SwiGLUMLP):
    """LigerMLP with config.mlp_multipliers on the gate and on the result. Raises ValueError where config.mlp_bias is
    set."""

    def __init__(self, config: Any) -> None:
        if getattr(config, "mlp_bias", False):
            raise ValueError("LigerFalconH1MLP has no biases, and config.mlp_bias asks for them")
        super().__init__(config)

    def forward(self, x: Tensor) -> Tensor:
        y = gated_mlp(self, x, SILU, float(self.gate_multiplier), float(self.down_multiplier), recompute=True)
        return super().forward(x) if y is None else y


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
        chunks = lambda t: [None] * ctx.shards if t is None else t.chunk(ctx.shards, -2)
        for shard, upstream, out in zip(*map(chunks, (x, dy, dx))):
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
    def apply(
        fn: Callable[..., Any], mlp_module: nn.Module, x: Tensor, shards: int, compute_params: Any = None
    ) -> Tensor:
        """fn(mlp_module, x) in `shards` tiles along x [..., S, H]'s tokens; backward runs each tile again.

        The module's parameters get their gradients from autograd, once, summed in float over the tiles. compute_params
        is not used.
        """
        return _TiledMLP.apply(fn, mlp_module, x, shards, *(p for p in mlp_module.parameters() if p.requires_grad))


def shards_of(x: Tensor, num_shards: int | None = None) -> int:
    """num_shards or, unless given, ceil(S / H) for x [..., S, H]; at least 1. Raises ValueError where x has one
    dimension."""
    if x.dim() < 2:
        raise ValueError(f"x must be [..., tokens, width], got {list(x.shape)}")
    return max(1, num_shards or -(-x.shape[-2] // max(1, x.shape[-1])))


def apply_tiled_mlp(
    fn: Callable[..., Any], mlp_module: nn.Module, x: Tensor, num_shards: int | None = None, compute_params: Any = None
) -> Tensor:
    """LigerTiledMLPFunction with ceil(S / H) shards unless num_shards is given."""
    return LigerTiledMLPFunction.apply(fn, mlp_module, x, shards_of(x, num_shards))


class _TiledGatedMLP(GatedMLP):
    """down_proj(act(gate_proj(x)) · up_proj(x)) in num_shards tiles, ceil(S / H) unless given; act is
    config.hidden_act. Raises ValueError for another one than `activations`, of which the first is the default."""

    activations: tuple[int, ...] = ()

    def __init__(self, config, num_shards=None):
        activation = activation_of(config, *self.activations, default=self.activations[0])
        super().__init__(config)
        self.activation, self.num_shards = activation, num_shards

    def _whole(self, x):
        return self.down_proj(run(ops.gated, self.gate_proj(x), self.up_proj(x), self.activation, 1.0))

    def forward(self, x):
        rows = max(1, -(-x.shape[:-1].numel() // shards_of(x, self.num_shards)))
        y = gated_mlp(self, x, self.activation, chunk=rows, recompute=True)
        return apply_tiled_mlp(type(self)._whole, self, x, self.num_shards) if y is None else y


class LigerTiledSwiGLUMLP(_TiledGatedMLP):
    __doc__ = _TiledGatedMLP.__doc__
    activations = (SILU,)


class LigerTiledGEGLUMLP(_TiledGatedMLP):
    __doc__ = _TiledGatedMLP.__doc__
    activations = (GELU_TANH, GELU_ERF)
