"""Experts of a mixture, and where those of a model keep transformers' forward."""

from torch import nn

from liger_kernel.ops.fused_moe import fused_experts
from liger_kernel.transformers.graft import is_dense

# What transformers' forward computes in another way. The others are a user's choice of how: other kernels, other
# roundings.
_DEFAULTS = (None, "eager", "grouped_mm")


def kept_by(experts, running=True) -> str | None:
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


def flat(t):
    return t.reshape(-1, t.shape[-1])


class LigerGEGLUExperts(nn.Module):
    """LigerExperts with gelu, of tanh, for silu: a forward for experts of transformers."""

    kept_by = staticmethod(kept_by)

    def forward(self, hidden_states, top_k_index, top_k_weights):
        """As LigerExperts."""
        x, index, weights = flat(hidden_states), flat(top_k_index), flat(top_k_weights)
        y = fused_experts(x, self.gate_up_proj, self.down_proj, index, weights, activation="gelu_tanh")
        return y.view_as(hidden_states).to(hidden_states.dtype)


class LigerGptOssExperts(nn.Module):
    """GPT-OSS's experts, as fused_experts has them with `clamped`: a forward for experts of transformers."""

    kept_by = staticmethod(kept_by)

    def forward(self, hidden_states, router_indices=None, routing_weights=None):
        """[..., H] for hidden_states [..., H] and the experts [..., K] of each token with their weights."""
        y = fused_experts(
            flat(hidden_states), self.gate_up_proj, self.down_proj, flat(router_indices), flat(routing_weights),
            self.gate_up_proj_bias, self.down_proj_bias, transposed=True, clamped=True, alpha=self.alpha,
            limit=self.limit,
        )  # fmt: skip
        return y.view_as(hidden_states).to(hidden_states.dtype)
