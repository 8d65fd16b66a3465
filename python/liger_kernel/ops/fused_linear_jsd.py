from liger_kernel import _lazy
from liger_kernel.operators.distillation import LigerFusedLinearJSDFunction

__getattr__ = _lazy.lookup(
    __name__, {"liger_kernel.compat.forwards": "fused_linear_jsd_backward fused_linear_jsd_forward"}
)
