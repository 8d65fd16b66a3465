from liger_kernel.operators.policy import (
    GrpoLossFunction,
    _compute_dapo_normalizer,
    _str_to_loss_type,
    check_level,
    check_loss,
    check_ratio,
    fused_selective_log_softmax,
    grpo_loss_of_logits,
    policy_options,
)
