from liger_kernel import _lazy
from liger_kernel.operators.loss import LigerKLDivLossFunction

__getattr__ = _lazy.lookup(__name__, {"liger_kernel.compat.forwards": "kldiv_backward_triton kldiv_forward_triton"})
