from liger_kernel.operators.norm import LigerLayerNorm, LigerLayerNormForCohere, LigerLayerNormFunction

__all__ = ["LigerLayerNorm", "LigerLayerNormForCohere"]
