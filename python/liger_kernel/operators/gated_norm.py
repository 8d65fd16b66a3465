"""RMSNorm with a gate; formulas in liger/ops/norm/gated_rms_norm.h."""

from typing import Any

import torch
from torch import Tensor, nn

from liger_kernel._library import ops
from liger_kernel._recompute import run
from liger_kernel.operators.common import beside, full_tensor, promoted
from liger_kernel.operators.coverage import GATED_NORM_KERNELS
from liger_kernel.operators.norm import casting_code, check_width

ACTIVATIONS: dict[Any, int] = {"silu": 0, "swish": 0, "sigmoid": 1}


def _activation_code(activation: Any) -> int:
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation is one of {list(ACTIVATIONS)}, not {activation!r}")
    return ACTIVATIONS[activation]


def liger_gated_rms_norm(
    X: Tensor, gate: Tensor, W: Tensor, eps: float = 1e-6, activation: str = "silu", norm_before_gate: bool = True,
    groups: int = 1, casting_mode: str | int = "llama",
) -> Tensor:  # fmt: skip
    """X / rms(X) · W · act(gate) or, with norm_before_gate=False, U / rms(U) · W with U = X · act(gate).

    X and gate [..., H]; W [H] of any dtype that X may have; the result has X's dtype. The mean square is over each of
    `groups` groups of neighbouring columns. activation is "silu" or "sigmoid". casting_mode is where the matched model
    rounds: "llama" before the weight, and the product with it, "gemma" only the result. Raises AssertionError where H
    and W differ, and ValueError for another activation or casting_mode.
    """
    check_width(X, W)
    x, z = promoted(full_tensor(X, W), full_tensor(gate, W))
    code, casting = _activation_code(activation), casting_code(casting_mode)
    y = run(ops.gated_rms_norm, x, z, beside(x, W), float(eps), code, norm_before_gate, groups, casting)
    return y.to(X.dtype)


class LigerGatedRMSNormFunction:
    apply = staticmethod(liger_gated_rms_norm)


class LigerRMSNormGated(nn.Module):
    """x / rms(x) · weight · act(gate), as Qwen3-Next has it; options as liger_gated_rms_norm.

    The norms of gated linear attention (Yang et al. 2024, arXiv:2312.06635) and, with norm_before_gate=False, of
    Mamba-2 (Dao & Gu 2024, arXiv:2405.21060).
    """

    #: What forward reads where a module of another class has nothing to say.
    preset: dict[str, Any] = dict(activation="silu", norm_before_gate=True, casting_mode="llama")

    def __init__(
        self, hidden_size: int, eps: float = 1e-6, activation: str = "silu", norm_before_gate: bool = True,
        groups: int = 1, casting_mode: str | int = "llama",
    ) -> None:  # fmt: skip
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon, self.activation, self.norm_before_gate = eps, activation, norm_before_gate
        self.groups, self.casting_mode = groups, casting_mode

    def forward(self, hidden_states: Tensor, gate: Tensor) -> Tensor:
        return liger_gated_rms_norm(
            hidden_states, gate, self.weight, self.variance_epsilon, self.activation, self.norm_before_gate,
            self.groups, self.casting_mode,
        )  # fmt: skip

    def extra_repr(self) -> str:
        return (
            f"weight_shape={tuple(self.weight.shape)}, eps={self.variance_epsilon}, activation={self.activation}, "
            f"norm_before_gate={self.norm_before_gate}, groups={self.groups}"
        )


class LigerRMSNormGatedForKimiLinear(LigerRMSNormGated):
    """The same in float throughout, with a sigmoid. Falcon-H1's, too, with a silu, in either order."""

    preset = dict(activation="silu", norm_before_gate=True, casting_mode="gemma")

    def __init__(self, hidden_size: int, eps: float = 1e-6, activation: str = "sigmoid") -> None:
        super().__init__(hidden_size, eps, activation, casting_mode="gemma")


class LigerRMSNormGatedForMamba2(LigerRMSNormGated):
    """x / rms(x) · weight of x · silu(gate), over each of some groups of columns."""

    preset = dict(activation="silu", norm_before_gate=False, casting_mode="llama")

    def __init__(self, hidden_size: int, eps: float = 1e-6, groups: int = 1) -> None:
        super().__init__(hidden_size, eps, norm_before_gate=False, groups=groups)
