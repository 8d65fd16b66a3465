from liger_kernel import _lazy
from liger_kernel.operators.activation import SOFTMAX, SPARSEMAX, LigerSoftmaxFunction

__getattr__ = _lazy.lookup(__name__, {"liger_kernel.compat.forwards": "_softmax_backward _softmax_forward"})
