from liger_kernel.operators.expert_parallel import LigerExpertParallelFusedMoEFunction, moe_fused

__all__ = ["LigerExpertParallelFusedMoEFunction", "moe_fused"]
