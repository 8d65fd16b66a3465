"""Routers of mixtures of experts (see liger/ops.h), and those of transformers as modules."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from liger_kernel._library import ops
from liger_kernel.operators.coverage import DENSE, ROUTER_KERNELS, ROUTER_LOSS_KERNELS, is_dense, kernels_cover

#: The names of RouterScore (liger/options.h), in the order of its numbers.
SCORES = ("softmax", "sigmoid", "sqrt_softplus")


class Routed(NamedTuple):
    """The experts of each token: weights and index [..., top_k], and counts [experts], the tokens of each expert."""

    weights: Tensor
    index: Tensor
    counts: Tensor


def liger_route(
    logits: Tensor, top_k: int, bias: Tensor | None = None, score: str = "softmax", normalise: bool = False,
    epsilon: float = 0.0, least_sum: float = 0.0, scale: float = 1.0, groups: int = 1, kept_groups: int = 1,
    group_best: int = 2, dtype: torch.dtype | None = None, index: Tensor | None = None,
) -> Routed:  # fmt: skip
    """The top_k experts of each token, by its logits [..., E], and their weights; computed in float.

    Scores s are softmax(logits), sigmoid(logits) or, "sqrt_softplus", √softplus(logits). The experts with the largest
    s + bias are chosen, the largest first, and of equal ones the lower number first; bias [E] counts only in the
    choice. Weights are scale · s or, with normalise, scale · s / (max(Σ s, least_sum) + epsilon), in `dtype`, by
    default float32; index is int64, counts int32. Of `groups` groups of neighbouring experts only kept_groups take
    part: those whose group_best (1 or 2) largest s + bias have the largest sum.

    index [..., top_k], of any integer dtype, replays a choice (Ma et al. 2025, arXiv:2510.11370): a token whose top_k
    ids there are different experts gets those, in that order; any other token, such as one of ids -1, chooses as
    without it. weights and counts are always those of the experts that the token gets.

    Differentiable with respect to logits, through weights. Raises ValueError for an unknown score and for numbers that
    do not fit, RuntimeError for an index of another shape and TypeError for one of no integers.
    """
    if score not in SCORES:
        raise ValueError(f"score must be one of {', '.join(map(repr, SCORES))}, got {score!r}")
    options = SCORES.index(score), normalise, epsilon, least_sum, scale, groups, kept_groups, group_best, dtype
    return Routed(*ops.route(logits, bias, index, top_k, *options))


def liger_expert_load(logits: Tensor, top_k: int, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(load, counts), both [E], of a router's logits [..., E]: load sums softmax(logits), in float, over the tokens
    that the bool mask [...] leaves, counts (int32) those that have an expert among their top_k. Differentiable through
    load."""
    return ops.expert_load(logits, mask, top_k)


def liger_load_balancing_loss(
    gate_logits: Tensor | Sequence[Tensor], top_k: int, attention_mask: Tensor | None = None
) -> Tensor:
    """The load-balancing loss of Switch Transformer (Fedus et al. 2021, arXiv:2101.03961) of the logits [tokens, E] of
    a layer, or of each of several layers: E · Σ_e f_e P_e, with f_e the tokens that have expert e among their top_k,
    and P_e its probabilities, both as means over the tokens of all layers. A float32 scalar.

    attention_mask holds as many numbers as there are tokens; those where it is 0 do not count.
    """
    layers = [gate_logits] if isinstance(gate_logits, Tensor) else gate_logits
    device = layers[0].device
    mask = None if attention_mask is None else attention_mask.reshape(-1).to(device) != 0
    sums = [liger_expert_load(layer.to(device), top_k, mask) for layer in layers]
    load, counts = (torch.stack(each).sum(0) for each in zip(*sums))
    tokens = sum(layer.shape[0] for layer in layers) if mask is None else mask.sum() * len(layers)
    return (load / tokens) @ (counts / tokens) * load.numel()


def liger_load_balancing_loss_func(
    gate_logits: Any, num_experts: int | None = None, top_k: int = 2, attention_mask: Tensor | None = None
) -> Any:
    """transformers' load_balancing_loss_func: 0 where gate_logits is no tuple; NotImplemented for what
    liger_load_balancing_loss does not take. A token counts where the mask is not 0."""
    if not isinstance(gate_logits, tuple):
        return 0
    if num_experts != gate_logits[0].shape[-1]:
        return NotImplemented
    if not all(kernels_cover(t, ROUTER_LOSS_KERNELS) and type(t) in DENSE for t in gate_logits):
        return NotImplemented
    if attention_mask is not None and (type(attention_mask) not in DENSE or attention_mask.is_floating_point()):
        return NotImplemented
    return liger_load_balancing_loss(gate_logits, top_k, attention_mask)


class Replayable(nn.Module):
    """A router whose choice liger_kernel.routing can replay and record."""

    #: What has the ids to replay (take(logits)), and what keeps those that were chosen (keep(index, experts)).
    liger_replay: Any = None
    liger_record: Any = None


def route_in(router: Any, logits: Tensor, bias: Tensor | None, **options: Any) -> tuple[Tensor, Tensor]:
    """(weights, index) of liger_route in a router, as liger_kernel.routing has it choose."""
    replay, record = getattr(router, "liger_replay", None), getattr(router, "liger_record", None)
    given = None if replay is None else replay.take(logits)
    weights, index, _ = liger_route(logits, router.top_k, bias, index=given, **options)
    if record is not None:
        record.keep(index, logits.shape[-1])
    return weights, index


class LigerRouter(Replayable):
    """The router of a mixture: hidden states [..., H] -> (logits [..., E], weights [..., top_k], index [..., top_k]).

    logits are F.linear(hidden_states, weight, bias); `options` are liger_route's, such as score, normalise and scale.
    With selection_bias there is a buffer e_score_correction_bias [E], zeros at first, which counts only in the choice.
    weight [E, H] and bias [E] are initialised as nn.Linear's.
    """

    def __init__(
        self, hidden_size: int, num_experts: int, top_k: int, bias: bool = False, selection_bias: bool = False,
        **options: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        linear = nn.Linear(hidden_size, num_experts, bias)
        self.weight, self.bias = linear.weight, linear.bias
        zeros = torch.zeros(num_experts) if selection_bias else None
        self.register_buffer("e_score_correction_bias", zeros)
        self.top_k, self.options = top_k, options

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = F.linear(hidden_states, self.weight, self.bias)
        return logits, *route_in(self, logits, self.e_score_correction_bias, **self.options)

    def extra_repr(self) -> str:
        experts, width = self.weight.shape
        return f"{width}, {experts}, top_k={self.top_k}, " + ", ".join(f"{k}={v}" for k, v in self.options.items())


# The routers of transformers: each the forward of some sources (formulas.py), on the attributes that those have.


def routed(
    router: Any, x: Tensor, bias: Tensor | None = None, in_float: bool = False,
    dtype: str = "float", change: Callable[[Tensor], Tensor] | None = None, **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(logits, weights, index) of a module with `weight`, perhaps `bias`, and `top_k`. in_float: the product is one of
    floats; dtype: that of weights, "float", or as "logits" or the "input" have it; change: what is done to logits."""
    weight, added = router.weight, getattr(router, "bias", None)
    x = x.reshape(-1, x.shape[-1])
    operands = [t if t is None or not in_float else t.float() for t in (x, weight, added)]
    logits = F.linear(*operands)
    logits = logits if change is None else change(logits)
    dtypes = {"float": torch.float32, "logits": logits.dtype, "input": x.dtype}
    return logits, *route_in(router, logits, bias, dtype=dtypes[dtype], **options)


class Router(Replayable):
    """A forward for a router of transformers."""


class RouterInFloat(Router):
    """One whose scores are floats, which autocast would round."""


class LigerSoftmaxRouter(Router):
    """The router of Qwen3-MoE, OLMoE and others: softmax, normalised where the module says so."""

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return routed(self, hidden_states, normalise=self.norm_topk_prob, dtype="logits")


class LigerNormalisedRouter(Router):
    """The router of Qwen3.5-MoE: softmax, normalised. GPT-OSS's and Aria's softmax over the chosen logits is the
    same."""

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return routed(self, hidden_states, normalise=True, dtype="logits")


class LigerMixtralRouter(Router):
    """The router of Mixtral and MiniMax: softmax, normalised, with weights in float."""

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return routed(self, hidden_states, normalise=True)


class LigerJambaRouter(Router):
    """The router of Jamba: softmax."""

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return routed(self, hidden_states, dtype="input")


class LigerGraniteRouter(Router):
    """The router of Granite's mixtures: softmax over the chosen logits, which it hands on in float."""

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits, *chosen = routed(self, hidden_states, normalise=True, dtype="input")
        return logits.float(), *chosen


class LigerPrivacyFilterRouter(RouterInFloat):
    """The router of OpenAI's privacy filter: a mean of softmax over the chosen logits, all in float."""

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return routed(self, hidden_states, in_float=True, normalise=True, scale=1 / self.top_k)


class LigerDeepseekV2Router(Router):
    """The router of DeepSeek-V2: softmax; of groups, those with the largest score, where the module says so."""

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        limited = self.topk_method == "group_limited_greedy"
        groups = dict(groups=self.num_group, kept_groups=self.topk_group, group_best=1) if limited else {}
        return routed(self, hidden_states, in_float=True, scale=self.routed_scaling_factor, **groups)


class LigerDeepseekV3Router(RouterInFloat):
    """The router of DeepSeek-V3, GLM-4.5, Kimi and others: sigmoid, a bias in the choice, and groups; A.X-K2 may have
    none."""

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        groups = {} if self.num_group is None else dict(groups=self.num_group, kept_groups=self.topk_group)
        return routed(
            self, hidden_states, self.e_score_correction_bias, in_float=True, score="sigmoid",
            normalise=self.norm_topk_prob, epsilon=1e-20, scale=self.routed_scaling_factor, **groups,
        )  # fmt: skip


class LigerBeamRouter(RouterInFloat):
    """LigerDeepseekV3Router without a scale."""

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return routed(
            self, hidden_states, self.e_score_correction_bias, in_float=True, score="sigmoid",
            normalise=self.norm_topk_prob, epsilon=1e-20, groups=self.num_group, kept_groups=self.topk_group,
        )  # fmt: skip


class LigerMistralLarge4Router(RouterInFloat):
    """The router of Mistral Large 4: softmax, normalised, and groups."""

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return routed(
            self, hidden_states, in_float=True, normalise=True, epsilon=1e-20, scale=self.routed_scaling_factor,
            groups=self.num_group, kept_groups=self.topk_group,
        )  # fmt: skip


class LigerHYV3Router(RouterInFloat):
    """The router of Hunyuan V3: sigmoid, normalised, with the bias of the choice as an argument."""

    def forward(self, hidden_states: Tensor, e_score_correction_bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return routed(
            self, hidden_states, e_score_correction_bias, in_float=True, score="sigmoid", normalise=True,
            epsilon=1e-20, scale=self.router_scaling_factor,
        )  # fmt: skip


class LigerMiniMaxM2Router(Router):
    """The router of MiniMax-M2: sigmoid, normalised, with the bias of the choice as an argument."""

    def forward(self, hidden_states: Tensor, e_score_correction_bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = hidden_states.to(self.weight.dtype)
        return routed(self, x, e_score_correction_bias, score="sigmoid", normalise=True)


class LigerMiniMaxM3Router(Router):
    """The router of MiniMax-M3: LigerMiniMaxM2Router with a bias that it has."""

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = hidden_states.to(self.weight.dtype)
        return routed(self, x, self.e_score_correction_bias, score="sigmoid", normalise=True)


class LigerErnieRouter(Router):
    """The router of ERNIE 4.5: softmax in float, a bias in the choice, normalised by a sum of at least norm_min."""

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        with torch.autocast(hidden_states.device.type, enabled=False):
            bias = self.moe_statics.e_score_correction_bias.squeeze()
            logits, weights, index = routed(
                self, hidden_states, bias, in_float=True, normalise=True, least_sum=self.norm_min,
                dtype="input",
            )  # fmt: skip
        return logits, weights, index


class LigerFlintRouter(RouterInFloat):
    """The router of Flint: sigmoid in float, normalised where the module says so."""

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return routed(self, hidden_states, in_float=True, score="sigmoid", normalise=self.norm_topk_prob)


class LigerInkling2Router(RouterInFloat):
    """The router of Inkling 2: sigmoid, normalised, with a bias in the choice."""

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return routed(
            self, hidden_states, self.e_score_correction_bias, in_float=True, score="sigmoid", normalise=True,
            epsilon=1e-20, scale=self.routed_scaling_factor,
        )  # fmt: skip


class LigerMuseSparkRouter(RouterInFloat):
    """The router of Muse Spark: that of Inkling 2, of logits times a number."""

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return routed(
            self, hidden_states, self.e_score_correction_bias, in_float=True, score="sigmoid", normalise=True,
            epsilon=self.norm_topk_prob_eps, scale=self.routed_scaling_factor,
            change=lambda logits: logits * self.output_multiplier,
        )  # fmt: skip


def _capped(logits: Tensor, cap: float) -> Tensor:
    return torch.tanh(logits / cap) * cap if cap > 0 else logits


class LigerLagunaRouter(Router):
    """The router of Laguna: sigmoid of logits in float, perhaps with a softcap, normalised, a bias in the choice."""

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return routed(
            self, hidden_states, self.e_score_correction_bias, score="sigmoid", normalise=True, dtype="input",
            change=lambda logits: _capped(logits.float(), self.router_logit_softcapping),
        )  # fmt: skip


class LigerLaraMiniRouter(RouterInFloat):
    """The router of Lara Mini: softmax of a product in float, normalised where the module says so."""

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return routed(self, hidden_states, in_float=True, normalise=self.norm_topk_prob, dtype="input")
