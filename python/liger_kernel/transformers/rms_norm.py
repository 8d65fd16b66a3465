"""RMSNorm modules: one class, and a line of presets for each model that rounds or initialises in another way."""

import inspect

import torch
from torch import nn

from liger_kernel.ops import LigerRMSNormFunction
from liger_kernel.transformers.coverage import NORM_KERNELS


class LigerRMSNorm(nn.Module):
    """y = x / rms(x) · (weight + offset) over the last dimension (Zhang & Sennrich 2019, arXiv:1910.07467).

    casting_mode is where the matched model rounds: "llama" before the weight, "gemma" only the result, "none" every
    step. in_place and row_mode are hints. Raises AssertionError for an init_fn other than "ones" and "zeros".
    """

    kernels = NORM_KERNELS

    def __init__(
        self,
        hidden_size,
        eps=1e-6,
        offset=0.0,
        casting_mode="llama",
        init_fn="ones",
        in_place=True,
        row_mode=None,
        elementwise_affine=True,
    ):
        super().__init__()
        if init_fn not in ("ones", "zeros"):
            raise AssertionError(f"init_fn is 'ones' or 'zeros', not {init_fn!r}")
        self.elementwise_affine = elementwise_affine
        if elementwise_affine:
            self.weight = nn.Parameter(getattr(torch, init_fn)(hidden_size))
        else:
            self.register_parameter("weight", None)
        self.variance_epsilon, self.offset, self.casting_mode, self.in_place, self.row_mode = (
            eps,
            offset,
            casting_mode,
            in_place,
            row_mode,
        )

    def forward(self, hidden_states):
        return LigerRMSNormFunction.apply(
            hidden_states,
            self.weight,
            self.variance_epsilon,
            self.offset,
            self.casting_mode,
            self.in_place,
            self.row_mode,
        )

    @staticmethod
    def as_original(module, x):
        """x in the dtype of the original module's result: where it rounds before the weight, the product with the
        weight has the dtype of both."""
        if module.weight is None or module.casting_mode == "gemma":
            return x
        return x.to(torch.promote_types(x.dtype, module.weight.dtype))

    @classmethod
    def attributes_for(cls, module, **preset):
        """What forward reads and a norm of another class lacks: its eps, and the rest from `preset` or by default."""
        defaults = {name: parameter.default for name, parameter in inspect.signature(cls).parameters.items()} | preset
        eps = (getattr(module, name, None) for name in ("variance_epsilon", "eps"))
        return {
            "variance_epsilon": next((value for value in eps if value is not None), defaults["eps"]),
            **{name: defaults.get(name) for name in ("offset", "casting_mode", "in_place", "row_mode")},
        }

    def extra_repr(self):
        shape = None if self.weight is None else tuple(self.weight.shape)
        return (
            f"weight_shape={shape}, eps={self.variance_epsilon}, offset={self.offset}, in_place={self.in_place}, "
            f"row_mode={self.row_mode}"
        )


class LigerRMSNormForGemma(LigerRMSNorm):
    def __init__(
        self, hidden_size, eps=1e-6, offset=1.0, casting_mode="gemma", init_fn="zeros", in_place=True, row_mode=None
    ):
        super().__init__(hidden_size, eps, offset, casting_mode, init_fn, in_place, row_mode)


class LigerRMSNormForGemma2(LigerRMSNorm):
    def __init__(
        self, hidden_size, eps=1e-6, offset=1.0, casting_mode="gemma", init_fn="zeros", in_place=False, row_mode=None
    ):
        super().__init__(hidden_size, eps, offset, casting_mode, init_fn, in_place, row_mode)


class LigerRMSNormForGemma3(LigerRMSNorm):
    def __init__(self, dim, eps=1e-6, offset=1.0, casting_mode="gemma", init_fn="zeros", in_place=False):
        super().__init__(dim, eps, offset, casting_mode, init_fn, in_place)


class LigerRMSNormForOlmo2(LigerRMSNorm):
    """OLMo-2 multiplies by the weight in float and rounds once, whatever the preset's name says elsewhere."""

    def __init__(
        self, hidden_size, eps=1e-6, offset=0.0, casting_mode="gemma", init_fn="ones", in_place=False, row_mode=None
    ):
        super().__init__(hidden_size, eps, offset, casting_mode, init_fn, in_place, row_mode)


class LigerRMSNormForGlm4(LigerRMSNorm):
    def __init__(
        self, hidden_size, eps=1e-6, offset=0.0, casting_mode="llama", init_fn="ones", in_place=False, row_mode=None
    ):
        super().__init__(hidden_size, eps, offset, casting_mode, init_fn, in_place, row_mode)


class LigerRMSNormForQwen3Next(LigerRMSNorm):
    def __init__(
        self, hidden_size, eps=1e-6, offset=1.0, casting_mode="gemma", init_fn="zeros", in_place=False, row_mode=None
    ):
        super().__init__(hidden_size, eps, offset, casting_mode, init_fn, in_place, row_mode)


class LigerRMSNormForGemma4(LigerRMSNorm):
    """Gemma 4's norm, which has a weight or, with with_scale=False, none."""

    def __init__(
        self, dim, eps=1e-6, offset=0.0, casting_mode="gemma", init_fn="ones", in_place=False, with_scale=True
    ):
        super().__init__(dim, eps, offset, casting_mode, init_fn, in_place, elementwise_affine=with_scale)
        self.with_scale = with_scale
