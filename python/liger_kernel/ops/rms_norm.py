from liger_kernel import _lazy
from liger_kernel.operators.norm import LigerRMSNormFunction, casting_code, check_width

__getattr__ = _lazy.lookup(__name__, {"liger_kernel.compat.forwards": "rms_norm_backward rms_norm_forward"})
