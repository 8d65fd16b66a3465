from liger_kernel.operators.norm import LigerLayerNorm, LigerLayerNormForCohere

__all__ = ["LigerLayerNorm", "LigerLayerNormForCohere"]
