from liger_kernel.operators.multi_head import linear_multi_head_cross_entropy, shifted_labels

__all__ = ["linear_multi_head_cross_entropy", "shifted_labels"]
