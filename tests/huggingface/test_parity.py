"""Patched models compute what the unpatched ones do."""

import copy

import pytest
import torch
from conftest import (
    CURVE_TOLERANCE,
    VOCABULARY,
    assert_close,
    assert_rounded_alike,
    assert_same_step,
    batch,
    class_of,
    config_of,
    make,
    run,
)
from liger_kernel.transformers import functional
from torch import nn
from torch.nn import functional as F

FUSED, UNFUSED = "fused_linear_cross_entropy", "cross_entropy"


def _curve(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(20):
        loss = model(**batch(step % 4)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


@pytest.mark.parametrize("level", ["class", "instance"])
@pytest.mark.parametrize("loss", [FUSED, UNFUSED])
def test_training_and_evaluation(family, patched, level, loss):
    reference = make(family)
    weights = copy.deepcopy(reference.state_dict())
    expected, expected_gradients = run(reference, **batch())
    with torch.no_grad():
        expected_evaluation = reference.eval()(**batch())
    expected_curve = _curve(reference.train())

    model = None if level == "class" else make(family)
    patched(family, model, strict=True, **{FUSED: False, loss: True})
    if level == "class":
        model = class_of(family)(config_of(family)).train()
    model.load_state_dict(weights)

    output, gradients = run(model, **batch())
    assert (output.logits is None) == (loss == FUSED)
    assert_close(output.loss, expected.loss)
    assert gradients.keys() == expected_gradients.keys()
    for name, gradient in expected_gradients.items():
        assert_close(gradients[name], gradient)
    with torch.no_grad():
        evaluation = model.eval()(**batch())
    assert_close(evaluation.loss, expected_evaluation.loss)
    assert_close(evaluation.logits, expected_evaluation.logits)
    assert_close(_curve(model.train()), expected_curve, CURVE_TOLERANCE)


def test_generate(family, patched):
    model = make(family, use_cache=True).eval()
    arguments = {"input_ids": batch()["input_ids"], "max_new_tokens": 12, "do_sample": False}
    expected = model.generate(**arguments)
    patched(family, model)
    assert torch.equal(model.generate(**arguments), expected)


def test_save_and_load(family, patched, tmp_path):
    model = make(family)
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    loss = model(**batch()).loss
    report = patched(family, model)
    model.save_pretrained(tmp_path)
    assert model.config.architectures == [class_of(family).__name__]
    report.undo()
    for switches in ({}, {"model": None}):
        if switches:
            patched(family, **switches)
        loaded = class_of(family).from_pretrained(tmp_path, attn_implementation="eager").train()
        state = loaded.state_dict()
        assert state.keys() == expected.keys()
        assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())
        assert_close(loaded(**batch()).loss, loss)


def test_what_skip_logits_decides(pair):
    model, reference = pair
    for training in (True, False):
        model.train(training)
        expected = reference.train(training)(**batch())
        # Without labels there is no loss to ask for; Trainer's label smoothing keeps skip_logits=True there.
        for skip_logits, given in (
            (None, True),
            (True, True),
            (False, True),
            (None, False),
            (False, False),
            (True, False),
        ):
            inputs = batch() if given else {"input_ids": batch()["input_ids"]}
            output = model(**inputs, skip_logits=skip_logits)
            fused = given and (training if skip_logits is None else skip_logits)
            if given:
                assert_close(output.loss, expected.loss)
            else:
                assert output.loss is None
            if fused:
                assert output.logits is None
            else:
                assert_close(output.logits, expected.logits)
            assert output.token_accuracy is None and output.predicted_tokens is None


def test_shift_labels_take_precedence(pair):
    model, reference = pair
    inputs = batch()
    shifted = F.pad(inputs["labels"], (0, 1), value=-100)[:, 1:].contiguous()
    shifted[1, 3:6] = -100
    expected, expected_gradients = run(reference, **inputs, shift_labels=shifted)
    for labels in ({"labels": inputs["labels"]}, {}):
        for skip_logits in (True, False):
            arguments = {"shift_labels": shifted, "skip_logits": skip_logits, **labels}
            output, gradients = run(model, input_ids=inputs["input_ids"], **arguments)
            assert_close(output.loss, expected.loss)
            for name, gradient in expected_gradients.items():
                assert_close(gradients[name], gradient)


@pytest.mark.parametrize("switch", [FUSED, UNFUSED])
def test_accumulated_gradients_are_those_of_the_whole_batch(family, patched, switch):
    reference = make(family)
    model = copy.deepcopy(reference)
    patched(family, model, rope=False, **{FUSED: False, switch: True})
    inputs = batch(rows=4)
    expected, expected_gradients = run(reference, **inputs)
    items = (inputs["labels"][:, 1:] != -100).sum()
    for count in (items, items.item()):
        model.zero_grad()
        total = 0
        for part in range(4):
            rows = {name: value[part : part + 1] for name, value in inputs.items()}
            loss = model(**rows, num_items_in_batch=count).loss
            loss.backward()
            total += loss.detach()
        assert_close(total, expected.loss)
        for name, parameter in model.named_parameters():
            assert_close(parameter.grad, expected_gradients[name])


def test_accuracy_and_predictions(pair):
    model, reference = pair
    inputs = batch()
    target = F.pad(inputs["labels"], (0, 1), value=-100)[:, 1:].reshape(-1)
    logits = reference(**inputs).logits.reshape(-1, VOCABULARY)
    predicted = logits.argmax(-1).masked_fill(target == -100, -1)
    # Make some predictions right, so that the accuracy is not zero.
    target = torch.where(torch.arange(target.numel()) % 3 == 0, predicted, target).masked_fill(target == -100, -100)
    output = model(
        inputs["input_ids"],
        shift_labels=target.view_as(inputs["labels"]),
        return_token_accuracy=True,
        return_predicted_tokens=True,
    )
    assert output.token_accuracy.dim() == 0 and output.token_accuracy.dtype == torch.float32
    assert_close(output.token_accuracy, (predicted == target).sum() / (target != -100).sum())
    assert torch.equal(output.predicted_tokens, predicted)
    as_tuple = model(**inputs, return_token_accuracy=True, return_dict=False)
    assert isinstance(as_tuple, tuple) and as_tuple[1] is None
    assert_close(as_tuple[0], reference(**inputs).loss)
    assert as_tuple[-1].dim() == 0


def test_options_of_the_loss(pair):
    model, reference = pair
    inputs = batch()
    logits = reference(**inputs).logits[:, :-1].reshape(-1, VOCABULARY)
    target = inputs["labels"][:, 1:].reshape(-1)
    smoothed = model(**inputs, label_smoothing=0.2, accum_dtype=torch.float32, some_unknown_keyword=1).loss
    assert_close(smoothed, F.cross_entropy(logits, target, label_smoothing=0.2))
    weights = torch.linspace(0.5, 2.0, VOCABULARY)
    assert_close(model(**inputs, ce_weight=weights).loss, F.cross_entropy(logits, target, weight=weights))
    ids = inputs["input_ids"]
    ignored = {"labels": ids, "ignore_index": int(ids[0, 5])}
    assert_close(model(ids, **ignored).loss, reference(ids, **ignored).loss)
    with pytest.raises(TypeError, match="reduction"):
        model(**inputs, reduction="sum")


def test_logits_to_keep(pair):
    model, reference = pair
    inputs = batch()
    shifted = inputs["labels"][:, -3:]
    logits = reference(inputs["input_ids"]).logits[:, -3:]
    expected = F.cross_entropy(logits.reshape(-1, VOCABULARY), shifted.reshape(-1))
    for logits_to_keep in (3, torch.tensor([7, 8, 9])):
        output = model(inputs["input_ids"], shift_labels=shifted, logits_to_keep=logits_to_keep)
        assert output.logits is None
        assert_close(output.loss, expected)


@pytest.mark.parametrize("tied", [True, False])
def test_tied_and_untied_embeddings(family, patched, tied):
    reference = make(family, tie_word_embeddings=tied)
    model = copy.deepcopy(reference)
    patched(family, model, rope=False)
    assert_same_step(model, reference, **batch())
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied


def test_bias_of_the_head(family, patched):
    reference = make(family, tie_word_embeddings=False)
    head = nn.Linear(64, VOCABULARY)
    head.weight = reference.lm_head.weight
    reference.lm_head = head
    model = copy.deepcopy(reference)
    patched(family, model, rope=False, strict=True)
    output = assert_same_step(model, reference, **batch())
    assert output.logits is None


def test_softcap_is_applied(patched):
    reference = make("gemma2")
    model = copy.deepcopy(reference)
    patched("gemma2", model, rope=False)
    capped = assert_same_step(model, reference, **batch())
    reference.config.final_logit_softcapping = model.config.final_logit_softcapping = None
    uncapped = assert_same_step(model, reference, **batch())
    assert abs(capped.loss - uncapped.loss) > 1e-2


def test_other_outputs_are_kept(pair):
    model, reference = pair
    expected = reference(**batch(), output_hidden_states=True, use_cache=True)
    output = model(**batch(), output_hidden_states=True, use_cache=True)
    assert output.logits is None
    assert type(output.past_key_values) is type(expected.past_key_values)
    assert len(output.hidden_states) == len(expected.hidden_states)
    for actual, hidden in zip(output.hidden_states, expected.hidden_states):
        assert_close(actual, hidden)


@pytest.mark.parametrize("level", ["class", "instance"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_parts_round_where_the_originals_do(family, patched, level, dtype):
    """Every norm and MLP on what it gets in the unpatched model, element by element; and bfloat16 hidden states at the
    end."""
    reference = make(family).to(dtype)
    seen = {}
    for name, module in reference.named_modules():
        if type(module).__name__.endswith(("RMSNorm", "MLP")):
            module.register_forward_hook(lambda m, x, y, name=name: seen.update({name: (x[0], y)}))
    with torch.no_grad():
        expected = reference(**batch(), output_hidden_states=True).hidden_states
        model = None if level == "class" else make(family).to(dtype)
        patched(family, model, strict=True, rope=False)
        if level == "class":
            model = class_of(family)(config_of(family)).train().to(dtype)
        model.load_state_dict(reference.state_dict())
        assert len(seen) == sum("Liger" in type(module).__name__ for module in model.modules())
        for name, (x, y) in seen.items():
            assert_rounded_alike(model.get_submodule(name)(x), y)
        if dtype == torch.bfloat16:
            for ours, plain in zip(model(**batch(), output_hidden_states=True).hidden_states, expected, strict=True):
                assert_rounded_alike(ours, plain, 0.05)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(family, patched, dtype):
    exact = make(family)
    reference = copy.deepcopy(exact).to(dtype)
    model = copy.deepcopy(reference)
    patched(family, model, rope=False)
    with torch.no_grad():
        expected = exact(**batch()).loss
        error, usual = _error(model(**batch()).loss, expected), _error(reference(**batch()).loss, expected)
    # Not worse than the unpatched model of that type, up to one rounding of the loss.
    assert error <= 2 * usual + torch.finfo(dtype).eps * expected


@pytest.mark.parametrize("dtype", [torch.bfloat16])
def test_autocast(family, patched, dtype):
    exact, reference = make(family), make(family)
    model = copy.deepcopy(reference)
    patched(family, model, rope=False)
    expected, expected_gradients = run(exact, **batch())
    with torch.autocast("cpu", dtype):
        usual, usual_gradients = run(reference, **batch())
        output, gradients = run(model, **batch())
    assert output.logits is None
    assert _error(output.loss, expected.loss) <= 2 * _error(usual.loss, expected.loss) + torch.finfo(dtype).eps * 4
    for name, gradient in expected_gradients.items():
        assert gradients[name].dtype == torch.float32
        # Twice the error of the unpatched model, plus one rounding of the largest element.
        allowed = 2 * _error(usual_gradients[name], gradient) + torch.finfo(dtype).eps * gradient.abs().max()
        assert _error(gradients[name], gradient) <= allowed


def _error(actual, expected):
    return (actual.float() - expected).abs().max()


@pytest.mark.parametrize("device", ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"])
def test_labels_are_counted_ahead_on_cuda(family, patched, monkeypatch, device):
    reference = make(family).to(device)
    model = copy.deepcopy(reference)
    patched(family, model, rope=False)
    inputs = {name: value.to(device) for name, value in batch().items()}
    seen, flce = [], functional.liger_fused_linear_cross_entropy

    def spy(*args, valid_count=None, **kwargs):
        seen.append(valid_count)
        return flce(*args, valid_count=valid_count, **kwargs)

    monkeypatch.setattr(functional, "liger_fused_linear_cross_entropy", spy)
    shifted = F.pad(inputs["labels"], (0, 1), value=-100)[:, 1:].contiguous()
    shifted[1, 2] = -100
    for arguments in ({}, {"shift_labels": shifted}):
        assert_same_step(model, reference, **inputs, **arguments)
    count = int((inputs["labels"][:, 1:] != -100).sum())
    assert seen == ([count, count - 1] if device == "cuda" else [None, None])
