"""Inputs of TRL's functions of a head, and what its own and ours give."""

import contextlib

import liger_kernel.trl
import torch
import trl.trainer.utils as trl_utils
from liger_kernel.trl import OUTPUTS
from trl.kernels import chunked_logprob

ALL = tuple(OUTPUTS)
TWO_HEADS = "linear_distillation_forward"  # in both passes
FLOAT = 2e-5  # sums of some hundred terms in another order


def inputs(tokens=37, width=24, classes=131, dtype=torch.float32, weight_dtype=None, bias=True):
    generator = torch.Generator().manual_seed(tokens)
    random = lambda *shape: torch.randn(*shape, generator=generator)
    weight_dtype = weight_dtype or dtype
    tensors = [
        random(tokens, width).to(dtype),
        (random(classes, width) * 0.5).to(weight_dtype),
        random(classes).to(weight_dtype) if bias else None,
    ]
    targets = torch.randint(classes, (tokens,), generator=generator)
    with torch.no_grad():  # some tokens are the likeliest
        targets[::3] = (tensors[0] @ tensors[1].to(dtype).T + (tensors[2] if bias else 0)).argmax(-1)[::3]
    return [t if t is None else t.requires_grad_() for t in tensors], targets


def run(function, tensors, targets, options, upstream=(True, True), autocast=None):
    """(results, gradients) of function.apply, with random upstream gradients of the first two results."""
    leaves = [t if t is None else t.detach().clone().requires_grad_(t.requires_grad) for t in tensors]
    with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
        found = function.apply(*leaves, targets, *options)
    generator = torch.Generator().manual_seed(1)
    factors = [torch.randn(len(targets), generator=generator) for _ in range(2)]
    terms = [(f * t).sum() for f, t, u in zip(factors, found, upstream) if u and t is not None]
    if terms:
        sum(terms).backward()
    return tuple(found), tuple(None if t is None else t.grad for t in leaves)


def both(*args, **kwargs):
    """The results and gradients of TRL's own function, and ours."""
    original = chunked_logprob.ChunkedLogProbFunction
    return tuple(
        run(function, *args, **kwargs) for function in (original, liger_kernel.trl._log_prob_function(original, 0))
    )


def assert_alike(expected, actual, tolerance):
    assert len(expected) == len(actual)
    for want, got in zip(expected, actual):
        assert (want is None) == (got is None)
        if want is not None:
            assert want.dtype == got.dtype and want.shape == got.shape
            if want.numel() and want.dtype != torch.bool:
                size = want.float().abs().max().item()
                assert (want.float() - got.float()).abs().max().item() <= tolerance * max(size, 1e-3)
            else:
                assert torch.equal(want, got)


def assert_no_worse(tensors, targets, options, ours, theirs, factor=1.1):
    """Results and gradients as near as theirs to TRL's in float64, and of the same dtypes."""
    whole = [t if t is None else t.detach().double().requires_grad_() for t in tensors]
    truth = run(chunked_logprob.ChunkedLogProbFunction, whole, targets, options)
    for place, (want, got, other) in enumerate(zip(*(found + gradients for found, gradients in (truth, ours, theirs)))):
        assert (got is None) == (want is None)
        if want is not None and place == ALL.index("is_top1") + 1:
            assert (got != other).float().mean() <= 0.03  # rounded logits tie
        elif want is not None:
            assert got.dtype == other.dtype
            error, allowed = ((t.double() - want).square().mean().sqrt() for t in (got, other))
            assert error <= factor * allowed + FLOAT * want.abs().max(), place


def counts(calls):
    return {name: len(each) for name, each in calls.items()}


def taken_away(monkeypatch, *parameters):
    """From the first time on that TRL's context is left, these are empty outside of it, as under ZeRO-3: that context,
    and what it was entered with."""
    whole = {id(p): p.detach().clone() for p in parameters}
    entered = []

    @contextlib.contextmanager
    def gather(*wanted):
        entered.append(wanted)
        for p in wanted:
            p.data = whole[id(p)]
        yield
        for p in wanted:
            p.data = torch.empty(0)

    monkeypatch.setattr(trl_utils, "maybe_gather_lm_head_ctx", gather)
    return gather, entered
