from liger_kernel.operators.distillation import KINDS, linear_distillation

__all__ = ["linear_distillation"]
