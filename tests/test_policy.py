"""Losses of policies on hidden states, against plain torch in float64."""

import math

import pytest
import torch
from liger_kernel._library import ops
from liger_kernel.chunked_loss import grpo_loss as fused
from liger_kernel.chunked_loss.fused_linear_ppo import LigerFusedLinearPPOBase
from liger_kernel.ops import grpo_loss as on_logits
from liger_kernel.transformers.grpo_loss import _masked_mean, _reduce_grpo_loss
from policy_reference import (
    BOUNDS,
    CLIPPED,
    MAX_LENGTH,
    SOFT,
    B,
    T,
    V,
    batch,
    check,
    expected_of,
    gamma,
    log_probs,
    reduced,
)


@pytest.mark.parametrize("loss", ("dapo", "cispo", "vespo"))
def test_normalizer(loss):
    tensors, ids, mask, advantages, old, *_ = batch("cpu")
    x, weight, bias = tensors
    module = fused.LigerFusedLinearGRPOLoss(beta=0.0, loss_type=loss, use_ref_model=False)
    run = lambda **kw: module(x[:, :-1], weight, ids, mask, advantages, bias, old_per_token_logps=old, **kw)[0]
    plain, by_sum, doubled = run(), run(num_items_in_batch=int(mask.sum())), run(num_items_in_batch=2 * mask.sum())
    assert plain.abs() > 1e-3
    torch.testing.assert_close(by_sum, plain)
    torch.testing.assert_close(2 * doubled, plain)
    assert (
        LigerFusedLinearPPOBase._compute_dapo_normalizer(mask) == mask.sum()
        and on_logits._compute_dapo_normalizer(mask, 0.5) == 1
    )


def test_normalizer_of_ranks(monkeypatch):
    """The share of this rank of the tokens of all: here both ranks of two have the same."""
    tensors, ids, mask, *_ = batch("cpu")
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda t: calls.append(t.add_(mask.sum() + 6)))
    calls = []
    assert on_logits._compute_dapo_normalizer(mask) == mask.sum() + 3 and len(calls) == 1
    assert on_logits._compute_dapo_normalizer(mask, 50) == 25 and len(calls) == 1
    fused.LigerFusedLinearGRPOLoss(use_ref_model=False)(tensors[0][:, :-1], tensors[1], ids, mask * 0, torch.ones(B))
    assert len(calls) == 2  # one for the whole batch, and on a rank without tokens too


def test_reference_model_and_frozen_weight(device):
    tensors, ids, mask, advantages, old, *_ = batch(device)
    x, weight, bias = tensors
    ref_x, ref_weight, ref_bias = x.detach() * 0.5, weight.detach()[:, :].clone() * 0.7, bias.detach() + 0.1
    module = fused.LigerFusedLinearGRPOLoss(beta=0.2)
    weight.requires_grad_(False)
    got, metrics = module(
        x[:, :-1],
        weight,
        ids,
        mask,
        advantages,
        bias,
        old_per_token_logps=old,
        ref_input=ref_x[:, :-1],
        ref_weight=ref_weight,
        ref_bias=ref_bias,
    )
    got.backward()
    ref = log_probs(ref_x[:, :-1].double(), ref_weight.double(), ids, ref_bias.double())
    expected, kl, _, gradients = expected_of(tensors, ids, mask, advantages, 1.0, old=old, ref=ref, beta=0.2)
    check(
        (got, metrics[0], x.grad, bias.grad),
        (expected, kl, gradients[0], gradients[2]),
        ("loss", "kl", "x", "bias"),
        BOUNDS[torch.float32],
    )
    assert weight.grad is None


def test_gradients_of_forward():
    """Twice over a retained graph, accumulated over steps, without the weight in backward, none under no_grad, no
    second derivative."""
    tensors, ids, mask, advantages, old, ref, _ = batch("cpu")
    x, weight, bias = tensors
    module = fused.LigerFusedLinearGRPOLoss(beta=0.1)
    run = lambda: module(x[:, :-1], weight, ids, mask, advantages, bias, ref, old)[0]
    loss = run()
    once = torch.autograd.grad(loss, tensors, retain_graph=True)
    whole, weight.data = weight.data, torch.empty(0)  # as ZeRO-3 leaves it
    twice = torch.autograd.grad(loss * 2, tensors)
    weight.data = whole
    for a, b in zip(once, twice):
        assert a.abs().max() > 1e-4
        torch.testing.assert_close(2 * a, b)
    for _ in range(3):
        run().backward()
    for t, a in zip(tensors, once):
        torch.testing.assert_close(t.grad, 3 * a)
    with torch.no_grad():
        without = run()
    assert not without.requires_grad
    torch.testing.assert_close(without, loss.detach())
    first = torch.autograd.grad(run(), x, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="second derivative"):
        first.sum().backward()


@pytest.mark.parametrize("loss", CLIPPED + SOFT)
def test_padding(loss):
    """What stands at masked places changes nothing, but for luspo, whose sum has their terms too."""
    tensors, ids, mask, advantages, old, ref, ratio = batch("cpu")
    x, weight, bias = tensors
    module = fused.LigerFusedLinearGRPOLoss(beta=0.1, loss_type=loss, max_completion_length=MAX_LENGTH)
    run = lambda ids, old, ref: module(x[:, :-1], weight, ids, mask, advantages, bias, ref, old)[0]
    garbage = lambda t, value: torch.where(mask == 0, value, t)
    plain = run(ids, old, ref)
    plain.backward()
    gradients = [t.grad.clone() for t in tensors]
    assert all(g.abs().max() > 1e-5 for g in gradients)
    x.grad = weight.grad = bias.grad = None
    padded = run(
        garbage(ids, -100),
        old if loss == "luspo" else garbage(old, -300.0),
        ref if loss == "luspo" else garbage(ref, math.nan),
    )
    padded.backward()
    assert padded.isfinite() and all(t.grad.isfinite().all() for t in tensors)
    if loss == "luspo":
        assert x.grad[2, 4:].count_nonzero() == 0 and gradients[0][2, 4:-1].abs().min(0).values.max() > 0
        return
    torch.testing.assert_close(padded, plain)
    for t, g in zip(tensors, gradients):
        torch.testing.assert_close(t.grad, g)
    assert x.grad[:, :-1][mask == 0].count_nonzero() == 0


@pytest.mark.parametrize("loss", CLIPPED + SOFT)
def test_everything_masked(loss):
    tensors, ids, mask, advantages, old, ref, _ = batch("cpu")
    x, weight, bias = tensors
    module = fused.LigerFusedLinearGRPOLoss(beta=0.1, loss_type=loss, max_completion_length=MAX_LENGTH)
    got, metrics = module(x[:, :-1], weight, ids, mask * 0, advantages, bias, ref, old)
    got.backward()
    assert got == 0 and all(m == 0 for m in metrics) and all(t.grad.count_nonzero() == 0 for t in tensors)


def test_importance_ratio_shapes():
    tensors, ids, mask, advantages, old, ref, ratio = batch("cpu")
    x, weight, bias = tensors
    module = fused.LigerFusedLinearGRPOLoss(beta=0.1)
    run = lambda ratio: module(x[:, :-1], weight, ids, mask, advantages, bias, ref, old, vllm_is_ratio=ratio)[
        0
    ].detach()
    row = ratio[:, 0]
    torch.testing.assert_close(run(row), run(row.unsqueeze(1)))
    torch.testing.assert_close(run(row), run(row.unsqueeze(1).expand(B, T)))
    torch.testing.assert_close(run(torch.ones(B, T)), run(None))
    assert (run(row) - run(None)).abs() > 1e-3
    for shape in ((B + 1,), (B, T + 1), (B, T, 1), ()):
        with pytest.raises(AssertionError, match="vllm_is_ratio"):
            run(torch.ones(shape))


def test_errors():
    tensors, ids, mask, advantages, old, ref, _ = batch("cpu")
    x, weight, bias = tensors

    def run(ref=ref, ref_input=None, **options):
        module = fused.LigerFusedLinearGRPOLoss(**options)
        return module(x[:, :-1], weight, ids, mask, advantages, bias, ref, old, ref_input)

    with pytest.raises(AssertionError, match="ref_input"):
        run(ref=None)
    for error in (ValueError, Warning):  # the API raises a bare Warning
        with pytest.raises(error, match="which one is the reference"):
            run(ref_input=x)
    with pytest.raises(AssertionError, match="max_completion_length"):
        run(loss_type="dr_grpo")
    for loss in SOFT:
        with pytest.raises(ValueError, match="Sequence-level importance sampling is not supported"):
            run(ref=None, loss_type=loss, importance_sampling_level="sequence")
    with pytest.raises(ValueError, match="loss_type"):
        run(loss_type="ppo")
    with pytest.raises(ValueError, match="importance_sampling_level"):
        run(importance_sampling_level="word")
    for options in (dict(sapo_temperature_pos=0), dict(sapo_temperature_neg=-1.0), dict(delta=0.0)):
        with pytest.raises(ValueError, match="must be positive"):
            run(**options)
    # Positional callers leave anything in the places of sapo's temperatures.
    loss, _ = fused.LigerFusedLinearGRPOFunction.apply(
        x[:, :-1],
        weight,
        ids,
        mask,
        advantages,
        bias,
        ref,
        old,
        None,
        None,
        None,
        0.1,
        0.2,
        0.2,
        "dapo",
        None,
        "token",
        False,
        True,
    )
    assert loss.isfinite()
    with pytest.raises(ValueError, match="max_completion_length"):
        fused.LigerFusedLinearGRPOFunction.ppo_loss_fn(old, mask, advantages, mask, loss_type="dr_grpo")
    with pytest.raises((IndexError, RuntimeError)):
        fused.LigerFusedLinearGRPOLoss(use_ref_model=False)(x[:, :-1], weight, ids + V, mask, advantages)
    with pytest.raises(RuntimeError, match="does not fit"):
        ops.policy_loss(
            old,
            mask,
            advantages[:2],
            None,
            None,
            None,
            None,
            None,
            None,
            **on_logits.policy_options("dapo", "token", 0.2, 0.2, None, 0.0, False, 1.0, 1.0),
        )


def test_own_loss_on_the_base():
    """A user's own loss: log-probabilities in, loss and metrics out; those of masked tokens are there."""

    class Reinforce(LigerFusedLinearPPOBase):
        @staticmethod
        def ppo_loss_fn(per_token_logps, attention_mask, advantages, full_attention_mask, **kwargs):
            seen.append(sorted(kwargs))
            loss = -(per_token_logps * advantages.unsqueeze(1)).sum() / full_attention_mask.sum()
            return loss, [per_token_logps.mean(), per_token_logps.sum(1)]

        @classmethod
        def forward(cls, ctx, _input, weight, ids, mask, advantages, bias=None):
            return super().forward(
                cls=cls,
                ctx=ctx,
                _input=_input,
                weight=weight,
                selected_token_ids=ids,
                attention_mask=mask,
                advantages=advantages,
                bias=bias,
            )

        @staticmethod
        def backward(ctx, *grad_output):
            return LigerFusedLinearPPOBase.backward(ctx, *grad_output)[:6]

    seen = []
    (x, weight, bias), ids, mask, advantages, *_ = batch("cpu")
    loss, (average, rows) = Reinforce.apply(x[:, :-1], weight, ids, mask, advantages, bias)
    loss.backward()
    exact = [t.detach().double().requires_grad_() for t in (x, weight, bias)]
    lp = log_probs(exact[0][:, :-1], exact[1], ids, exact[2])
    expected = -(lp * advantages.double().unsqueeze(1)).sum() / mask.sum()
    gradients = torch.autograd.grad(expected, exact)
    check(
        (loss, average, rows, x.grad, weight.grad, bias.grad),
        (expected, lp.mean(), lp.sum(1), *gradients),
        ("loss", "average", "rows", "x", "weight", "bias"),
        BOUNDS[torch.float32],
    )
    assert len(seen) == 1 and {
        "ref_per_token_logps",
        "old_per_token_logps",
        "epsilon_low",
        "vllm_is_ratio",
        "num_items_in_batch",
        "vespo_k_pos",
    } <= set(seen[0])
    with pytest.raises(NotImplementedError):
        LigerFusedLinearPPOBase.ppo_loss_fn()


def test_chunk_forward():
    g = torch.Generator().manual_seed(2)
    x, weight, bias = (torch.randn(*s, generator=g).requires_grad_() for s in ((3, 700, 16), (4200, 16), (4200,)))
    ids = torch.randint(0, 4200, (3, 700), generator=g)
    ids[1, 5:9] = torch.tensor([-100, -1, -100, -7])
    upstream = torch.randn(3, 700, generator=g)
    got = LigerFusedLinearPPOBase.chunk_forward(x, weight, ids, bias, temperature=0.7)
    got.backward(upstream)
    exact = [t.detach().double().requires_grad_() for t in (x, weight, bias)]
    expected = torch.where(ids < 0, 0, log_probs(exact[0], exact[1], ids.clamp(min=0), exact[2], 0.7))
    expected.backward(upstream.double())
    check(
        (got, x.grad, weight.grad, bias.grad),
        (expected, *(t.grad for t in exact)),
        ("logp", "x", "weight", "bias"),
        BOUNDS[torch.float32],
    )
    assert got.dtype == torch.float32 and got[1, 5:9].count_nonzero() == 0


def test_formulas():
    g = torch.Generator().manual_seed(3)
    p, q = torch.randn(2, 5, generator=g, dtype=torch.float64), torch.randn(2, 5, generator=g, dtype=torch.float64)
    torch.testing.assert_close(fused.k3_loss_fn(p, q), (p - q).exp() - (p - q) - 1)
    assert (
        fused.k3_loss_fn(torch.full((9,), 1e-4), torch.zeros(9)) > 4.9e-9
    ).all()  # exp(x) − x − 1 in float32 is 0 there
    torch.testing.assert_close(fused.sapo_loss_fn(p.exp(), 0.7), torch.sigmoid(0.7 * (p.exp() - 1)) * 4 / 0.7)
    with pytest.raises(ValueError):
        fused.sapo_loss_fn(p, 0)
    clipped, low, high = fused.clip_coef_fn(p.exp(), 0.2, 0.3, "grpo")
    assert low.any() and high.any() and clipped.min() == 0.8 and clipped.max() == 1.3
    clipped, low, high = fused.clip_coef_fn(p.exp().requires_grad_(), 0.2, 1.5, "cispo")
    assert low is False and not clipped.requires_grad and clipped.max() == 1.5 and high.any()
    assert fused.clip_coef_fn(p, 0.2, 0.2, "sapo")[0] is None
    advantages, mask = torch.tensor([1.0, -1.0], dtype=torch.float64), torch.tensor([[1, 1, 1, 0, 0], [1, 0, 1, 1, 1]])
    for ratio in (None, q.exp(), q[:, :1].exp(), torch.zeros(2, 5, dtype=torch.float64)):
        got = fused.get_gamma_weights(advantages, p, mask, ratio, 1.5, 2.5, 1.0, 0.0)
        torch.testing.assert_close(got, gamma(advantages, p, mask, ratio, 1.5, 2.5, 1.0, 0.0))
    torch.testing.assert_close(fused.get_gamma_weights(advantages, p * 0, mask), torch.ones(2, 1, dtype=torch.float64))
    assert not fused.get_gamma_weights(advantages, p.requires_grad_(), mask).requires_grad
    values = torch.arange(10.0).view(2, 5)
    torch.testing.assert_close(_masked_mean(values, mask), (values * mask).sum() / mask.sum())
    assert _masked_mean(values, mask * 0) == 0
    for loss in CLIPPED + SOFT:
        torch.testing.assert_close(
            _reduce_grpo_loss(values, mask, loss, None), reduced(values.double(), mask.double(), loss, 5).float()
        )
        torch.testing.assert_close(
            _reduce_grpo_loss(values, None, loss, 9),
            reduced(values.double(), torch.ones(2, 5).double(), loss, 9).float(),
        )
    with pytest.raises(ValueError, match="loss_type"):
        _reduce_grpo_loss(values, mask, "ppo", None)
