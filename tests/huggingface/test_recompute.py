"""liger_kernel.memory.recompute: less is kept for backward, and the numbers are the same to the bit."""

import copy
import io
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from conftest import batch, make
from liger_kernel import _recompute
from liger_kernel.memory import keep, recompute
from liger_kernel.transformers import LigerRMSNorm
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode


class Storages(TorchDispatchMode):
    """All memory that operators return, of which `alive` is still there."""

    def __init__(self):
        super().__init__()
        self.found = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        results = function(*args, **kwargs or {})
        for t in results if isinstance(results, (tuple, list)) else (results,):
            if isinstance(t, torch.Tensor):
                storage = t.untyped_storage()
                self.found[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return results

    def alive(self):
        return sum(size for storage, size in self.found.values() if not storage.expired())


def step(model, inputs):
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def same(found, expected):
    assert torch.equal(found[0], expected[0]) and found[1].keys() == expected[1].keys()
    assert all(torch.equal(found[1][name], gradient) for name, gradient in expected[1].items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_the_same_step(family, dtype, patched):
    torch.manual_seed(1)
    model = make(family).to(dtype).train()
    patched(family, model)
    expected = step(model, batch())
    recomputed = recompute(model)
    same(step(model, batch()), expected)
    same(step(model, batch()), expected)
    recomputed.remove()
    same(step(model, batch()), expected)


class Block(nn.Module):
    """A norm and a layer that keeps its input, of which backward needs nothing else."""

    def __init__(self, width=64):
        super().__init__()
        self.norm, self.linear = LigerRMSNorm(width), nn.Linear(width, width, bias=False)
        self.calls = 0

    def forward(self, x, between=None):
        y = self.norm(x)
        if between is not None:
            between(x, y)
        return self.linear(y) + self.linear(y * 1)


@pytest.fixture
def made(monkeypatch):
    """How often the norm's operator ran in backward."""
    from liger_kernel import _recompute

    counts = []
    take = _recompute._Recipe.take

    def counted(self, index):
        if self.made is None:
            counts.append(self.op)
        return take(self, index)

    monkeypatch.setattr(_recompute._Recipe, "take", counted)
    return counts


def gradients(block, x, **options):
    y = block(x, **options)
    return torch.autograd.grad(y.square().sum(), (x, *block.parameters()), retain_graph=False)


def test_made_once_for_all_readers(made):
    """And again in a second backward over the same graph."""
    torch.manual_seed(0)
    block, x = Block(), torch.randn(2, 3, 64, requires_grad=True)
    expected = gradients(block, x)
    recompute(block)
    y = block(x)
    for count in (1, 2):
        found = torch.autograd.grad(y.square().sum(), (x, *block.parameters()), retain_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(found, expected)) and len(made) == count


def test_the_result_is_not_kept():
    block, x = Block(), torch.randn(2, 3, 64, requires_grad=True)
    storages = []
    for recomputes in (False, True):
        if recomputes:
            recompute(block)
        y = block(x, between=lambda x, y: storages.append(StorageWeakRef(y.untyped_storage())))
        assert storages[-1].expired() == recomputes
        y.sum().backward()


def test_a_result_that_is_written_to(made):
    """Is kept as it was saved, or refused as autograd refuses it."""
    torch.manual_seed(0)
    block, x = Block(), torch.randn(2, 3, 64, requires_grad=True)

    def double(x, y):
        with torch.no_grad():
            y.mul_(2)

    expected = gradients(block, x, between=double)
    recompute(block)
    found = gradients(block, x, between=double)
    assert not made and all(torch.equal(a, b) for a, b in zip(found, expected))
    x = torch.randn(2, 3, 64, requires_grad=True)
    y = block(x)
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(RuntimeError, match="modified in place"):
        y.sum().backward()


def test_memory_that_is_used_again(made):
    """A tensor at the address of a result that is gone is not taken for it."""
    torch.manual_seed(0)
    block, x = Block(), torch.randn(2, 3, 64, requires_grad=True)
    other = nn.Linear(64, 64, bias=False)

    class Both(nn.Module):
        def forward(self, x):
            total = 0
            for _ in range(20):
                block.norm(x)  # is freed at once
                z = x * 1.5
                total = total + other(z)
            return total

    both = Both()
    weights = list(other.parameters())
    expected = torch.autograd.grad(both(x).square().sum(), (x, *weights))
    recompute(both)
    found = torch.autograd.grad(both(x).square().sum(), (x, *weights))
    assert not made and all(torch.equal(a, b) for a, b in zip(found, expected))


@pytest.mark.parametrize("reentrant", [True, False])
def test_with_gradient_checkpointing(reentrant, patched):
    torch.manual_seed(1)
    model = make("llama").train()
    patched("llama", model)
    expected = step(model, batch())
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    recompute(model)
    same(step(model, batch()), expected)


def test_with_adapters(patched):
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    config = peft.LoraConfig(
        r=4, target_modules=["q_proj", "gate_proj", "up_proj", "down_proj"], init_lora_weights=False
    )
    model = peft.get_peft_model(make("llama"), config).train()
    patched("llama", model)
    expected = step(model, batch())
    recompute(model)
    same(step(model, batch()), expected)


def test_less_is_kept(patched):
    """Without two norms' results and an MLP's product per layer."""
    torch.manual_seed(1)
    model = make("llama").train()
    patched("llama", model)
    inputs, alive = batch(), []
    for prepare in (lambda: None, lambda: recompute(model)):
        prepare()
        with Storages() as storages:
            loss = model(**inputs).loss
        alive.append(storages.alive())
        loss.backward()
        del loss
    config, tokens = model.config, inputs["input_ids"].numel()
    unkept = config.num_hidden_layers * tokens * (2 * config.hidden_size + config.intermediate_size) * 4
    assert alive[0] - alive[1] == unkept


def test_without_gradients(patched):
    model = make("llama").eval()
    patched("llama", model)
    recompute(model)
    with torch.no_grad():
        first = model(**batch()).loss
    assert not first.requires_grad and torch.equal(first, model(**batch()).loss)


def test_where_hooks_for_saved_tensors_are_forbidden(patched):
    """The forward runs without it, and the next one with it again."""
    model = make("llama")
    patched("llama", model)
    expected = step(model, batch())
    recomputed = recompute(model)
    with torch.autograd.graph.disable_saved_tensors_hooks("forbidden"):
        same(step(model, batch()), expected)
    with Storages() as found:
        loss = model(**batch()).loss
    recomputed.remove()
    with Storages() as without:
        kept = model(**batch()).loss
    assert found.alive() < without.alive()
    del loss, kept


def test_a_forward_that_raises(patched):
    """Inside, and in a hook that runs before."""
    model = make("llama")
    patched("llama", model)
    first = model.register_forward_pre_hook(lambda module, args, kwargs: kwargs["fail"](), with_kwargs=True)
    recompute(model)

    def fail():
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        model(**batch(), fail=fail)
    first.remove()
    with pytest.raises(TypeError):
        model(input_ids=3.5)
    assert getattr(_recompute._local, "recording", None) is None and not _recompute._recordings


@pytest.mark.parametrize("how", ["pickle", "deepcopy", "save"])
@pytest.mark.parametrize("what", ["recompute", "cheap", "input"])
def test_copies(what, how, patched):
    model = make("llama")
    patched("llama", model)
    expected = step(model, batch())
    recompute(model) if what == "recompute" else keep(model, what)
    if how == "save":
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    else:
        other = copy.deepcopy(model) if how == "deepcopy" else pickle.loads(pickle.dumps(model))
    for each in (other, model, other):
        same(step(each, batch()), expected)


def test_threads(patched):
    """Replicas of a model share its hooks, and begin and end at other times."""
    model = make("llama")
    patched("llama", model)
    expected = step(model, batch())
    recompute(model)
    replicas = [copy.copy(model) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        losses = list(pool.map(lambda replica: replica(**batch()).loss.detach(), replicas * 4))
    assert all(torch.equal(loss, expected[0]) for loss in losses) and not _recompute._recordings
    same(step(model, batch()), expected)
