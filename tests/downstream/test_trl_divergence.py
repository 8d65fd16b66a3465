"""liger_kernel.trl.patch()'s divergence of two heads against TRL's own."""

import liger_kernel.trl
import pytest
import torch
from heads import FLOAT, TWO_HEADS, assert_alike, inputs, taken_away
from trl.kernels import chunked_divergence


def heads(tokens, dtype=torch.float32, bias=True):
    """A student and a teacher of different widths."""
    student, teacher = (
        inputs(tokens, dtype=dtype, bias=bias)[0],
        inputs(tokens + 1, width=17, dtype=dtype, bias=bias)[0],
    )
    return [*student, *(t if t is None else t.detach() for t in (teacher[0][:tokens], *teacher[1:]))]


def both_divergences(tensors, options, backward=True, autocast=None):
    outcome, original = [], chunked_divergence.ChunkedDivergenceFunction
    for function in (original, liger_kernel.trl._divergence_function(original, 0)):
        leaves = [t if t is None else t.detach().clone().requires_grad_(t.requires_grad) for t in tensors]
        with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
            found = function.apply(*leaves, *options)
        if backward:
            (found[0] * torch.randn(len(tensors[0]), generator=torch.Generator().manual_seed(1))).sum().backward()
        outcome.append((found, [None if t is None else t.grad for t in leaves]))
    return outcome


@pytest.mark.parametrize("bias", (True, False))
@pytest.mark.parametrize(
    "options",
    (
        (0.0,),
        (1.0, 0.7),
        (0.5, 1.3),
        (0.2, 0.7, 1.6, 3.0, 0.4, None),
        (0.0, 1.0, 1.0, None, 2.0, 5.0),
        (1.0, 0.7, 0.8, 3.0),
    ),
)
def test_divergence_function(calls, options, bias):
    (expected, gradients), (found, own) = both_divergences(heads(1100, bias=bias), options)
    assert_alike(expected, found, FLOAT)
    assert_alike(gradients, own, FLOAT)
    assert (
        own[1].abs().max() > 0.1 and own[3:] == [None] * 3 and not found[1].requires_grad and len(calls[TWO_HEADS]) == 2
    )


@pytest.mark.parametrize(
    "dtype, autocast", ((torch.bfloat16, None), (torch.float16, None), (torch.float32, torch.bfloat16))
)
@pytest.mark.parametrize("beta", (0.0, 0.5, 1.0))
def test_divergence_in_16_bits(calls, dtype, autocast, beta):
    tensors, options = heads(700, dtype), (beta, 0.7, 1.0, 5.0)
    theirs, ours = both_divergences(tensors, options, autocast=autocast)
    assert len(calls[TWO_HEADS]) == 2
    truth = both_divergences([t.detach().double().requires_grad_(t.requires_grad) for t in tensors], options)[0]
    for want, other, got in zip(*((*found, *gradients[:3]) for found, gradients in (truth, theirs, ours))):
        assert got.dtype == other.dtype
        error, allowed = ((t.double() - want).square().mean().sqrt() for t in (got, other))
        assert error <= 1.1 * allowed + FLOAT * want.abs().max()


@pytest.mark.parametrize("frozen", ((0,), (1,), (1, 2)))
def test_divergence_of_frozen_inputs(frozen):
    tensors = heads(9)
    for place in frozen:
        tensors[place].requires_grad_(False)
    (_, gradients), (_, own) = both_divergences(tensors, (0.5,))
    assert_alike(gradients, own, FLOAT)


def test_divergence_has_no_second_derivative():
    tensors = heads(9)
    loss = liger_kernel.trl._divergence_function(None, 0).apply(*tensors, 0.5)[0].square().sum()
    (gradient,) = torch.autograd.grad(loss, tensors[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="second derivative"):
        gradient.sum().backward()


def test_divergence_of_no_tokens_and_of_what_has_no_kernel(calls):
    (expected, gradients), (found, own) = both_divergences(heads(0), (0.5,))
    assert_alike((*expected, *gradients), (*found, *own), 0)
    calls.clear()
    for dtype, options in ((torch.float64, (0.5,)), (torch.float32, (0.5, 1.0, 1.0, 0.0))):
        (expected, gradients), (found, own) = both_divergences(heads(5, dtype), options)
        assert_alike((*expected, *gradients), (*found, *own), 0)
    assert not calls


def test_divergence_gathers_the_weights_that_were_taken_away(monkeypatch):
    function, tensors = liger_kernel.trl._divergence_function(chunked_divergence.ChunkedDivergenceFunction, 0), heads(9)
    expected = torch.autograd.grad(function.apply(*tensors, 0.5)[0].sum(), tensors[:3])
    taken_away(monkeypatch, *(t for i, t in enumerate(tensors) if i % 3))
    divergence, _ = function.apply(*tensors, 0.5)
    assert not tensors[1].numel()
    torch.testing.assert_close(torch.autograd.grad(divergence.sum(), tensors[:3]), expected)
