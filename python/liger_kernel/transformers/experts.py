"""Experts of a mixture, and where those of a model keep transformers' forward."""

import contextlib

import torch
from torch import nn

from liger_kernel.ops.fused_moe import fused_experts
from liger_kernel.transformers.coverage import EXPERTS_KERNELS, is_dense

# What transformers' forward computes in another way. The others are a user's choice of how: other kernels, other
# roundings.
_DEFAULTS = (None, "eager", "grouped_mm")


def reason_to_keep(experts, running=True) -> str | None:
    """Why experts keep transformers' forward, or None; `running`: its weights are what a forward sees, not shards."""
    chosen = getattr(getattr(experts, "config", None), "_experts_implementation", None)
    if chosen not in _DEFAULTS:
        return f"experts_implementation is {chosen!r}"
    if getattr(experts, "_is_expert_parallel", False):
        return "its experts are spread over ranks"
    weights = experts.parameters(recurse=False) if running else ()
    if not all(map(is_dense, weights)):
        return "a weight is sharded or quantised"
    return None


def computed(experts, hidden_states, top_k_index, top_k_weights, *biases, **options):
    """fused_experts on the weights of a module, in the dtype in which transformers computes; the result is as
    hidden_states are.

    transformers' loop over experts computes in autocast's dtype, its grouped GEMMs in that of the weights.
    """
    x, index, weights = (t.reshape(-1, t.shape[-1]) for t in (hidden_states, top_k_index, top_k_weights))
    grouped = getattr(getattr(experts, "config", None), "_experts_implementation", None) == "grouped_mm"
    autocast = torch.is_autocast_enabled(x.device.type)
    with torch.autocast(x.device.type, enabled=False) if grouped and autocast else contextlib.nullcontext():
        x = x.to(experts.gate_up_proj.dtype) if grouped else x
        y = fused_experts(x, experts.gate_up_proj, experts.down_proj, index, weights, *biases, **options)
    return y.view(hidden_states.shape).to(hidden_states.dtype)


class LigerGEGLUExperts(nn.Module):
    """LigerExperts with gelu, of tanh, for silu: a forward for experts of transformers."""

    kernels, reason_to_keep = EXPERTS_KERNELS, staticmethod(reason_to_keep)

    def forward(self, hidden_states, top_k_index, top_k_weights):
        """As LigerExperts."""
        return computed(self, hidden_states, top_k_index, top_k_weights, activation="gelu_tanh")


class LigerGptOssExperts(nn.Module):
    """GPT-OSS's experts, as fused_experts has them with `clamped`: a forward for experts of transformers."""

    kernels, reason_to_keep = EXPERTS_KERNELS, staticmethod(reason_to_keep)

    def forward(self, hidden_states, router_indices=None, routing_weights=None):
        """[..., H] for hidden_states [..., H] and the experts [..., K] of each token with their weights."""
        return computed(
            self, hidden_states, router_indices, routing_weights, self.gate_up_proj_bias, self.down_proj_bias,
            transposed=True, clamped=True, alpha=self.alpha, limit=self.limit,
        )  # fmt: skip
