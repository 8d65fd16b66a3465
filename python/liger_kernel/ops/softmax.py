from liger_kernel._compat import _softmax_backward, _softmax_forward
from liger_kernel.operators.activation import SOFTMAX, SPARSEMAX, LigerSoftmaxFunction
