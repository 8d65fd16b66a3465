from liger_kernel.operators.gated_delta_rule import LigerDeltaGatesFunction

__all__ = ["LigerDeltaGatesFunction"]
