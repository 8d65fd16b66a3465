"""The gated delta rule, the recurrence of Qwen3-Next's, Qwen3.5's, OLMo Hybrid's and Kimi Linear's linear attention,
its gates, and modules that make them; formulas in liger/ops/mixers."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from liger_kernel._library import ops
from liger_kernel._recompute import run
from liger_kernel.operators.common import beside
from liger_kernel.operators.documents import document_starts


def liger_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None = None,
    cu_seqlens: Tensor | None = None, seq_idx: Tensor | None = None, starts: Tensor | None = None,
    scale: float | None = None, eps: float | None = 1e-6, delta: bool = True, final_state: bool = False,
    skip: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """(o, the state after each document's last token): the gated delta rule (Yang et al. 2024, arXiv:2412.06464). For
    each document and head, token by token, with a state S [K, V]:

        S ← e^g S
        S ← S + k̂ (beta (v − Sᵀ k̂))ᵀ
        o  = scale Sᵀ q̂

    with x̂ = x / √(Σ x² + eps), or x where eps is None; without delta the second line is S ← S + k̂ (beta v)ᵀ, gated
    linear attention, and skip [heads], of any floating dtype, adds skip v to o. With a gate for each channel of k it is
    Kimi delta attention (Kimi Team 2025, arXiv:2510.26692): the first line is S ← diag(e^g) S. It is computed in chunks
    of tokens; all between the inputs and the results is float32, or a product of as many terms of 16 bits as come close
    to it.

    q, k [batch, tokens, key heads, K] and v [batch, tokens, heads, V] have one dtype: float32, bfloat16 or float16.
    Head h reads key head h // (heads / key heads). g is at most 0: [batch, tokens, heads], float32, or for each channel
    [batch, tokens, heads, K] in any of these dtypes; beta [batch, tokens, heads] may have any of them, too. On a GPU K
    is at most 256. scale is 1 / √K unless given.

    state [documents, heads, K, V], float32, is what each document begins with: 0 where it is missing. The second result
    is None without final_state.

    A document's results are those that it has alone, bit for bit, and the same in every run. Documents are given by one
    of cu_seqlens [documents + 1], where they begin, and the end (batch must be 1); seq_idx [batch, tokens], the
    document's number; starts [batch, tokens], int32, the index within the row of the first token of a token's
    document. A token of no document (a negative number) is one by itself. Without them each row is one.

    Raises ValueError for cu_seqlens with a batch other than 1, and RuntimeError for skip with delta or with gates of
    channels.
    """
    if cu_seqlens is not None and q.shape[0] != 1:
        raise ValueError(f"cu_seqlens are of a batch of 1, and q has {q.shape[0]} rows")
    if starts is None:
        starts = document_starts(q.shape[1], cu_seqlens, seq_idx)
    if final_state and state is None and cu_seqlens is not None:
        shape = (len(cu_seqlens) - 1, v.shape[2], q.shape[3], v.shape[3])
        state = torch.zeros(shape, dtype=torch.float32, device=q.device)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    eps = -1.0 if eps is None else eps
    o, last = run(
        ops.gated_delta_rule, q, k, v, g, beta, state, beside(q, skip), starts, scale, eps, delta, final_state
    )
    return o, last if final_state else None


def liger_delta_gates(
    a: Tensor, A: Tensor, dt_bias: Tensor | None = None, b: Tensor | None = None, log: bool = True,
    dt_limit: tuple[float, float] = (0.0, math.inf),
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(g, beta), the gates of liger_gated_delta_rule, float32:

        dt   = clamp(softplus(a + dt_bias), *dt_limit)
        g    = -exp(A) dt
        beta = sigmoid(b)

    as gated delta nets have them. Without log g is A dt, and without b beta is dt, as Mamba-2 has them.

    a [..., heads] and b, as large, have one dtype: float32, bfloat16 or float16; A and dt_bias [heads] have any of
    these. Slices of a projection are not copied. Gradients of A and dt_bias are summed in a fixed order.

    Raises ValueError where the first limit is above the second.
    """
    low, high = dt_limit
    return run(ops.delta_gates, a, beside(a, A), beside(a, dt_bias), b, log, low, high)


def liger_channel_gates(
    a: Tensor, A_log: Tensor, dt_bias: Tensor | None = None, low: float | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """g [..., heads, K], the gates of liger_gated_delta_rule for each channel of k, as Kimi delta attention (Kimi Team
    2025, arXiv:2510.26692) has them:

        x = a + dt_bias
        g = -exp(A_log) softplus(x), or low sigmoid(exp(A_log) x) where low is given

    computed in float32. Channels of a head share its number of A_log.

    a [..., heads K] is float32, bfloat16 or float16; A_log, of as many numbers as there are heads, and dt_bias, as many
    as a has columns, may have any of these dtypes and any shape. Slices of a projection are not copied. g is float32,
    or has `dtype`: a's. Nothing but the arguments is kept for backward. Gradients of A_log and dt_bias are summed in a
    fixed order.

    Raises ValueError where low is not below 0, RuntimeError where heads do not divide a's columns, and TypeError for a
    dtype that is neither float32 nor a's.
    """
    of_heads, bias = (None if t is None else beside(a, t.flatten()) for t in (A_log, dt_bias))
    g = run(ops.channel_gates, a, of_heads, bias, low, dtype)
    return g.unflatten(-1, (A_log.numel(), -1))


class ForgetGate(nn.Module):
    """A forward for a module of transformers that makes the gates of Kimi delta attention: hidden states [batch,
    tokens, width] -> g [batch, tokens, heads, K]. It has A_log and dt_bias."""


class LigerForgetGate(ForgetGate):
    """The gates of Kimi Linear and GLM-5-Next, in float32: a projection of low rank, f_b_proj(f_a_proj(x)), and the
    lower bound where safe_gate_lower_bound is one."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        a = self.f_b_proj(self.f_a_proj(hidden_states))
        return liger_channel_gates(a, self.A_log, self.dt_bias, lower_bound(self))


class LigerBailingForgetGate(ForgetGate):
    """The gates of Bailing hybrid, rounded to the dtype of hidden states: the projection is f_proj, and the bound
    lower_bound where safe_gate says so."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        a, dtype = self.f_proj(hidden_states), hidden_states.dtype
        rounded = dtype if dtype is a.dtype else None
        return liger_channel_gates(a, self.A_log, self.dt_bias, lower_bound(self), rounded).to(dtype)


def lower_bound(gate: Any) -> float | None:
    """The bound of the gates that a module of transformers makes, or None."""
    if hasattr(gate, "safe_gate"):
        return gate.lower_bound if gate.safe_gate else None
    return getattr(gate, "safe_gate_lower_bound", None)


class LigerChannelGatesFunction:
    apply = staticmethod(liger_channel_gates)


class LigerDeltaGatesFunction:
    apply = staticmethod(liger_delta_gates)


class LigerGatedDeltaRuleFunction:
    apply = staticmethod(liger_gated_delta_rule)
