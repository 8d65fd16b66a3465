from liger_kernel.operators.gated_delta_rule import LigerChannelGatesFunction

__all__ = ["LigerChannelGatesFunction"]
