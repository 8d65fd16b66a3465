from liger_kernel import _lazy
from liger_kernel.operators.norm import LigerFusedAddRMSNormFunction

__getattr__ = _lazy.lookup(
    __name__, {"liger_kernel.compat.forwards": "fused_add_rms_norm_backward fused_add_rms_norm_forward"}
)
