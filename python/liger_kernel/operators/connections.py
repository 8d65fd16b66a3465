"""What connects a model's blocks in place of a residual sum; formulas in liger/ops/connections.

Attention residuals (Kimi Team 2026): a block's input is an average of the earlier blocks' outputs, weighted by
attention.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

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
