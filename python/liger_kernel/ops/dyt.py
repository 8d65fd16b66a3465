"""DyT, dynamic tanh in place of a norm (Zhu et al. 2025, arXiv:2503.10622)."""

from liger_kernel._library import ops


class LigerDyTFunction:
    @staticmethod
    def apply(x, alpha, gamma, beta):
        """gamma · tanh(alpha · x) + beta for x [..., H], one number alpha, gamma and beta [H] in x's dtype or float;
        beta may be None."""
        return ops.dyt(x, alpha, gamma, beta)


def liger_dyt_fwd(x, alpha, gamma, beta):
    """y, without autograd."""
    return ops.dyt_forward(x, alpha, gamma, beta)


def liger_dyt_bwd(dy, x, alpha, gamma, beta):
    """(dx, dalpha, dgamma, dbeta or None)."""
    dx, dalpha, dgamma, dbeta = ops.dyt_backward(dy, x, alpha, gamma, beta, True, True, True, beta is not None)
    return dx, dalpha, dgamma, dbeta if beta is not None else None
