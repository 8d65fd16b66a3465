from liger_kernel import _lazy
from liger_kernel.operators.loss import LigerTVDLossFunction

__getattr__ = _lazy.lookup(__name__, {"liger_kernel.compat.forwards": "tv_distance_forward_triton tvd_backward_triton"})
