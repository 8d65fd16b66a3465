"""Every class and function of the installed transformers that is tagged for `use_kernels=True`, and every gated MLP: its layer against
its own code, values and gradients, in float and in bfloat16. Needs no `kernels`: part of `make test-families`, and of `make test-hub`."""

import functools

import pytest
import tagged
import torch
from tagged import WIDTH, close, load, make, rotary_inputs

from liger_kernel.hub import layers
from liger_kernel.transformers import hub_kernels

# Sums of 64 float terms in another order: some roundings of 2^-24, and gradients that are differences of such sums.
FLOAT = 2.0**-17
# Three products and sums rounded to bfloat16, 2^-9 each, in a gradient of the untagged code in float.
BFLOAT16 = 2.0**-7

# What no layer stands for: an opposite sign, adjacent columns, and tables whose halves differ.
WITHOUT = {"modeling_nanochat", "modeling_openai_privacy_filter", "modeling_hunyuan_vl"}

TAGGED = tagged.tagged()
NORMS = [(module, name) for tag, module, name in TAGGED if tag in tagged.NORMS]
ROTARIES = [(module, name) for tag, module, name in TAGGED if tag == tagged.ROTARY]
UNTAGGED = [part for part in tagged.norms() if part not in NORMS]


def parts(found):
    return pytest.mark.parametrize("module, name", found, ids=[f"{module.rpartition('.')[2]}.{name}" for module, name in found])


def short(module):
    return module.rpartition(".")[2]


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


def check_module(cls, layer, monkeypatch, last_bits):
    original = cls.forward
    for dtype in (torch.float32, torch.bfloat16):
        module = make(cls, torch.bfloat16).to(dtype)
        exact = make(cls, torch.bfloat16).float()
        theirs, their_gradients = with_gradients(functools.partial(original, exact), [rows()], exact.parameters())
        untagged = original(module, rows().to(dtype))
        with monkeypatch.context() as patch:
            patch.setattr(cls, "forward", refuse)
            values, gradients = with_gradients(functools.partial(layer.forward, module), [rows().to(dtype)], list(module.parameters()))
        assert values[0].dtype == untagged.dtype
        if dtype == torch.float32:
            assert_same(values, theirs, FLOAT)
            assert_same(gradients, their_gradients, FLOAT)
        else:
            assert (values[0] != untagged).float().mean() <= last_bits
            assert_same(gradients, their_gradients, BFLOAT16)


# A sum of squares in another order moves a rounding to bfloat16 in one of some hundred elements.
LAST_BITS = 0.02


@parts(NORMS)
def test_norm(module, name, monkeypatch):
    cls = load(module, name)
    layer = hub_kernels._layer_of(cls)
    assert layer in layers.NORMS
    check_module(cls, layer, monkeypatch, LAST_BITS)


@parts([part for part in UNTAGGED if hub_kernels._layer_of(load(*part))])
def test_untagged_norm(module, name, monkeypatch):
    cls = load(module, name)
    check_module(cls, hub_kernels._layer_of(cls), monkeypatch, LAST_BITS)


@parts([part for part in tagged.gated_mlps() if hub_kernels._layer_of(load(*part))])
@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
def test_gated_mlp(module, name, activation, monkeypatch):
    cls = load(module, name)
    monkeypatch.setattr(tagged.CONFIG, "hidden_act", activation)
    monkeypatch.setattr(tagged.CONFIG, "hidden_activation", activation)
    if make(cls) is None:
        pytest.fail(f"{name} takes other arguments: teach make() them")
    assert hub_kernels._layer_of(cls) is layers.LigerGatedMLP
    original = cls.forward
    x = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(3)).bfloat16().float()
    for dtype, tolerance in ((torch.float32, FLOAT), (torch.bfloat16, 4 * BFLOAT16)):  # two products of matrices more
        mlp, exact = make(cls, torch.bfloat16).to(dtype), make(cls, torch.bfloat16).float()
        theirs, their_gradients = with_gradients(functools.partial(original, exact), [x], exact.parameters())
        with monkeypatch.context() as patch:
            patch.setattr(cls, "forward", refuse)
            values, gradients = with_gradients(functools.partial(layers.LigerGatedMLP.forward, mlp), [x.to(dtype)], list(mlp.parameters()))
        assert_same(values, theirs, tolerance)
        assert_same(gradients, their_gradients, tolerance)


@parts([part for part in ROTARIES if short(part[0]) not in WITHOUT])
@pytest.mark.parametrize("unsqueeze_dim", [0, 1, 2])
def test_rotary_embedding(module, name, unsqueeze_dim):
    function = load(module, name)
    layer = hub_kernels._layer_of(function)
    width = WIDTH // 2 if layer is layers.LigerHalfTableRotaryEmbedding else WIDTH
    exact = [t.float() for t in rotary_inputs(torch.bfloat16, width, unsqueeze_dim)]
    theirs, their_gradients = with_gradients(lambda q, k: function(q, k, *exact[2:], unsqueeze_dim=unsqueeze_dim), exact[:2], [])
    for dtype, tolerance in ((torch.float32, FLOAT), (torch.bfloat16, BFLOAT16)):
        q, k, cos, sin = (t.to(dtype) for t in exact)
        values, gradients = with_gradients(lambda q, k: layer.forward(Refusing(), q, k, cos, sin, unsqueeze_dim), [q, k], [])
        assert_same(values, theirs, tolerance)
        assert_same(gradients, their_gradients, tolerance)


@parts(ROTARIES)
def test_rotary_embedding_with_float_tables_has_the_dtype_of_the_untagged_code(module, name):
    function = load(module, name)
    layer = hub_kernels._layer_of(function) or layers.LigerRotaryEmbedding
    width = WIDTH // 2 if short(module) in ("modeling_gpt_oss", "modeling_openai_privacy_filter") else WIDTH
    arguments = rotary_inputs(torch.bfloat16, width, table_dtype=torch.float32)
    host = type("Host", (torch.nn.Module,), {"forward": lambda self, *a: function(*a)})()
    assert layer.forward(host, *arguments)[0].dtype == function(*arguments)[0].dtype


def test_what_has_no_layer_keeps_its_own_code():
    without = {short(module) for tag, module, name in TAGGED if not hub_kernels._layer_of(load(module, name))}
    assert without == WITHOUT & {short(module) for _, module, _ in TAGGED}


def test_the_comparison_tells_where_a_norm_rounds(monkeypatch):
    cls = load("transformers.models.olmo2.modeling_olmo2", "Olmo2RMSNorm")
    with pytest.raises(AssertionError):
        check_module(cls, layers.LigerRMSNorm, monkeypatch, LAST_BITS)
