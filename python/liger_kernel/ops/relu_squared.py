"""Squared ReLU (So et al. 2021, arXiv:2109.08668)."""

from liger_kernel._library import ops
from liger_kernel.ops.activations import RELU_SQUARED


class LigerReLUSquaredFunction:
    @staticmethod
    def apply(X):
        """max(X, 0)², element by element, in fresh memory."""
        return ops.activate(X, RELU_SQUARED)


def relu_squared_forward(X):
    """max(X, 0)², without autograd."""
    return ops.activate_forward(X, RELU_SQUARED)


def relu_squared_backward(X, dY):
    """2 · dY · max(X, 0)."""
    return ops.activate_backward(dY.reshape(X.shape), X, RELU_SQUARED)
