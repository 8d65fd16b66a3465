from liger_kernel import _lazy
from liger_kernel.operators.norm import LigerModulatedRMSNormFunction

__getattr__ = _lazy.lookup(
    __name__, {"liger_kernel.compat.forwards": "modulated_rms_norm_backward modulated_rms_norm_forward"}
)
