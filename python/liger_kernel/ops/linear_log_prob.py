from liger_kernel.operators.head import OUTPUTS, linear_log_prob, output_bits

__all__ = ["linear_log_prob", "output_bits"]
