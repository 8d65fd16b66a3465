from liger_kernel.operators.head import quantised_linear_log_prob, vocab_parallel_linear_log_prob

__all__ = ["quantised_linear_log_prob", "vocab_parallel_linear_log_prob"]
