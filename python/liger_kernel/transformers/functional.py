"""The operators as functions."""

from liger_kernel import _lazy
from liger_kernel.operators.activation import (
    LigerGELUMulFunction,
    LigerReLUSquaredFunction,
    LigerSiLUMulFunction,
    LigerSoftmaxFunction,
    liger_geglu,
    liger_relu_squared,
    liger_softmax,
    liger_swiglu,
    liger_xielu,
)
from liger_kernel.operators.causal_conv1d import liger_causal_conv1d
from liger_kernel.operators.distillation import LigerFusedLinearJSDFunction, liger_fused_linear_jsd
from liger_kernel.operators.gated_delta_rule import liger_channel_gates, liger_delta_gates, liger_gated_delta_rule
from liger_kernel.operators.gated_norm import liger_gated_rms_norm
from liger_kernel.operators.head import liger_fused_linear_cross_entropy
from liger_kernel.operators.loss import (
    CrossEntropyOutput,
    LigerCrossEntropyFunction,
    LigerJSDFunction,
    LigerKLDivLossFunction,
    LigerTVDLossFunction,
    liger_cross_entropy,
    liger_jsd,
    liger_kl_div,
    liger_selective_log_softmax,
    liger_tvd,
)
from liger_kernel.operators.mamba2 import liger_mamba2_scan
from liger_kernel.operators.norm import (
    LigerFusedAddRMSNormFunction,
    LigerLayerNormFunction,
    LigerModulatedRMSNormFunction,
    LigerRMSNormFunction,
    liger_fused_add_rms_norm,
    liger_layer_norm,
    liger_modulated_rms_norm,
    liger_rms_norm,
)
from liger_kernel.operators.rope import (
    LigerQwen2VLMRopeFunction,
    LigerRopeFunction,
    liger_qk_norm_rope,
    liger_qwen2vl_mrope,
    liger_rope,
    liger_rope_packed,
)
from liger_kernel.operators.router import Routed, liger_expert_load, liger_load_balancing_loss, liger_route
from liger_kernel.operators.score_centering import fused_linear_score_centering as liger_fused_linear_score_centering
from liger_kernel.operators.soft_targets import LigerFusedLinearKLDivFunction, liger_fused_linear_kl_div
from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction
from liger_kernel.ops.fused_linear_scaled_cross_entropy import LigerFusedLinearScaledCrossEntropyTPFunction

liger_fused_linear_scaled_cross_entropy_tp = LigerFusedLinearScaledCrossEntropyTPFunction.apply

__getattr__ = _lazy.lookup(
    __name__,
    {
        "liger_kernel.research.sparsemax": "LigerSparsemaxFunction liger_sparsemax",
        "liger_kernel.research.attention": (
            "LigerFusedNeighborhoodAttentionFunction LigerMultiTokenAttentionFunction "
            "liger_fused_neighborhood_attention liger_multi_token_attention"
        ),
        "liger_kernel.research.connections": (
            "LigerAttnResFunction LigerMHCCoeffsFunction LigerMHCPostResFunction LigerMHCPreFunction "
            "liger_attn_res liger_mhc_apply liger_mhc_coeffs liger_mhc_forward liger_mhc_post_res liger_mhc_pre"
        ),
        "liger_kernel.research.norm": (
            "LigerDyTFunction LigerGroupNormFunction LigerPolyNormFunction liger_dyt liger_group_norm liger_poly_norm"
        ),
    },
)

__all__ = [
    "CrossEntropyOutput", "Routed", "liger_attn_res", "liger_causal_conv1d", "liger_cross_entropy", "liger_dyt",
    "liger_channel_gates", "liger_delta_gates", "liger_gated_delta_rule", "liger_mamba2_scan",
    "liger_expert_load",
    "liger_fused_add_rms_norm",
    "liger_fused_linear_cross_entropy", "liger_fused_linear_jsd", "liger_fused_linear_kl_div",
    "liger_fused_linear_scaled_cross_entropy_tp", "liger_fused_linear_score_centering",
    "liger_fused_neighborhood_attention", "liger_gated_rms_norm",
    "liger_geglu", "liger_group_norm", "liger_jsd", "liger_kl_div", "liger_layer_norm",
    "liger_load_balancing_loss", "liger_mhc_apply",
    "liger_mhc_coeffs", "liger_mhc_forward", "liger_mhc_post_res", "liger_mhc_pre", "liger_modulated_rms_norm",
    "liger_multi_token_attention", "liger_poly_norm", "liger_qwen2vl_mrope", "liger_relu_squared", "liger_rms_norm",
    "liger_qk_norm_rope", "liger_rope", "liger_rope_packed", "liger_route", "liger_selective_log_softmax",
    "liger_softmax", "liger_sparsemax", "liger_swiglu", "liger_tvd", "liger_xielu",
]  # fmt: skip
