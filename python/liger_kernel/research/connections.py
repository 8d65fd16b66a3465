"""What connects a model's blocks in place of a residual sum; formulas in liger/ops/research/connections.

Attention residuals (Kimi Team 2026): a block's input is an average of the earlier blocks' outputs, weighted by
attention. Manifold-constrained hyper-connections (mHC, Xie et al. 2025, arXiv:2512.24880): several streams, mixed by
doubly stochastic matrices.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from liger_kernel._library import ops
from liger_kernel.operators.common import beside


class LigerAttnResFunction:
    @staticmethod
    def apply(V_stacked: Tensor | Sequence[Tensor], w_query: Tensor, w_norm: Tensor, eps: float) -> Tensor:
        """Σ_n α_n · V_n, α = softmax_n(<w_query, w_norm · V_n / rms(V_n)>), in V's dtype.

        V_stacked [N, ..., D], or N tensors [..., D], for N of 1 to 32; w_query and w_norm [D] of any dtype that V may
        have. Computed in float, and rounded once.
        """
        V = V_stacked if isinstance(V_stacked, Tensor) else torch.stack(tuple(V_stacked))
        return ops.attention_residuals(V, beside(V, w_query), beside(V, w_norm), float(eps))


def liger_attn_res(V: Tensor | Sequence[Tensor], w_query: Tensor, w_norm: Tensor, eps: float = 1e-6) -> Tensor:
    """Σ_n α_n · V_n, α = softmax_n(<w_query, w_norm · V_n / rms(V_n)>); see LigerAttnResFunction."""
    return LigerAttnResFunction.apply(V, w_query, w_norm, eps)


def _check_mhc(x: Tensor, phi: Tensor, b: Tensor, allow_fp32: bool) -> None:
    if x.dim() < 3:
        raise AssertionError(f"x must be [..., streams, width] of at least three dimensions, got {tuple(x.shape)}")
    if not allow_fp32 and x.dtype == torch.float32:
        raise AssertionError("x must be float16 or bfloat16; allow_fp32=True takes float32")
    streams, width = x.shape[-2:]
    columns = streams * (streams + 2)
    if phi.shape != (streams * width, columns):
        raise AssertionError(f"phi must be {(streams * width, columns)}, got {tuple(phi.shape)}")
    if b.shape != (columns,):
        raise AssertionError(f"b must be {(columns,)}, got {tuple(b.shape)}")


class LigerMHCCoeffsFunction:
    @staticmethod
    def apply(
        x: Tensor, phi: Tensor, b: Tensor, alpha_pre: Tensor, alpha_post: Tensor, alpha_res: Tensor,
        allow_fp32: bool = False, tmax: int = 20, rms_eps: float = 1e-6, pre_eps: float = 0.0,
        sinkhorn_eps: float = 1e-6, post_mult: float = 2.0,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """(h_pre [..., HC], h_post [..., HC], h_res [..., HC, HC]), float, of the streams x [..., HC, C].

        With mix = (x phi) / rms(x), x as one row: σ(alpha_pre · mix + b) + pre_eps, σ(alpha_post · mix + b) ·
        post_mult, and tmax iterations of Sinkhorn's algorithm on alpha_res · mix + b. phi [HC · C, HC² + 2 HC] in a
        dtype that x may have; b and the alphas are computed with as float. HC is at most 16. Raises AssertionError for
        other shapes, and for a float32 x unless allow_fp32.
        """
        _check_mhc(x, phi, b, allow_fp32)
        return ops.mhc_coefficients(
            x, phi, b.float(), alpha_pre.float(), alpha_post.float(), alpha_res.float(),
            iterations=int(tmax), rms_eps=float(rms_eps), pre_eps=float(pre_eps), sinkhorn_eps=float(sinkhorn_eps),
            post_scale=float(post_mult),
        )  # fmt: skip


class LigerMHCPreFunction:
    @staticmethod
    def apply(x: Tensor, h_pre: Tensor) -> Tensor:
        """Σ_i h_pre_i · x_i for x [..., HC, C] and h_pre [..., HC]: [..., C] in x's dtype."""
        return ops.mhc_pre(x, h_pre.float())


class LigerMHCPostResFunction:
    @staticmethod
    def apply(x: Tensor, f_out: Tensor, h_post: Tensor, h_res: Tensor) -> Tensor:
        """Σ_i h_res[o, i] · x_i + h_post_o · f_out for x [..., HC, C], f_out [..., C] of any dtype that x may have,
        h_post [..., HC] and h_res [..., HC, HC]; as x."""
        return ops.mhc_post_res(x, beside(x, f_out), h_post.float(), h_res.float())


def liger_mhc_coeffs(
    x: Tensor, phi: Tensor, b: Tensor, alpha_pre: Tensor, alpha_post: Tensor, alpha_res: Tensor, *,
    allow_fp32: bool = False, tmax: int = 20, rms_eps: float = 1e-6, pre_eps: float = 0.0, sinkhorn_eps: float = 1e-6,
    post_mult: float = 2.0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(h_pre, h_post, h_res) of x; see LigerMHCCoeffsFunction."""
    return LigerMHCCoeffsFunction.apply(
        x, phi, b, alpha_pre, alpha_post, alpha_res, allow_fp32, tmax, rms_eps, pre_eps, sinkhorn_eps, post_mult
    )


def liger_mhc_pre(x: Tensor, h_pre: Tensor) -> Tensor:
    """Σ_i h_pre_i · x_i; see LigerMHCPreFunction."""
    return LigerMHCPreFunction.apply(x, h_pre)


def liger_mhc_post_res(x: Tensor, f_out: Tensor, h_post: Tensor, h_res: Tensor) -> Tensor:
    """Σ_i h_res[o, i] · x_i + h_post_o · f_out; see LigerMHCPostResFunction."""
    return LigerMHCPostResFunction.apply(x, f_out, h_post, h_res)


def liger_mhc_apply(
    x: Tensor, f_out: Tensor, h_pre: Tensor, h_post: Tensor, h_res: Tensor, *, return_x_in: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """The streams after a layer, and with return_x_in also the layer's input."""
    x_out = liger_mhc_post_res(x, f_out, h_post, h_res)
    return (x_out, liger_mhc_pre(x, h_pre)) if return_x_in else x_out


def liger_mhc_forward(
    x: Tensor, layer: Callable[[Tensor], Tensor], phi: Tensor, b: Tensor, alpha_pre: Tensor, alpha_post: Tensor,
    alpha_res: Tensor, *, allow_fp32: bool = False, tmax: int = 20, rms_eps: float = 1e-6, pre_eps: float = 0.0,
    sinkhorn_eps: float = 1e-6, post_mult: float = 2.0, return_coeffs: bool = False,
) -> Any:  # fmt: skip
    """The streams x [..., HC, C] after `layer`, which maps [..., C] to the same; see LigerMHCCoeffsFunction.

    The layer's input has the dtype of its first parameter, or x's. With return_coeffs: (streams, (h_pre, h_post,
    h_res)).
    """
    coefficients = liger_mhc_coeffs(
        x, phi, b, alpha_pre, alpha_post, alpha_res, allow_fp32=allow_fp32, tmax=tmax, rms_eps=rms_eps,
        pre_eps=pre_eps, sinkhorn_eps=sinkhorn_eps, post_mult=post_mult,
    )  # fmt: skip
    h_pre, h_post, h_res = coefficients
    x_in = liger_mhc_pre(x, h_pre)
    first = next(layer.parameters(), None) if isinstance(layer, nn.Module) else None
    x_out = liger_mhc_post_res(x, layer(x_in if first is None else x_in.to(first.dtype)), h_post, h_res)
    return (x_out, coefficients) if return_coeffs else x_out


class LigerMHC(nn.Module):
    """`layer` between the hc streams of a manifold-constrained hyper-connection: [..., hc, c] to the same.

    phi has phi_dtype, the rest of the parameters float32, on the layer's device. Raises ValueError for more than 16
    streams, and in forward for other streams than these.
    """

    def __init__(
        self, layer: nn.Module, *, hc: int, c: int, tmax: int = 20, rms_eps: float = 1e-6, pre_eps: float = 0.0,
        sinkhorn_eps: float = 1e-6, post_mult: float = 2.0, phi_dtype: torch.dtype = torch.float16,
        allow_fp32: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        if hc > 16:
            raise ValueError(f"hc must be at most 16, got {hc}")
        first = next(layer.parameters(), None)
        device = torch.device("cpu") if first is None else first.device
        columns = hc * (hc + 2)
        self.layer, self.hc, self.c, self.tmax = layer, int(hc), int(c), int(tmax)
        self.rms_eps, self.pre_eps, self.sinkhorn_eps, self.post_mult = rms_eps, pre_eps, sinkhorn_eps, post_mult
        self.phi_dtype, self.allow_fp32 = phi_dtype, allow_fp32
        self.phi = nn.Parameter((0.02 * torch.randn(hc * c, columns, device=device)).to(phi_dtype))
        self.b = nn.Parameter(torch.zeros(columns, device=device))
        self.alpha_pre, self.alpha_post, self.alpha_res = (
            nn.Parameter(torch.tensor(1.0, device=device)) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-2:] != (self.hc, self.c):
            raise ValueError(f"x must be [..., {self.hc}, {self.c}], got {tuple(x.shape)}")
        return liger_mhc_forward(
            x, self.layer, self.phi, self.b, self.alpha_pre, self.alpha_post, self.alpha_res,
            allow_fp32=self.allow_fp32, tmax=self.tmax, rms_eps=self.rms_eps, pre_eps=self.pre_eps,
            sinkhorn_eps=self.sinkhorn_eps, post_mult=self.post_mult,
        )  # fmt: skip

    def extra_repr(self) -> str:
        return f"hc={self.hc}, c={self.c}, tmax={self.tmax}"
