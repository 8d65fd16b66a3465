from liger_kernel.operators.gated_delta_rule import LigerGatedDeltaRuleFunction

__all__ = ["LigerGatedDeltaRuleFunction"]
