"""Sparsemax (Martins & Astudillo 2016, arXiv:1602.02068)."""

from liger_kernel._library import ops
from liger_kernel.ops.softmax import SPARSEMAX


class LigerSparsemaxFunction:
    @staticmethod
    def apply(x, dim=-1):
        """max(x − τ, 0) along dim, with the τ for which it sums to 1: the probabilities nearest to x. In x's dtype."""
        return ops.softmax(x.transpose(dim, -1), SPARSEMAX).transpose(dim, -1)


def _sparsemax_forward(x, dim):
    """(y, y with dim last as rows), without autograd."""
    y = ops.softmax_forward(x.transpose(dim, -1), SPARSEMAX)
    return y.transpose(dim, -1), y.reshape(-1, y.shape[-1])


def _sparsemax_backward(grad_out, out_flat, dim):
    dy = grad_out.transpose(dim, -1)
    return ops.softmax_backward(dy, out_flat.reshape(dy.shape), SPARSEMAX).transpose(dim, -1)
