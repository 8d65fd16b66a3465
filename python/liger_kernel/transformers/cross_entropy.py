from liger_kernel.operators.loss import LigerCrossEntropyFunction, LigerCrossEntropyLoss, check_options, vars_of

__all__ = ["LigerCrossEntropyLoss"]
