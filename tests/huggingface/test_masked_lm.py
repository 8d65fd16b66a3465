"""Masked language models: the loss is computed in the head, of the labels as they are, also where modules stand between
a model and its head. The reference is the unpatched model of transformers."""

import copy
import inspect
import pickle

import liger_kernel
import pytest
import torch
import transformers
from conftest import assert_close, run
from liger_kernel.transformers import causal_lm
from liger_kernel.transformers.causal_lm import fused_forward
from liger_kernel.transformers.patching.apply import patch
from liger_kernel.transformers.patching.families import CausalLM, Family
from shrink import VOCABULARY, shrunk
from test_families import assert_same_gradients
from torch import nn
from torch.nn import functional as F
from transformers import Trainer, TrainingArguments

#: Class -> its model type: a head of the model, by transformers' loss; by torch's cross entropy; by one that the model
#: holds; behind one module; behind two, of which the second form returns its logits in a tuple.
MODELS = {
    "ModernBertForMaskedLM": "modernbert",
    "ElectraForMaskedLM": "electra",
    "DistilBertForMaskedLM": "distilbert",
    "XLMRobertaForMaskedLM": "xlm-roberta",
    "AlbertForMaskedLM": "albert",
    "BertForMaskedLM": "bert",
    "BertForPreTraining": "bert",
}
FUSED, UNFUSED = "fused_linear_cross_entropy", "cross_entropy"


def made(name, **fields):
    """A tiny random model, in training, without dropout."""
    torch.manual_seed(0)
    config = shrunk(MODELS[name])
    for field, value in fields.items():
        setattr(config, field, value)
    model = getattr(transformers, name)(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model.float().train()


def inputs(rows=3, length=12):
    """Token ids, and labels of a fifth of them; the last row has padding."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(4, VOCABULARY - 8, (rows, length), generator=generator)
    labels = torch.where(torch.rand(rows, length, generator=generator) < 0.2, ids, -100)
    mask = torch.ones_like(ids)
    mask[-1, length - 3 :] = 0
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


def other_labels(name):
    return {"next_sentence_label": torch.tensor([0, 1, 1])} if name == "BertForPreTraining" else {}


def logits_of(output):
    return output.prediction_logits if hasattr(output, "prediction_logits") else output.logits


def assert_same_step(model, reference, **given):
    """The same loss and gradients, with the same masks of dropout."""
    torch.manual_seed(3)
    expected, expected_gradients = run(reference, **given)
    torch.manual_seed(3)
    output, gradients = run(model, **given)
    assert_close(output.loss, expected.loss)
    assert_same_gradients({key.removeprefix("_orig_mod."): g for key, g in gradients.items()}, expected_gradients)
    return output


def switches(report):
    return {entry.switch for entry in report.replaced}


@pytest.mark.parametrize("name", MODELS)
def test_the_loss_is_computed_in_the_head(name, fused):
    model = made(name)
    reference = copy.deepcopy(model)
    assert FUSED in switches(liger_kernel.patch(model))
    more = other_labels(name)
    output = assert_same_step(model, reference, **inputs(), **more)
    assert len(fused) == 1 and logits_of(output) is None
    # In evaluation and without labels there are logits, which are the plain model's.
    model.eval(), reference.eval()
    output, expected = model(**inputs(), **more), reference(**inputs(), **more)
    assert_close(logits_of(output), logits_of(expected))
    assert_close(output.loss, expected.loss)
    if not more:
        labels = inputs()["labels"]
        assert_close(output.loss, F.cross_entropy(logits_of(expected).view(-1, VOCABULARY), labels.view(-1)))
    assert_close(logits_of(model.train()(inputs()["input_ids"])), logits_of(reference.train()(inputs()["input_ids"])))
    assert len(fused) == 1


@pytest.mark.parametrize("name", ["ModernBertForMaskedLM", "BertForMaskedLM"])
@pytest.mark.parametrize("options", [{"num_items_in_batch": 17}, {"ignore_index": -1}, {"shift_labels": True}], ids=str)
def test_keywords_of_the_loss(name, options, fused):
    """BERT's forward hands none to its loss, and takes none in transformers 4.57; transformers' loss of masked models
    knows no shifted labels."""
    model, given = made(name), inputs()
    reference = copy.deepcopy(model)
    if "ignore_index" in options and name == "ModernBertForMaskedLM":
        given["labels"] = given["labels"].clamp(min=-1)
    if "shift_labels" in options:
        options = {"shift_labels": given["labels"].roll(1, 1)}
    if "kwargs" not in inspect.signature(model.forward).parameters:
        options = {}
    liger_kernel.patch(model)
    assert_same_step(model, reference, **given, **options)
    assert len(fused) == 1


def test_logits_of_masked_tokens_alone(fused):
    """ModernBERT's sparse_prediction, which takes labels and hidden states of these before its head."""
    model = made("ModernBertForMaskedLM", sparse_prediction=True)
    reference = copy.deepcopy(model)
    liger_kernel.patch(model)
    assert_same_step(model, reference, **inputs())
    assert len(fused[0]["hidden_states"]) == (inputs()["labels"] != -100).sum()


@pytest.mark.parametrize("name", ["ModernBertForMaskedLM", "EuroBertForMaskedLM"])
def test_the_loss_of_logits(name, monkeypatch):
    """The switch cross_entropy: this package's cross entropy, of labels that are not shifted."""
    if not hasattr(transformers, name):
        pytest.skip("this version of transformers does not have it")
    monkeypatch.setitem(MODELS, "EuroBertForMaskedLM", "eurobert")
    model = made(name)
    reference = copy.deepcopy(model)
    report = liger_kernel.patch(model, **{FUSED: False, UNFUSED: True})
    assert "masked_lm_loss" in {entry.by for entry in report.replaced}
    output = assert_same_step(model, reference, **inputs())
    assert output.logits is not None
    report.undo()
    assert model.loss_function is reference.loss_function


@pytest.mark.parametrize(
    "name, head, switch",
    [
        ("ModernBertForMaskedLM", "decoder", FUSED),
        ("ModernBertForMaskedLM", "decoder", UNFUSED),
        ("BertForMaskedLM", "cls.predictions.decoder", FUSED),
    ],
)
def test_a_row_of_the_callers_own(name, head, switch, fused):
    """Classes that are patched before a model exists."""
    reference, loss, kind = made(name), {name: CausalLM(head)}, MODELS[name]
    modeling = f"transformers.models.{kind}.modeling_{kind}"
    report = patch(Family(kind, {}, loss, modeling=modeling), **{FUSED: switch == FUSED, UNFUSED: switch == UNFUSED})
    try:
        output, gradients = run(made(name), **inputs())
    finally:
        report.undo()
    expected, expected_gradients = run(reference, **inputs())
    assert_close(output.loss, expected.loss)
    assert_same_gradients(gradients, expected_gradients)
    assert len(fused) == (switch == FUSED) and (output.logits is None) == (switch == FUSED)


@pytest.mark.parametrize("name", ["BertForMaskedLM", "XLMRobertaForMaskedLM"])
def test_what_changes_the_logits_on_their_way_is_honoured(name, fused):
    """A hook on the module between a model and its head, and on the head."""
    model = made(name)
    reference = copy.deepcopy(model)
    liger_kernel.patch(model)
    place = {"BertForMaskedLM": "cls", "XLMRobertaForMaskedLM": "lm_head"}[name]
    for hooked in (place, "get_output_embeddings"):
        for each in (model, reference):
            module = each.get_output_embeddings() if hooked != place else getattr(each, place)
            module.register_forward_hook(lambda module, given, result: 2 * result)
        output = assert_same_step(model, reference, **inputs())
        assert output.logits is not None and not fused


@pytest.mark.parametrize("name", ["ModernBertForMaskedLM", "BertForMaskedLM", "XLMRobertaForMaskedLM"])
def test_labels_are_counted_ahead(name, fused, monkeypatch):
    """As on a GPU, where the head would wait for the number; also of labels that a forward flattens for torch's cross
    entropy, and not of others."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = made(name).to(device)
    reference = copy.deepcopy(model)
    liger_kernel.patch(model)
    if device == "cpu":
        monkeypatch.setattr(causal_lm, "_count_ahead", lambda labels, *_: (labels, lambda: int((labels != -100).sum())))
    given = {key: value.to(device) for key, value in inputs().items()}
    assert_same_step(model, reference, **given)
    assert fused[0]["valid_count"] == (given["labels"] != -100).sum()
    call, flat = causal_lm._Call(model, CausalLM(""), {}, given), given["labels"].view(-1)
    assert call.counted(flat, -100) == {"valid_count": fused[0]["valid_count"]}
    assert call.counted(flat[3:], -100) == call.counted(flat.clone(), -100) == call.counted(flat, 0) == {}


def test_no_loss_without_another_label():
    """BertForPreTraining makes none of labels alone: its logits are those of the plain model."""
    model = made("BertForPreTraining")
    reference = copy.deepcopy(model)
    liger_kernel.patch(model)
    output, expected = model(**inputs()), reference(**inputs())
    assert output.loss is None and expected.loss is None
    assert_close(output.prediction_logits, expected.prediction_logits)


@pytest.mark.parametrize("name", ["BertForMaskedLM", "XLMRobertaForMaskedLM"])
def test_copies_pickles_and_undo(name, fused):
    model = made(name)
    reference, types = copy.deepcopy(model), [type(module) for module in model.modules()]
    report = liger_kernel.patch(model)
    for each in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_same_step(each, reference, **inputs())
    assert len(fused) == 3
    assert model.state_dict().keys() == reference.state_dict().keys()
    report.undo()
    assert [type(module) for module in model.modules()] == types


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.full(when=lambda p: p["name"] not in ("ModernBertForMaskedLM", "BertForPreTraining"))
def test_compiled(name, fused):
    model = made(name)
    reference = copy.deepcopy(model)
    liger_kernel.patch(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    output = assert_same_step(compiled, reference, **inputs(), **other_labels(name))
    assert logits_of(output) is None and fused


def test_adapters(fused):
    """PEFT's, with a head that is trained: the loss is computed in the copy that PEFT makes of it."""
    peft = pytest.importorskip("peft")
    models = []
    for patched in (False, True):
        model = made("ModernBertForMaskedLM", tie_word_embeddings=False)
        if patched:
            liger_kernel.patch(model)
        torch.manual_seed(2)
        config = peft.LoraConfig(r=4, target_modules=["Wqkv", "Wi", "Wo"], modules_to_save=["decoder"])
        models.append(peft.get_peft_model(model, config).train())
    plain, model = models
    assert_same_step(model, plain, **inputs())
    assert len(fused) == 1


@pytest.mark.parametrize("activation", ["gelu", "gelu_pytorch_tanh", "silu"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_mlp_of_modernbert(activation, dropout):
    """The activation of the config, and the masks of dropout that the plain module draws."""
    model = made("ModernBertForMaskedLM", hidden_activation=activation, mlp_dropout=dropout)
    reference = copy.deepcopy(model)
    report = liger_kernel.patch(model)
    assert "LigerModernBertMLP" in {entry.by for entry in report.replaced}
    assert_same_step(model, reference, **inputs())


@pytest.mark.parametrize("keywords", [True, False])
def test_a_patched_forward_takes_the_keywords_of_its_own(keywords):
    """Trainer asks the signature whether it may add num_items_in_batch; BERT's of transformers 4.57 takes none."""

    def named(self, input_ids=None, labels=None):
        return self.loss_function

    def more(self, input_ids=None, labels=None, **kwargs):
        return self.loss_function

    forward = fused_forward(more if keywords else named, CausalLM())
    kinds = {parameter.kind for parameter in inspect.signature(forward).parameters.values()}
    assert (inspect.Parameter.VAR_KEYWORD in kinds) == keywords


def test_trainer(available, tmp_path):
    """use_liger_kernel=True: the same losses, and gradients summed over two batches as of one."""
    losses = {}
    rows = [{key: value[i] for key, value in inputs(8).items()} for i in range(8)]
    for use in (False, True):
        model = made("BertForMaskedLM")
        options = TrainingArguments(
            tmp_path, max_steps=3, per_device_train_batch_size=2, gradient_accumulation_steps=2, logging_steps=1,
            report_to=[], use_cpu=True, use_liger_kernel=use, learning_rate=1e-2, seed=1, eval_strategy="epoch",
        )  # fmt: skip
        trainer = Trainer(model, options, train_dataset=rows, eval_dataset=rows[:3])
        trainer.train()
        losses[use] = [row[key] for row in trainer.state.log_history for key in ("loss", "eval_loss") if key in row]
    assert len(losses[True]) >= 4
    assert_close(torch.tensor(losses[True]), torch.tensor(losses[False]), 2e-4)


class _Holder(nn.Module):
    def __init__(self, *models):
        super().__init__()
        self.models, self.pool = nn.ModuleList(models), nn.Linear(2, 2)


def test_a_module_that_holds_a_model():
    """As sentence_transformers' and Lightning's do; one that holds two says which."""
    model = made("ModernBertForMaskedLM")
    holder = _Holder(model)
    report = liger_kernel.patch(holder)
    assert FUSED in switches(report) and liger_kernel.report(holder) is report is liger_kernel.report(model)
    with pytest.raises(TypeError, match="a _Holder holds several models.*BertForMaskedLM, ElectraForMaskedLM"):
        liger_kernel.patch(_Holder(made("BertForMaskedLM"), made("ElectraForMaskedLM")))
    with pytest.raises(TypeError, match="a _Holder is no model of transformers, and holds none"):
        liger_kernel.report(_Holder())
