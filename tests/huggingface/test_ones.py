"""Attention masks of ones are dropped where a model is called, before its compiled region begins."""

import copy

import pytest
import torch
from conftest import assert_close, batch, can_be_made, make, run
from liger_kernel.graphs import capture_model
from liger_kernel.transformers import drop_masks_of_ones
from liger_kernel.transformers.patching import ones
from liger_kernel.transformers.patching.attention import makes_masks
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel, Trainer, TrainingArguments

FAMILIES = ("llama", "qwen3")
#: Families whose mixers, or routers' losses, read the mask.
READ_IT = ("qwen3_next", "falcon_h1", "mixtral")


def masked(rows=2, padding=0):
    inputs = batch(rows=rows)
    mask = torch.ones_like(inputs["input_ids"])
    if padding:
        mask[0, -padding:] = 0
        inputs["labels"] = inputs["labels"].masked_fill(mask == 0, -100)
    return {**inputs, "attention_mask": mask}


def model_of(family):
    """Its attention takes no mask where all of what comes before is seen."""
    model = make(family)
    model.set_attn_implementation("sdpa")
    return model.train()


class Attention:
    """A backend for torch.compile that runs graphs as they are, and notes for each call of attention in them whether it
    has a mask."""

    def __init__(self):
        self.masks, self.graphs = [], 0

    def __call__(self, graph, _, **options):
        self.graphs += 1
        parts = [each for each in graph.modules() if isinstance(each, torch.fx.GraphModule)]  # of checkpointed layers
        for node in (node for part in parts for node in part.graph.nodes):
            if node.target in (scaled_dot_product_attention, torch._C._nn.scaled_dot_product_attention):
                self.masks.append(node.kwargs.get("attn_mask") is not None)
        return graph.forward


@pytest.fixture
def attention():
    torch._dynamo.reset()
    yield Attention()
    torch._dynamo.reset()


class Wrapper(nn.Module):
    """As PEFT's."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, **kwargs):
        return self.model(**kwargs)


def compiled(model, how, backend):
    if how == "method":
        model.compile(backend=backend, fullgraph=True)
        return model
    if how == "wrapped":
        model = Wrapper(model)
        drop_masks_of_ones(model)
    return torch.compile(model, backend=backend, fullgraph=how == "function")


@pytest.mark.full(when=lambda p: p["family"] != "llama")
@pytest.mark.parametrize("how", ["function", "method", "wrapped"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_compiled_model_has_no_mask_of_ones(family, how, patched, attention):
    """The losses and gradients are those of the model with it; another mask stays, and positions keep it."""
    reference = model_of(family)
    model = copy.deepcopy(reference)
    patched(family, model)
    call = compiled(model, how, attention)
    whole, padded = masked(), masked(padding=3)
    positions = torch.arange(whole["input_ids"].shape[1]).expand_as(whole["input_ids"])
    placed = {**whole, "position_ids": positions}
    for inputs, has_mask in ((whole, False), (padded, True), (placed, True)):
        del attention.masks[:]
        expected, gradients = run(reference, **inputs)
        model.zero_grad()
        loss = call(**inputs).loss
        loss.backward()
        assert attention.masks and set(attention.masks) == {has_mask}
        assert_close(loss.detach(), expected.loss, 1e-5)
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                assert_close(parameter.grad, gradients[name])


@pytest.mark.parametrize("family", [*filter(can_be_made, READ_IT)])
def test_models_that_multiply_by_the_mask(family, patched):
    """Mixers of hybrid models and routers' losses: with a mask of ones they compute what they do without one."""
    reference = make(family).train()
    model = copy.deepcopy(reference)
    patched(family, model)
    inputs = masked()
    assert ones._without_ones(model, (), inputs)[1]["attention_mask"] is None
    (expected, gradients), (output, found) = run(reference, **inputs), run(model, **inputs)
    assert_close(output.loss, expected.loss, 1e-5)
    for name, gradient in gradients.items():
        assert_close(found[name], gradient, 1e-3)


def test_what_keeps_a_mask(patched):
    model = model_of("llama")
    patched("llama", model)
    inputs = masked()
    hook = lambda **more: ones._without_ones(model, (), {**inputs, **more})
    assert hook()[1]["attention_mask"] is None
    documents = inputs["attention_mask"] + 1  # 2, as of a second document
    longer = torch.ones(2, inputs["input_ids"].shape[1] + 1, dtype=torch.long)  # as with a cache
    for more in (
        dict(position_ids=torch.zeros_like(inputs["input_ids"])),
        dict(past_key_values=()),
        dict(attention_mask=documents),
        dict(attention_mask=longer),
        dict(attention_mask=inputs["attention_mask"][:, None, None]),
    ):
        assert hook(**more) is None


class Enclosing(PreTrainedModel):
    """A model that encloses a language model, and passes it the mask."""

    _supports_sdpa = True

    def __init__(self, inner):
        super().__init__(inner.config)
        self.inner = inner

    def forward(self, input_ids, attention_mask=None):
        return self.inner(input_ids, attention_mask=attention_mask)


class Reading(Enclosing):
    """As Qwen3-VL's in transformers 4.57."""

    def forward(self, input_ids, attention_mask=None):
        positions = None if attention_mask is None else attention_mask.cumsum(-1) // 4
        return self.inner(input_ids, attention_mask=attention_mask, position_ids=positions)


class Masking(Enclosing):
    """As PaliGemma's in transformers 4.57."""

    def forward(self, input_ids, attention_mask=None):
        return self.inner(input_ids, attention_mask=self._prefix(attention_mask))

    def _prefix(self, attention_mask):
        return attention_mask if attention_mask is None else attention_mask[:, None, None].expand(-1, -1, 10, -1)


@pytest.mark.parametrize("kind", [Enclosing, Reading, Masking])
def test_a_mask_that_an_enclosing_model_reads_stays(kind, patched):
    model = model_of("llama")
    patched("llama", model)
    outer = kind(model)
    assert ones.takes_none(model) and ones.takes_none(outer) == (kind is Enclosing)
    assert capture_model(outer).takes_none == (kind is Enclosing)


def test_attention_that_builds_its_own_mask():
    """It is not causal unless it is given a mask."""
    from transformers.models.doge.modeling_doge import DogeAttention
    from transformers.models.llama.modeling_llama import LlamaAttention

    assert makes_masks(DogeAttention) and not makes_masks(LlamaAttention)


def test_a_note_is_of_values_that_have_not_changed(patched):
    """A batch that accelerate moves: the host does not look again, unless the mask was changed in place."""
    from accelerate import data_loader

    model, before = model_of("llama"), data_loader.send_to_device  # as another model, still patched, may have left it
    report = patched("llama", model)
    inputs = data_loader.send_to_device(masked(), torch.device("cpu"))
    mask = inputs["attention_mask"]
    assert vars(mask)[ones.NOTE] == mask._version
    assert ones._without_ones(model, (), inputs)[1]["attention_mask"] is None
    mask[0, -1] = 0
    assert ones._without_ones(model, (), inputs) is None
    assert not vars(data_loader.send_to_device(masked(padding=1), torch.device("cpu"))["attention_mask"])
    report.undo()
    assert not model._forward_pre_hooks and not model._forward_pre_hooks_with_kwargs
    assert data_loader.send_to_device is before


def test_generation_is_as_it_was(patched):
    reference = model_of("llama").eval()
    model = copy.deepcopy(reference)
    patched("llama", model)
    inputs = {name: masked()[name] for name in ("input_ids", "attention_mask")}
    generate = lambda each: each.generate(**inputs, max_new_tokens=5, do_sample=False, pad_token_id=0)
    assert torch.equal(generate(model), generate(reference))


class Rows(torch.utils.data.Dataset):
    def __init__(self, padding):
        self.padding = padding

    def __len__(self):
        return 16

    def __getitem__(self, index):
        row = batch(index, rows=1)
        tokens = len(row["input_ids"][0])
        mask = torch.ones(tokens, dtype=torch.long)
        mask[tokens - self.padding :] = 0
        labels = row["labels"][0].masked_fill(mask == 0, -100)
        return {"input_ids": row["input_ids"][0], "labels": labels, "attention_mask": mask}


class Stream(Rows, torch.utils.data.IterableDataset):
    def __iter__(self):
        return (self[i] for i in range(len(self)))


def train(model, rows, path, **kwargs):
    arguments = TrainingArguments(
        output_dir=str(path),
        max_steps=2,
        per_device_train_batch_size=2,
        learning_rate=1e-3,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        **kwargs,
    )
    trainer = Trainer(model, arguments, train_dataset=rows, eval_dataset=rows)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return torch.tensor([*losses, trainer.evaluate()["eval_loss"]])


@pytest.fixture
def trainers_attention(attention, available, monkeypatch):
    """In the place of the backend "eager"."""
    from torch._dynamo.backends import registry

    registry.lookup_backend("eager")
    for table in (registry._BACKENDS, registry._COMPILER_FNS):
        if "eager" in table:
            monkeypatch.setitem(table, "eager", attention)
    return attention


@pytest.mark.full(when=lambda p: p["checkpointing"] != (p["data"] is Stream) or p["padding"] and p["checkpointing"])
@pytest.mark.parametrize("data", [Rows, Stream])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("padding", [0, 3])
def test_a_compiled_trainer(padding, checkpointing, data, trainers_attention, tmp_path):
    """Its losses are those without a patch, training and evaluating."""
    reference = model_of("llama")
    model = copy.deepcopy(reference)
    more = {"gradient_checkpointing": True} if checkpointing else {}
    expected = train(reference, data(padding), tmp_path, **more)
    del trainers_attention.masks[:]  # some versions compile whatever follows a first Trainer that did
    losses = train(
        model, data(padding), tmp_path, use_liger_kernel=True, torch_compile=True, torch_compile_backend="eager", **more
    )
    masks = trainers_attention.masks
    assert masks and set(masks) == {bool(padding)}
    assert_close(losses, expected, 1e-4)
