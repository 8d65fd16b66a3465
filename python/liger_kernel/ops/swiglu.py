from liger_kernel._compat import (
    swiglu_backward,
    swiglu_forward,
    swiglu_fused_gate_up_backward,
    swiglu_fused_gate_up_forward,
)
from liger_kernel.operators.activation import LigerFusedGateUpSiLUMulFunction, LigerSiLUMulFunction
