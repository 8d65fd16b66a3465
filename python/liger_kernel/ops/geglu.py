from liger_kernel import _lazy
from liger_kernel.operators.activation import LigerGELUMulFunction

__getattr__ = _lazy.lookup(__name__, {"liger_kernel.compat.forwards": "geglu_backward geglu_forward"})
