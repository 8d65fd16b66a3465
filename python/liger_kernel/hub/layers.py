"""The layers. A layer has a forward and nothing else: `self` is the module, or the tagged function, whose forward it
replaces.

What the operators have no kernel for, and what they would round in another way, goes to the code that was replaced.
"""

import inspect

from torch import nn

from liger_kernel.operators.coverage import GATED_KERNELS, NORM_KERNELS, ROPE_KERNELS, kernels_cover
from liger_kernel.ops import LigerGELUMulFunction, LigerRMSNormFunction, LigerRopeFunction, LigerSiLUMulFunction
from liger_kernel.transformers.patching import mixer_functions
from liger_kernel.transformers.patching.part import rms_norm_input


class HubLayer(nn.Module):
    """What `kernels` wants to know of a layer."""

    can_torch_compile = True
    has_backward = True


def _layer(name, doc, forward):
    forward.__qualname__ = f"{name}.forward"
    return type(name, (HubLayer,), {"forward": forward, "__doc__": doc, "__module__": __name__})


def _norm(name, doc, offset, casting_mode):
    def forward(self, hidden_states):
        weight, x = getattr(self, "weight", None), hidden_states  # some of a class have no weight
        fits = weight is not None and kernels_cover(x, NORM_KERNELS)
        if not fits or (x := rms_norm_input(x, weight, casting_mode)) is None:
            return type(self).forward(self, hidden_states)
        eps = self.eps if hasattr(self, "eps") else self.variance_epsilon
        return LigerRMSNormFunction.apply(x, weight, eps, offset, casting_mode, False)

    return _layer(name, doc, forward)


LigerRMSNorm = _norm("LigerRMSNorm", "y = round(x / rms(x)) · weight, as Llama's.", 0.0, "llama")
LigerFloatRMSNorm = _norm("LigerFloatRMSNorm", "y = round(x / rms(x) · weight), as OLMo-2's.", 0.0, "gemma")
LigerZeroCenteredRMSNorm = _norm(
    "LigerZeroCenteredRMSNorm", "y = round(x / rms(x) · (1 + weight)), as Gemma's.", 1.0, "gemma"
)


def _rotary(name, doc, part=1, any_dtype=False):
    def forward(self, q, k, cos, sin, unsqueeze_dim=1):
        # With tables of another dtype the result is of neither, unless the original makes it q's.
        if not (any_dtype or cos.dtype == q.dtype) or not _fits(q, k, cos, sin, unsqueeze_dim, q.shape[-1] // part):
            return type(self).forward(self, q, k, cos, sin, unsqueeze_dim)
        # Tables [seq, dim] have no dimension of the batch, whose place unsqueeze_dim=0 is.
        return LigerRopeFunction.apply(q, k, cos, sin, None, unsqueeze_dim or 1, q.shape[-1])

    return _layer(name, doc, forward)


LigerRotaryEmbedding = _rotary(
    "LigerRotaryEmbedding", "(q, k) rotated by tables of their dtype, as wide as a head, whose halves are equal."
)
LigerFloatRotaryEmbedding = _rotary(
    "LigerFloatRotaryEmbedding", "The same with tables of any dtype; the result is of q's dtype.", any_dtype=True
)
LigerHalfTableRotaryEmbedding = _rotary(
    "LigerHalfTableRotaryEmbedding", "(q, k) rotated by tables of their dtype, half as wide as a head, as GPT-OSS's.", 2
)


def _fits(q, k, cos, sin, unsqueeze_dim, width):
    """Whether the operator has a layout of these tensors: [batch, heads, seq, dim], or [batch, seq, heads, dim] with
    unsqueeze_dim 2."""
    if (
        not (kernels_cover(q, ROPE_KERNELS) and kernels_cover(cos))
        or k.dtype != q.dtype
        or sin.dtype != cos.dtype
        or q.dim() != 4
        or k.dim() != 4
    ):
        return False
    if cos.shape != sin.shape or cos.shape[-1] != width or q.shape[0] != k.shape[0]:
        return False
    if unsqueeze_dim == 0:
        return cos.dim() == 2 and cos.shape[0] == q.shape[2] == k.shape[2]
    if unsqueeze_dim not in (1, 2) or cos.dim() != 3 or cos.shape[0] not in (1, q.shape[0]):
        return False
    place = 3 - unsqueeze_dim
    return cos.shape[1] == q.shape[place] == k.shape[place]


class LigerGatedMLP(HubLayer):
    """down_proj(act(gate_proj(x)) · up_proj(x)) for the activations of `GATES`; the projections are called, with what
    wraps them."""

    def forward(self, x):
        if not kernels_cover(x, GATED_KERNELS):
            return type(self).forward(self, x)
        return self.down_proj(gate_of(self).apply(self.gate_proj(x), self.up_proj(x)))


#: Transformers' and torch's activation classes, of which an MLP holds one -> the operator that multiplies with it.
GATES = {
    "SiLU": LigerSiLUMulFunction,
    "SiLUActivation": LigerSiLUMulFunction,
    "GELUTanh": LigerGELUMulFunction,
    "NewGELUActivation": LigerGELUMulFunction,
}


def gate_of(mlp):
    """The operator of a gated MLP's activation; None where there is none."""
    activation = type(getattr(mlp, "act_fn", None) or getattr(mlp, "activation_fn", None))
    known = activation.__module__.split(".")[0] in ("torch", "transformers")
    return GATES.get(activation.__name__) if known else None


def _function(name, of):
    """The layer of a function of mixer_functions.py, with its parameters. transformers' function may have more of them
    by name, of which `kernels` asks for as many: use_as_hub_kernels makes a layer with those."""

    def forward(self, *args, **kwargs):
        result = of(*args, **kwargs)
        return type(self).forward(self, *args, **kwargs) if result is NotImplemented else result

    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    forward.__signature__ = inspect.Signature([own, *inspect.signature(of).parameters.values()])
    return _layer(name, of.__doc__, forward)


LigerCausalConv1d = _function("LigerCausalConv1d", mixer_functions.liger_causal_conv1d_fn)
LigerChunkGatedDeltaRule = _function("LigerChunkGatedDeltaRule", mixer_functions.liger_chunk_gated_delta_rule)
LigerChunkKimiDeltaAttention = _function(
    "LigerChunkKimiDeltaAttention", mixer_functions.liger_chunk_kimi_delta_attention
)
LigerMamba2ChunkScan = _function("LigerMamba2ChunkScan", mixer_functions.liger_mamba2_chunk_scan)
LigerMamba2Parts = _function("LigerMamba2Parts", mixer_functions.liger_mamba2_split_conv1d_scan_combined)

#: The layers that liger_kernel.transformers.patching.formulas names.
NORMS = (LigerRMSNorm, LigerFloatRMSNorm, LigerZeroCenteredRMSNorm)
ROTARIES = (LigerRotaryEmbedding, LigerFloatRotaryEmbedding, LigerHalfTableRotaryEmbedding)
MIXERS = (
    LigerCausalConv1d,
    LigerChunkGatedDeltaRule,
    LigerChunkKimiDeltaAttention,
    LigerMamba2ChunkScan,
    LigerMamba2Parts,
)
