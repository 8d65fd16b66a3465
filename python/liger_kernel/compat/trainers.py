"""What Axolotl and scripts of others import from liger_kernel.transformers.monkey_patch, among it what patches single
modules."""

import types

from liger_kernel.operators.activation import LigerReLUSquared
from liger_kernel.operators.coverage import kinds_in
from liger_kernel.operators.loss import LigerCrossEntropyLoss, liger_cross_entropy
from liger_kernel.operators.mlp import LigerGEGLUMLP, LigerGEGLUMLPForGemma4
from liger_kernel.operators.norm import LigerLayerNorm
from liger_kernel.transformers.patching.place import Edits, ReplacedModule, own_attributes, replace_class
from liger_kernel.transformers.qwen2vl_mrope import liger_multimodal_rotary_pos_emb
from liger_kernel.transformers.rms_norm import (
    LigerRMSNorm,
    LigerRMSNormForMuseGlimmer,
    LigerRMSNormForMuseGlimmerTextCentered,
)
from liger_kernel.transformers.rope import (
    liger_rotary_pos_emb,
    liger_rotary_pos_emb_gpt_oss,
    liger_rotary_pos_emb_vision,
)
from liger_kernel.transformers.swiglu import (
    LigerBlockSparseTop2MLP,
    LigerExperts,
    LigerPhi3SwiGLUMLP,
    LigerSwiGLUMLP,
    LigerSwiGLUMLPForMuseGlimmer,
)
from liger_kernel.utils import PEFT_AVAILABLE


def _bind_method_to_module(module, method_name: str, new_method) -> None:
    """Bind a function to one module, under `method_name`."""
    module.__dict__[method_name] = types.MethodType(new_method, module)


def _patch_rms_norm_module(module, offset=0.0, eps=1e-6, casting_mode="llama", in_place=True, row_mode=None) -> None:
    """Make one RMSNorm module compute as LigerRMSNorm does; of a PEFT wrapper, both copies of the module."""
    if type(module).__name__ == "ModulesToSaveWrapper":
        parts = [*module.modules_to_save.values(), module.original_module]
    else:
        parts = [module]
    preset = {"offset": offset, "eps": eps, "casting_mode": casting_mode, "in_place": in_place, "row_mode": row_mode}
    for part in parts:
        replace_class(part, ReplacedModule(LigerRMSNorm), Edits(), **own_attributes(part, LigerRMSNorm, **preset))


def _patch_layer_norm_module(module, eps=1e-6) -> None:
    """Make one LayerNorm module compute as LigerLayerNorm does; of a PEFT wrapper, both copies of the module."""
    parts = (
        [*module.modules_to_save.values(), module.original_module]
        if type(module).__name__ == "ModulesToSaveWrapper"
        else [module]
    )
    for part in parts:
        shape = getattr(part, "normalized_shape", None) or part.weight.shape
        own = {"hidden_size": getattr(part, "hidden_size", None) or shape[0]}
        if getattr(part, "variance_epsilon", None) is None:
            own["variance_epsilon"] = eps if getattr(part, "eps", None) is None else part.eps
            own |= {"liger_eps": "eps"} if hasattr(part, "eps") else {}
        replace_class(part, ReplacedModule(LigerLayerNorm), Edits(), **own)


def _patch_swiglu_module(module, liger_module) -> None:
    """Make one gated feed-forward module compute as `liger_module`, a class, does."""
    replace_class(module, ReplacedModule(liger_module, kinds=kinds_in(module)), Edits())


def _patch_geglu_module(module) -> None:
    """Make one gated feed-forward module compute as LigerGEGLUMLP does."""
    replace_class(module, ReplacedModule(LigerGEGLUMLP, kinds=kinds_in(module)), Edits())
