from liger_kernel.compat.functional import (
    cross_entropy,
    fused_add_rms_norm,
    fused_linear_cross_entropy,
    fused_linear_jsd,
    geglu,
    jsd,
    kl_div,
    layer_norm,
    rms_norm,
    rope,
    softmax,
    swiglu,
)
