from liger_kernel.operators.expert_parallel import MoEConfig, configure

__all__ = ["MoEConfig", "configure"]
