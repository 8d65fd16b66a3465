"""The gated delta rule, the recurrence of Qwen3-Next's, Qwen3.5's and OLMo Hybrid's linear attention."""

from __future__ import annotations

import torch
from torch import Tensor

from liger_kernel._library import ops


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor | None = None,
    *,
    starts: Tensor | None = None,
    scale: float | None = None,
    eps: float | None = 1e-6,
    final_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """(o, the state after each document's last token, or None).

    For each document and head, token by token, with a state S [K, V]:

        S ← e^g S
        S ← S + k̂ (beta (v − Sᵀ k̂))ᵀ
        o  = scale Sᵀ q̂

    with x̂ = x / √(Σ x² + eps), or x where eps is None (Yang et al. 2024, arXiv:2412.06464). Exact: everything between
    the inputs and the results is computed in float32, or in products of as many terms as that takes.

    q, k: [rows, tokens, key heads, K]. v: [rows, tokens, heads, V], of the same dtype: float32, bfloat16 or float16.
    Head h reads key head h // (heads / key heads).
    g: float32 [rows, tokens, heads], at most 0. beta: [rows, tokens, heads].
    state: float32 [documents, heads, K, V], what each document begins with; 0 where it is missing.
    starts: int32 [rows, tokens], for each token where, in its row, its document begins; without it each row is one
    document. A document's results are, bit for bit, those that it has alone.
    scale: 1 / √K unless given.
    """
    o, last = ops.gated_delta_rule(
        q, k, v, g, beta, state, starts, q.shape[-1] ** -0.5 if scale is None else scale, -1.0 if eps is None else eps,
        final_state,
    )  # fmt: skip
    return o, last if final_state else None
