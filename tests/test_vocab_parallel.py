"""Cross entropy of logits spread over ranks, against plain torch on all of them."""

import pytest
import torch
from liger_kernel import ops as liger_ops
from liger_kernel.transformers import LigerVocabParallelCrossEntropy
from liger_kernel.transformers.vocab_parallel_cross_entropy import validate_formula_and_mode
from ranks import DEVICE, on_ranks

S, B, V, RANKS = 5, 3, 24, 2
OPTIONS = [dict()] + [
    dict(label_smoothing=0.2, label_smoothing_formula=f, label_smoothing_mode=m)
    for f in ("pytorch", "megatron")
    for m in ("global", "partition")
]


def batch(dtype=torch.float32, ignore_index=-100):
    g = torch.Generator().manual_seed(1)
    target = torch.randint(0, V, (S, B), generator=g)
    target[0], target[1, 0] = ignore_index, ignore_index
    return (torch.randn(S, B, V, generator=g) * 3).to(dtype), target, torch.randn(S, B, generator=g)


def expected_of(
    logits,
    target,
    upstream,
    ranks=1,
    rank=0,
    ignore_index=-100,
    label_smoothing=0.0,
    label_smoothing_formula="pytorch",
    label_smoothing_mode="global",
):
    """(loss, gradient of this rank's logits) in float64."""
    x = logits.double().requires_grad_()
    logp = torch.log_softmax(x, -1)
    classes = logits.shape[-1] // ranks
    mine = slice(rank * classes, (rank + 1) * classes)
    smoothed = logp if label_smoothing_mode == "global" else logp[..., mine]
    k = smoothed.shape[-1]
    a = label_smoothing * (k / (k - 1) if label_smoothing_formula == "megatron" else 1)
    nll = -logp.gather(-1, target.clamp(0, logits.shape[-1] - 1).unsqueeze(-1)).squeeze(-1)
    loss = ((1 - a) * nll - a * smoothed.mean(-1)).masked_fill(target == ignore_index, 0)
    loss.backward(upstream.double())
    return loss.detach(), x.grad[..., mine]


class One:
    def size(self):
        return 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_one_rank(device, dtype, options):
    logits, target, upstream = (t.to(device) for t in batch(dtype, ignore_index=5))
    before = logits.clone()
    logits.requires_grad_()
    module = LigerVocabParallelCrossEntropy(ignore_index=5, **options)
    loss = module(logits, target, One())
    loss.backward(upstream, retain_graph=True)
    expected, gradient = expected_of(logits.detach(), target, upstream, ignore_index=5, **options)
    assert (
        loss.dtype == torch.float32
        and loss.shape == (S, B)
        and logits.grad.dtype == dtype
        and torch.equal(logits.detach(), before)
    )
    assert (
        loss[0].count_nonzero() == 0 == logits.grad[0].count_nonzero()
        and expected[1:].abs().max() > 1
        and gradient.abs().max() > 0.1
    )
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        logits.grad.double(),
        gradient,
        **{torch.float32: dict(rtol=1e-5, atol=1e-6)}.get(dtype, dict(rtol=0.01, atol=0.01)),
    )
    once = logits.grad.clone()
    loss.backward(upstream)
    torch.testing.assert_close(logits.grad, 2 * once)
    with torch.no_grad():
        torch.testing.assert_close(module(logits, target), loss.detach())
    with pytest.raises(RuntimeError, match="second derivative"):
        torch.autograd.grad(module(logits, target).sum(), logits, create_graph=True)[0].float().sum().backward()


def test_targets_that_are_no_class():
    logits, target, upstream = batch()
    target[2, 0], target[2, 1], target[3, 1] = V, -7, 10**9
    logits.requires_grad_()
    loss = LigerVocabParallelCrossEntropy()(logits, target)
    loss.backward(upstream)
    p = torch.softmax(logits.detach(), -1)
    for at in ((2, 0), (2, 1), (3, 1)):
        torch.testing.assert_close(loss[at], torch.logsumexp(logits[at], -1) - logits[at].max())
        torch.testing.assert_close(logits.grad[at], p[at] * upstream[at])


def test_far_logits():
    """A class 200 below the largest has a finite log-probability, and so has the smoothed loss."""
    logits = torch.zeros(1, 1, 8)
    logits[..., 3] = -200
    loss = LigerVocabParallelCrossEntropy(label_smoothing=0.1)(logits, torch.tensor([[1]]))
    torch.testing.assert_close(
        loss.double(), expected_of(logits, torch.tensor([[1]]), torch.ones(1, 1), label_smoothing=0.1)[0]
    )


def on_rank(rank):
    mine = slice(rank * V // RANKS, (rank + 1) * V // RANKS)
    for dtype in (torch.float32, torch.bfloat16):
        logits, target, upstream = (t.to(DEVICE) for t in batch(dtype))
        for options in OPTIONS:
            x = logits[..., mine].clone().requires_grad_()
            loss = LigerVocabParallelCrossEntropy(**options)(x, target, torch.distributed.group.WORLD)
            loss.backward(upstream)
            expected, gradient = expected_of(logits, target, upstream, RANKS, rank, **options)
            torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(
                x.grad.double(),
                gradient,
                **(dict(rtol=1e-5, atol=1e-6) if dtype == torch.float32 else dict(rtol=0.01, atol=0.01)),
            )


def test_two_ranks():
    on_ranks(on_rank, ranks=RANKS)


def test_contract():
    assert LigerVocabParallelCrossEntropy().extra_repr() == (
        "ignore_index=-100, label_smoothing=0.0, reduction='none', label_smoothing_formula='pytorch', "
        "label_smoothing_mode='global'"
    )
    for options, match in (
        (dict(reduction="mean"), "reduction must be 'none'"),
        (dict(label_smoothing=1.0), "label_smoothing must be in"),
        (dict(label_smoothing=-0.1), "label_smoothing must be in"),
        (dict(label_smoothing_formula="Megatron"), "label_smoothing_formula"),
        (dict(label_smoothing_mode="local"), "label_smoothing_mode"),
    ):
        with pytest.raises(ValueError, match=match):
            LigerVocabParallelCrossEntropy(**options)
    with pytest.raises(ValueError, match="label_smoothing_mode"):
        validate_formula_and_mode("pytorch", "Global")
    for call in (
        lambda x, y: LigerVocabParallelCrossEntropy()(x, y),
        lambda x, y: liger_ops.LigerVocabParallelCEFunction.apply(x, y, None, -100, 0.0, "pytorch", "global"),
    ):
        with pytest.raises(ValueError, match="3-D"):
            call(torch.randn(4, 8), torch.zeros(4, dtype=torch.long))
