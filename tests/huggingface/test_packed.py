"""Packed and padded rows under sdpa: the numbers of transformers' mask that is written out, without it."""

import copy
import functools

import pytest
import torch
from conftest import TOLERANCE, assert_close, assert_same, batch, make, run
from liger_kernel.transformers.patching import packed
from liger_kernel.transformers.patching.attention import is_tracing
from torch import nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward


def positions(*rows):
    """Of rows of documents with these lengths."""
    return torch.stack([torch.cat([torch.arange(length) for length in row]) for row in rows])


def made(family, **options):
    model = make(family, **options) if options else make(family)
    model.set_attn_implementation("sdpa")
    return model


@pytest.mark.parametrize(
    "family, windows",
    [("llama", {None}), ("qwen3_moe", {None}), ("mistral", {4}), ("gemma3_text", {4, None}), ("olmo3", {4})],
)
def test_numbers_of_the_written_out_mask(family, windows, patched, calls):
    """Rows with other documents each, one of a single token; the windows of these models hold four tokens."""
    reference = made(family)
    model = copy.deepcopy(reference)
    patched(family, model)
    assert_same(model, reference, {**batch(), "position_ids": positions((3, 1, 6), (10,))})
    assert {window for _, window in calls} == windows and {longest for longest, _ in calls} == {10}
    del calls[:]
    assert_same(model, reference, {**batch(), "position_ids": positions((3, 1, 3, 3), (4, 2, 4))})
    assert {longest for longest, _ in calls} == {4} and {window for _, window in calls} == {None}
    del calls[:]
    assert_same(model, reference, {**batch(), "position_ids": positions((10,), (10,))})
    mask = torch.ones_like(batch()["input_ids"])
    assert_same(model, reference, {**batch(), "position_ids": positions((4, 6), (4, 6)), "attention_mask": mask})
    assert not calls


def padded(*rows):
    """A batch with such attention masks, whose padding has no labels."""
    mask = torch.tensor(rows)
    inputs = batch()
    return {**inputs, "attention_mask": mask, "labels": inputs["labels"].masked_fill(mask == 0, -100)}


@pytest.mark.parametrize(
    "family, windows", [("llama", {None}), ("mixtral", {None}), ("mistral", {4}), ("gemma3_text", {4, None})]
)
def test_padding_after_tokens(family, windows, patched, calls):
    reference = made(family)
    model = copy.deepcopy(reference)
    patched(family, model)
    inputs = padded([1] * 7 + [0] * 3, [1] * 10)
    assert_same(model, reference, inputs)
    assert {window for _, window in calls} == windows and {longest for longest, _ in calls} == {10}
    real = inputs["attention_mask"].bool()
    given = {**inputs, "labels": None}
    assert_close(model(**given).logits[real], reference(**given).logits[real])


@pytest.mark.parametrize(
    "rows",
    [
        ([1] * 10, [1] * 10),
        ([0] * 3 + [1] * 7, [1] * 10),  # the last token of padding predicts the first of the document
        ([1] * 5 + [0] + [1] * 4, [1] * 10),
        ([0] * 3 + [1] * 4 + [0] * 3, [1] * 10),
    ],
)
def test_masks_that_are_written_out_and_of_ones(rows, patched, calls):
    for family in ("llama", "gemma3_text"):
        reference = made(family)
        model = copy.deepcopy(reference)
        patched(family, model)
        assert_same(model, reference, padded(*rows))
        assert not calls


def test_a_document_does_not_see_another(patched, calls):
    model = made("llama")
    patched("llama", model)
    inputs = {**batch(), "position_ids": positions((4, 6), (4, 6))}
    logits = model(**{**inputs, "labels": None}).logits
    other = inputs["input_ids"].clone()
    other[:, :4] = (other[:, :4] + 1) % 7
    assert torch.equal(model(**{**inputs, "labels": None, "input_ids": other}).logits[:, 4:], logits[:, 4:])
    assert calls


def test_an_empty_cache(patched, calls):
    """A forward makes one where `use_cache` is left on. Without gradients it may be for generation, which continues a
    row from its last place, be that padding; and with it transformers does not look for documents."""
    reference = made("mistral")
    model = copy.deepcopy(reference)
    patched("mistral", model)
    inputs = {**padded([1] * 10, [1] * 6 + [0] * 4), "use_cache": True}
    assert_same(model, reference, inputs)
    assert {window for _, window in calls} == {4}
    del calls[:]
    del inputs["labels"]
    with torch.no_grad():
        assert_close(model(**inputs).logits, reference(**inputs).logits)
    assert_same(model, reference, {**batch(), "position_ids": positions((4, 6), (10,)), "use_cache": True})
    assert not calls


def test_short_rows_on_a_cpu_have_one_mask(patched, calls, monkeypatch):
    reference = made("mistral")
    model = copy.deepcopy(reference)
    patched("mistral", model)
    inputs = padded([1] * 10, [1] * 6 + [0] * 4)
    for shortest, documents in ((11, False), (10, True)):
        monkeypatch.setattr(packed, "SHORTEST_ON_CPU", shortest)
        assert_same(model, reference, inputs)
        assert bool(calls) == documents


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant, patched, calls):
    reference = made("mistral")
    model = copy.deepcopy(reference)
    patched("mistral", model)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.train(), reference.train()
    assert_same(model, reference, {**batch(), "position_ids": positions((5, 5), (2, 8))})
    assert len(calls) == 2 * model.config.num_hidden_layers


@pytest.mark.parametrize("family", ["paligemma", "llava"])
def test_an_outer_model_may_make_the_mask(family, patched, calls):
    reference = made(family).eval()  # in training some versions of PaliGemma want more inputs
    model = copy.deepcopy(reference)
    patched(family, model)
    assert_same(model, reference, {**batch(), "position_ids": positions((4, 6), (4, 6))})
    assert calls or family == "paligemma"  # which makes a mask of another kind before 5


def test_dropout_writes_the_mask_out(patched, calls):
    reference = made("llama").train()
    for module in reference.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.5
    model = copy.deepcopy(reference)
    patched("llama", model)
    inputs = {**batch(), "position_ids": positions((4, 6), (4, 6))}
    losses = []
    for each in (reference, model):
        torch.manual_seed(1)
        losses.append(each(**inputs).loss)
    torch.testing.assert_close(losses[1], losses[0], rtol=TOLERANCE, atol=0)
    assert not calls


def test_a_module_that_reads_its_mask_keeps_it(patched, calls):
    class Reads(nn.Module):
        def forward(self, hidden_states, attention_mask=None, **kwargs):
            return hidden_states * attention_mask.shape[0], None

    class Hands(nn.Module):
        def forward(self, hidden_states, attention_mask=None):
            """Not attention_mask.shape."""
            return self.inner(hidden_states, attention_mask=attention_mask)  # attention_mask + 1

    assert not packed.passes_on(Reads) and packed.passes_on(Hands)
    reference = made("llama")
    model = copy.deepcopy(reference)
    patched("llama", model)
    model.model.layers[0].reads = Reads()
    assert_same(model, reference, {**batch(), "position_ids": positions((4, 6), (4, 6))})
    assert not calls


def test_undo_and_the_function_of_another(patched, calls, monkeypatch):
    monkeypatch.setitem(AttentionInterface._global_mapping, "sdpa", sdpa_attention_forward)  # whatever ran before
    reference = made("llama")
    model = copy.deepcopy(reference)
    report = patched("llama", model)
    assert AttentionInterface()["sdpa"] is packed.attention
    inputs = {**batch(), "position_ids": positions((4, 6), (4, 6))}

    with monkeypatch.context() as changed:
        changed.setitem(AttentionInterface._global_mapping, "sdpa", functools.partial(sdpa_attention_forward))
        assert_same(model, reference, inputs)
    assert not calls
    report.undo()
    assert AttentionInterface()["sdpa"] is sdpa_attention_forward
    assert_same(model, reference, inputs)
    assert not calls


@pytest.mark.skipif(not torch.cuda.is_available(), reason="runs torch's flash attention for documents")
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_on_a_gpu(family, patched, calls):
    """The loss and the gradients of bfloat16 are at most twice as far from float32's as transformers' own."""
    exact = made(family).cuda()
    reference = copy.deepcopy(exact).bfloat16()
    model = copy.deepcopy(reference)
    patched(family, model)
    inputs = {**{name: t.cuda() for name, t in batch().items()}, "position_ids": positions((3, 1, 6), (10,)).cuda()}
    runs = [run(each, **inputs) for each in (exact, reference, model)]
    assert calls
    far = [
        sum(((found[name].float() - gradient).norm() / gradient.norm()).item() for name, gradient in runs[0][1].items())
        for _, found in runs[1:]
    ]
    assert far[1] <= 2 * far[0]
    losses = [(output.loss.float() - runs[0][0].loss).abs().item() for output, _ in runs[1:]]
    assert losses[1] <= 2 * losses[0] + 2.0**-8 * runs[0][0].loss.item()


def test_a_process_that_cannot_start_cuda(monkeypatch):
    """A fork of a process that has started CUDA has a GPU, and every question about its streams raises."""

    def refuse():
        raise RuntimeError("CUDA error: initialization error")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", refuse)
    assert not is_tracing()
