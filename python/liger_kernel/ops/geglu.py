"""GeGLU: gelu(a) · b (Shazeer 2020, arXiv:2002.05202), with the tanh form of gelu unless told otherwise."""

from liger_kernel._library import ops
from liger_kernel.ops.activations import GELU_ERF, GELU_TANH
from liger_kernel.ops.utils import promoted


class LigerGELUMulFunction:
    @staticmethod
    def apply(a, b, approximate="tanh"):
        """gelu(a) · b for a, b of one shape, in the dtype that torch's product has; neither is changed. approximate is
        "tanh" or "none", as torch.nn.functional.gelu has it."""
        return ops.gated(*promoted(a, b), {"tanh": GELU_TANH, "none": GELU_ERF}[approximate], 1.0)


def geglu_forward(a, b):
    """(a, b, c) with a and b as rows, without autograd."""
    a, b = a.reshape(-1, a.shape[-1]), b.reshape(-1, b.shape[-1])
    return a, b, ops.gated_forward(a, b, GELU_TANH, 1.0)


def geglu_backward(a, b, dc):
    """(da, db), in fresh memory, in dc's shape."""
    da, db = ops.gated_backward(dc.reshape(a.shape), a, b, GELU_TANH, 1.0)
    return da.reshape(dc.shape), db.reshape(dc.shape)
