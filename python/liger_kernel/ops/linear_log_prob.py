from liger_kernel.operators.head import OUTPUTS, linear_log_prob

__all__ = ["linear_log_prob"]
