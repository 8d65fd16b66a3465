"""The promise of logits: what a model's own forward does to its logits is in the loss, whether it can be recorded or
not."""

import copy

import pytest
import torch
from conftest import COMMON, assert_close, batch, make, run
from liger_kernel.transformers.causal_lm import fused_forward
from liger_kernel.transformers.patching.families import CausalLM
from liger_kernel.transformers.patching.place import with_globals
from torch import nn
from torch.nn import functional as F
from transformers.modeling_outputs import CausalLMOutputWithPast

RECORDED = {
    "nothing": lambda x: x,
    "float": lambda x: x.float(),
    "scale": lambda x: x * 0.3,
    "quotient": lambda x: 2 * x / 7,
    "softcap": lambda x: torch.tanh(x / 0.7) * 0.7,
    "softcap_in_place": lambda x: _softcap_in_place(x),
    "scale_and_softcap": lambda x: torch.tanh(x * 0.4) * 3,
    "softcap_and_scale": lambda x: torch.tanh(x / 0.7) * 0.7 * 2 / 3,
    "method": lambda x: x.tanh() * 2,
    "contiguous": lambda x: x.float().contiguous() / 2,
    "functional": lambda x: F.tanh(x / 0.7) * 0.7,
}
COMPUTED = {
    "twice": lambda x: torch.tanh(torch.tanh(x)),
    "sum": lambda x: x + 1,
    "difference": lambda x: 1 - x,
    "negative": lambda x: -x,
    "negative_cap": lambda x: torch.tanh(x) * -2,
    "clamp": lambda x: x.clamp(-0.5, 0.5),
    "tensor": lambda x: x * torch.linspace(0.5, 2, 128),
    "in_place": lambda x: (x.mul_(2), x)[1],
    "operator_in_place": lambda x: _plus_in_place(x),
    "function": lambda x: F.softplus(x) / 2,
    "values": lambda x: x / x.abs().max(),
    "power": lambda x: x**2,
    "columns": lambda x: torch.cat((x[..., :64], 2 * x[..., 64:]), dim=-1),
    "list": lambda x: torch.stack([x, 2 * x]).sum(0),
    "after_a_scale": lambda x: (x / 3 + 1) * 2,
    "assigned": lambda x: _assigned(x),
}


def _softcap_in_place(x):
    x /= 0.7
    return torch.tanh(x) * 0.7


def _plus_in_place(x):
    x += 1
    return x


def _assigned(x):
    x = x * 2
    x[..., 5] = 0.0
    return x


def _loss(model, logits, labels, **kwargs):
    return model.loss_function(logits=logits, labels=labels, vocab_size=128, **kwargs)


def _own_loss(model, logits, labels, **kwargs):
    """As some of transformers' models with images did: rows are chosen first."""
    logits = logits.float()
    rows, targets = logits[..., :-1, :], labels[..., 1:]
    keep = (torch.arange(targets.numel()) % 3 != 0).view_as(targets)
    rows, targets = rows[keep.to(logits.device) != 0].contiguous(), targets[keep].contiguous()
    return nn.CrossEntropyLoss()(rows.view(-1, rows.size(-1)), targets.view(-1).to(rows.device))


def _pair(change, loss=_loss, bias=False):
    def forward(self, input_ids=None, labels=None, **kwargs):
        logits = change(self.lm_head(self.model(input_ids)[0]))
        return CausalLMOutputWithPast(
            loss=None if labels is None else loss(self, logits, labels, **kwargs), logits=logits
        )

    return _with(forward, bias)


def _with(forward, bias=False):

    reference = make("llama", tie_word_embeddings=False)
    if bias:
        reference.lm_head.bias = nn.Parameter(torch.randn(128))
    model = copy.deepcopy(reference)
    model.__class__ = type("Fused", (type(model),), {"forward": fused_forward(forward, CausalLM())})
    reference.__class__ = type("Plain", (type(reference),), {"forward": forward})
    return model, reference


def _assert_same(model, reference, **inputs):
    expected, expected_gradients = run(reference, **inputs)
    output, gradients = run(model, **inputs)
    assert_close(output.loss, expected.loss)
    assert output.logits is None and gradients.keys() == expected_gradients.keys()
    for name, gradient in expected_gradients.items():
        assert_close(gradients[name], gradient)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", [*RECORDED, *COMPUTED])
def test_what_a_forward_does_to_its_logits_is_in_the_loss(name, bias, fused):
    model, reference = _pair({**RECORDED, **COMPUTED}[name], bias=bias)
    _assert_same(model, reference, **batch())
    assert len(fused) == (name in RECORDED)


@pytest.mark.parametrize("name", ["nothing", "scale_and_softcap", "sum"])
def test_a_loss_of_the_forwards_own(name, fused):
    model, reference = _pair({**RECORDED, **COMPUTED}[name], _own_loss)
    _assert_same(model, reference, **batch())
    assert len(fused) == (name in RECORDED)


@pytest.mark.parametrize(
    "options", [{"label_smoothing": 0.1}, {"reduction": "sum"}, {"weight": torch.linspace(0.5, 2, 128)}]
)
def test_another_cross_entropy_than_the_mean(options, fused):
    def loss(model, logits, labels):
        return F.cross_entropy(logits[..., :-1, :].contiguous().view(-1, 128), labels[..., 1:].reshape(-1), **options)

    model, reference = _pair(RECORDED["scale"], loss)
    _assert_same(model, reference, **batch())
    assert not fused


@pytest.mark.parametrize("skip_logits", [True, False])
def test_shifted_labels_that_a_forward_keeps_from_its_loss(skip_logits):
    """As those of transformers' models with images did, up to 5.16."""

    def forward(self, input_ids=None, labels=None, **kwargs):
        logits = self.lm_head(self.model(input_ids)[0]) / 3
        loss = None if labels is None else self.loss_function(logits=logits, labels=labels, vocab_size=128)
        return CausalLMOutputWithPast(loss=loss, logits=logits)

    model, reference = _with(forward)
    labels = batch()["labels"].roll(3, dims=1)
    expected = F.cross_entropy(reference(batch()["input_ids"]).logits.view(-1, 128), labels.view(-1))
    for others in ({}, {"labels": batch()["labels"]}):
        assert_close(model(batch()["input_ids"], shift_labels=labels, skip_logits=skip_logits, **others).loss, expected)


def test_accuracy_of_scaled_logits(fused):
    model, reference = _pair(lambda x: x * -0.3)
    output, logits = model(**batch(), return_token_accuracy=True), reference(**batch()).logits
    labels = batch()["labels"][:, 1:]
    right = (logits[:, :-1].argmax(-1) == labels)[labels != -100].float().mean()
    assert_close(output.token_accuracy, right)


def test_a_promise_looks_like_logits():
    seen = []

    def look(x):
        seen.extend([x.shape, x.dtype, x.device, x.size(), x.size(-1), x.view(-1, 128).shape, x.float().dtype])
        return x

    model, reference = _pair(look)
    for m in (model, reference):
        m(**batch())
    assert seen[:7] == seen[7:]
    assert model(**batch()).logits is None


@pytest.mark.parametrize(
    "name", [*(name for name in RECORDED if name != "functional"), "sum", "tensor"]
)  # see gpu_traces.py
@pytest.mark.full(when=lambda p: p["name"] not in ("nothing", "scale", "sum"))
def test_compiled(name):
    model, reference = _pair({**RECORDED, **COMPUTED}[name])
    model(**batch())  # prepares the head
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert_close(compiled(**batch()).loss, reference(**batch()).loss)


def test_super_and_attributes_set_by_a_forward():
    """A forward sees a view of its model, which is of the model's class and hands on what is assigned."""
    from transformers import LlamaConfig, LlamaForCausalLM

    class Counting(LlamaForCausalLM):
        def forward(self, input_ids=None, labels=None, **kwargs):
            self.count = getattr(self, "count", 0) + 1
            assert isinstance(self, Counting) and self.training
            return super().forward(input_ids=input_ids, labels=labels, **kwargs)

    torch.manual_seed(0)
    model = Counting(LlamaConfig(**COMMON)).train()
    expected = model(**batch()).loss
    model.__class__ = type("Fused", (Counting,), {"forward": fused_forward(Counting.forward, CausalLM())})
    output = model(**batch())
    assert_close(output.loss, expected)
    assert output.logits is None and model.count == 2


def _decorated(function):
    import functools

    @functools.wraps(function)
    def wrapper(*args):
        return function(*args) + 1

    return wrapper


def _hidden(function):
    import functools

    holder = [function]

    @functools.wraps(function)
    def wrapper(*args):
        return holder[0](*args)

    return wrapper


def _help(x):
    return x


def _plain(x):
    return _help(x)


def test_a_copy_of_a_function_with_other_globals():
    other = {"_help": lambda x: 10 * x}
    assert with_globals(_plain, other)(2) == 20 and _plain(2) == 2
    assert with_globals(_decorated(_decorated(_plain)), other)(2) == 22
    assert with_globals(_hidden(_plain), other) is None
