"""Models that make their attention masks without a search for packed sequences."""

import copy
import inspect
import types
import warnings

import pytest
import torch
from conftest import TOLERANCE, assert_close, batch, make, run
from liger_kernel.graphs import capture_model
from liger_kernel.transformers import apply_liger_kernel_to_llama
from liger_kernel.transformers.patching.masks import _without_positions, is_counting
from torch._dynamo.testing import CompileCounter
from transformers import AttentionInterface, masking_utils, modeling_flash_attention_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward


@pytest.fixture
def searches(monkeypatch):
    """How often transformers has searched."""
    found = []
    original = masking_utils.find_packed_sequence_indices

    def search(position_ids):
        found.append(position_ids)
        return original(position_ids)

    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", search)
    return found


def packed():
    """Two documents in each row: positions begin again."""
    inputs = batch()
    positions = torch.cat([torch.arange(4), torch.arange(6)])
    return {**inputs, "position_ids": positions.expand_as(inputs["input_ids"])}


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3", "mistral"])
def test_no_search_without_positions(family, patched, searches):
    """The same numbers as transformers' model; positions that are given are searched, and documents stay apart."""
    reference = make(family)
    model = copy.deepcopy(reference)
    report = patched(family, model)
    assert [entry.name for entry in report.replaced if entry.switch == "masks"] == [type(reference.model).__name__]
    for inputs, count in ((batch(), 0), (packed(), 1)):
        expected, gradients = run(reference, **inputs)
        del searches[:]
        output, found = run(model, **inputs)
        assert bool(searches) == bool(count)
        torch.testing.assert_close(output.loss, expected.loss, rtol=TOLERANCE, atol=0)
        for name, gradient in gradients.items():
            assert_close(found[name], gradient)
    assert not torch.equal(run(model, **batch())[0].loss, run(model, **packed())[0].loss)


def test_a_mask_is_what_it_was(patched):
    reference = make("llama")
    model = copy.deepcopy(reference)
    patched("llama", model)
    mask = torch.ones_like(batch()["input_ids"])
    mask[0, :3] = 0
    inputs = {**batch(), "attention_mask": mask}
    torch.testing.assert_close(run(model, **inputs)[0].loss, run(reference, **inputs)[0].loss, rtol=TOLERANCE, atol=0)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_arguments_by_place(attention):
    """As Granite's hybrids of transformers 5.0.0 give them: the mask is transformers' own."""
    model = make("llama")
    model.set_attn_implementation(attention)
    given = {"cache_position": torch.arange(10), "attention_mask": None, "past_key_values": None}
    given |= dict.fromkeys(("input_embeds", "inputs_embeds"), torch.zeros(2, 10, 64)) | {"config": model.config}
    function = masking_utils.create_causal_mask
    needed = {name: p.kind for name, p in inspect.signature(function).parameters.items() if p.default is p.empty}
    arguments = [given.get(name) for name, kind in needed.items() if kind is not inspect.Parameter.KEYWORD_ONLY]
    named = {name: given.get(name) for name, kind in needed.items() if kind is inspect.Parameter.KEYWORD_ONLY}
    home = types.SimpleNamespace(create_causal_mask=function)
    found = _without_positions(home, "create_causal_mask")(*arguments, **named)
    expected = function(*arguments, **named)
    assert found is expected is None if attention == "sdpa" else torch.equal(found, expected)


def test_the_switch_and_undo(patched, searches):
    model = make("llama")
    cls = type(model.model)
    assert not patched("llama", copy.deepcopy(model), masks=False).replaced[0].switch == "masks"
    report = patched("llama", model)
    assert is_counting(type(model.model)) and type(model.model).__name__ == cls.__name__
    run(copy.deepcopy(model), **batch())
    assert not searches
    report.undo()
    assert type(model.model) is cls
    run(model, **batch())
    assert searches


def test_classes(searches):
    report = apply_liger_kernel_to_llama()
    try:
        run(make("llama"), **batch())
        assert not searches
    finally:
        report.undo()
    run(make("llama"), **batch())
    assert searches


def test_a_compiled_model_writes_no_mask(patched):
    """Attention is called without a mask, and as causal."""
    torch._dynamo.reset()
    model = make("llama")
    model.set_attn_implementation("sdpa")
    patched("llama", model)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    compiled = torch.compile(model, backend=backend)
    torch.testing.assert_close(compiled(**batch()).loss, model(**batch()).loss, rtol=TOLERANCE, atol=0)
    calls = [
        node
        for graph in graphs
        for node in graph.graph.nodes
        if "scaled_dot_product_attention" in getattr(node.target, "__name__", str(node.target))
    ]
    assert len(calls) == model.config.num_hidden_layers
    assert all(node.kwargs.get("attn_mask") is None and node.kwargs["is_causal"] for node in calls)
    counter = CompileCounter()
    torch._dynamo.reset()
    torch.compile(model, backend=counter, fullgraph=True)(**batch())
    assert counter.frame_count == 1


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_other_code_of_the_module_is_called(attention, patched, monkeypatch):
    """What somebody puts in the place of a function of the modeling module later is what runs."""
    from transformers.models.llama import modeling_llama

    model = make("llama")
    model.set_attn_implementation(attention)
    patched("llama", model)
    seen = []
    original = modeling_llama.create_causal_mask
    monkeypatch.setattr(
        modeling_llama, "create_causal_mask", lambda *args, **kwargs: seen.append(kwargs) or original(*args, **kwargs)
    )
    run(model, **batch())
    assert [kwargs["position_ids"] for kwargs in seen] == [None]


def test_flash_attention_does_not_look_for_packed_sequences(patched, monkeypatch):
    """transformers' flash attention looks in every layer, which is one wait for the GPU each."""
    looks = []
    original = modeling_flash_attention_utils._is_packed_sequence

    def flash(module, query, key, value, attention_mask, **kwargs):
        looks.append(modeling_flash_attention_utils._is_packed_sequence(kwargs["position_ids"], query.shape[0]))
        return sdpa_attention_forward(module, query, key, value, None, **kwargs)

    AttentionInterface.register("looks_for_packed", flash)
    model = make("llama")
    model.set_attn_implementation("looks_for_packed")
    monkeypatch.setattr(torch.Tensor, "min", lambda *_: pytest.fail("it looked"))
    report = patched("llama", model)
    row = {name: tensor[:1] for name, tensor in batch().items()}
    run(model, **row)
    monkeypatch.undo()
    run(model, **{name: tensor[:1] for name, tensor in packed().items()})
    layers = model.config.num_hidden_layers
    assert looks == [False] * layers + [True] * layers
    report.undo()
    assert modeling_flash_attention_utils._is_packed_sequence is original


@pytest.mark.skipif(not torch.cuda.is_available(), reason="looks for waits for the GPU")
@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt_oss"])
def test_a_step_waits_for_the_head_alone(family, patched):
    """The head counts the labels that are not ignored; nothing else is read by the host."""
    model = make(family).to("cuda", torch.bfloat16).train()
    if family != "gpt_oss":
        model.set_attn_implementation("sdpa")
    patched(family, model)
    inputs = {name: tensor.cuda() for name, tensor in batch().items()}
    run(model, **inputs)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            model(**inputs).loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    waits = [warning for warning in found if "synchronizing" in str(warning.message)]
    assert len(waits) <= 1 and all("liger_kernel" in warning.filename for warning in waits)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="captures a CUDA graph")
@pytest.mark.parametrize("mixed", [False, True])
def test_a_captured_model_without_a_mask_of_ones(mixed, patched):
    """A graph that is captured without a mask runs a batch whose mask is of ones; another batch has its mask."""
    reference = make("llama").to("cuda", torch.bfloat16).train()
    reference.set_attn_implementation("sdpa")
    model = copy.deepcopy(reference)
    for each in (reference, model):
        patched("llama", each)
    captured = capture_model(model, warmup=1, shapes=2)
    inputs = {name: tensor.cuda() for name, tensor in batch().items()}
    ones = torch.ones_like(inputs["input_ids"])
    left = ones.clone()
    left[0, :3] = 0
    for step in range(6):
        given = {**inputs, "attention_mask": left if mixed and step % 2 else ones}
        expected, gradients = run(reference, **given)
        output, found = run(model, **given)
        assert torch.equal(output.loss, expected.loss)
        assert all(torch.equal(found[name], gradient) for name, gradient in gradients.items())
    assert len(captured.graphs) == 1 + mixed
    leaves = [static for passes in captured.graphs.values() for static in passes.static]
    assert sum(isinstance(t, torch.Tensor) and t.dim() == 2 and torch.equal(t, left) for t in leaves) == mixed
    assert not any(isinstance(t, torch.Tensor) and torch.equal(t, ones) for t in leaves)
