"""A small forward and backward of each operator against plain torch, for env_report."""

import importlib
from dataclasses import dataclass
from typing import Any, Callable

import torch
import torch.nn.functional as F

from liger_kernel._library import RESEARCH, ops
from liger_kernel.chunked_loss import (
    LigerFusedLinearCPOLoss,
    LigerFusedLinearDPOLoss,
    LigerFusedLinearKTOLoss,
    LigerFusedLinearORPOLoss,
)
from liger_kernel.operators.experts import fused_experts
from liger_kernel.operators.head import class_logits, linear_log_prob
from liger_kernel.operators.topk_distillation import topk_divergence
from liger_kernel.ops import LigerEmbeddingFunction
from liger_kernel.transformers import functional as liger

EPS = 1e-6
#: A last bit or two of each term of some dozen, of the largest number of a tensor.
TOLERANCES = {torch.float32: 2.0**-16, torch.bfloat16: 2.0**-5}


@dataclass(frozen=True)
class Check:
    """An operator, what it is compared with, and the shapes of its floating arguments; `fixed` are further arguments of
    both."""

    operator: str
    ours: Callable
    plain: Callable
    shapes: tuple
    fixed: tuple = ()
    dtypes: tuple = (torch.float32, torch.bfloat16)


def _rms(x, w, eps=EPS):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * w


def _add_rms(x, r, w):
    return _rms(x + r, w), x + r


def _rotated(x, cos, sin):
    a, b = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat((-b, a), -1) * sin[:, None]


def _packed(qkv, cos, sin):
    q, k, v = qkv.view(2, 3, 4, 8).split((2, 1, 1), 2)
    q, k = (_rotated(t.transpose(1, 2), cos, sin).transpose(1, 2) for t in (q, k))
    return torch.cat((q, k, v), 2).reshape(qkv.shape)


def _experts(x, gate_up, down, weights, index):
    gate, up = torch.einsum("th,ekh->tek", x, gate_up).chunk(2, -1)
    every = torch.einsum("tei,ehi->teh", F.silu(gate) * up, down)
    return (every.gather(1, index[..., None].expand(-1, -1, x.shape[1])) * weights[..., None]).sum(1)


def _adapted(x, w, a, b):
    return x @ w.T + 2 * (x @ a.T) @ b.T


def _jsd(x, t):
    m = (x.exp() + t.exp()) / 2
    return ((x.exp() * (x - m.log())).sum() + (t.exp() * (t - m.log())).sum()) / (2 * x.shape[0])


def _log_probs(x, w, ids):
    return (x @ w.T).log_softmax(-1).gather(-1, ids[..., None])[..., 0]


def _chosen(x, w, y):
    return _log_probs(x, w, y).sum(1).chunk(2)


def _odds(x, w, y):
    chosen, rejected = (logp / y.shape[1] for logp in _chosen(x, w, y))
    ratio = chosen - rejected - torch.log1p(-chosen.exp()) + torch.log1p(-rejected.exp())
    return -0.1 * F.logsigmoid(ratio).mean()


def _distance(x, y):
    return 1 - F.cosine_similarity(x, y, -1)


def _policy(logp, mask, advantages):
    ratio = (logp - logp.detach()).exp()
    terms = -torch.minimum(ratio * advantages[:, None], ratio.clamp(0.8, 1.2) * advantages[:, None])
    return (terms * mask).sum() / mask.sum()


def _policy_loss(logp, mask, advantages):
    named = {
        "loss_type": "dapo",
        "level": "token",
        "epsilon_low": 0.2,
        "epsilon_high": 0.2,
        "delta": None,
        "beta": 0.0,
        "unbiased_kl": False,
    }
    sapo = {"sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05}
    vespo = {"vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0}
    options = {**named, **sapo, **vespo, "max_length": 1.0, "masked_terms": False}
    return ops.policy_loss(logp, mask, advantages, None, None, None, None, None, None, **options)[0]


def _xielu(x, alpha_p, alpha_n):
    n = 0.5 + F.softplus(alpha_n)
    return torch.where(x > 0, F.softplus(alpha_p) * x * x, n * (torch.expm1(x.clamp(max=-1e-6)) - x)) + 0.5 * x


def _delta_rule(q, k, v, beta):
    return liger.liger_gated_delta_rule(q, k, v, -F.softplus(beta.float()), beta)[0]


def _channel_delta_rule(q, k, v, beta, g):
    return liger.liger_gated_delta_rule(q, k, v, -F.softplus(g.float()), beta)[0]


def _plain_delta_rule(q, k, v, beta, g=None):
    q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    state, rows, decay = 0, [], -F.softplus(beta[..., None] if g is None else g)
    for t in range(q.shape[1]):
        state = decay[:, t, :, :, None].exp() * (state if t else k.new_zeros(2, 2, 8, 4))
        error = beta[:, t, :, None] * (v[:, t] - (k[:, t, :, :, None] * state).sum(2))
        state = state + k[:, t, :, :, None] * error[:, :, None]
        rows.append((q[:, t, :, :, None] * state).sum(2) * 8**-0.5)
    return torch.stack(rows, 1)


def _load_balancing(z):
    chosen = torch.zeros_like(z).scatter(-1, z.topk(2).indices, 1).mean(0)
    return len(chosen) * chosen @ z.softmax(-1).mean(0)


def _of_research():
    return importlib.import_module("liger_kernel.research.self_test").CHECKS if RESEARCH else ()


_IDS = torch.tensor([1, 0, 2, 4, 1, 3])
_EXPERTS = torch.tensor([[0, 2], [2, 0], [3, 0], [0, 3], [2, 3], [3, 2]])  # expert 1 has no token
_LABELS = torch.tensor([[1, 0, 2], [3, 4, 1], [2, 2, 0], [1, 4, 3]])
_LIKED = torch.tensor([True, False, False, True])
_MASK = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0], [1, 1, 1]])
_TABLES = tuple(
    t.repeat(1, 1, 2)
    for t in (torch.linspace(0, 3, 24).view(2, 3, 4).cos(), torch.linspace(0, 3, 24).view(2, 3, 4).sin())
)
_HEAD = ((6, 8), (16, 8))
_PAIRS = ((4, 3, 8), (16, 8))
_PLAIN: dict[str, Any] = {"compute_nll_loss": False, "compiled": False}

CHECKS = (
    Check("rms_norm", lambda x, w: liger.liger_rms_norm(x, w, EPS), _rms, ((6, 40), (40,))),
    Check(
        "fused_add_rms_norm",
        lambda x, r, w: liger.liger_fused_add_rms_norm(x, r, w, EPS),
        _add_rms,
        ((6, 40), (6, 40), (40,)),
    ),
    Check(
        "modulated_rms_norm",
        lambda x, w, a, b: liger.liger_modulated_rms_norm(x, w, a, b, EPS),
        lambda x, w, a, b: _rms(x, w) * (1 + a) + b,
        ((6, 40), (40,), (6, 40), (6, 40)),
    ),
    Check(
        "gated_rms_norm",
        lambda x, z, w: liger.liger_gated_rms_norm(x, z, w, EPS),
        lambda x, z, w: _rms(x, w) * F.silu(z),
        ((6, 40), (6, 40), (40,)),
    ),
    Check(
        "causal_conv1d",
        lambda x, w, b: liger.liger_causal_conv1d(x, w, b, "silu"),
        lambda x, w, b: F.silu(F.conv1d(x, w.unsqueeze(1), b, padding=3, groups=8)[..., :20]),
        ((2, 8, 20), (8, 4), (8,)),
    ),
    Check(
        "delta_gates",
        lambda a, A, bias, b: torch.stack(liger.liger_delta_gates(a, A, bias, b)),
        lambda a, A, bias, b: torch.stack([-A.exp() * F.softplus(a + bias), torch.sigmoid(b)]),
        ((6, 20), (20,), (20,), (6, 20)),
    ),
    Check(
        "channel_gates",
        liger.liger_channel_gates,
        lambda a, A, bias: -A.exp()[:, None] * F.softplus(a + bias).unflatten(-1, (4, 5)),
        ((6, 20), (4,), (20,)),
    ),
    Check(
        "gated_delta_rule", _delta_rule, _plain_delta_rule, ((2, 20, 1, 8), (2, 20, 1, 8), (2, 20, 2, 4), (2, 20, 2))
    ),
    Check(
        "channel_delta_rule",
        _channel_delta_rule,
        _plain_delta_rule,
        ((2, 20, 1, 8), (2, 20, 1, 8), (2, 20, 2, 4), (2, 20, 2), (2, 20, 2, 8)),
    ),
    Check(
        "layer_norm",
        lambda x, w, b: liger.liger_layer_norm(x, w, b, EPS),
        lambda x, w, b: F.layer_norm(x, (40,), w, b, EPS),
        ((6, 40), (40,), (40,)),
    ),
    Check("gated", liger.liger_swiglu, lambda a, b: F.silu(a) * b, ((6, 40), (6, 40))),
    Check("gated, gelu", liger.liger_geglu, lambda a, b: F.gelu(a, approximate="tanh") * b, ((6, 40), (6, 40))),
    Check(
        "gated_packed", lambda y: ops.gated_packed(y, 0, 1.0), lambda y: F.silu(y[..., :20]) * y[..., 20:], ((6, 40),)
    ),
    Check(
        "route",
        lambda z: liger.liger_route(z, 2, normalise=True).weights,
        lambda z: torch.softmax(z.topk(2).values, -1),
        ((6, 40),),
    ),
    Check(
        "route",
        lambda z, index: liger.liger_route(z, 2, normalise=True, index=index).weights,
        lambda z, index: torch.softmax(z.gather(-1, index), -1),
        ((6, 40),),
        (_EXPERTS,),
    ),
    Check("expert_load", lambda z: liger.liger_load_balancing_loss(z, 2), _load_balancing, ((6, 40),)),
    Check("activate", liger.liger_relu_squared, lambda x: F.relu(x).square(), ((6, 40),)),
    Check("xielu", liger.liger_xielu, _xielu, ((6, 40), (1,), (1,))),
    Check(
        "fused_experts",
        lambda x, g, d, w, index: fused_experts(x, g, d, index, w),
        _experts,
        ((6, 8), (4, 24, 8), (4, 8, 12), (6, 2)),
        (_EXPERTS,),
    ),
    Check(
        "rope",
        liger.liger_rope,
        lambda q, k, *t: tuple(_rotated(x, *t) for x in (q, k)),
        ((2, 4, 3, 8), (2, 2, 3, 8)),
        _TABLES,
    ),
    Check(
        "qk_norm_rope",
        lambda q, k, a, b, c, s: liger.liger_qk_norm_rope(q, k, a, b, c, s, EPS),
        lambda q, k, a, b, *t: tuple(_rotated(_rms(x, w), *t) for x, w in ((q, a), (k, b))),
        ((2, 4, 3, 8), (2, 2, 3, 8), (8,), (8,)),
        _TABLES,
    ),
    Check("rope_packed", lambda x, c, s: liger.liger_rope_packed(x, c, s, 2, 1), _packed, ((2, 3, 32),), _TABLES),
    Check("embedding", LigerEmbeddingFunction.apply, lambda w, ids: F.embedding(ids, w), ((5, 40),), (_IDS,)),
    Check(
        "linear",
        lambda x, w, a, b: ops.linear(x, w, None, a, b, None, None, 2.0),
        _adapted,
        ((6, 8), (12, 8), (3, 8), (12, 3)),
    ),
    Check(
        "qkv",
        lambda x, w, a, b: ops.qkv(
            x, w, None, a, b, w, None, None, None, w, None, a, b, None, None, None, 2.0, 1.0, 2.0
        ),
        lambda x, w, a, b: (_adapted(x, w, a, b), x @ w.T, _adapted(x, w, a, b)),
        ((6, 8), (12, 8), (3, 8), (12, 3)),
    ),
    Check(
        "activated_linear",
        lambda x, w, a, b: ops.activated_linear(x, w, None, a, b, None, 2.0),
        lambda x, w, a, b: _adapted(F.silu(x), w, a, b),
        ((6, 8), (12, 8), (3, 8), (12, 3)),
    ),
    Check(
        "gated_linear",
        lambda x, w, a, b: ops.gated_linear(x, w, None, a, b, None, 2.0),
        lambda x, w, a, b: _adapted(F.silu(x[..., :8]) * x[..., 8:], w, a, b),
        ((6, 16), (12, 8), (3, 8), (12, 3)),
    ),
    Check(
        "gated_mlp",
        lambda x, w, a, b, d: ops.gated_mlp(x, w, None, a, b, w, None, None, None, d, *(None,) * 6, 2.0, 1.0, 1.0),
        lambda x, w, a, b, d: (F.silu(_adapted(x, w, a, b)) * (x @ w.T)) @ d.T,
        ((6, 8), (12, 8), (3, 8), (12, 3), (8, 12)),
    ),
    Check("softmax", liger.liger_softmax, lambda x: x.softmax(-1), ((6, 40),)),
    Check("cross_entropy", liger.liger_cross_entropy, F.cross_entropy, ((6, 40),), (_IDS,)),
    Check(
        "fused_linear_cross_entropy",
        liger.liger_fused_linear_cross_entropy,
        lambda x, w, y: F.cross_entropy(x @ w.T, y),
        _HEAD,
        (_IDS,),
    ),
    Check(
        "selective_log_softmax",
        lambda x, ids: liger.liger_selective_log_softmax(x, ids)[0],
        lambda x, ids: -F.cross_entropy(x, ids, reduction="none"),
        ((6, 40),),
        (_IDS,),
    ),
    Check("linear_log_prob", linear_log_prob, _log_probs, _HEAD, (_IDS,)),
    Check(
        "class_logits",
        lambda x, w, ids: class_logits(x, w, ids.unsqueeze(1)),
        lambda x, w, ids: (x @ w.T).gather(1, ids.unsqueeze(1)),
        _HEAD,
        (_IDS,),
    ),
    Check(
        "divergence, jsd",
        lambda x, t: liger.liger_jsd(x.log_softmax(-1), t.log_softmax(-1).detach()),
        lambda x, t: _jsd(x.log_softmax(-1), t.log_softmax(-1).detach()),
        ((6, 40), (6, 40)),
    ),
    Check(
        "linear_distillation",
        lambda x, w, t, v: liger.liger_fused_linear_jsd(x, w, t.detach(), v.detach()),
        lambda x, w, t, v: _jsd((x @ w.T).log_softmax(-1), (t.detach() @ v.detach().T).log_softmax(-1)),
        (*_HEAD, *_HEAD),
    ),
    Check("cosine_distance", ops.cosine_distance, _distance, ((6, 40), (6, 40))),
    Check(
        "topk_divergence",
        lambda x, t: topk_divergence(x.log_softmax(-1), t.log_softmax(-1).detach(), beta=0.5, tail="drop").mean(),
        lambda x, t: _jsd(x.log_softmax(-1), t.log_softmax(-1).detach()),
        ((6, 40), (6, 40)),
    ),
    Check(
        "dpo_loss",
        lambda x, w, y: LigerFusedLinearDPOLoss(beta=0.1, use_ref_model=False, **_PLAIN)(w, x, y)[0],
        lambda x, w, y: -F.logsigmoid(0.1 * torch.sub(*_chosen(x, w, y))).mean(),
        _PAIRS,
        (_LABELS,),
    ),
    Check(
        "cpo_loss",
        lambda x, w, y: LigerFusedLinearCPOLoss(beta=0.1, **_PLAIN)(w, x, y)[0],
        lambda x, w, y: -F.logsigmoid(0.1 * torch.sub(*_chosen(x, w, y))).mean(),
        _PAIRS,
        (_LABELS,),
    ),
    Check(
        "orpo_loss", lambda x, w, y: LigerFusedLinearORPOLoss(beta=0.1, **_PLAIN)(w, x, y)[0], _odds, _PAIRS, (_LABELS,)
    ),
    Check(
        "kto_loss",
        lambda x, w, y, liked: LigerFusedLinearKTOLoss(beta=0.1, use_ref_model=False, compiled=False)(
            x, w, y, preference_labels=liked
        )[0],
        lambda x, w, y, liked: (
            1 - torch.sigmoid(0.1 * _log_probs(x, w, y).sum(1) * torch.where(liked, 1.0, -1.0))
        ).mean(),
        _PAIRS,
        (_LABELS, _LIKED),
    ),
    Check(
        "policy_loss", _policy_loss, _policy, ((4, 3),), (_MASK, torch.tensor([1.0, -0.5, 0.3, -2.0])), (torch.float32,)
    ),
    *(Check(*row) for row in _of_research()),
)


def _run(function, tensors, fixed):
    leaves = [t.detach().requires_grad_() for t in tensors]
    results = function(*leaves, *fixed)
    results = results if isinstance(results, tuple) else (results,)
    if not leaves:
        return list(results)
    # Whole numbers, which every dtype holds, in an order of no meaning.
    weights = [(torch.arange(result.numel()) * 7 % 5 - 1).view(result.shape).to(result) for result in results]
    gradients = torch.autograd.grad(results, leaves, weights, allow_unused=True)
    return [*results, *gradients]


def error_of(check: Check, device: str, dtype: torch.dtype) -> float:
    """How far results and gradients are from float64, in parts of the largest element of each."""
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(shape, generator=generator).to(device, dtype) for shape in check.shapes]
    fixed = [t.to(device) for t in check.fixed]
    exact = _run(
        check.plain,
        [t.double() for t in tensors],
        [t.to(dtype).double() if t.is_floating_point() else t for t in fixed],
    )
    ours = _run(check.ours, tensors, [t.to(dtype) if t.is_floating_point() else t for t in fixed])
    worst = 0.0
    for a, b in zip(ours, exact, strict=True):
        if (a is None) != (b is None):
            return float("inf")
        if a is not None:
            error = ((a.double() - b).abs().max() / b.abs().max().clamp_min(1e-3)).item()
            worst = max(worst, error if error == error else float("inf"))
    return worst
