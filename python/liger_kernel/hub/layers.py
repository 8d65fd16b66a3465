"""The layers. A layer has a forward and nothing else: `self` is the module, or the tagged function, whose forward it
replaces.

What the operators have no kernel for, and what they would round in another way, goes to the code that was replaced.
"""

import torch
from torch import nn

from liger_kernel.operators.coverage import GATED_KERNELS, NORM_KERNELS, ROPE_KERNELS, kernels_cover
from liger_kernel.ops import LigerGELUMulFunction, LigerRMSNormFunction, LigerRopeFunction, LigerSiLUMulFunction


class Layer(nn.Module):
    """What `kernels` wants to know of a layer."""

    can_torch_compile = True
    has_backward = True


class LigerRMSNorm(Layer):
    """y = round(x / rms(x)) · weight, as Llama's."""

    def forward(self, hidden_states):
        # With a weight of another dtype the product is of neither.
        if not kernels_cover(hidden_states, NORM_KERNELS) or self.weight.dtype != hidden_states.dtype:
            return type(self).forward(self, hidden_states)
        return LigerRMSNormFunction.apply(hidden_states, self.weight, _eps(self), 0.0, "llama", False)


class LigerFloatRMSNorm(Layer):
    """y = round(x / rms(x) · weight), as OLMo-2's."""

    def forward(self, hidden_states):
        if not _multiplies_in_float(self, hidden_states):
            return type(self).forward(self, hidden_states)
        return LigerRMSNormFunction.apply(hidden_states, self.weight, _eps(self), 0.0, "gemma", False)


class LigerZeroCenteredRMSNorm(Layer):
    """y = round(x / rms(x) · (1 + weight)), as Gemma's."""

    def forward(self, hidden_states):
        if not _multiplies_in_float(self, hidden_states):
            return type(self).forward(self, hidden_states)
        return LigerRMSNormFunction.apply(hidden_states, self.weight, _eps(self), 1.0, "gemma", False)


def _eps(norm):
    return norm.eps if hasattr(norm, "eps") else norm.variance_epsilon


def _multiplies_in_float(norm, x):
    weight = getattr(norm, "weight", None)  # some of a class have none
    return weight is not None and kernels_cover(x, NORM_KERNELS) and weight.dtype in (x.dtype, torch.float32)


class LigerRotaryEmbedding(Layer):
    """(q, k) rotated by tables of their dtype, as wide as a head, whose halves are equal."""

    def forward(self, q, k, cos, sin, unsqueeze_dim=1):
        # With tables of another dtype the result is of neither.
        if cos.dtype != q.dtype or not _fits(q, k, cos, sin, unsqueeze_dim, q.shape[-1]):
            return type(self).forward(self, q, k, cos, sin, unsqueeze_dim)
        return _rotated(q, k, cos, sin, unsqueeze_dim)


class LigerFloatRotaryEmbedding(Layer):
    """(q, k) rotated by tables of any dtype, as wide as a head, whose halves are equal; the result is of q's dtype."""

    def forward(self, q, k, cos, sin, unsqueeze_dim=1):
        if not _fits(q, k, cos, sin, unsqueeze_dim, q.shape[-1]):
            return type(self).forward(self, q, k, cos, sin, unsqueeze_dim)
        return _rotated(q, k, cos, sin, unsqueeze_dim)


class LigerHalfTableRotaryEmbedding(Layer):
    """(q, k) rotated by tables of their dtype, half as wide as a head, as GPT-OSS's."""

    def forward(self, q, k, cos, sin, unsqueeze_dim=1):
        if cos.dtype != q.dtype or not _fits(q, k, cos, sin, unsqueeze_dim, q.shape[-1] // 2):
            return type(self).forward(self, q, k, cos, sin, unsqueeze_dim)
        return _rotated(q, k, cos, sin, unsqueeze_dim)


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


def _rotated(q, k, cos, sin, unsqueeze_dim):
    # Tables [seq, dim] have no dimension of the batch, whose place unsqueeze_dim=0 is.
    return LigerRopeFunction.apply(q, k, cos, sin, None, unsqueeze_dim or 1, q.shape[-1])


class LigerGatedMLP(Layer):
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


#: The layers that liger_kernel.transformers.patching.formulas names.
NORMS = (LigerRMSNorm, LigerFloatRMSNorm, LigerZeroCenteredRMSNorm)
ROTARIES = (LigerRotaryEmbedding, LigerFloatRotaryEmbedding, LigerHalfTableRotaryEmbedding)
