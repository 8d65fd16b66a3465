from liger_kernel import _lazy
from liger_kernel.operators.rope import LigerQKNormRopeFunction, LigerRopeFunction, heads_swapped, rotated

__getattr__ = _lazy.lookup(__name__, {"liger_kernel.compat.forwards": "rope_backward rope_forward"})
