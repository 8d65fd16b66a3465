"""Routers of mixtures of experts (see liger/ops.h)."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from liger_kernel._library import ops

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
    group_best: int = 2, dtype: torch.dtype | None = None,
) -> Routed:  # fmt: skip
    """The top_k experts of each token, by its logits [..., E], and their weights; computed in float.

    Scores s are softmax(logits), sigmoid(logits) or, "sqrt_softplus", √softplus(logits). The experts with the largest
    s + bias are chosen, the largest first, and of equal ones the lower number first; bias [E] counts in the choice only.
    Weights are scale · s or, with normalise, scale · s / (max(Σ s, least_sum) + epsilon), in `dtype`, by default
    float32; index is int64, counts int32. Of `groups` groups of neighbouring experts only kept_groups take part: those
    whose group_best (1 or 2) largest s + bias have the largest sum.

    Differentiable with respect to logits, through weights. Raises ValueError for an unknown score and for numbers that
    do not fit.
    """
    if score not in SCORES:
        raise ValueError(f"score must be one of {', '.join(map(repr, SCORES))}, got {score!r}")
    options = SCORES.index(score), normalise, epsilon, least_sum, scale, groups, kept_groups, group_best, dtype
    return Routed(*ops.route(logits, bias, top_k, *options))


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
