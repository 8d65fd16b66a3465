from liger_kernel.operators.head import class_logits
from liger_kernel.operators.topk_distillation import linear_topk_divergence, topk_divergence, topk_entropy

__all__ = ["class_logits", "linear_topk_divergence", "topk_divergence", "topk_entropy"]
