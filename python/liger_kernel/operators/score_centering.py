"""A policy gradient whose score is centred on the sampler's distribution, token by token, in chunks of tokens."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from liger_kernel.operators.common import accumulate, autocast_dtype, first_derivative_only, roots, wanted_gradients
from liger_kernel.operators.soft_targets import chunks

#: Where the ratio ends for a negative advantage, with the sign "ppo" (Ye et al. 2020, arXiv:1912.09729).
DUAL_CLIP = 3.0


class ISCorrection(NamedTuple):
    """The weight of a class with the ratio r = p / q of its probabilities: r in [low, high], outside of that 0 ("drop")
    or the nearest bound ("clamp").

    With the sign "ppo" a positive advantage has only the upper bound; a negative one the lower bound, and is outside
    above 3 too.
    """

    low: float = 0.0
    high: float = math.inf
    outside: str = "drop"
    sign: str = "both"

    def check(self) -> None:
        """Raises AssertionError for other names."""
        if self.outside not in ("clamp", "drop"):
            raise AssertionError(f"outside must be 'clamp' or 'drop', got {self.outside!r}")
        if self.sign not in ("both", "ppo"):
            raise AssertionError(f"sign must be 'both' or 'ppo', got {self.sign!r}")

    def weight(self, ratio: Tensor, advantage: Tensor) -> tuple[Tensor, Tensor]:
        """(weight, whether the ratio is outside)."""
        above, below = ratio > self.high, ratio < self.low
        if self.sign == "ppo":
            outside = torch.where(advantage > 0, above, below | (ratio > DUAL_CLIP))
        else:
            outside = above | below
        bound = ratio.clamp(self.low, self.high) if self.outside == "clamp" else torch.zeros_like(ratio)
        return torch.where(outside, bound, ratio), outside


def _weighted(q, p, advantage, correction):
    """q times the weight of p / q; 0 where q is."""
    if correction is None:
        return q
    weight, _ = correction.weight(p / q, advantage)
    return torch.where(q > 0, q * weight, 0)


def _centre(logp, top, logq, advantage, correction, eps):
    """(c, what the sampler's distribution is from p): c [tokens, V] sums up to one without a correction."""
    q, of_top = logq.exp(), logp.gather(1, top)
    centre = logp.exp().scatter_(1, top, 0)
    rest_p, rest_q = centre.sum(1, keepdim=True).clamp_(min=eps), (1 - q.sum(1, keepdim=True)).clamp_(min=0)
    centre *= _weighted(rest_q, rest_p, advantage, correction) / rest_p
    centre.scatter_(1, top, _weighted(q, of_top.exp(), advantage, correction))
    known = torch.where(q > 0, q * (logq - of_top), 0).sum(1) + torch.special.xlogy(rest_q, rest_q / rest_p).squeeze(1)
    return centre, known


def _check(x, weight, ids, mask, advantages, token_logps, top, logq, bias, temperature):
    tokens, hidden = x.shape[:-1], x.shape[-1]
    shapes = {
        "weight": (weight, (weight.shape[0], hidden)), "selected_token_ids": (ids, tokens),
        "attention_mask": (mask, tokens), "sampler_token_logps": (token_logps, tokens),
        "sampler_topk_ids": (top, (*tokens, top.shape[-1])), "sampler_topk_logps": (logq, (*tokens, top.shape[-1])),
        "advantages": (advantages, tokens[:1] if advantages.dim() == 1 else tokens),
        "bias": (bias, weight.shape[:1]),
    }  # fmt: skip
    for name, (t, shape) in shapes.items():
        if t is not None and t.shape != torch.Size(shape):
            raise ValueError(f"{name} must be {list(shape)}, got {list(t.shape)}")
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")


class LigerFusedLinearScoreCenteringFunction(torch.autograd.Function):
    """The loss Σ −A (w ln p(y) − Σ_v c_v ln p_v) / N of the tokens y that a sampler has drawn, with advantages A and
    p = softmax((input weightᵀ + bias) / temperature); w and c are constants. The logits of a chunk of tokens exist at a
    time."""

    @staticmethod
    def forward(
        ctx: Any, _input: Tensor, weight: Tensor, selected_token_ids: Tensor, attention_mask: Tensor,
        advantages: Tensor, sampler_token_logps: Tensor, sampler_topk_ids: Tensor, sampler_topk_logps: Tensor,
        bias: Tensor | None = None, score_center: bool = True, correction: ISCorrection | None = None,
        temperature: float = 1.0, eps: float = 1e-6, num_items_in_batch: float | Tensor | None = None,
        chunk_size: int | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        """(loss, entropy, kl_head, frac_masked), float; the last three are means over the mask without gradients: of
        the policy's entropy, of the sampler's divergence from it, and of what the correction drops.

        _input [B, T, H], weight [V, H], ids, mask and the sampler's ln q(y) [B, T], its K likeliest classes and their
        ln q [B, T, K], advantages [B] or [B, T]. c is q of these classes, and p of the others in the proportion in
        which q and p give probability to all of them; p's is at least eps. With a correction w, 1 without, is its
        weight of p / q, and c is multiplied by that of each class. N is num_items_in_batch, or the number of tokens in
        the mask. chunk_size bounds the tokens of a chunk. The gradients are made in forward; the weight's is summed in
        float. Raises ValueError for shapes that do not agree and a temperature that is not positive.
        """
        if correction is not None:
            correction.check()
        given = sampler_token_logps, sampler_topk_ids, sampler_topk_logps
        _check(_input, weight, selected_token_ids, attention_mask, advantages, *given, bias, temperature)
        dtype = autocast_dtype(_input) or _input.dtype
        w, b = weight.detach().to(dtype), None if bias is None else bias.detach().float()
        x = _input.detach().reshape(-1, _input.shape[-1]).to(dtype)
        kept = attention_mask.reshape(-1).bool()
        column = lambda t: t.reshape(-1, 1)
        top, logq = (t.detach().reshape(len(x), -1) for t in given[1:])
        advantages = advantages if advantages.dim() > 1 else advantages[:, None].expand(selected_token_ids.shape)
        advantages, drawn = (column(t.detach()).float() for t in (advantages, sampler_token_logps))
        ids = column(selected_token_ids.reshape(-1).where(kept, 0))
        count = kept.sum().clamp(min=1).float()
        items = count if num_items_in_batch is None else torch.as_tensor(num_items_in_batch, device=x.device).float()
        wanted = wanted_gradients(ctx, _input, weight, bias)
        sums = torch.zeros(4, device=x.device)
        dx = torch.empty(x.shape, device=x.device) if wanted[0] else None
        dw = torch.zeros(w.shape, device=x.device) if wanted[1] else None
        db = torch.zeros(len(w), device=x.device) if wanted[2] else None
        for rows in chunks(len(x), len(w), chunk_size):
            logits = (x[rows] @ w.t()).float()
            logp = (logits if b is None else logits.add_(b)).mul_(1 / temperature).log_softmax(-1)
            advantage, of_drawn = advantages[rows], logp.gather(1, ids[rows])
            factor, dropped = torch.ones_like(of_drawn), torch.zeros_like(of_drawn)
            if correction is not None:
                factor, outside = correction.weight((of_drawn - drawn[rows]).exp(), advantage)
                dropped = outside.float() if correction.outside == "drop" else dropped
            centre, known = _centre(
                logp, top[rows].where(kept[rows, None], 0), logq[rows].float(), advantage, correction, eps
            )
            p = logp.exp()
            if not score_center:
                centre.zero_()
            score = factor * of_drawn - (centre * logp).sum(1, keepdim=True)
            each = (-advantage * score).squeeze(1), -(p * logp).sum(1), known, dropped.squeeze(1)
            sums += torch.stack([value.where(kept[rows], 0).sum() for value in each])
            if not any(wanted):
                continue
            # of the logits: −A (w (1_y − p) − (c − p Σ c)) / temperature
            gradient = centre.sub_(p.mul_(centre.sum(1, keepdim=True) - factor)).scatter_add_(1, ids[rows], -factor)
            gradient.mul_(advantage / temperature)
            gradient = gradient.where(kept[rows, None], 0)
            if db is not None:
                db += gradient.sum(0)
            gradient = gradient.to(dtype)
            if dx is not None:
                dx[rows] = gradient @ w
            if dw is not None:
                accumulate(dw, gradient.t(), x[rows])
        ctx.save_for_backward(dx, dw, db, items)
        ctx.shape, ctx.dtypes = _input.shape, [None if t is None else t.dtype for t in (_input, weight, bias)]
        ctx.roots = roots(_input, weight, bias)
        loss, entropy, kl_head, frac_masked = (sums / torch.stack([items, count, count, count])).unbind()
        ctx.mark_non_differentiable(entropy, kl_head, frac_masked)
        return loss, entropy, kl_head, frac_masked

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad_output: Tensor, *grad_metrics: Tensor) -> tuple[Tensor | None, ...]:
        dx, dw, db, items = ctx.saved_tensors
        scale = grad_output / items
        of_x, of_weight, of_bias = (
            g if g is None else (g * scale).to(dtype) for g, dtype in zip((dx, dw, db), ctx.dtypes)
        )
        return None if of_x is None else of_x.view(ctx.shape), of_weight, *[None] * 6, of_bias, *[None] * 6


def fused_linear_score_centering(
    _input: Tensor, weight: Tensor, selected_token_ids: Tensor, attention_mask: Tensor, advantages: Tensor,
    sampler_token_logps: Tensor, sampler_topk_ids: Tensor, sampler_topk_logps: Tensor, bias: Tensor | None = None,
    score_center: bool = True, correction: ISCorrection | None = None, temperature: float = 1.0, eps: float = 1e-6,
    num_items_in_batch: float | Tensor | None = None, chunk_size: int | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
    """(loss, its metrics by name); see LigerFusedLinearScoreCenteringFunction."""
    loss, *metrics = LigerFusedLinearScoreCenteringFunction.apply(
        _input, weight, selected_token_ids, attention_mask, advantages, sampler_token_logps, sampler_topk_ids,
        sampler_topk_logps, bias, score_center, correction, temperature, eps, num_items_in_batch, chunk_size,
    )  # fmt: skip
    return loss, dict(zip(("entropy", "kl_head", "frac_masked"), metrics))


class LigerFusedLinearScoreCenteringLoss(nn.Module):
    """The loss of fused_linear_score_centering and its metrics."""

    def __init__(
        self, score_center: bool = True, correction: ISCorrection | None = None, temperature: float = 1.0,
        eps: float = 1e-6, chunk_size: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.score_center, self.correction = score_center, correction
        self.temperature, self.eps, self.chunk_size = temperature, eps, chunk_size

    def forward(
        self, _input: Tensor, lin_weight: Tensor, selected_token_ids: Tensor, attention_mask: Tensor,
        advantages: Tensor, sampler_token_logps: Tensor, sampler_topk_ids: Tensor, sampler_topk_logps: Tensor,
        bias: Tensor | None = None, num_items_in_batch: float | Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
        return fused_linear_score_centering(
            _input, lin_weight, selected_token_ids, attention_mask, advantages, sampler_token_logps, sampler_topk_ids,
            sampler_topk_logps, bias, self.score_center, self.correction, self.temperature, self.eps,
            num_items_in_batch, self.chunk_size,
        )  # fmt: skip

    def extra_repr(self) -> str:
        return f"score_center={self.score_center}, correction={self.correction}, temperature={self.temperature}"
