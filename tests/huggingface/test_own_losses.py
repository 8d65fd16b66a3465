"""A loss of a model's own, however it comes to be the model's, is computed from logits."""

import copy

import pytest
import torch
import transformers
from conftest import assert_same_step, batch, class_of, config_of, make
from liger_kernel.transformers import _apply_liger_kernel_to_instance, functional
from liger_kernel.utils import warn_once
from torch.nn import functional as F
from transformers.loss import loss_utils

FUSED = "fused_linear_cross_entropy"


def doubled(logits, labels, vocab_size, **kwargs):
    return 2 * F.cross_entropy(logits.float().view(-1, vocab_size), labels.view(-1))


def _fixed(source, target, num_items_in_batch=None, ignore_index=-100, **kwargs):
    return 2 * F.cross_entropy(source, target, ignore_index=ignore_index)


class Method:
    def loss_function(self, logits, labels, vocab_size, **kwargs):
        return doubled(logits, labels, vocab_size)


class Property:
    @property
    def loss_function(self):
        return doubled


class Attribute:
    loss_function = staticmethod(doubled)


@pytest.mark.parametrize("level", ["instance", "class"])
@pytest.mark.parametrize("own", [Method, Property, Attribute])
def test_of_a_subclass(own, level, patched):
    base = class_of("llama")
    reference = make("llama")
    plain = reference(**batch()).loss
    reference.__class__ = type("Own", (own, base), {})
    model = copy.deepcopy(reference)
    report = patched("llama", model if level == "instance" else None, rope=False)
    if level == "instance":
        assert [(entry.switch, "its loss with" in entry.reason) for entry in report.skipped] == [(FUSED, True)]
    else:
        model = type("Own", (own, base), {})(config_of("llama"))
        model.load_state_dict(reference.state_dict())
    expected = base.forward.liger_original(reference, **batch()) if level == "class" else reference(**batch())
    output = model.train()(**batch())
    assert output.logits is not None and not torch.isclose(expected.loss, plain, rtol=0.1)
    torch.testing.assert_close(output.loss, expected.loss)


def _of_class(monkeypatch):
    monkeypatch.setattr(class_of("llama"), "loss_function", staticmethod(doubled))


def _of_table(monkeypatch):
    monkeypatch.setitem(loss_utils.LOSS_MAPPING, "ForCausalLM", doubled)


def _of_transformers(monkeypatch):
    monkeypatch.setattr(loss_utils, "fixed_cross_entropy", _fixed)


def _of_torch(monkeypatch):
    cross_entropy = F.cross_entropy
    monkeypatch.setattr(F, "cross_entropy", lambda *args, **kwargs: 2 * cross_entropy(*args, **kwargs))


@pytest.mark.parametrize("loss", [FUSED, "cross_entropy"])
@pytest.mark.parametrize("first", ["patch", "replace"])
@pytest.mark.parametrize("replace", [_of_class, _of_table, _of_transformers, _of_torch])
def test_that_replaces_transformers(replace, first, loss, patched, monkeypatch, caplog):
    """Of all models: what is replaced after the patch counts too, as in a model that is not patched."""
    warn_once.cache_clear()
    reference = make("llama")
    plain, model = reference(**batch()).loss, copy.deepcopy(reference)
    switches = {FUSED: False, loss: True, "rope": False}
    if first == "replace":
        replace(monkeypatch)
    report = patched("llama", model, **switches)
    if first == "patch":
        assert model(**batch()).logits is None or loss != FUSED
        # cross_entropy=True has given this model a loss function, which the class's and the table's do not replace.
        if loss != FUSED and replace in (_of_class, _of_table):
            return
        replace(monkeypatch)
    else:
        assert {entry.switch for entry in report.skipped} == {loss} and "computes its loss with" in str(report)
    expected = reference(**batch()).loss
    output = model(**batch())
    assert output.logits is not None and not torch.isclose(expected, plain, rtol=0.1)
    torch.testing.assert_close(output.loss, expected)
    assert "computes its loss with" in caplog.text or loss != FUSED


def test_this_packages_cross_entropy_in_torchs_place_leaves_the_loss_fused(patched, monkeypatch):
    model = make("llama")
    patched("llama", model)
    monkeypatch.setattr(F, "cross_entropy", functional.liger_cross_entropy)
    assert model(**batch()).logits is None


def test_a_wrapper_of_transformers_loss_is_another(patched, monkeypatch):
    """functools.wraps gives it the original's name and module, which therefore say nothing."""
    import functools

    reference = make("llama")
    model = copy.deepcopy(reference)
    patched("llama", model, rope=False)
    standard = loss_utils.ForCausalLMLoss
    tripled = functools.wraps(standard)(lambda *args, **kwargs: 3 * standard(*args, **kwargs))
    for each in (model, reference):
        each.loss_function = tripled
    assert assert_same_step(model, reference, **batch()).logits is not None


@pytest.mark.parametrize(
    "dtype, autocast",
    [
        (torch.float32, False),
        (torch.bfloat16, False),
        (torch.float16, False),
        (torch.float32, True),
        (torch.bfloat16, True),
    ],
    ids=str,
)
def test_the_dtype_of_torchs_own_loss(dtype, autocast):
    """A model whose forward calls torch's cross entropy has that function's dtype, patched and not."""
    torch.manual_seed(0)
    sizes = dict(vocab_size=64, d_model=32, encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=32)
    layers = dict(encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2, dropout=0.0)
    reference = transformers.BartForConditionalGeneration(transformers.BartConfig(**sizes, **layers)).to(dtype).train()
    model = copy.deepcopy(reference)
    _apply_liger_kernel_to_instance(model)
    ids = torch.arange(4, 24).view(2, 10)
    losses = []
    for each in (reference, model):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            output = each(input_ids=ids, labels=ids, use_cache=False)
        losses.append(output.loss)
        output.loss.backward()
    assert output.logits is None and losses[0].dtype == losses[1].dtype
    torch.testing.assert_close(losses[1], losses[0], rtol=2 * torch.finfo(dtype).eps, atol=0)
