from liger_kernel.operators.causal_conv1d import LigerShortConvolution

__all__ = ["LigerShortConvolution"]
