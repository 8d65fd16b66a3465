from liger_kernel import _lazy
from liger_kernel.operators.norm import LigerLayerNormFunction

__getattr__ = _lazy.lookup(__name__, {"liger_kernel.compat.forwards": "layer_norm_backward layer_norm_forward"})
