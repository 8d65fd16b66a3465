from liger_kernel.operators.loss import (
    CrossEntropyOutput,
    LigerCrossEntropyFunction,
    LigerCrossEntropyLoss,
    check_options,
    vars_of,
)

__all__ = ["LigerCrossEntropyLoss"]
