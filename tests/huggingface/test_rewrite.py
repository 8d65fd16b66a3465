"""Decoder layers and attention whose forwards compute several steps by one operator."""

import copy
import inspect
import pickle
import types

import pytest
import torch
from conftest import batch, make, run
from liger_kernel.operators import together
from liger_kernel.transformers import LigerRMSNorm, apply_liger_kernel_to_llama
from liger_kernel.transformers.rewrite import ADD_AND_NORM, PROJECTIONS, rewritten
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

BOTH = frozenset((ADD_AND_NORM, PROJECTIONS))
OPERATORS = ("gated_mlp", "qkv", "fused_add_rms_norm")


class Watching(TorchDispatchMode):
    """Looks on: every module then runs as its own class says."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **kwargs or {})


def nodes(loss):
    """The names of the nodes of a graph."""
    waiting, seen = [loss.grad_fn], set()
    while waiting:
        if (node := waiting.pop()) is not None and node not in seen:
            seen.add(node)
            waiting += [following for following, _ in node.next_functions]
    return [node.name() for node in seen]


def count(loss):
    """How often the graph has each of the operators that stand for several steps."""
    names = {"gated_mlp": "linear::GatedMLP", "qkv": "linear::QKV", "fused_add_rms_norm": "FusedAddRMSNorm"}
    return {op: sum(f"op::{name}>" in node for node in nodes(loss)) for op, name in names.items()}


def same_to(expected, found, tolerance):
    for name, gradient in expected.items():
        assert (found[name] - gradient).abs().max() <= tolerance * max(1.0, gradient.abs().max()), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gemma2"])
def test_a_step_as_the_modules_compute_it(family, dtype, patched):
    """The loss is the same to the bit: nothing is rounded elsewhere. Gradients of the input of several projections are
    summed inside of their GEMMs, and those of the residual stream inside of the norm's: two roundings less each."""
    model = make(family).to(dtype)
    report = patched(family, model)
    by = {entry.by: entry for entry in report.replaced}
    assert by["fused_add_rms_norm"].count == by["qkv"].count == by["gated_mlp"].count == model.config.num_hidden_layers
    assert (
        "DecoderLayer" in by["fused_add_rms_norm"].name
        and "Attention" in by["qkv"].name
        and "MLP" in by["gated_mlp"].name
    )
    output, found = run(model, **batch())
    assert count(output.loss) == dict.fromkeys(OPERATORS, model.config.num_hidden_layers)
    with Watching():
        alone, expected = run(model, **batch())
        assert count(alone.loss) == dict.fromkeys(OPERATORS, 0)
    assert torch.equal(output.loss, alone.loss)
    same_to(expected, found, 64 * torch.finfo(dtype).eps)


def test_hooks_and_adapters_see_what_they_saw(patched):
    """Where something waits for a module's call, the module is called."""
    model = make("llama")
    patched("llama", model)
    expected, gradients = run(model, **batch())
    layer, seen = model.model.layers[0], []
    watched = [layer.post_attention_layernorm, layer.self_attn.k_proj, layer.mlp.up_proj]
    hooks = [module.register_forward_hook(lambda *call: seen.append(call)) for module in watched]
    output, found = run(model, **batch())
    assert [call[0] for call in seen] == [watched[1], watched[0], watched[2]]
    assert all(torch.equal(module(*given), result) for module, given, result in list(seen)[:3])
    layers = model.config.num_hidden_layers
    assert count(output.loss) == dict.fromkeys(OPERATORS, layers - 1)
    assert torch.equal(output.loss, expected.loss)
    same_to(gradients, found, 64 * torch.finfo(torch.float32).eps)
    for hook in hooks:
        hook.remove()
    assert count(run(model, **batch())[0].loss) == dict.fromkeys(OPERATORS, layers)
    layer.mlp.gate_proj.weight.requires_grad_(False)
    layer.self_attn.q_proj.forward = types.MethodType(nn.Linear.forward, layer.self_attn.q_proj)  # as offloading does
    output, found = run(model, **batch())
    assert count(output.loss)["qkv"] == layers - 1 and count(output.loss)["gated_mlp"] == layers
    assert "model.layers.0.mlp.gate_proj.weight" not in found


def test_copies_pickles_and_undo(patched):
    model = make("llama")
    layer = type(model.model.layers[0])
    report = patched("llama", model)
    changed = model.model.layers[0]
    assert type(changed) is not layer and type(changed).__name__ == layer.__name__ and isinstance(changed, layer)
    expected = run(model, **batch())[0].loss
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        loss = run(other, **batch())[0].loss
        assert torch.equal(loss, expected) and count(loss)["fused_add_rms_norm"] == model.config.num_hidden_layers
    assert len(patched("llama", model).replaced) == len(report.replaced)  # a second patch finds it done
    report.undo()
    assert type(changed) is layer


def test_classes_are_rewritten_in_place():
    from transformers.models.llama import modeling_llama

    before = modeling_llama.LlamaDecoderLayer.forward, modeling_llama.LlamaAttention.forward
    report = apply_liger_kernel_to_llama()
    try:
        after = modeling_llama.LlamaDecoderLayer.forward, modeling_llama.LlamaAttention.forward
        assert [forward.liger_original for forward in after] == [*before]
        assert all(inspect.signature(a) == inspect.signature(b) for a, b in zip(after, before))
        loss = run(make("llama"), **batch())[0].loss
        assert count(loss) == dict.fromkeys(OPERATORS, 2)
    finally:
        report.undo()
    assert (modeling_llama.LlamaDecoderLayer.forward, modeling_llama.LlamaAttention.forward) == before


def scaled(function):
    """A decorator that holds what it wraps in a cell, as transformers' do."""

    def wrapper(self, *args):
        return 2 * function(self, *args)

    wrapper.__wrapped__ = function
    return wrapper


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.second_norm = LigerRMSNorm(8), LigerRMSNorm(8)
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(8, n, bias=n == 8) for n in (8, 4, 4))

    def kept(self, x, r):
        x = r + 0.5 * x
        r = x
        y = self.norm(x)
        return x, r, y

    def dropped(self, x, r):
        x = x + r
        x = self.norm(x)
        return (x,)

    def inner(self, x, r):
        if r is not None:
            x = x + r
            r = x
            x = self.second_norm(x)
        return x, r

    def three(self, x, r):
        q = self.norm(self.q_proj(x))
        k = self.k_proj(x) + r[..., :4]
        v = self.v_proj(x)
        return q, k, v

    @scaled
    def decorated(self, x, r):
        x = x + r
        return self.norm(x)

    def other_input(self, x, r):
        q = self.q_proj(x)
        k = self.k_proj(r)
        v = self.v_proj(x)
        return q, k, v

    def rebound(self, x, r):
        x = self.q_proj(x)
        r = self.k_proj(x)
        v = self.v_proj(x)
        return x, r, v

    def not_a_sum(self, x, r):
        x = x * r
        x = self.norm(x)
        return (x,)

    def two_calls(self, x, r):
        q = self.q_proj(x) + self.q_proj(x)
        k = self.k_proj(x)
        v = self.v_proj(x)
        return q, k, v


@pytest.mark.parametrize("name", ["kept", "dropped", "inner", "three"])
def test_statements_that_are_rewritten(name):
    torch.manual_seed(0)
    layer, x, r = Layer(), torch.randn(3, 8, requires_grad=True), torch.randn(3, 8)
    new, found = rewritten(getattr(Layer, name), BOTH)
    assert found == {PROJECTIONS if name == "three" else ADD_AND_NORM}
    ours, plain = new(layer, x, r), getattr(layer, name)(x, r)
    assert len(ours) == len(plain) and all(torch.equal(a, b) for a, b in zip(ours, plain))
    names = nodes(sum(t.sum() for t in ours))
    assert any("QKV" in n if name == "three" else "FusedAdd" in n for n in names)
    assert new.__code__.co_firstlineno >= getattr(Layer, name).__code__.co_firstlineno


def test_a_decorator_is_kept():
    layer, x, r = Layer(), torch.randn(3, 8, requires_grad=True), torch.randn(3, 8)
    new, found = rewritten(Layer.decorated, BOTH)
    assert found == set()  # what is normalised is returned, not assigned
    new, found = rewritten(scaled(Layer.dropped_sum), BOTH)
    assert found == {ADD_AND_NORM}
    torch.testing.assert_close(new(layer, x, r), 2 * layer.norm(x + r), rtol=0, atol=0)


def _dropped_sum(self, x, r):
    x = x + r
    x = self.norm(x)
    return x


Layer.dropped_sum = _dropped_sum


@pytest.mark.parametrize("name", ["other_input", "rebound", "not_a_sum", "two_calls"])
def test_statements_that_stay(name):
    assert rewritten(getattr(Layer, name), BOTH) == (None, frozenset())


def test_a_traceback_names_the_line():
    new, _ = rewritten(Layer.kept, BOTH)
    with pytest.raises(TypeError) as raised:
        new(Layer(), torch.ones(3, 8), None)
    entry = next(entry for entry in raised.traceback if entry.name == "kept")
    assert str(entry.path) == __file__ and "self.norm(x)" in str(entry.statement)


@pytest.mark.parametrize("mixed", [False, True])
def test_sums_of_what_the_operator_does_not_take(mixed):
    """Other shapes, and a weight whose type changes that of the result."""
    norm, a = LigerRMSNorm(8), torch.randn(2, 3, 8, requires_grad=True)
    b = torch.randn(2, 3, 8).bfloat16() if mixed else torch.randn(8)
    total, y = together.add_and_normalise(norm, a, b)
    assert torch.equal(total, a + b) and torch.equal(y, norm(a + b))
    total, y = together.add_and_normalise(norm, a.bfloat16(), a.bfloat16())
    assert torch.equal(y, norm(a.bfloat16() + a.bfloat16())) and "FusedAdd" not in y.grad_fn.name()


class Private(nn.Module):
    """A decoder layer with a name that its class's goes before."""

    def __init__(self):
        super().__init__()
        self.__scale = 2.0
        self.norm = LigerRMSNorm(8)

    def forward(self, hidden_states, residual):
        hidden_states = self.__scale * hidden_states
        hidden_states = residual + hidden_states
        residual = hidden_states
        hidden_states = self.norm(hidden_states)
        return hidden_states, residual


class Public(Private):
    def forward(self, hidden_states, residual):
        hidden_states = residual + hidden_states
        residual = hidden_states
        hidden_states = self.norm(hidden_states)
        return hidden_states, residual


def test_private_names_keep_their_forward():
    """Outside of its class a forward would look for another name."""
    assert rewritten(Public.forward, BOTH)[1] == {ADD_AND_NORM}
    assert rewritten(Private.forward, BOTH) == (None, frozenset())
