"""GroupNorm (Wu & He 2018, arXiv:1803.08494), PolyNorm (Zhuo et al. 2024, arXiv:2411.03884), and DyT, dynamic tanh in
place of a norm (Zhu et al. 2025, arXiv:2503.10622); formulas in liger/ops/research/norm."""

import torch
from torch import Tensor, nn

from liger_kernel._library import ops
from liger_kernel.operators.norm import eps_of, initial


def check_poly_norm(W: Tensor, B: Tensor) -> None:
    if W.shape[0] != 3:
        raise AssertionError(f"the weight has 3 elements, for the third, second and first power, not {W.shape[0]}")
    if B.numel() != 1:
        raise AssertionError(f"the bias is one number, not {B.numel()}")


def liger_group_norm(
    X: Tensor, affine_scaling_weight: Tensor | None, affine_shifting_bias: Tensor | None, num_channels: int,
    num_groups: int, eps: float,
) -> Tensor:  # fmt: skip
    """(X − mean) / sqrt(variance + eps) over each group of channels of a sample, times a channel's weight, plus its
    bias.

    X [N, num_channels, ...]; weight and bias [num_channels] in X's dtype or float, or None.
    """
    return ops.group_norm(X, affine_scaling_weight, affine_shifting_bias, num_groups, float(eps))


class LigerGroupNormFunction:
    apply = staticmethod(liger_group_norm)


def liger_poly_norm(X: Tensor, W: Tensor, B: Tensor, eps: float = 1e-6, in_place: bool = True) -> Tensor:
    """W[0] · N(X³) + W[1] · N(X²) + W[2] · N(X) + B with N(u) = u / sqrt(mean(u²) + eps) over the last dimension.

    in_place is a hint: no argument is changed. Raises AssertionError for other sizes of W and B.
    """
    check_poly_norm(W, B)
    return ops.poly_norm(X, W, B, float(eps))


class LigerPolyNormFunction:
    apply = staticmethod(liger_poly_norm)


def liger_dyt(x: Tensor, alpha: Tensor, gamma: Tensor, beta: Tensor | None) -> Tensor:
    """gamma · tanh(alpha · x) + beta for x [..., H], one number alpha, gamma and beta [H] in x's dtype or float; beta
    may be None."""
    return ops.dyt(x, alpha, gamma, beta)


class LigerDyTFunction:
    apply = staticmethod(liger_dyt)


class LigerGroupNorm(nn.Module):
    """GroupNorm (Wu & He 2018, arXiv:1803.08494) of [N, num_channels, ...].

    The bias always exists; it starts at zero, or random with bias=True. Raises AssertionError for an init_fn other than
    "ones" and "zeros", groups that do not divide the channels, and inputs of another shape.
    """

    def __init__(
        self, num_channels: int, num_groups: int, eps: float = 1e-6, bias: bool = False, init_fn: str = "ones"
    ) -> None:
        super().__init__()
        if num_groups <= 0 or num_channels % num_groups != 0:
            raise AssertionError(f"{num_groups} groups do not divide {num_channels} channels")
        self.num_channels, self.num_groups, self.eps, self.variance_epsilon = num_channels, num_groups, eps, eps
        self.weight = initial(init_fn, num_channels)
        self.bias = nn.Parameter(torch.randn(num_channels) if bias else torch.zeros(num_channels))

    def forward(self, hidden_states: Tensor) -> Tensor:
        channels, dims = self.num_channels, hidden_states.dim()
        if dims < 3:
            raise AssertionError(f"the input is [N, channels, ...], at least three dimensions, not {dims}")
        if hidden_states.shape[1] != channels:
            raise AssertionError(f"the input has {hidden_states.shape[1]} channels, not {channels}")
        return liger_group_norm(hidden_states, self.weight, self.bias, channels, self.num_groups, self.variance_epsilon)

    def extra_repr(self) -> str:
        return f"{self.num_channels}, num_groups={self.num_groups}, eps={self.eps}"


class LigerPolyNorm(nn.Module):
    """weight[0] · N(x³) + weight[1] · N(x²) + weight[2] · N(x) + bias, N(u) = u / rms(u) (Zhuo et al. 2024,
    arXiv:2411.03884)."""

    def __init__(self, eps: float = 1e-6, in_place: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), 1 / 3))
        self.bias = nn.Parameter(torch.tensor(1.0))
        self.variance_epsilon, self.in_place = eps, in_place

    def forward(self, hidden_states: Tensor) -> Tensor:
        return liger_poly_norm(hidden_states, self.weight, self.bias, self.variance_epsilon)

    def extra_repr(self) -> str:
        return f"eps={eps_of(self)}, in_place={self.in_place}"


class LigerDyT(nn.Module):
    """gamma · tanh(alpha · x) + beta in place of a norm (Zhu et al. 2025, arXiv:2503.10622)."""

    beta: nn.Parameter | None

    def __init__(self, hidden_size: int, beta: bool = True, init_alpha: float = 0.5) -> None:
        super().__init__()
        self.hidden_size, self.init_alpha = hidden_size, init_alpha
        self.alpha = nn.Parameter(torch.full((1,), float(init_alpha)))
        self.gamma = nn.Parameter(torch.ones(hidden_size))
        self.register_parameter("beta", nn.Parameter(torch.zeros(hidden_size)) if beta else None)

    def forward(self, x: Tensor) -> Tensor:
        return liger_dyt(x, self.alpha, self.gamma, self.beta)

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, init_alpha={self.init_alpha}, beta={self.beta is not None}"
