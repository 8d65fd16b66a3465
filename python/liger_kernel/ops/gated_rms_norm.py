from liger_kernel.operators.gated_norm import LigerGatedRMSNormFunction

__all__ = ["LigerGatedRMSNormFunction"]
