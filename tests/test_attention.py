"""Attention with a sink per head, against the softmax with one more column in float64."""

import math

import pytest
import torch
from liger_kernel.operators.attention import attention_with_sinks, rows


def eager(q, k, v, sinks, boundaries, window, causal=True):
    """The formula with all scores: [tokens, Hq, D]."""
    places = torch.arange(q.shape[0], device=q.device)
    document = torch.bucketize(places, boundaries[1:].long(), right=True)
    seen = document == document[:, None]
    if causal:
        seen &= places <= places[:, None]
    if window:
        seen &= (places - places[:, None]).abs() < window
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, q.shape[0], 1)], -1)
    weights = scores.softmax(-1, dtype=scores.dtype)[..., : q.shape[0]]
    return torch.einsum("hqk,khd->qhd", weights, v)


def tensors(tokens, heads, groups, width, dtype, device):
    draw = torch.Generator().manual_seed(0)
    shapes = (tokens, heads, width), (tokens, groups, width), (tokens, groups, width), (heads,)
    return [torch.randn(shape, generator=draw).to(device, dtype).requires_grad_() for shape in shapes]


def passes(function, inputs):
    """The result and the gradients of all inputs."""
    y = function(*inputs)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.device, y.dtype)
    return y.detach(), *torch.autograd.grad(y, [x for x in inputs if x is not None], dy)


def sink_terms(y, inputs, boundaries, window, causal):
    """exp(s - l') dy y [tokens, Hq, D], whose negative sum is a sink's gradient."""
    q, k, v, sinks = (x.detach().double() for x in inputs)
    ones = torch.ones_like(v)
    taken = 1 - eager(q, k, ones, sinks, boundaries, window, causal)[..., :1]  # the weight of the sink
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.device, inputs[0].dtype)
    return taken * dy.double() * y


def error(found, exact):
    return ((found.double() - exact).norm() / exact.norm()).item()


DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 1, 5, 64])
@pytest.mark.parametrize("heads, groups, width", [(4, 4, 16), (8, 2, 64), (3, 1, 128)])
@pytest.mark.parametrize("causal", [True, False])
def test_error_at_most_that_of_all_scores(device, dtype, window, heads, groups, width, causal):
    """1.1 times the error of eager attention in the same dtype, and one rounding: the result is rounded twice, with and
    without the sink. Sums of D products and of 70 tokens err as the square root of their number."""
    if device == "cuda" and dtype.itemsize > 2:
        dtype = torch.bfloat16
    ends = torch.tensor([0, 7, 8, 43, 70], dtype=torch.int32, device=device)
    inputs = tensors(70, heads, groups, width, dtype, device)
    wide = [x.detach().double().requires_grad_() for x in inputs]
    exact = passes(lambda *x: eager(*x, ends, window, causal), wide)
    plain = passes(lambda *x: eager(*x, ends, window, causal), inputs)
    found = passes(lambda *x: attention_with_sinks(*x, ends, 35, window, causal=causal), inputs)
    sums = torch.finfo(torch.promote_types(dtype, torch.float32)).eps * (width + 70) ** 0.5
    once = torch.finfo(dtype).eps / 2 if dtype.itemsize == 2 else 0.0
    for ours, theirs, truth in zip(found[:-1], plain[:-1], exact[:-1], strict=True):
        assert ours.dtype is dtype
        assert error(ours, truth) <= math.hypot(1.1 * error(theirs, truth), once) + sums
    # A sink's gradient is a sum over tokens and columns that cancels: each term of it is rounded.
    parts = sink_terms(exact[0], inputs, ends, window, causal)
    bound = torch.finfo(dtype).eps * (
        exact[-1].abs() + 4 * parts.square().sum((0, 2)).sqrt()
    ) / 2 + sums * parts.abs().sum((0, 2))
    assert ((found[-1].double() - exact[-1]).abs() <= bound).all()


def test_documents_have_the_bits_that_they_have_by_themselves(device):
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    inputs = tensors(60, 4, 2, 32, dtype, device)
    ends = torch.tensor([0, 20, 60], dtype=torch.int32, device=device)
    q, k, v, sinks = inputs
    together = attention_with_sinks(q, k, v, sinks, ends, 60, 16)
    for begin, end in ((0, 20), (20, 60)):
        apart = attention_with_sinks(*(x[begin:end] for x in (q, k, v)), sinks, rows(1, end - begin, device), 60, 16)
        assert torch.equal(together[begin:end], apart)


@pytest.mark.parametrize("value", [None, -torch.inf, 30.0])
def test_absent_and_large_sinks(device, value):
    """An absent sink, or one of -inf, is plain attention; a large one takes nearly all weight."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    q, k, v, sinks = tensors(40, 4, 2, 32, dtype, device)
    sinks = None if value is None else torch.full_like(sinks, value).requires_grad_()
    ends = rows(2, 20, device)
    found = passes(lambda *x: attention_with_sinks(*x, ends, 20), [q, k, v, sinks])
    wide = [None if x is None else x.detach().double().requires_grad_() for x in (q, k, v, sinks)]
    for ours, truth in zip(found, passes(lambda *x: eager(*x, ends, None), wide), strict=True):
        assert ours.isfinite().all()
        # Each is a sum of some tens of products of rounded numbers, times exp(30), whose argument is rounded.
        bound = 8 * torch.finfo(dtype).eps + 32 * torch.finfo(torch.float32).eps
        torch.testing.assert_close(ours.double(), truth, rtol=0, atol=bound * truth.abs().max().item())


def test_one_token_and_an_empty_document(device):
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    inputs = tensors(3, 4, 2, 16, dtype, device)
    ends = torch.tensor([0, 1, 1, 2, 3], dtype=torch.int32, device=device)
    found = passes(lambda *x: attention_with_sinks(*x, ends, 1), inputs)
    exact = passes(
        lambda *x: eager(*x, rows(3, 1, device), None), [x.detach().double().requires_grad_() for x in inputs]
    )
    for ours, truth in zip(found, exact, strict=True):
        torch.testing.assert_close(
            ours.double(), truth, rtol=0, atol=4 * torch.finfo(dtype).eps * (1 + truth.abs().max())
        )


@pytest.mark.parametrize("window", [None, 32])
@pytest.mark.parametrize("causal", [True, False])
def test_whole_rows(device, window, causal):
    """Documents of one length need no boundaries; on a GPU cuDNN's kernels may take them."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    inputs = tensors(3 * 32, 8, 2, 64, dtype, device)
    ends = rows(3, 32, device)
    found = passes(lambda *x: attention_with_sinks(*x, None, 32, window, causal=causal), inputs)
    other = passes(lambda *x: attention_with_sinks(*x, ends, 32, causal=causal), inputs)
    wide = [x.detach().double().requires_grad_() for x in inputs]
    exact = passes(lambda *x: eager(*x, ends, None, causal), wide)
    for ours, theirs, truth in zip(found, other, exact, strict=True):
        assert ours.shape == truth.shape
        assert error(ours, truth) <= 1.5 * error(theirs, truth) + torch.finfo(torch.float32).eps


def test_what_is_refused(device):
    q, k, v, sinks = tensors(8, 4, 2, 16, torch.bfloat16, device)
    ends = rows(1, 8, device)
    with pytest.raises(ValueError, match="heads do not divide"):
        attention_with_sinks(q[:, :3], k, v, sinks[:3], ends, 8)
    with pytest.raises(ValueError, match="differ in dtype"):
        attention_with_sinks(q, k.float(), v, sinks, ends, 8)
    if device == "cuda":
        with pytest.raises(ValueError, match="float16 and bfloat16"):
            attention_with_sinks(q.float(), k.float(), v.float(), sinks, ends, 8)
    y = attention_with_sinks(q, k, v, sinks, ends, 8)
    gradient = torch.autograd.grad(y.float().square().sum(), q, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.float().sum().backward()
