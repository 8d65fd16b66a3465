from liger_kernel.operators.expert_parallel import LigerExpertParallelFusedMoe, moe_fused

__all__ = ["LigerExpertParallelFusedMoe", "moe_fused"]
