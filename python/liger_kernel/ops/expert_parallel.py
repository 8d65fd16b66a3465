from liger_kernel.operators.expert_parallel import GatheredTokens, expert_parallel, expert_parallel_fused_experts

__all__ = ["GatheredTokens", "expert_parallel", "expert_parallel_fused_experts"]
