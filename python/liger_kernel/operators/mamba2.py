"""Mamba-2's scan (Dao & Gu 2024, arXiv:2405.21060), which is gated linear attention: liger_gated_delta_rule without the
delta."""

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_kernel.operators.gated_delta_rule import liger_delta_gates, liger_gated_delta_rule


def liger_mamba2_scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None, z: Tensor | None = None,
    dt_bias: Tensor | None = None, dt_softplus: bool = True, dt_limit: tuple[float, float] = (0.0, float("inf")),
    state: Tensor | None = None, cu_seqlens: Tensor | None = None, seq_idx: Tensor | None = None,
    starts: Tensor | None = None, final_state: bool = False,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """(y, the state after each document's last token). For each document and head, token by token, with a state S
    [P, N]:

        dt ← clamp(softplus(dt + dt_bias), *dt_limit)
        S  ← e^(dt A) S + dt x Bᵀ
        y  = S C + D x

    and y ← y · silu(z) where z is given. dt and what follows from it are float32.

    x [batch, tokens, heads, P], B and C [batch, tokens, groups, N] of one dtype: float32, bfloat16 or float16. Head h
    reads group h // (heads / groups). dt [batch, tokens, heads] and A, D, dt_bias [heads] have any floating dtype; z is
    as x.
    On a GPU N is at most 256. state [documents, heads, P, N], float32, is what each document begins with: 0 where it
    is missing. The second result is None without final_state.

    y has x's dtype, to which it is rounded once, or float32 where z makes a product of it. Documents are given as for
    liger_gated_delta_rule, and a document's results are those that it has alone: bit for bit from the same dt.

    Raises ValueError for cu_seqlens with a batch other than 1.
    """
    if dt_softplus:
        g, dt = liger_delta_gates(dt, A, dt_bias, log=False, dt_limit=dt_limit)
    else:
        dt = (dt.float() if dt_bias is None else dt.float() + dt_bias.float()).clamp(*dt_limit)
        g = dt * A.float()
    begin = None if state is None else state.transpose(-1, -2).contiguous()
    y, last = liger_gated_delta_rule(
        C, B, x, g, dt, begin, cu_seqlens=cu_seqlens, seq_idx=seq_idx, starts=starts, scale=1.0, eps=None,
        delta=False, final_state=final_state, skip=D,
    )  # fmt: skip
    if z is not None:
        y = y.float() * F.silu(z.float())
    return y, None if last is None else last.transpose(-1, -2)
