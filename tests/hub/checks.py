"""A layer against the code that it replaces: values and gradients, in float and in bfloat16."""

import functools

import tagged
import torch
from liger_kernel.hub import layers
from tagged import WIDTH, close, make, rotary_inputs

# Sums of 64 float terms in another order: some roundings of 2^-24, and gradients that are differences of such sums.
FLOAT = 2.0**-17
# Three products and sums rounded to bfloat16, 2^-9 each, in a gradient of the untagged code in float.
BFLOAT16 = 2.0**-7
# A sum of squares in another order moves a rounding to bfloat16 in one of some hundred elements.
LAST_BITS = 0.02


def refuse(self, *arguments):
    raise AssertionError("the layer handed its arguments on to the code that it replaces")


class Refusing(torch.nn.Module):
    forward = refuse


def with_gradients(forward, inputs, parameters):
    """The results of a forward, and the gradients of its inputs and parameters for fixed ones of the results."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    results = forward(*inputs)
    results = results if isinstance(results, tuple) else (results,)
    generator = torch.Generator().manual_seed(1)
    wanted = [torch.randn(result.shape, generator=generator).bfloat16().to(result.dtype) for result in results]
    gradients = torch.autograd.grad(results, [*inputs, *parameters], wanted)
    return [result.detach() for result in results], gradients


def assert_same(ours, theirs, tolerance):
    for a, b in zip(ours, theirs, strict=True):
        assert close(a, b.to(a.dtype), tolerance)


@functools.cache
def rows():
    generator = torch.Generator().manual_seed(2)
    # Of very different sizes: that tells where eps is added.
    return (torch.randn(64, WIDTH, generator=generator) * torch.logspace(-3, 1, 64)[:, None]).bfloat16().float()


def check_norm(cls, layer, monkeypatch):
    """A layer computes and rounds as the forward of `cls` does."""
    original = cls.forward
    for dtype in (torch.float32, torch.bfloat16):
        module = make(cls, torch.bfloat16).to(dtype)
        exact = make(cls, torch.bfloat16).float()
        theirs, their_gradients = with_gradients(functools.partial(original, exact), [rows()], exact.parameters())
        untagged = original(module, rows().to(dtype))
        with monkeypatch.context() as patch:
            patch.setattr(cls, "forward", refuse)
            values, gradients = with_gradients(
                functools.partial(layer.forward, module), [rows().to(dtype)], list(module.parameters())
            )
        assert values[0].dtype == untagged.dtype
        if dtype == torch.float32:
            assert_same(values, theirs, FLOAT)
            assert_same(gradients, their_gradients, FLOAT)
        else:
            assert (values[0] != untagged).float().mean() <= LAST_BITS
            assert_same(gradients, their_gradients, BFLOAT16)


def check_gated_mlp(cls, activation, monkeypatch):
    """The layer computes what the forward of `cls` does with an activation."""
    monkeypatch.setattr(tagged.CONFIG, "hidden_act", activation)
    monkeypatch.setattr(tagged.CONFIG, "hidden_activation", activation)
    assert make(cls) is not None, f"{cls.__name__} takes other arguments: teach make() them"
    original = cls.forward
    x = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(3)).bfloat16().float()
    for dtype, tolerance in ((torch.float32, FLOAT), (torch.bfloat16, 4 * BFLOAT16)):  # two products of matrices more
        mlp, exact = make(cls, torch.bfloat16).to(dtype), make(cls, torch.bfloat16).float()
        theirs, their_gradients = with_gradients(functools.partial(original, exact), [x], exact.parameters())
        with monkeypatch.context() as patch:
            patch.setattr(cls, "forward", refuse)
            values, gradients = with_gradients(
                functools.partial(layers.LigerGatedMLP.forward, mlp), [x.to(dtype)], list(mlp.parameters())
            )
        assert_same(values, theirs, tolerance)
        assert_same(gradients, their_gradients, tolerance)


def check_rotary_embedding(function, layer, unsqueeze_dim):
    """A layer rotates as a tagged function does."""
    width = WIDTH // 2 if layer is layers.LigerHalfTableRotaryEmbedding else WIDTH
    exact = [t.float() for t in rotary_inputs(torch.bfloat16, width, unsqueeze_dim)]
    theirs, their_gradients = with_gradients(
        lambda q, k: function(q, k, *exact[2:], unsqueeze_dim=unsqueeze_dim), exact[:2], []
    )
    for dtype, tolerance in ((torch.float32, FLOAT), (torch.bfloat16, BFLOAT16)):
        q, k, cos, sin = (t.to(dtype) for t in exact)
        values, gradients = with_gradients(
            lambda q, k: layer.forward(Refusing(), q, k, cos, sin, unsqueeze_dim), [q, k], []
        )
        assert_same(values, theirs, tolerance)
        assert_same(gradients, their_gradients, tolerance)
