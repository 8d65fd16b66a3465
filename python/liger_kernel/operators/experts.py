"""Experts of a mixture by grouped GEMMs (see liger/ops.h), and where those of a model keep transformers' forward."""

import contextlib
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from liger_kernel._library import ops
from liger_kernel.operators.activation import ACTIVATIONS, SILU, activation_of
from liger_kernel.operators.coverage import DENSE, EXPERTS_KERNELS, is_dense
from liger_kernel.operators.eight_bit_experts import in_eight_bits
from liger_kernel.operators.mlp import limit_of

# What transformers' forward computes in another way. The others are a user's choice of how: other kernels, other
# roundings.
_DEFAULTS = (None, "eager", "grouped_mm")


class Adapter(NamedTuple):
    """scale · b_e a_e, which is added to the matrix of each expert e: a [E, rank, in], b [E, out, rank], whatever the
    layout of the matrix."""

    a: Tensor | None
    b: Tensor | None
    scale: float

    def padded(self) -> tuple[Tensor | None, Tensor | None]:
        """a and b with zeros up to a rank that is a multiple of 8, which grouped GEMMs ask for."""
        if self.a is None or self.b is None or not (missing := -self.a.shape[1] % 8):
            return self.a, self.b
        return nn.functional.pad(self.a, (0, 0, 0, missing)), nn.functional.pad(self.b, (0, missing))


def fused_experts(
    x: Tensor, gate_up: Tensor, down: Tensor, index: Tensor, weights: Tensor, gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None, activation: str = "silu", transposed: bool = False, interleaved: bool = False,
    limit: float = 0.0, alpha: float = 1.0, up_offset: float = 0.0, recompute: bool = True,
    gate_up_adapter: Adapter | None = None, down_adapter: Adapter | None = None, most_rows: int | None = None,
    gate_up_weight_scale: Tensor | None = None, down_weight_scale: Tensor | None = None, gated: bool = True,
) -> Tensor:  # fmt: skip
    """y[t] = Σ_k weights[t, k] · down_e (act(gate_e x[t]) · up_e x[t]) for the experts e = index[t, k]; [tokens, H] in
    x's dtype, summed over k in float.

    x [tokens, H], gate_up [E, 2 I, H], gate above up, down [E, H, I], biases [E, 2 I] and [E, H], all in one dtype;
    transposed: [E, H, 2 I] and [E, I, H]; interleaved: rows of gate and up in turn. index [tokens, k] integers, of
    which those outside [0, E) add nothing, weights [tokens, k], floating. All but index are differentiable; backward
    keeps x and the routing and recomputes gate and up, unless recompute=False. Adapters (LoRA, Hu et al. 2021,
    arXiv:2106.09685) add scale · b_e a_e to the matrices of each expert, which stay as they are.

    limit, alpha and up_offset, of silu, are the clamped gate of GPT-OSS and DeepSeek-V4: gate' · σ(alpha · gate') ·
    (up' + up_offset) with gate' = min(gate, limit) and up' = clamp(up, −limit, limit); limit 0 is none.

    gated=False, as in Nemotron-H: E_e(x) = down_e act(up_e x), and gate_up is up [E, I, H], or transposed [E, H, I],
    with a bias [E, I]; no option of a gate then.

    With a weight scale, float32 [E, rows], gate_up or down is in eight bits, numbers · scale: int8, or uint8 with the
    bits of E4M3 floats. Each pass rounds it to x's dtype. It has no gradient.

    most_rows bounds what forward and backward allocate by the number of pairs (t, k) that have an expert, instead of
    tokens · k: for calls in which most ids are outside [0, E). None is ever dropped: more raise RuntimeError on a CPU,
    and on CUDA are a device assertion, which the next synchronisation reports.

    On CUDA in bfloat16, with widths that are multiples of 8, nothing is read on the host; otherwise the counts of
    tokens are. Raises KeyError for an activation that is none of "silu", "gelu_tanh", "gelu_erf", "relu_squared", and
    ValueError for options of silu with another, and for those of a gate without one.
    """
    gate = float(limit), float(alpha), float(up_offset)
    options = ACTIVATIONS[activation], transposed, interleaved, *gate, recompute
    of_gate_up, of_down = (adapter or Adapter(None, None, 1.0) for adapter in (gate_up_adapter, down_adapter))
    adapters = (*of_gate_up.padded(), *of_down.padded())
    scales, most = (of_gate_up.scale, of_down.scale), -1 if most_rows is None else most_rows
    return ops.fused_experts(
        x, gate_up, down, weights, gate_up_bias, down_bias, *adapters, gate_up_weight_scale, down_weight_scale, index,
        *options, *scales, most, gated,
    )  # fmt: skip


class LigerFusedMoEFunction:
    """fused_experts of SwiGLU experts without biases, under the API's name."""

    @staticmethod
    def apply(x: Tensor, gate_up_proj: Tensor, down_proj: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return fused_experts(x, gate_up_proj, down_proj, top_k_index, top_k_weights)


def reason_to_keep(experts: nn.Module, running: bool = True) -> str | None:
    """Why experts keep transformers' forward, or None; `running`: its weights are what a forward sees, not shards."""
    chosen = getattr(getattr(experts, "config", None), "_experts_implementation", None)
    if chosen not in _DEFAULTS:
        return f"experts_implementation is {chosen!r}"
    if running and not all(is_whole(experts, name) for name in experts._parameters):
        return "a weight is sharded or quantised"
    return None


def is_whole(experts: nn.Module, name: str) -> bool:
    """Whether a parameter of experts is one that the operator takes: a tensor as torch has them, or what
    liger_kernel.quantise has put into eight bits."""
    if (found := in_eight_bits(experts, name)) is not None:
        return type(found[0]) in DENSE
    weight = experts._parameters[name]
    return weight is None or is_dense(weight)


def _is_checkpointed() -> bool:
    """Whether backward follows at once on the forward that keeps something for it: under torch's gradient
    checkpointing, whose hooks drop what the first forward saves, or in a forward that a backward pass runs."""
    if torch.compiler.is_compiling():
        return False
    hooks = _saved_tensors_hooks(True) if _saved_tensors_hooks is not None else None
    return torch._C._current_graph_task_id() >= 0 if hooks is None else hooks[0].__module__ == "torch.utils.checkpoint"


_saved_tensors_hooks: Any = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)


def computed(
    experts: Any, hidden_states: Tensor, top_k_index: Any, top_k_weights: Any, *biases: Any, **options: Any
) -> Tensor:
    """fused_experts on the weights of a module, in the dtype in which transformers computes; the result is as
    hidden_states are.

    transformers' loop over experts computes in autocast's dtype, its grouped GEMMs in that of the weights. An adapter
    that waits for this call in the module's dict `liger_adapters` is taken out of it. Of the pairs in index, the share
    `liger_share` of the module, if it has one, is for these experts at most.

    Backward recomputes gate and up, unless the module's `liger_keeps` is true, or the layer is checkpointed: there it
    would make them a third time, and they are held for one layer at a time.
    """
    x, index, weights = (t.reshape(-1, t.shape[-1]) for t in (hidden_states, top_k_index, top_k_weights))
    if weights.shape[-1] > index.shape[-1]:  # those of all experts, as routers of transformers 5.0.0 give them
        weights = weights.gather(1, index)
    grouped = getattr(getattr(experts, "config", None), "_experts_implementation", None) == "grouped_mm"
    autocast = torch.is_autocast_enabled(x.device.type)
    first = "gate_up_proj" if options.get("gated", True) else "up_proj"
    with torch.autocast(x.device.type, enabled=False) if grouped and autocast else contextlib.nullcontext():
        x = x.to(vars(experts).get("liger_dtype") or getattr(experts, first).dtype) if grouped else x
        for name, parameter in (("gate_up", first), ("down", "down_proj")):
            options[f"{name}_adapter"] = _waiting(experts, parameter, options.get("transposed", False))
        gate_up, options["gate_up_weight_scale"] = _stored(experts, first)
        down, options["down_weight_scale"] = _stored(experts, "down_proj")
        options["recompute"] = not (getattr(experts, "liger_keeps", False) or _is_checkpointed())
        if (share := vars(experts).get("liger_share")) is not None:
            options["most_rows"] = math.ceil(share * index.numel())
        y = fused_experts(x, gate_up, down, index, weights, *biases, **options)
    return y.view(hidden_states.shape).to(hidden_states.dtype)


def _stored(experts, name) -> tuple[Tensor, Tensor | None]:
    """A weight as the operator takes it, and its scales where it is in eight bits."""
    return in_eight_bits(experts, name) or (getattr(experts, name), None)


def _waiting(experts, name, transposed) -> Adapter | None:
    """The adapter of a weight, given as (first, second, scale): scale · first second, in the layout of the weight."""
    if (given := vars(experts).get("liger_adapters", {}).pop(name, None)) is None:
        return None
    first, second, scale = given
    a, b = (first.transpose(1, 2), second.transpose(1, 2)) if transposed else (second, first)
    return Adapter(a.contiguous(), b.contiguous(), float(scale))


class Experts(nn.Module):
    """What has gate_up_proj, or up_proj, and down_proj of all experts, in one layout or another."""

    liger_keeps = False  # the first product, for backward


class LigerExperts(Experts):
    """The SwiGLU experts of a mixture, as one operator; see fused_experts. Raises ValueError where config.hidden_act is
    not silu.

    gate_up_proj [E, 2 I, H] and down_proj [E, H, I] are not initialised; E is config.num_experts or num_local_experts,
    I moe_intermediate_size or intermediate_size.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        activation_of(config, SILU)
        first = lambda *names: next(getattr(config, name) for name in names if getattr(config, name, None) is not None)
        self.num_experts = first("num_experts", "num_local_experts")
        self.hidden_dim, self.intermediate_dim = config.hidden_size, first("moe_intermediate_size", "intermediate_size")
        self.gate_up_proj = nn.Parameter(torch.empty(self.num_experts, 2 * self.intermediate_dim, self.hidden_dim))
        self.down_proj = nn.Parameter(torch.empty(self.num_experts, self.hidden_dim, self.intermediate_dim))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """[..., H] for hidden_states [..., H] and the experts [..., K] of each token with their weights."""
        return computed(self, hidden_states, top_k_index, top_k_weights)


class LigerGEGLUExperts(Experts):
    """LigerExperts with gelu, of tanh, for silu: a forward for experts of transformers."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """As LigerExperts."""
        return computed(self, hidden_states, top_k_index, top_k_weights, activation="gelu_tanh")


class LigerTransposedExperts(Experts):
    """LigerExperts whose weights are [E, H, 2 I] and [E, I, H] (Aria): a forward for experts of transformers."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """As LigerExperts."""
        return computed(self, hidden_states, top_k_index, top_k_weights, transposed=True)


class LigerClampedExperts(Experts):
    """LigerExperts that clamp gate and up (DeepSeek-V4): a forward for experts of transformers."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """As LigerExperts."""
        return computed(self, hidden_states, top_k_index, top_k_weights, limit=limit_of(self))


class LigerClampedSwishExperts(Experts):
    """LigerClampedExperts with GPT-OSS's gate (MiniMax-M3): a forward for experts of transformers."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """As LigerExperts."""
        gate = dict(limit=limit_of(self), alpha=self.swiglu_alpha, up_offset=1.0)
        return computed(self, hidden_states, top_k_index, top_k_weights, **gate)


class LigerUngatedExperts(Experts):
    """Experts of relu² without a gate, whose weights are up_proj [E, I, H] and down_proj [E, H, I] (Nemotron-H): a
    forward for experts of transformers."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """As LigerExperts."""
        return computed(self, hidden_states, top_k_index, top_k_weights, activation="relu_squared", gated=False)


class LigerGptOssExperts(Experts):
    """GPT-OSS's experts, whose gate and up interleave and are clamped: a forward for experts of transformers."""

    # Versions of transformers 5 find the experts that they quantise to MXFP4 by the name of their class.
    liger_named_as_original = True

    def forward(
        self, hidden_states: Tensor, router_indices: Tensor | None = None, routing_weights: Tensor | None = None
    ) -> Tensor:
        """[..., H] for hidden_states [..., H] and the experts [..., K] of each token with their weights."""
        biases = self.gate_up_proj_bias, self.down_proj_bias
        gate = dict(interleaved=True, limit=self.limit, alpha=self.alpha, up_offset=1.0)
        return computed(self, hidden_states, router_indices, routing_weights, *biases, transposed=True, **gate)
