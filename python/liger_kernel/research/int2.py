"""Matrix products with weights in {-1, 0, 1, 2}, four to a byte; formula in liger/ops/research/matmul/int2_matmul.h."""

from torch import Tensor

from liger_kernel._library import ops


def _two_bits(bits):
    if bits != 2:
        raise ValueError(f"weights have 2 bits, not {bits}")


def pack_weights(intweights: Tensor, bits: int = 2) -> Tensor:
    """Integer weights [rows, ...] in {-1, 0, 1, 2} as uint8 [ceil(rows / 4), ...]; missing rows count as -1. The
    argument is not changed."""
    _two_bits(bits)
    return ops.int2_pack(intweights)


def unpack_weights(packed: Tensor, bits: int = 2) -> Tensor:
    """The weights of uint8 packed [rows / 4, ...], as int32 [rows, ...]."""
    _two_bits(bits)
    return ops.int2_unpack(packed)


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """The exact product of int8 a [M, K] and packed weights b [K/4, N], as int32 [M, N]; it has no gradient.

    Raises AssertionError where K differs from four times b's rows or a is not contiguous; b may have any strides.
    """
    if a.shape[1] != 4 * b.shape[0]:
        raise AssertionError(f"a has {a.shape[1]} columns, b holds {4 * b.shape[0]} rows")
    if not a.is_contiguous():
        raise AssertionError("a must be contiguous")
    return ops.int2_matmul(a, b)
