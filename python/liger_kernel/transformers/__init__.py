"""Drop-in modules, losses and functions, and patches for Hugging Face models.

Only the patches import transformers, when they are first asked for.
"""

import importlib
import importlib.util

from liger_kernel.transformers import functional
from liger_kernel.transformers.cross_entropy import LigerCrossEntropyLoss
from liger_kernel.transformers.expert_parallel import register_expert_parallel
from liger_kernel.transformers.fused_add_rms_norm import LigerFusedAddRMSNorm
from liger_kernel.transformers.fused_ce_tvd import LigerFusedCETVDLoss
from liger_kernel.transformers.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyLoss
from liger_kernel.transformers.fused_linear_jsd import LigerFusedLinearJSD
from liger_kernel.transformers.fused_linear_kl_div import LigerFusedLinearKLDivLoss
from liger_kernel.transformers.fused_linear_score_centering import ISCorrection, LigerFusedLinearScoreCenteringLoss
from liger_kernel.transformers.gated_rms_norm import LigerRMSNormGated
from liger_kernel.transformers.geglu import LigerGEGLUMLP, LigerGEGLUMLPForGemma4
from liger_kernel.transformers.jsd import LigerJSD
from liger_kernel.transformers.kl_div import LigerKLDIVLoss
from liger_kernel.transformers.layer_norm import LigerLayerNorm
from liger_kernel.transformers.llama4_rope import liger_llama4_text_rotary_pos_emb, liger_llama4_vision_rotary_pos_emb
from liger_kernel.transformers.mlp import LigerFalconH1MLP, LigerMLP
from liger_kernel.transformers.modulated_rms_norm import LigerModulatedRMSNorm
from liger_kernel.transformers.patching.families import FAMILIES, missing
from liger_kernel.transformers.qwen2vl_mrope import liger_multimodal_rotary_pos_emb
from liger_kernel.transformers.relu_squared import LigerReLUSquared
from liger_kernel.transformers.rms_norm import (  # noqa: F401
    LigerRMSNorm,
    LigerRMSNormForMuseGlimmer,
    LigerRMSNormForMuseGlimmerTextCentered,
)
from liger_kernel.transformers.rope import liger_rotary_pos_emb
from liger_kernel.transformers.router import LigerRouter
from liger_kernel.transformers.short_convolution import LigerShortConvolution
from liger_kernel.transformers.softmax import LigerSoftmax
from liger_kernel.transformers.swiglu import (
    LigerBlockSparseTop2MLP,
    LigerExperts,  # noqa: F401  (not in __all__, as in the API)
    LigerFalconH1SwiGLUMLP,
    LigerPhi3SwiGLUMLP,
    LigerQwen3MoeSwiGLUMLP,
    LigerSwiGLUMLP,
    LigerSwiGLUMLPForMuseGlimmer,  # noqa: F401
)
from liger_kernel.transformers.tiled_mlp import LigerTiledGEGLUMLP, LigerTiledSwiGLUMLP
from liger_kernel.transformers.tvd import LigerTVDLoss
from liger_kernel.transformers.vocab_parallel_cross_entropy import LigerVocabParallelCrossEntropy  # noqa: F401
from liger_kernel.transformers.xielu import LigerXIELU

_RESEARCH = {
    "LigerDyT": "dyt", "LigerGroupNorm": "group_norm", "LigerMHC": "mhc", "LigerPolyNorm": "poly_norm",
    "LigerMultiTokenAttention": "multi_token_attention", "LigerSparsemax": "sparsemax",
}  # fmt: skip
_LAZY = {
    "AutoLigerKernelForCausalLM": "auto_model",
    "drop_masks_of_ones": "patching.ones",
    "use_as_hub_kernels": "patching.hub",
    **dict.fromkeys(("_apply_liger_kernel", "_apply_liger_kernel_to_instance"), "monkey_patch"),
    **{f"apply_liger_kernel_to_{name}": "monkey_patch" for name in FAMILIES},
    "apply_liger_kernel_by_structure": "patching.structure",
}
register_expert_parallel()


def is_transformers_available() -> bool:
    """Whether transformers is installed."""
    return importlib.util.find_spec("transformers") is not None


def __getattr__(name):
    if name in _RESEARCH:
        return getattr(importlib.import_module(f"{__name__}.{_RESEARCH[name]}"), name)
    if name not in _LAZY:
        raise missing(__name__, name)
    if not is_transformers_available():
        raise ImportError(f"{name} needs the transformers library: run `pip install transformers`")
    return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)


__all__ = [
    "is_transformers_available", "ISCorrection", "LigerFusedLinearScoreCenteringLoss",
    "LigerBlockSparseTop2MLP", "LigerCrossEntropyLoss", "LigerDyT", "LigerFalconH1MLP",
    "LigerFalconH1SwiGLUMLP", "LigerFusedAddRMSNorm", "LigerFusedCETVDLoss", "LigerFusedLinearCrossEntropyLoss",
    "LigerFusedLinearJSD", "LigerFusedLinearKLDivLoss",
    "liger_llama4_text_rotary_pos_emb", "liger_llama4_vision_rotary_pos_emb", "LigerGEGLUMLP", "LigerGroupNorm",
    "LigerJSD", "LigerKLDIVLoss", "LigerLayerNorm", "LigerMHC", "LigerMLP", "LigerModulatedRMSNorm",
    "LigerMultiTokenAttention", "LigerPhi3SwiGLUMLP", "LigerPolyNorm", "LigerQwen3MoeSwiGLUMLP", "LigerReLUSquared",
    "LigerRMSNorm", "LigerRMSNormGated", "LigerRouter", "LigerShortConvolution", "LigerSoftmax", "LigerSparsemax",
    "LigerSwiGLUMLP", "LigerTiledGEGLUMLP", "LigerTiledSwiGLUMLP", "LigerTVDLoss", "LigerXIELU",
    "liger_multimodal_rotary_pos_emb", "liger_rotary_pos_emb", "register_expert_parallel",
]  # fmt: skip
if is_transformers_available():
    __all__ += _LAZY
