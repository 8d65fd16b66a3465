"""The operators under the names of liger_kernel.ops: Function classes with `apply`, and their forward and backward as
plain functions."""

from liger_kernel import _lazy
from liger_kernel.ops.causal_conv1d import LigerCausalConv1dFunction
from liger_kernel.ops.channel_gates import LigerChannelGatesFunction
from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction
from liger_kernel.ops.delta_gates import LigerDeltaGatesFunction
from liger_kernel.ops.experimental.embedding import LigerEmbeddingFunction
from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction
from liger_kernel.ops.fused_ce_tvd import LigerFusedCETVDFunction
from liger_kernel.ops.fused_linear_cross_entropy import (
    LigerFusedLinearCrossEntropyFunction,
    fused_linear_cross_entropy_backward,
    fused_linear_cross_entropy_forward,
)
from liger_kernel.ops.fused_linear_jsd import LigerFusedLinearJSDFunction
from liger_kernel.ops.fused_linear_kl_div import LigerFusedLinearKLDivFunction
from liger_kernel.ops.fused_linear_scaled_cross_entropy import (
    LigerFusedLinearScaledCrossEntropyFunction,
    LigerFusedLinearScaledCrossEntropyTPFunction,
)
from liger_kernel.ops.fused_linear_score_centering import (
    ISCorrection,
    LigerFusedLinearScoreCenteringFunction,
    fused_linear_score_centering,
)
from liger_kernel.ops.fused_moe import LigerFusedMoEFunction
from liger_kernel.ops.gated_delta_rule import LigerGatedDeltaRuleFunction
from liger_kernel.ops.gated_rms_norm import LigerGatedRMSNormFunction
from liger_kernel.ops.geglu import LigerGELUMulFunction
from liger_kernel.ops.grpo_loss import GrpoLossFunction
from liger_kernel.ops.jsd import LigerJSDFunction
from liger_kernel.ops.kl_div import LigerKLDivLossFunction
from liger_kernel.ops.layer_norm import LigerLayerNormFunction
from liger_kernel.ops.llama4_rope import LigerLlama4RopeFunction
from liger_kernel.ops.mlp import LigerMLPFunction
from liger_kernel.ops.modulated_rms_norm import LigerModulatedRMSNormFunction
from liger_kernel.ops.qwen2vl_mrope import LigerQwen2VLMRopeFunction
from liger_kernel.ops.relu_squared import LigerReLUSquaredFunction
from liger_kernel.ops.rms_norm import LigerRMSNormFunction
from liger_kernel.ops.rope import LigerQKNormRopeFunction, LigerRopeFunction
from liger_kernel.ops.softmax import LigerSoftmaxFunction
from liger_kernel.ops.swiglu import LigerFusedGateUpSiLUMulFunction, LigerSiLUMulFunction
from liger_kernel.ops.tiled_mlp import LigerTiledMLPFunction, apply_tiled_mlp
from liger_kernel.ops.tvd import LigerTVDLossFunction
from liger_kernel.ops.vocab_parallel_cross_entropy import LigerVocabParallelCEFunction
from liger_kernel.ops.xielu import LigerXIELUFunction

__getattr__ = _lazy.lookup(
    __name__,
    {
        "liger_kernel.research.connections": (
            "LigerAttnResFunction LigerMHCCoeffsFunction LigerMHCPostResFunction LigerMHCPreFunction"
        ),
        "liger_kernel.research.norm": "LigerDyTFunction LigerGroupNormFunction LigerPolyNormFunction",
        "liger_kernel.research.sparsemax": "LigerSparsemaxFunction",
        "liger_kernel.research.attention": "LigerFusedNeighborhoodAttentionFunction LigerMultiTokenAttentionFunction",
        "liger_kernel.compat.forwards": (
            "cross_entropy_backward cross_entropy_forward fused_add_rms_norm_backward fused_add_rms_norm_forward "
            "fused_linear_jsd_backward fused_linear_jsd_forward geglu_backward geglu_forward jsd_backward "
            "jsd_forward layer_norm_backward layer_norm_forward modulated_rms_norm_backward "
            "modulated_rms_norm_forward qwen2vl_mrope_backward qwen2vl_mrope_forward relu_squared_backward "
            "relu_squared_forward rms_norm_backward rms_norm_forward rope_backward rope_forward swiglu_backward "
            "swiglu_forward"
        ),
        "liger_kernel.compat.research_forwards": (
            "attn_res_backward attn_res_forward group_norm_backward group_norm_forward poly_norm_backward "
            "poly_norm_forward"
        ),
    },
)

__all__ = [
    "GrpoLossFunction", "ISCorrection", "LigerFusedLinearScoreCenteringFunction", "fused_linear_score_centering",
    "LigerAttnResFunction", "LigerCausalConv1dFunction", "LigerChannelGatesFunction",
    "LigerDeltaGatesFunction", "LigerGatedDeltaRuleFunction", "LigerCrossEntropyFunction", "LigerDyTFunction",
    "LigerEmbeddingFunction",
    "LigerFusedAddRMSNormFunction", "LigerFusedGateUpSiLUMulFunction", "LigerFusedLinearCrossEntropyFunction",
    "LigerFusedLinearJSDFunction", "LigerFusedLinearScaledCrossEntropyFunction", "LigerFusedMoEFunction",
    "LigerFusedNeighborhoodAttentionFunction", "LigerGatedRMSNormFunction", "LigerGELUMulFunction",
    "LigerGroupNormFunction", "LigerJSDFunction", "LigerKLDivLossFunction", "LigerLayerNormFunction",
    "LigerLlama4RopeFunction", "LigerMHCCoeffsFunction", "LigerMHCPostResFunction", "LigerMHCPreFunction",
    "LigerMLPFunction", "LigerModulatedRMSNormFunction", "LigerMultiTokenAttentionFunction", "LigerPolyNormFunction",
    "LigerQKNormRopeFunction", "LigerQwen2VLMRopeFunction", "LigerReLUSquaredFunction", "LigerRMSNormFunction",
    "LigerRopeFunction", "LigerSiLUMulFunction", "LigerSoftmaxFunction", "LigerSparsemaxFunction",
    "LigerTVDLossFunction", "LigerTiledMLPFunction", "LigerVocabParallelCEFunction",
    "LigerXIELUFunction", "apply_tiled_mlp", "attn_res_backward", "attn_res_forward",
    "cross_entropy_backward", "cross_entropy_forward", "fused_add_rms_norm_backward", "fused_add_rms_norm_forward",
    "fused_linear_cross_entropy_backward", "fused_linear_cross_entropy_forward", "fused_linear_jsd_backward",
    "fused_linear_jsd_forward", "geglu_backward", "geglu_forward", "group_norm_backward", "group_norm_forward",
    "jsd_backward", "jsd_forward", "layer_norm_backward", "layer_norm_forward", "modulated_rms_norm_backward",
    "modulated_rms_norm_forward", "poly_norm_backward", "poly_norm_forward", "qwen2vl_mrope_backward",
    "qwen2vl_mrope_forward", "relu_squared_backward", "relu_squared_forward", "rms_norm_backward", "rms_norm_forward",
    "rope_backward", "rope_forward", "swiglu_backward", "swiglu_forward",
]  # fmt: skip
