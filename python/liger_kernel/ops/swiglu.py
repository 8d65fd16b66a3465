from liger_kernel import _lazy
from liger_kernel.operators.activation import LigerFusedGateUpSiLUMulFunction, LigerSiLUMulFunction

__getattr__ = _lazy.lookup(
    __name__,
    {
        "liger_kernel.compat.forwards": (
            "swiglu_backward swiglu_forward swiglu_fused_gate_up_backward swiglu_fused_gate_up_forward"
        )
    },
)
