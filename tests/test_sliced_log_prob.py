"""Heads whose classes come in slices, against plain torch on all of them in float64."""

import pytest
import torch
from liger_kernel.ops.sliced_log_prob import quantised_linear_log_prob, vocab_parallel_linear_log_prob
from ranks import DEVICE, on_ranks

N, H, V, RANKS = 21, 64, 90, 2


def batch(dtype=torch.float32):
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(0, V, (3, N // 3), generator=g)
    ids[0, 0] = ids[2, 3] = -100
    return (
        torch.randn(3, N // 3, H, generator=g).to(dtype),
        (torch.randn(V, H, generator=g) * 0.2).to(dtype),
        torch.randn(V, generator=g).to(dtype),
        ids,
        torch.randn(2, 3, N // 3, generator=g),
    )


def expected_of(hidden, weight, bias, ids, upstream, temperature=1.0, softcap=None):
    """(logp, entropy, gradients of hidden, weight and bias) in float64."""
    leaves = [t.detach().double().requires_grad_() for t in (hidden, weight, bias)]
    z = torch.nn.functional.linear(*leaves)
    z = (softcap * torch.tanh(z / softcap) if softcap else z) / temperature
    p = torch.log_softmax(z, -1)
    kept = ids != -100
    logp, entropy = (
        torch.where(kept, p.gather(-1, ids.clamp(min=0)[..., None])[..., 0], 0),
        torch.where(kept, -(p.exp() * p).sum(-1), 0),
    )
    return logp, entropy, *torch.autograd.grad([logp, entropy], leaves, list(upstream.double()))


BOUNDS = {torch.float32: dict(rtol=1e-5, atol=1e-5), torch.bfloat16: dict(rtol=0.03, atol=0.03)}


def on_rank(rank):
    cuts = [0, 40, V]  # slices of different sizes
    mine = slice(cuts[rank], cuts[rank + 1])
    for dtype, bounds in BOUNDS.items():
        hidden, weight, bias, ids, upstream = (t.to(DEVICE) for t in batch(dtype))
        for options in (dict(), dict(temperature=0.7, softcap=5.0, max_bytes=1)):
            leaves = [t.clone().requires_grad_() for t in (hidden, weight[mine], bias[mine])]
            found = vocab_parallel_linear_log_prob(
                leaves[0], leaves[1], ids, torch.distributed.group.WORLD, mine.start, leaves[2], entropy=True, **options
            )
            options.pop("max_bytes", None)
            gradients = torch.autograd.grad(found, leaves, list(upstream))
            logp, entropy, *exact = expected_of(hidden, weight, bias, ids, upstream, **options)
            exact[1], exact[2] = exact[1][mine], exact[2][mine]
            for got, want in zip((*found, *gradients), (logp, entropy, *exact)):
                assert want.abs().max() > 0.1
                torch.testing.assert_close(got.double() / want.abs().max(), want / want.abs().max(), **bounds)


def test_vocabulary_over_two_ranks():
    on_ranks(on_rank, ranks=RANKS)


def classes_of(ids):
    """Five classes of each token in both slices, one twice, one absent."""
    classes = torch.randint(0, V, (*ids.shape, 5), generator=torch.Generator().manual_seed(4)).to(ids.device)
    classes[..., 3], classes[0, 0, 1] = classes[..., 2], -1
    upstream = torch.rand(*ids.shape, 6, generator=torch.Generator().manual_seed(5)).to(ids.device)
    return classes, upstream


def expected_at_classes(hidden, weight, ids, classes, upstream):
    """(log-probabilities at the classes, of all others, gradients of hidden and weight) in float64."""
    leaves = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    logp, kept = torch.nn.functional.linear(*leaves).log_softmax(-1), ids != -100
    at = torch.where((classes >= 0) & kept[..., None], logp.gather(-1, classes.clamp(min=0)), 0)
    inside = torch.nn.functional.one_hot(classes + 1, V + 1).amax(-2)[..., 1:].bool()
    outside = torch.where(kept, logp.masked_fill(inside, -torch.inf).logsumexp(-1), 0)
    return at, outside, *torch.autograd.grad([at, outside], leaves, [upstream[..., :5], upstream[..., 5]])


def classes_on_rank(rank):
    mine = slice(40 * rank, 40 + 50 * rank)
    hidden, weight, _, ids, _ = (t.to(DEVICE) for t in batch())
    classes, upstream = classes_of(ids)
    leaves = [hidden.requires_grad_(), weight[mine].clone().requires_grad_()]
    _, *found = vocab_parallel_linear_log_prob(
        *leaves, ids, torch.distributed.group.WORLD, mine.start, class_ids=classes, log_tail=True
    )
    gradients = torch.autograd.grad(found, leaves, [upstream[..., :5], upstream[..., 5]])
    *exact, d_weight = expected_at_classes(hidden, weight, ids, classes, upstream.double())
    for got, want in zip((*found, *gradients), (*exact, d_weight[mine]), strict=True):
        torch.testing.assert_close(got.double(), want, **BOUNDS[torch.float32])


def test_classes_over_two_ranks():
    on_ranks(classes_on_rank, ranks=RANKS)


def test_classes_of_an_int8_head():
    hidden, weight, _, ids, _ = batch()
    classes, upstream = classes_of(ids)
    q, dense = quantised(weight)
    _, *found = quantised_linear_log_prob(
        hidden.requires_grad_(), q, ids, classes_at_once=30, class_ids=classes, log_tail=True
    )
    gradients = torch.autograd.grad(found, [hidden], [upstream[..., :5], upstream[..., 5]])
    *exact, _ = expected_at_classes(hidden, dense, ids, classes, upstream.double())
    for got, want in zip((*found, *gradients), exact, strict=True):
        torch.testing.assert_close(got.double(), want, **BOUNDS[torch.float32])


class Int8(torch.Tensor):
    """What bitsandbytes' Int8Params holds: rows of int8 and the largest absolute number of each."""


def quantised(weight):
    scale = weight.float().abs().amax(1)
    q = (weight.float() / scale[:, None] * 127).round().to(torch.int8).as_subclass(Int8)
    q.SCB = scale
    return q, q.float().as_subclass(torch.Tensor) * scale[:, None] / 127


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("at_once", [7, 32768])
@pytest.mark.parametrize("max_bytes", [0, 1])
def test_int8_head(dtype, at_once, max_bytes):
    hidden, weight, bias, ids, upstream = batch(dtype)
    q, dense = quantised(weight)
    leaves = [hidden.requires_grad_(), bias.requires_grad_()]
    found = quantised_linear_log_prob(hidden, q, ids, bias, entropy=True, classes_at_once=at_once, max_bytes=max_bytes)
    gradients = torch.autograd.grad(found, leaves, list(upstream))
    logp, entropy, d_hidden, _, d_bias = expected_of(hidden, dense.to(dtype), bias, ids, upstream)
    for got, want in zip((*found, *gradients), (logp, entropy, d_hidden, d_bias)):
        torch.testing.assert_close(got.double() / want.abs().max(), want / want.abs().max(), **BOUNDS[dtype])
    torch.testing.assert_close(quantised_linear_log_prob(hidden, q, ids, bias), found[0], rtol=1e-5, atol=1e-5)
    with pytest.raises(TypeError, match="quantised"):
        quantised_linear_log_prob(hidden, weight, ids)


def test_what_waits_for_backward_is_quantised():
    """No slice of the dense weight is kept: it is recomputed in backward."""
    hidden, weight, _, ids, _ = batch()
    q, _ = quantised(weight)
    made = []
    scale = q.SCB

    class Counted:
        def __getitem__(self, rows):
            made.append(rows)
            return scale[rows]

    q.SCB = Counted()
    logp = quantised_linear_log_prob(hidden.requires_grad_(), q, ids, classes_at_once=30)
    assert len(made) == 3
    logp.sum().backward()
    assert len(made) == 6
