from liger_kernel.operators.policy import (
    GrpoLossFunction,
    _masked_mean,
    _reduce_grpo_loss,
    fused_selective_log_softmax,
    triton_grpo_loss,
)
