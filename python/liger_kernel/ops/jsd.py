from liger_kernel import _lazy
from liger_kernel.operators.loss import LigerJSDFunction

__getattr__ = _lazy.lookup(__name__, {"liger_kernel.compat.forwards": "jsd_backward jsd_forward"})
