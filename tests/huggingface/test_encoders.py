"""Encoders, whose tokens see the ones after them: padding and windows under sdpa without a mask that is written out."""

import copy
import inspect
import sys

import every_type
import liger_kernel
import pytest
import torch
import transformers
from conftest import TOLERANCE, assert_close, assert_same, run
from liger_kernel.transformers.patching import masks as masks_of_models
from liger_kernel.transformers.patching import packed
from torch import nn
from transformers import masking_utils

PADDED = [[1] * 12, [1] * 7 + [0] * 5]


def inputs(*rows):
    """Token ids and labels with such attention masks; padding has no labels."""
    batch = every_type.inputs()
    mask = torch.tensor(rows)
    return {**batch, "attention_mask": mask, "labels": batch["labels"].masked_fill(mask == 0, -100)}


def made(kind, **config):
    """A tiny model under sdpa, without dropout, and a patched copy with its report."""
    model = every_type.model_of(kind)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if hasattr(module, "config"):
            vars(module.config).update(attention_dropout=0.0, attention_probs_dropout_prob=0.0)
            vars(module.config).update(config)
    model.set_attn_implementation("sdpa")
    copied = copy.deepcopy(model)
    return model, copied, liger_kernel.patch(copied)


class Neighbours(nn.Conv1d):
    """A convolution over three tokens [batch, tokens, columns]."""

    def __init__(self, columns):
        super().__init__(columns, columns, 3, padding=1)

    def forward(self, x):
        return super().forward(x.mT).mT


def masks(report):
    return [entry.by for entry in report.replaced if entry.switch == "masks"]


#: Kind -> the windows of its layers.
WINDOWS = {
    "modernbert": {None, 3}, "ultrabert": {None, 9}, "eurobert": {None}, "nomic_bert": {None}, "gte": {None},
    "jina_embeddings_v3": {None},
}  # fmt: skip


def encodes(kind):
    """Whether this version of transformers has the type, and makes its masks by the functions that all encoders use."""
    cls = getattr(transformers, every_type.types().get(kind, ""), None)
    return hasattr(sys.modules.get(getattr(cls, "__module__", ""), None), "create_bidirectional_mask")


modernbert = pytest.mark.skipif(not encodes("modernbert"), reason="this version's ModernBERT makes its own masks")


@pytest.mark.parametrize("kind", filter(encodes, WINDOWS))
def test_padding_after_tokens(kind, calls):
    """The loss and the gradients of the mask that transformers writes out; ModernBERT sees two tokens on each side, and
    its own. A batch without padding, or with a mask of ones, has no documents."""
    reference, model, report = made(kind, **({"local_attention": 4} if kind == "modernbert" else {}))
    assert masks(report) == ["padding and windows without masks"]
    assert_same(model, reference, inputs(*PADDED))
    assert {*calls} == {(12, window, "both sides") for window in WINDOWS[kind]}
    del calls[:]
    assert_same(model, reference, inputs([1] * 12, [1] * 12))
    assert_same(model, reference, every_type.inputs())
    assert not calls


@pytest.mark.parametrize("use_cache", [False, True])
def test_embedding_gemma(use_cache, calls):
    """A causal model of which a flag makes an encoder. An empty cache, which Sentence Transformers have, changes
    nothing. A window of 6 is 3 tokens on each side."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16}
    layers = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 6, "pad_token_id": 0}
    config = transformers.Gemma3TextConfig(
        **sizes, **layers, num_attention_heads=4, num_key_value_heads=2, use_bidirectional_attention=True
    )
    reference = transformers.Gemma3TextModel(config).train()
    model = copy.deepcopy(reference)
    assert masks(liger_kernel.patch(model)) == ["masks without positions"]
    ids, whole, padded = every_type.inputs()["input_ids"], torch.ones(2, 12).long(), torch.tensor(PADDED)

    def embed(model, mask):
        model.zero_grad()
        states = model(ids, attention_mask=mask, use_cache=use_cache).last_hidden_state
        mean = (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        mean.square().sum().backward()
        return mean.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}

    both = ("both sides",)
    for mask, expected_calls in ((padded, {(12, None, *both), (12, config.sliding_window, *both)}), (whole, set())):
        del calls[:]
        (mean, gradients), (expected, expected_gradients) = embed(model, mask), embed(reference, mask)
        assert {*calls} == expected_calls
        assert_close(mean, expected)
        for name, gradient in expected_gradients.items():
            assert_close(gradients[name], gradient)


@pytest.mark.parametrize("rows", [([0] * 3 + [1] * 9, [1] * 12), ([1] * 4 + [0] * 2 + [1] * 6, [1] * 12)])
def test_other_padding_is_written_out(rows, calls):
    reference, model, _ = made("modernbert")
    assert_same(model, reference, inputs(*rows))
    assert not calls


@modernbert
def test_dropout_writes_the_mask_out(calls):
    """Flash attention has none here: one mask for all layers, as in transformers."""
    reference, model, _ = made("modernbert", attention_dropout=0.1)
    assert_same(model.eval(), reference.eval(), inputs(*PADDED))
    assert not calls


@modernbert
def test_a_convolution_keeps_the_mask(calls):
    """It carries what attention gives for padding to the tokens before."""
    reference, _, _ = made("modernbert")
    reference.model.embeddings.norm = nn.Sequential(
        Neighbours(reference.config.hidden_size), reference.model.embeddings.norm
    )
    model = copy.deepcopy(reference)
    report = liger_kernel.patch(model)
    assert not masks(report)
    assert ("masks", "a convolution mixes tokens with padding") in {(e.switch, e.reason) for e in report.skipped}
    assert_same(model, reference, inputs(*PADDED))
    assert not calls


@pytest.mark.parametrize(
    "name", [pytest.param("ModernBertForQuestionAnswering", marks=modernbert), "LlamaForQuestionAnswering"]
)
def test_answers_are_chosen_among_all_tokens(name, calls):
    """The loss is that of a softmax over the row, of which padding is a part."""
    torch.manual_seed(0)
    cls = getattr(transformers, name)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    reference = cls(cls.config_class(vocab_size=512, pad_token_id=0, attn_implementation="sdpa", **sizes))
    model = copy.deepcopy(reference)
    report = liger_kernel.patch(model)
    assert "an answer is chosen among all tokens, with padding" in {entry.reason for entry in report.skipped}
    batch = {**inputs(*PADDED), "start_positions": torch.tensor([3, 2]), "end_positions": torch.tensor([5, 6])}
    del batch["labels"]
    losses = (run(each, **batch)[0].loss for each in (model, reference))
    torch.testing.assert_close(*losses, rtol=TOLERANCE, atol=0)
    assert not calls


def test_the_switch_and_undo(calls):
    reference = every_type.model_of("modernbert")
    model = copy.deepcopy(reference)
    assert not masks(liger_kernel.patch(model, masks=False))
    _, model, report = made("modernbert")
    report.undo()
    run(model, **inputs(*PADDED))
    assert not calls


@pytest.mark.skipif(not hasattr(masking_utils, "_ignore_bidirectional_mask_sdpa"), reason="these write no such mask")
def test_whole_rows_have_no_mask(monkeypatch):
    """Also where transformers writes it out: before 5.18, for compiled and captured models."""
    monkeypatch.setattr(masking_utils, "_ignore_bidirectional_mask_sdpa", lambda *args: False)
    model = made("modernbert")[0]
    name, embeddings = "create_bidirectional_mask", torch.zeros(2, 10, 64)
    embedded = next(
        n
        for n in ("inputs_embeds", "input_embeds")
        if n in inspect.signature(masking_utils.create_bidirectional_mask).parameters
    )
    create = masks_of_models._without_windows(masking_utils, name)
    arguments = {"config": model.config, embedded: embeddings}
    assert masking_utils.create_bidirectional_mask(**arguments, attention_mask=None) is not None
    assert create(**arguments, attention_mask=None) is None
    padding = torch.tensor([[1] * 10, [1] * 6 + [0] * 4])
    assert create(**arguments, attention_mask=padding).shape == (2, 1, 10, 10)
    more = {"encoder_hidden_states": torch.zeros(2, 7, 64)}
    assert create(**arguments, attention_mask=None, **more).shape == (2, 1, 10, 7)


@pytest.mark.parametrize("window", [2, 5])
def test_whole_rows_with_a_window(window):
    """What a layer on a GPU gets in place of a mask that is written out: the result of scores in float64."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(3, 4, 10, 16, generator=generator, dtype=torch.float64) for _ in range(3))
    mask = packed.whole(torch.empty(3, 10), window + 1)
    assert mask.shape == (2, window + 1, 4, 10) and mask.untyped_storage().nbytes() == 4 * 4
    out, weights = packed.attention(nn.Module(), q, k, v, mask)
    places = torch.arange(10)
    scores = (q @ k.mT / 4).masked_fill((places - places[:, None]).abs() > window, -torch.inf)
    exact = (scores.softmax(-1) @ v).transpose(1, 2)
    torch.testing.assert_close(out, exact, rtol=0, atol=64 * torch.finfo(torch.float64).eps)  # sums of 10 and 16 terms
    assert weights is None
    again, _ = packed.attention(
        nn.Module(), q, k, v, mask, softcap=None, position_bias=torch.zeros(3, 4, 10, 10).double()
    )
    torch.testing.assert_close(again, exact, rtol=0, atol=64 * torch.finfo(torch.float64).eps)  # written out


@pytest.mark.skipif(not torch.cuda.is_available(), reason="flash attention for windows needs a GPU")
@pytest.mark.parametrize("compiled", [False, True])
def test_windows_on_a_gpu(compiled, calls):
    """Whole rows have no mask either; the largest difference is some roundings of bfloat16."""
    reference, model, _ = made("modernbert", local_attention=4)
    reference, model = (each.to("cuda", torch.bfloat16) for each in (reference, model))
    batch = {name: value.cuda() for name, value in every_type.inputs().items()}
    expected, gradients = run(reference, **batch)
    output, found = run(torch.compile(model, fullgraph=True) if compiled else model, **batch)
    assert compiled or {*calls} == {(12, 3, "both sides")}
    torch.testing.assert_close(output.loss, expected.loss, rtol=2**-7, atol=0)
    found = {name.removeprefix("_orig_mod."): gradient for name, gradient in found.items()}
    for name, gradient in gradients.items():
        assert_close(found[name].float(), gradient.float(), 2**-5)
