"""The norms; formulas in liger/ops/norm/norm.h.

RMSNorm (Zhang & Sennrich 2019, arXiv:1910.07467) alone, of a sum and with a modulation, and LayerNorm (Ba et al. 2016,
arXiv:1607.06450).
"""

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from liger_kernel._library import ops
from liger_kernel._recompute import run
from liger_kernel.operators.common import beside, full_tensor, promoted
from liger_kernel.operators.coverage import NORM_KERNELS
from liger_kernel.utils import in_float_under_autocast

_CASTING: dict[str | int, int] = {"none": -1, "llama": 0, "gemma": 1}


def casting_code(mode: str | int) -> int:
    """The code of a casting mode, "llama", "gemma" or "none"; raises AssertionError for another."""
    code: Any = _CASTING.get(mode, mode)
    if code not in _CASTING.values():
        raise AssertionError(f"casting_mode is one of {list(_CASTING)}, not {mode!r}")
    return code


def check_width(x: Tensor, w: Tensor | None) -> None:
    if w is not None and x.shape[-1] != w.shape[0]:
        raise AssertionError(f"the input's last dimension is {x.shape[-1]}, the weight has {w.shape[0]}")


def check_widths(X: Tensor, *vectors: Tensor | None) -> None:
    for v in vectors:
        if v is not None and X.shape[-1] != v.shape[0]:
            raise ValueError(f"the input's last dimension is {X.shape[-1]}, a weight or bias has {v.shape[0]}")


def check_modulation(X: Tensor, W: Tensor | None, scale: Tensor, shift: Tensor | None) -> None:
    check_width(X, W)
    if X.numel() == 0:
        return
    width, rows = X.shape[-1], X.numel() // X.shape[-1]
    if scale.numel() == 0 or scale.numel() % width != 0:
        raise AssertionError(f"scale has {scale.numel()} elements, which is no multiple of the width {width}")
    if rows % (scale.numel() // width) != 0:
        raise AssertionError(f"scale has {scale.numel() // width} rows, which do not divide the input's {rows}")
    if shift is not None and shift.numel() != scale.numel():
        raise AssertionError(f"shift has {shift.numel()} elements, scale {scale.numel()}")


def as_rows(t: Any, width: int) -> Any:
    return None if t is None else t.reshape(-1 if width else 1, width)


class LigerRMSNormFunction:
    @staticmethod
    def apply(
        X: Tensor, W: Tensor | None, eps: float, offset: float = 0.0, casting_mode: str | int = "llama",
        in_place: bool = True, row_mode: bool | None = None,
    ) -> Tensor:  # fmt: skip
        """y = X / rms(X) · (W + offset) over the last dimension.

        X [..., H]; W [H] of any dtype that X may have, or None; y has X's dtype. casting_mode says where the matched
        model rounds. in_place and row_mode are accepted as hints: no argument is ever changed. DTensors stay sharded;
        beside a plain W a DTensor is gathered, and y is plain. Raises AssertionError where H and W differ.
        """
        try:
            x, code = X if W is None else full_tensor(X, W), casting_code(casting_mode)
            return run(ops.rms_norm, x, beside(X, W), float(eps), float(offset), code)
        except RuntimeError:
            check_width(X, W)  # see liger_layer_norm
            raise


def liger_rms_norm(
    X: Tensor, W: Tensor | None, eps: float, offset: float = 0.0, casting_mode: str = "llama", in_place: bool = True
) -> Tensor:
    """X / rms(X) · (W + offset) over the last dimension; see LigerRMSNormFunction."""
    return LigerRMSNormFunction.apply(X, W, eps, offset, casting_mode)


class LigerFusedAddRMSNormFunction:
    @staticmethod
    def apply(
        X: Tensor, R: Tensor, W: Tensor | None, eps: float, offset: float = 0.0, casting_mode: str | int = "llama",
        in_place: bool = False,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """(rms_norm(S), S) for S = X + R in the dtype that torch's sum has, to which S is rounded; see
        LigerRMSNormFunction. in_place is a hint: no argument is changed."""
        check_width(X, W)
        X, R = promoted(X, R)
        return ops.fused_add_rms_norm(X, R, beside(X, W), float(eps), float(offset), casting_code(casting_mode))


def liger_fused_add_rms_norm(
    X: Tensor, R: Tensor, W: Tensor | None, eps: float, offset: float = 0.0, casting_mode: str = "llama",
    in_place: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(rms_norm(X + R), X + R); see LigerFusedAddRMSNormFunction."""
    return LigerFusedAddRMSNormFunction.apply(X, R, W, eps, offset, casting_mode)


class LigerModulatedRMSNormFunction:
    @staticmethod
    def apply(
        X: Tensor, W: Tensor | None, scale: Tensor, shift: Tensor | None, eps: float, offset: float = 0.0,
        casting_mode: str | int = "llama", in_place: bool = True,
    ) -> Tensor:  # fmt: skip
        """rms_norm(X) · (1 + scale) + shift, an adaptive norm (Peebles & Xie 2022, arXiv:2212.09748); see
        LigerRMSNormFunction.

        scale and shift (or None) hold a row of X's width for all rows of X, for each of equal runs of them, or for
        every one, of any dtype that X may have. in_place is a hint: no argument is changed. Raises AssertionError for
        sizes that do not fit.
        """
        X = full_tensor(X, scale)
        check_modulation(X, W, scale, shift)
        width, code = X.shape[-1], casting_code(casting_mode)
        scale, shift = as_rows(beside(X, scale), width), as_rows(beside(X, shift), width)
        return ops.modulated_rms_norm(X, beside(X, W), scale, shift, float(eps), float(offset), code)


def liger_modulated_rms_norm(
    X: Tensor, W: Tensor | None, scale: Tensor, shift: Tensor | None = None, eps: float = 1e-6, offset: float = 0.0,
    casting_mode: str = "llama", in_place: bool = True,
) -> Tensor:  # fmt: skip
    """rms_norm(X) · (1 + scale) + shift; see LigerModulatedRMSNormFunction."""
    return LigerModulatedRMSNormFunction.apply(X, W, scale, shift, eps, offset, casting_mode)


def liger_layer_norm(X: Tensor, W: Tensor | None, B: Tensor | None, eps: float) -> Tensor:
    """(X − mean) / sqrt(variance + eps) · W + B over the last dimension.

    X [..., H]; W and B [H] of any dtype that X may have, or None; the result has X's dtype. Raises ValueError where a
    width differs.
    """
    try:
        return run(ops.layer_norm, X, beside(X, W), beside(X, B), float(eps))
    except RuntimeError:
        # Says it in the API's own exception. Asked before, it would add half to the time of a small call.
        check_widths(X, W, B)
        raise


class LigerLayerNormFunction:
    apply = staticmethod(liger_layer_norm)


def eps_of(module: Any) -> float:
    """The eps of a norm now. Modules of transformers call it by either name; that of some is None, for a default."""
    found = getattr(module, getattr(module, "liger_eps", "variance_epsilon"))
    return module.variance_epsilon if found is None else found


def weight_in(norm: Any) -> Tensor | None:
    """The weight that an RMSNorm multiplies by: Gemma 4's has one that a flag leaves out when it runs."""
    return None if getattr(norm, "liger_with_scale", False) and not norm.with_scale else norm.weight


def initial(init_fn: str, size: int) -> nn.Parameter:
    """A weight that begins as "ones" or "zeros"; raises AssertionError for another word."""
    if init_fn not in ("ones", "zeros"):
        raise AssertionError(f"init_fn is 'ones' or 'zeros', not {init_fn!r}")
    return nn.Parameter(getattr(torch, init_fn)(size))


class LigerRMSNorm(nn.Module):
    """y = x / rms(x) · (weight + offset) over the last dimension (Zhang & Sennrich 2019, arXiv:1910.07467).

    casting_mode is where the matched model rounds: "llama" before the weight, "gemma" only the result, "none" every
    step. in_place and row_mode are hints. Raises AssertionError for an init_fn other than "ones" and "zeros".
    """

    # What eps_of and weight_in ask for: an attribute that a module lacks takes microseconds to look for.
    liger_eps, liger_with_scale = "variance_epsilon", False
    weight: nn.Parameter | None

    def __init__(
        self, hidden_size: int, eps: float = 1e-6, offset: float = 0.0, casting_mode: str | int = "llama",
        init_fn: str = "ones", in_place: bool = True, row_mode: bool | None = None, elementwise_affine: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        weight = initial(init_fn, hidden_size)
        self.register_parameter("weight", weight if elementwise_affine else None)
        self.elementwise_affine, self.variance_epsilon, self.offset = elementwise_affine, eps, offset
        self.casting_mode, self.in_place, self.row_mode = casting_mode, in_place, row_mode

    def forward(self, hidden_states: Tensor) -> Tensor:
        return LigerRMSNormFunction.apply(hidden_states, weight_in(self), eps_of(self), self.offset, self.casting_mode)

    def extra_repr(self) -> str:
        shape = None if self.weight is None else tuple(self.weight.shape)
        return (
            f"weight_shape={shape}, eps={eps_of(self)}, offset={self.offset}, in_place={self.in_place}, "
            f"row_mode={self.row_mode}"
        )


def _preset(name, offset, casting_mode, init_fn, in_place):
    """LigerRMSNorm under a model's name, with that model's defaults."""

    class Preset(LigerRMSNorm):
        def __init__(
            self, hidden_size, eps=1e-6, offset=offset, casting_mode=casting_mode, init_fn=init_fn, in_place=in_place,
            row_mode=None,
        ):  # fmt: skip
            super().__init__(hidden_size, eps, offset, casting_mode, init_fn, in_place, row_mode)

    Preset.__name__ = Preset.__qualname__ = name
    return Preset


LigerRMSNormForGemma = _preset("LigerRMSNormForGemma", 1.0, "gemma", "zeros", True)
LigerRMSNormForGemma2 = _preset("LigerRMSNormForGemma2", 1.0, "gemma", "zeros", False)
LigerRMSNormForGlm4 = _preset("LigerRMSNormForGlm4", 0.0, "llama", "ones", False)
LigerRMSNormForQwen3Next = _preset("LigerRMSNormForQwen3Next", 1.0, "gemma", "zeros", False)
# OLMo-2 multiplies by the weight in float and rounds once, whatever the preset's name says elsewhere.
LigerRMSNormForOlmo2 = _preset("LigerRMSNormForOlmo2", 0.0, "gemma", "ones", False)


class LigerRMSNormForGemma3(LigerRMSNorm):
    def __init__(
        self, dim: int, eps: float = 1e-6, offset: float = 1.0, casting_mode: str | int = "gemma",
        init_fn: str = "zeros", in_place: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(dim, eps, offset, casting_mode, init_fn, in_place)


class LigerRMSNormForGemma4(LigerRMSNorm):
    """Gemma 4's norm, which has a weight or, with with_scale=False, none."""

    def __init__(
        self, dim: int, eps: float = 1e-6, offset: float = 0.0, casting_mode: str | int = "gemma",
        init_fn: str = "ones", in_place: bool = False, with_scale: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(dim, eps, offset, casting_mode, init_fn, in_place, elementwise_affine=with_scale)
        self.with_scale = with_scale


class LigerRMSNormWithoutWeight(LigerRMSNorm):
    """x / rms(x) over the last dimension, in x's dtype; a weight that a module of another class has does not count."""

    def __init__(self, hidden_size: int = 0, eps: float = 1e-6, casting_mode: str | int = "gemma") -> None:
        super().__init__(hidden_size, eps, casting_mode=casting_mode, elementwise_affine=False)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return LigerRMSNormFunction.apply(hidden_states, None, eps_of(self), 0.0, self.casting_mode)


class LigerFusedAddRMSNorm(LigerRMSNorm):
    """(rms_norm(s), s) for s = hidden_states + residual; options as LigerRMSNorm."""

    def __init__(
        self, hidden_size: int, eps: float = 1e-6, offset: float = 0.0, casting_mode: str | int = "llama",
        init_fn: str = "ones", in_place: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(hidden_size, eps, offset, casting_mode, init_fn, in_place)

    def forward(self, hidden_states: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        return LigerFusedAddRMSNormFunction.apply(
            hidden_states, residual, self.weight, self.variance_epsilon, self.offset, self.casting_mode
        )


class LigerModulatedRMSNorm(LigerRMSNorm):
    """rms_norm(x) · (1 + scale) + shift; options as LigerRMSNorm, shapes as LigerModulatedRMSNormFunction."""

    def __init__(
        self, hidden_size: int, eps: float = 1e-6, offset: float = 0.0, casting_mode: str | int = "llama",
        init_fn: str = "ones", in_place: bool = True, elementwise_affine: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(hidden_size, eps, offset, casting_mode, init_fn, in_place, None, elementwise_affine)

    def forward(self, hidden_states: Tensor, scale: Tensor, shift: Tensor | None = None) -> Tensor:
        return LigerModulatedRMSNormFunction.apply(
            hidden_states, self.weight, scale, shift, self.variance_epsilon, self.offset, self.casting_mode
        )


class LigerLayerNorm(nn.Module):
    """(x − mean) / sqrt(variance + eps) · weight + bias over the last dimension (Ba et al. 2016, arXiv:1607.06450).

    The bias always exists; it starts at zero, or random with bias=True. Raises AssertionError for an init_fn other than
    "ones" and "zeros". impl, mode and backend change nothing.
    """

    liger_eps = "variance_epsilon"

    def __init__(
        self, hidden_size: int, eps: float = 1e-6, bias: bool = False, init_fn: str = "ones", impl: str | None = None,
        mode: str | None = None, backend: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.hidden_size, self.eps, self.variance_epsilon = hidden_size, eps, eps
        self.weight = initial(init_fn, hidden_size)
        self.bias = nn.Parameter(torch.randn(hidden_size) if bias else torch.zeros(hidden_size))

    def forward(self, hidden_states: Tensor) -> Tensor:
        return liger_layer_norm(hidden_states, self.weight, self.bias, eps_of(self))

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, eps={self.eps}"


class LigerLayerNormForCohere(LigerLayerNorm):
    """Cohere's LayerNorm, which has a weight and no bias, and OLMo's, which has neither: computed in float, in x's
    dtype."""

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(self, hidden_size: int, eps: float = 1e-5, bias: bool = False) -> None:
        super().__init__(hidden_size, eps, bias)
        if not bias:
            self.bias = None
