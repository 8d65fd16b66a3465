from liger_kernel.operators.gated_delta_rule import LigerBailingForgetGate, LigerForgetGate

__all__ = ["LigerBailingForgetGate", "LigerForgetGate"]
