"""Decoder layers and attention whose forwards compute several steps by one operator."""

import copy
import inspect
import pickle
import types

import every_type
import pytest
import torch
import transformers
from conftest import batch, make, run
from liger_kernel.operators.residual import add_and_normalise
from liger_kernel.transformers import LigerRMSNorm, apply_liger_kernel_to_llama
from liger_kernel.transformers.patching.formulas import FORMULAS
from liger_kernel.transformers.patching.layers import STEPS, fused_forward, linear_arguments
from liger_kernel.transformers.patching.mixer_functions import STARTS
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

NEW = transformers.__version__.split(".")[0] != "4"
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
# Layers of transformers 4 that return tuples keep their forward.
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", *(["gemma2"] if NEW else [])])
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gate_and_up_in_one_layer(dtype, patched):
    """What follows that layer is one operator, unless a hook waits for a call of down_proj. The loss is the same to the
    bit: nothing is rounded elsewhere."""
    model = make("phi3").to(dtype)
    report = patched("phi3", model)
    layers = model.config.num_hidden_layers
    assert [(entry.name, entry.count) for entry in report.replaced if entry.by == "gated_linear"] == [
        ("Phi3MLP", layers)
    ]
    operators = lambda loss: sum("op::linear::GatedLinear>" in node for node in nodes(loss))
    output, found = run(model, **batch())
    assert operators(output.loss) == layers
    with Watching():
        alone, expected = run(model, **batch())
    assert operators(alone.loss) == 0 and torch.equal(output.loss, alone.loss)
    same_to(expected, found, 64 * torch.finfo(dtype).eps)
    hook = model.model.layers[0].mlp.down_proj.register_forward_hook(lambda *call: None)
    assert operators(run(model, **batch())[0].loss) == layers - 1
    hook.remove()
    patched("phi3", whole := make("phi3").to(dtype), layers=False)
    assert operators(run(whole, **batch())[0].loss) == 0


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


@pytest.mark.parametrize(
    "family",
    ["glm4", "phi3", "qwen3_next", *(["granite", "gemma3_text", "mixtral", "gpt_oss", "olmoe"] if NEW else [])],
)
def test_other_layers_as_their_own_forward_computes_them(family, patched):
    """Norms and dropouts of what is added, multipliers, linear attention, experts that return their router's logits."""
    model = every_type.model_of(family)
    reference = copy.deepcopy(model)
    report = patched(family, model)
    patched(family, reference, layers=False)
    fused = {entry.by: entry.count for entry in report.replaced if entry.switch == "layers"}
    assert fused["fused_add_rms_norm"] == model.config.num_hidden_layers
    torch.manual_seed(1)
    output, found = run(model, **every_type.inputs())
    torch.manual_seed(1)
    plain, expected = run(reference, **every_type.inputs())
    assert count(output.loss)["fused_add_rms_norm"] == model.config.num_hidden_layers
    assert count(plain.loss)["fused_add_rms_norm"] == 0
    assert torch.equal(output.loss, plain.loss)
    same_to(expected, found, 64 * torch.finfo(torch.float32).eps)


def test_a_layer_called_by_position_runs_its_own_forward(patched):
    model = make("llama")
    patched("llama", model)
    layer, x = model.model.layers[0], torch.randn(1, 3, model.config.hidden_size, requires_grad=True)
    tables = model.model.rotary_emb(x, torch.arange(3)[None])
    by_name, by_place = (
        layer(x, attention_mask=None, position_embeddings=tables),
        layer(x, None, position_embeddings=tables),
    )
    assert torch.equal(by_name, by_place)
    assert "FusedAdd" in str(nodes(by_name.sum())) and "FusedAdd" not in str(nodes(by_place.sum()))


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


def test_classes_are_patched_in_place():
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


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(8, n, bias=n == 8) for n in (8, 4, 4))
        self.calls = 0

    def forward(self, hidden_states, **kwargs):
        self.calls += 1
        self.last = hidden_states
        q = self.q_proj(hidden_states)
        k = self.k_proj(hidden_states) * self.k_proj.weight.mean()
        v = self.v_proj(hidden_states)
        return q, k, v


class InPlace(Attention):
    def forward(self, hidden_states):
        q = self.q_proj(hidden_states)
        hidden_states.mul_(2)
        k = self.k_proj(hidden_states)
        hidden_states = hidden_states + 1
        v = self.v_proj(hidden_states)
        return q, k, v


class Named(Attention):
    def forward(self, hidden_states):
        q = self.q_proj(input=hidden_states)
        return q, self.k_proj(hidden_states), self.v_proj(hidden_states)


class TwoInputs(Attention):
    def forward(self, hidden_states, others):
        return self.q_proj(hidden_states), self.k_proj(others), self.v_proj(others)


class TwoCalls(Attention):
    def forward(self, hidden_states):
        q = self.q_proj(hidden_states) + self.q_proj(hidden_states)
        return q, self.k_proj(hidden_states), self.v_proj(hidden_states)


def test_projections_of_one_input():
    """All three come from one operator; what the forward sets on the module stays there, and no tensor does."""
    torch.manual_seed(0)
    module, x = Attention(), torch.randn(3, 8, requires_grad=True)
    ours, plain = fused_forward(Attention)(module, x), module(x)
    assert all(torch.equal(a, b) for a, b in zip(ours, plain)) and len(ours) == 3
    assert any("QKV" in name for name in nodes(sum(t.sum() for t in ours)))
    assert module.calls == 2 and module.last is x
    assert list(module._modules) == ["q_proj", "k_proj", "v_proj"] and type(module.q_proj) is nn.Linear
    assert set(vars(module)) == {*vars(Attention()), "last"}


def test_a_projection_without_gradients_is_a_call():
    module, x = Attention(), torch.randn(3, 8)
    seen = []
    module.k_proj.forward = lambda x: seen.append(x) or x[..., :4]
    with torch.no_grad():
        fused_forward(Attention)(module, x)
    assert len(seen) == 1


def test_projections_of_an_input_that_changes():
    torch.manual_seed(0)
    module, x = InPlace(), torch.randn(3, 8)
    plain = module(x.clone())
    ours = fused_forward(InPlace)(module, x.clone())
    assert all(torch.equal(a, b) for a, b in zip(ours, plain))


@pytest.mark.parametrize("cls", [Named, TwoInputs, TwoCalls])
def test_attention_that_keeps_its_forward(cls):
    assert fused_forward(cls) is None


def test_an_error_names_the_line():
    with pytest.raises(RuntimeError) as raised:
        fused_forward(Attention)(Attention(), torch.ones(3, 7, requires_grad=True))
    entry = next(entry for entry in raised.traceback if str(entry.path) == __file__ and entry.name == "forward")
    assert "self.q_proj(hidden_states)" in str(entry.statement)


def test_every_kind_of_layer_has_its_steps():
    assert set(STEPS) == {name for name in FORMULAS if name.endswith("decoder_layer")}


def test_a_mixer_gets_only_arguments_that_its_layer_had():
    """transformers 5.4 to 5.8.1 give the layers of Qwen3.5 no cache_position, which their linear attention refuses; an
    early LFM's convolution learns of documents by seq_idx alone."""
    given = {"position_embeddings": "tables", "attention_mask": "mask", "past_key_values": "cache", "more": 1}
    hybrid, convolving = STEPS["early_hybrid_decoder_layer"], STEPS["early_convolution_decoder_layer"]
    expected = {"cache_params": "cache", "attention_mask": "mask"}
    assert linear_arguments(given, hybrid) == expected
    assert linear_arguments(given | {"cache_position": 3}, hybrid) == expected | {"cache_position": 3}
    expected = {"past_key_values": "cache", "attention_mask": "mask"}
    assert linear_arguments(given, convolving) == expected | {"seq_idx": None}
    assert linear_arguments(given | {STARTS: "starts"}, convolving) == expected | {"seq_idx": "starts"}


@pytest.mark.parametrize("mixed", [False, True])
def test_sums_of_what_the_operator_does_not_take(mixed):
    """Other shapes, and a weight whose type changes that of the result."""
    norm, a = LigerRMSNorm(8), torch.randn(2, 3, 8, requires_grad=True)
    b = torch.randn(2, 3, 8).bfloat16() if mixed else torch.randn(8)
    total, y = add_and_normalise(norm, a, b)
    assert torch.equal(total, a + b) and torch.equal(y, norm(a + b))
    total, y = add_and_normalise(norm, a.bfloat16(), a.bfloat16())
    assert torch.equal(y, norm(a.bfloat16() + a.bfloat16())) and "FusedAdd" not in y.grad_fn.name()
