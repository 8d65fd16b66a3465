from liger_kernel.operators.norm import LigerLayerNorm

__all__ = ["LigerLayerNorm"]
