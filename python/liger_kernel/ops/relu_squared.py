from liger_kernel import _lazy
from liger_kernel.operators.activation import LigerReLUSquaredFunction

__getattr__ = _lazy.lookup(__name__, {"liger_kernel.compat.forwards": "relu_squared_backward relu_squared_forward"})
