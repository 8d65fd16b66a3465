"""Models with attention sinks, which run flash attention where transformers has eager attention for them."""

import copy

import pytest
import torch
import transformers
from conftest import TOLERANCE, VOCABULARY, assert_close, batch, make, run
from liger_kernel.operators.attention import rows
from liger_kernel.transformers import apply_liger_kernel_to_gpt_oss
from liger_kernel.transformers.monkey_patch import _apply_liger_kernel_to_instance
from liger_kernel.transformers.patching import attention
from liger_kernel.transformers.patching.attention import IMPLEMENTATION


@pytest.fixture
def calls(monkeypatch):
    """The boundaries that attention with sinks was called with."""
    found = []
    original = attention.attention_with_sinks

    def call(q, k, v, sinks, boundaries, longest, *others):
        found.append(rows(q.shape[0] // longest, longest, q.device) if boundaries is None else boundaries)
        return original(q, k, v, sinks, boundaries, longest, *others)

    monkeypatch.setattr(attention, "attention_with_sinks", call)
    return found


def with_sinks():
    model = make("gpt_oss", sliding_window=3)
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(parameter)
    return model.train()


def padded(left, right):
    """The first row is padded on its left, the second on its right."""
    inputs = batch()
    mask = torch.ones_like(inputs["input_ids"])
    mask[0, :left] = 0
    mask[1, mask.shape[1] - right :] = 0
    return {**inputs, "attention_mask": mask, "labels": inputs["labels"].masked_fill(mask == 0, -100)}


def packed():
    positions = torch.cat([torch.arange(4), torch.arange(6)])
    return {**batch(), "position_ids": positions.expand_as(batch()["input_ids"])}


def packed_masks(model):
    """Masks that keep the documents of `packed` apart, which GPT-OSS in transformers does not do by positions."""
    places, document = torch.arange(10), torch.arange(10) >= 4
    seen = (places <= places[:, None]) & (document == document[:, None])
    window = seen & (places > places[:, None] - model.config.sliding_window)
    kinds = {"full_attention": seen, "sliding_attention": window}
    masks = {kind: torch.zeros(10, 10).masked_fill(~mask, -torch.inf)[None, None] for kind, mask in kinds.items()}
    return {"attention_mask": masks}


BATCHES = {
    "whole": (batch, [0, 10, 20]),
    "with a cache": (lambda: {**batch(), "use_cache": True}, [0, 10, 20]),
    "a mask of ones": (lambda: padded(0, 0), [0, 10, 20]),
    "padded": (lambda: padded(3, 2), [0, 7, 15]),
    "packed": (packed, [0, 4, 10, 14, 20]),
}


@pytest.mark.parametrize("name", BATCHES)
def test_numbers_of_eager_attention(name, patched, calls):
    reference, (inputs, boundaries) = with_sinks(), BATCHES[name]
    model = copy.deepcopy(reference)
    report = patched("gpt_oss", model)
    layers = model.config.num_hidden_layers
    found = [(entry.name, entry.count) for entry in report.replaced if entry.switch == "attention"]
    assert found == [("GptOssAttention", layers)]
    given = {**inputs(), "output_router_logits": False}
    expected, gradients = run(reference, **{**given, **(packed_masks(reference) if name == "packed" else {})})
    output, ours = run(model, **given)
    assert [each.tolist() for each in calls] == [boundaries] * layers
    torch.testing.assert_close(output.loss, expected.loss, rtol=TOLERANCE, atol=0)
    assert gradients.keys() == ours.keys()
    for name, gradient in gradients.items():
        assert_close(ours[name], gradient)


def test_checkpointing_and_documents_of_the_collator(patched, calls):
    """Boundaries that a collator passes stand in the place of those that positions tell."""
    reference = with_sinks()
    model = copy.deepcopy(reference)
    patched("gpt_oss", model)
    model.gradient_checkpointing_enable()
    row = {**{name: tensor[:1] for name, tensor in packed().items()}, "output_router_logits": False}
    ends = torch.tensor([0, 4, 10], dtype=torch.int32)
    expected, gradients = run(reference, **row, **packed_masks(reference))
    collated = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 6, "max_length_k": 6}
    output, ours = run(model, **row, **collated)
    assert {tuple(each.tolist()) for each in calls} == {(0, 4, 10)}
    torch.testing.assert_close(output.loss, expected.loss, rtol=TOLERANCE, atol=0)
    for name, gradient in gradients.items():
        assert_close(ours[name], gradient)


def test_eager_attention_where_weights_or_dropout_or_an_own_mask_need_it(patched, calls):
    reference = with_sinks().eval()
    model = copy.deepcopy(reference)
    patched("gpt_oss", model)
    inputs = padded(3, 2)
    expected = reference.generate(inputs["input_ids"][:1], max_new_tokens=5, do_sample=False, pad_token_id=0)
    assert torch.equal(
        model.generate(inputs["input_ids"][:1], max_new_tokens=5, do_sample=False, pad_token_id=0), expected
    )
    del calls[:]
    own = torch.zeros(2, 1, 10, 10).masked_fill(torch.ones(10, 10).triu(1).bool(), torch.finfo(torch.float32).min)
    for layer in (*reference.model.layers, *model.model.layers):
        layer.self_attn.sliding_window = None
    states = [each.model(batch()["input_ids"], attention_mask=own).last_hidden_state for each in (model, reference)]
    torch.testing.assert_close(*states, rtol=TOLERANCE, atol=TOLERANCE)
    assert not calls
    layer = model.model.layers[0].self_attn
    q, k, v = torch.randn(2, 4, 10, 16), *torch.randn(2, 2, 2, 10, 16)
    for mask in (inputs["attention_mask"], torch.tensor([0, 4, 10, 20], dtype=torch.int32)):
        asked = attention.sinks_attention(layer, q, k, v, mask, 0.0, 0.25, 3, layer.sinks, output_attentions=True)
        usual = attention.sinks_attention(layer, q, k, v, mask, 0.0, 0.25, 3, layer.sinks)
        assert asked[1].shape == (2, 4, 10, 10) and usual[1] is None
        real = mask.bool()[..., None, None] if mask.dim() == 2 else torch.tensor(True)
        torch.testing.assert_close(usual[0] * real, asked[0] * real)


def test_the_switch_classes_and_undo(patched):
    model = with_sinks()
    before = model.config._attn_implementation
    assert "attention" not in {
        entry.switch for entry in patched("gpt_oss", copy.deepcopy(model), attention=False).replaced
    }
    report = patched("gpt_oss", model)
    assert model.config._attn_implementation == IMPLEMENTATION
    report.undo()
    assert model.config._attn_implementation == before
    report = apply_liger_kernel_to_gpt_oss()
    try:
        assert with_sinks().config._attn_implementation == IMPLEMENTATION
    finally:
        report.undo()
    assert with_sinks().config._attn_implementation == before


def test_a_reason_where_it_stays(patched):
    model = with_sinks()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    report = patched("gpt_oss", model)
    assert [entry.reason for entry in report.skipped if entry.switch == "attention"] == ["it drops attention weights"]
    assert model.config._attn_implementation == "eager"


FIELDS = {
    **dict(vocab_size=VOCABULARY, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4),
    **dict(num_key_value_heads=2, head_dim=16, sliding_window=3, num_local_experts=4, num_experts_per_tok=2),
    **dict(num_experts=4, moe_intermediate_size=32, n_routed_experts=4, pad_token_id=0),
}
#: Other models with sinks -> why they keep their attention.
OTHERS = {
    "FlintForCausalLM": None,
    "GraniteSWAForCausalLM": None,
    "GraniteMoeSWAForCausalLM": None,
    "MiMoV2FlashForCausalLM": "its values are of another width than its keys",
    "OpenAIPrivacyFilterForTokenClassification": "it is not causal",
}


@pytest.mark.parametrize("name", [name for name in OTHERS if hasattr(transformers, name)])
def test_other_families(name, calls):
    cls = getattr(transformers, name)
    reference = cls(cls.config_class(**FIELDS)).train()
    for parameter in reference.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model = copy.deepcopy(reference)
    report = _apply_liger_kernel_to_instance(model)
    entries = [entry for entry in (*report.replaced, *report.skipped) if entry.switch == "attention"]
    assert [getattr(entry, "reason", None) for entry in entries] == [OTHERS[name]]
    inputs = padded(3, 2)
    inputs["labels"] = torch.where(inputs["labels"] < 0, -100, inputs["labels"] % 2)  # of two classes, too
    expected, gradients = run(reference, **inputs)
    output, ours = run(model, **inputs)
    assert bool(calls) == (OTHERS[name] is None)
    torch.testing.assert_close(output.loss, expected.loss, rtol=TOLERANCE, atol=0)
    for key, gradient in gradients.items():
        assert_close(ours[key], gradient)


def test_compiled(patched, calls):
    reference = with_sinks()
    model = copy.deepcopy(reference)
    patched("gpt_oss", model)
    torch._dynamo.reset()
    inputs = {**batch(), "use_cache": False}
    expected, gradients = run(reference, **inputs)
    run(model, **inputs)  # transformers installs hooks under a lock, which its compiler does not follow
    output, ours = run(torch.compile(model, backend="aot_eager"), **inputs)
    assert len(calls) == 2 * model.config.num_hidden_layers
    torch.testing.assert_close(output.loss, expected.loss, rtol=TOLERANCE, atol=0)
    for name, gradient in gradients.items():
        assert_close(ours[f"_orig_mod.{name}"], gradient)
