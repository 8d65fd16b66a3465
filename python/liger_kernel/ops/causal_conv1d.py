from liger_kernel.operators.causal_conv1d import LigerCausalConv1dFunction

__all__ = ["LigerCausalConv1dFunction"]
