"""The operators under the names of liger_kernel.ops: Function classes with `apply`, and their forward and backward as plain functions."""

from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction, cross_entropy_backward, cross_entropy_forward
from liger_kernel.ops.fused_linear_cross_entropy import (
    LigerFusedLinearCrossEntropyFunction,
    fused_linear_cross_entropy_backward,
    fused_linear_cross_entropy_forward,
)
from liger_kernel.ops.geglu import LigerGELUMulFunction, geglu_backward, geglu_forward
from liger_kernel.ops.jsd import LigerJSDFunction, jsd_backward, jsd_forward
from liger_kernel.ops.kl_div import LigerKLDivLossFunction
from liger_kernel.ops.rms_norm import LigerRMSNormFunction, rms_norm_backward, rms_norm_forward
from liger_kernel.ops.rope import LigerRopeFunction, rope_backward, rope_forward
from liger_kernel.ops.softmax import LigerSoftmaxFunction
from liger_kernel.ops.sparsemax import LigerSparsemaxFunction
from liger_kernel.ops.swiglu import LigerFusedGateUpSiLUMulFunction, LigerSiLUMulFunction, swiglu_backward, swiglu_forward
from liger_kernel.ops.tvd import LigerTVDLossFunction
