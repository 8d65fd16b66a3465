"""A mixture of experts by grouped GEMMs; see liger/ops.h."""

import torch

from liger_kernel._library import ops
from liger_kernel.ops.activations import ACTIVATIONS, SILU

#: Rows of a tile of compute_routing_metadata.
BLOCK_M_TOKEN = 64


def fused_experts(
    x,
    gate_up,
    down,
    index,
    weights,
    gate_up_bias=None,
    down_bias=None,
    activation="silu",
    transposed=False,
    clamped=False,
    alpha=1.702,
    limit=7.0,
    recompute=True,
):
    """y[t] = Σ_k weights[t, k] · down_e (act(gate_e x[t]) · up_e x[t]) for the experts e = index[t, k]; [tokens, H] in
    x's dtype, summed over k in float.

    x [tokens, H], gate_up [E, 2 I, H], gate above up, down [E, H, I], biases [E, 2 I] and [E, H], all in one dtype;
    transposed: [E, H, 2 I] and [E, I, H]. index [tokens, k] integers, of which those outside [0, E) add nothing,
    weights [tokens, k], floating. All but index are differentiable; backward keeps x and the routing and makes gate and
    up again, unless recompute=False. clamped: GPT-OSS's gate instead, of columns that interleave: (up' + 1) · gate' ·
    σ(alpha · gate') with gate' = min(gate, limit) and up' = clamp(up, −limit, limit). On CUDA in bfloat16, with widths
    that are multiples of 8, nothing is read on the host; otherwise the counts of tokens are. Raises KeyError for an
    activation that is none of "silu", "gelu_tanh", "gelu_erf", "relu_squared".
    """
    return ops.fused_experts(
        x,
        gate_up,
        down,
        weights,
        gate_up_bias,
        down_bias,
        index,
        ACTIVATIONS[activation],
        transposed,
        clamped,
        float(alpha),
        float(limit),
        recompute,
    )


class LigerFusedMoEFunction:
    """fused_experts of SwiGLU experts without biases, under the API's name."""

    @staticmethod
    def apply(x, gate_up_proj, down_proj, top_k_index, top_k_weights):
        return fused_experts(x, gate_up_proj, down_proj, top_k_index, top_k_weights)


def compute_routing_metadata(topk_indices, E, block_m_token=BLOCK_M_TOKEN):
    """How tokens are sorted by expert: (counts [E], starts [E + 1], token of each sorted pair, pair of each, place of
    each pair, row and expert of each tile), all int32.

    topk_indices [tokens, k]; pairs are (token, slot), numbered by rows, sorted stably by expert. A tile is at most
    block_m_token rows of one expert.
    """
    k, flat = topk_indices.shape[1], topk_indices.reshape(-1).long()
    counts = torch.bincount(flat, minlength=E)
    starts = torch.cat((counts.new_zeros(1), counts.cumsum(0)))
    order = torch.sort(flat, stable=True).indices
    place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    tiles = (counts + block_m_token - 1) // block_m_token
    experts = torch.repeat_interleave(torch.arange(E, device=flat.device), tiles)
    within = torch.arange(len(experts), device=flat.device) - (tiles.cumsum(0) - tiles)[experts]
    return tuple(
        t.int() for t in (counts, starts, order // k, order, place, starts[experts] + within * block_m_token, experts)
    )
