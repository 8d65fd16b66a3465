from liger_kernel.chunked_loss.fused_linear_ppo import LigerFusedLinearPPOBase
from liger_kernel.chunked_loss.grpo_loss import get_gamma_weights
from liger_kernel.operators.policy import (
    GrpoLossFunction,
    _masked_mean,
    _reduce_grpo_loss,
    fused_selective_log_softmax,
    triton_grpo_loss,
)
