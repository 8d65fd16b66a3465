"""Activations, alone and gated, and softmax; formulas in liger/core/math.h and liger/ops/activation.

SwiGLU and GeGLU (Shazeer 2020, arXiv:2002.05202), squared ReLU (So et al. 2021, arXiv:2109.08668) and xIELU (Huang &
Schlag 2024, arXiv:2411.13010).
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from liger_kernel._library import ops
from liger_kernel._recompute import run
from liger_kernel.operators.common import first_derivative_only, placed_as, promoted
from liger_kernel.operators.coverage import ACTIVATION_KERNELS, XIELU_KERNELS
from liger_kernel.utils import in_float_under_autocast

#: The number of each name in LIGER_ACTIVATIONS (liger/options.h).
ACTIVATIONS = {name: number for number, name in enumerate(ops.activations())}
SILU, GELU_TANH, GELU_ERF, RELU_SQUARED = (ACTIVATIONS[n] for n in ("silu", "gelu_tanh", "gelu_erf", "relu_squared"))

#: The number of each name in transformers' ACT2FN.
CONFIG_NAMES = {
    **dict.fromkeys(("silu", "swish"), SILU),
    **dict.fromkeys(("gelu", "gelu_python"), GELU_ERF),
    **dict.fromkeys(("gelu_pytorch_tanh", "gelu_python_tanh", "gelu_new", "gelu_accurate", "gelu_fast"), GELU_TANH),
    "relu2": RELU_SQUARED,
}

#: Rows of libliger's table of maps to probabilities.
SOFTMAX, SPARSEMAX = range(2)


def activation_of(config: Any, *allowed: int, default: int | None = None) -> int:
    """The number of config.hidden_activation or hidden_act, `default` where it has neither; raises ValueError where it
    is none of `allowed`."""
    name = getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None)
    number = default if name is None else CONFIG_NAMES.get(name)
    if number not in allowed:
        names = [known for known, number in CONFIG_NAMES.items() if number in allowed]
        raise ValueError(f"hidden_act must be one of {names}, got {name!r}")
    return number


class LigerSiLUMulFunction:
    @staticmethod
    def apply(a: Tensor, b: Tensor, gate_multiplier: float = 1.0, down_multiplier: float = 1.0) -> Tensor:
        """silu(gate_multiplier · a) · b · down_multiplier for a, b of one shape, in the dtype that torch's product has;
        neither is changed. A plain tensor beside a DTensor is placed as that."""
        c = run(ops.gated, *promoted(placed_as(a, b), placed_as(b, a)), SILU, float(gate_multiplier))
        return c if down_multiplier == 1 else c * float(down_multiplier)


def liger_swiglu(a: Tensor, b: Tensor) -> Tensor:
    """silu(a) · b; see LigerSiLUMulFunction."""
    return LigerSiLUMulFunction.apply(a, b)


class LigerGELUMulFunction:
    @staticmethod
    def apply(a: Tensor, b: Tensor, approximate: str = "tanh") -> Tensor:
        """gelu(a) · b for a, b of one shape, in the dtype that torch's product has; neither is changed. approximate is
        "tanh" or "none", as torch.nn.functional.gelu has it."""
        return run(ops.gated, *promoted(a, b), {"tanh": GELU_TANH, "none": GELU_ERF}[approximate], 1.0)


def liger_geglu(a: Tensor, b: Tensor) -> Tensor:
    """gelu(a) · b, gelu in its tanh form; see LigerGELUMulFunction."""
    return LigerGELUMulFunction.apply(a, b)


class _InPlaceGateUp(Function):
    @staticmethod
    def forward(ctx, y):
        ctx.save_for_backward(y)
        ctx.done = False
        return ops.gated_packed_forward(y, SILU, 1.0)

    @staticmethod
    @first_derivative_only
    def backward(ctx, dc):
        if ctx.done:
            raise RuntimeError("backward ran twice, and in_place=True has put the gradient where the input was")
        ctx.done = True
        (y,) = ctx.saved_tensors
        ops.gated_packed_backward_(dc, y, SILU, 1.0)
        return y


class LigerFusedGateUpSiLUMulFunction:
    @staticmethod
    def apply(y: Tensor, in_place: bool = False) -> Tensor:
        """silu(gate) · up for y [..., 2F] = [gate, up]; the result is [..., F]. Raises ValueError where 2F is odd.

        in_place=True lets backward write the gradient over y; a second backward then raises RuntimeError.
        """
        return _InPlaceGateUp.apply(y.contiguous()) if in_place else run(ops.gated_packed, y, SILU, 1.0)


class LigerReLUSquaredFunction:
    @staticmethod
    def apply(X: Tensor) -> Tensor:
        """max(X, 0)², element by element, in fresh memory."""
        return ops.activate(X, RELU_SQUARED)


def liger_relu_squared(x: Tensor) -> Tensor:
    """max(x, 0)², element by element."""
    return ops.activate(x, RELU_SQUARED)


class LigerReLUSquared(nn.Module):
    """max(x, 0)², element by element."""

    def __init__(self) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        return ops.activate(x, RELU_SQUARED)


def liger_xielu(
    x: Tensor, alpha_p: Tensor, alpha_n: Tensor, beta: float | Tensor = 0.5, eps: float | Tensor = -1e-6
) -> Tensor:
    """p x² + beta x where x > 0, n (expm1(min(x, eps)) − x) + beta x elsewhere, with p = softplus(alpha_p) and
    n = beta + softplus(alpha_n); in x's dtype.

    alpha_p and alpha_n are one number each and have gradients; beta and eps are numbers, or tensors without gradients.
    """
    beta, eps = (v if isinstance(v, Tensor) else x.new_full((), v, dtype=torch.float32) for v in (beta, eps))
    return ops.xielu(x, alpha_p, alpha_n, beta, eps)


class LigerXIELUFunction:
    apply = staticmethod(liger_xielu)


class LigerXIELU(nn.Module):
    """liger_xielu with its parameters, which have the names and shapes of transformers' XIELUActivation.

    p and n are alpha_p_init and alpha_n_init at the start.
    """

    beta: Tensor
    eps: Tensor

    def __init__(
        self, alpha_p_init: float = 0.8, alpha_n_init: float = 0.8, beta: float = 0.5, eps: float = -1e-6,
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        inverse = lambda softplus: nn.Parameter(torch.full((1,), math.log(math.expm1(softplus)), dtype=dtype))
        self.alpha_p, self.alpha_n = inverse(alpha_p_init), inverse(alpha_n_init - beta)
        self.register_buffer("beta", torch.tensor(beta, dtype=dtype))
        self.register_buffer("eps", torch.tensor(eps, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return liger_xielu(x, self.alpha_p, self.alpha_n, self.beta, self.eps)


class LigerSoftmaxFunction:
    @staticmethod
    def apply(input_: Tensor) -> Tensor:
        """exp(x) / Σ exp(x) over the last dimension of x [..., n], summed in float, in x's dtype."""
        return ops.softmax(input_, SOFTMAX)


def liger_softmax(x: Tensor) -> Tensor:
    """Softmax over the last dimension; see LigerSoftmaxFunction."""
    return ops.softmax(x, SOFTMAX)


class LigerSoftmax(nn.Module):
    """Softmax over the last dimension."""

    def __init__(self) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        return ops.softmax(x, SOFTMAX)
