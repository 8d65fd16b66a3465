"""The options that schemas carry as lists without names."""

from typing import NamedTuple


class CrossEntropyFlags(NamedTuple):
    """The `flags` of both cross entropies, in the order that liger/ops/loss/cross_entropy_op.h gives."""

    ignore_index: int
    reduction: int
    token_scaling: bool
    z_loss: bool
    accuracy: bool
    predicted: bool
