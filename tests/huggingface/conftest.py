"""Tiny random models, and what the tests share. The reference is always the unpatched model of transformers."""

import collections
import contextlib
import copy
import importlib
import importlib.util
import pathlib
import sys

import pytest
import torch
import transformers
from liger_kernel.transformers.causal_lm import names_in
from liger_kernel.transformers.model import loss_utils
from liger_kernel.transformers.patching import packed
from liger_kernel.transformers.patching.apply import patch
from liger_kernel.transformers.patching.families import FAMILIES
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "examples"))
# What tests take from here, too.
from random_models import TEXT as COMMON  # noqa: E402, F401
from random_models import VOCABULARY  # noqa: E402, F401
from tiny import TINY_MODELS, can_be_made, class_of, config_of, kinds_of, make  # noqa: E402, F401
from tiny import text as batch  # noqa: E402, F401

# The models are so small that threads cost more than they give.
torch.set_num_threads(1)

# Families that every test of the engine takes; test_families.py has a model of every row.
ENGINE = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2")

# Float32 sums of some hundred terms in another order: 2^7 roundings of 2^-24, doubled. The gradients of queries and
# keys cancel, softmax's being a difference: another 2^2.
TOLERANCE = 2.0**-14
# Adam divides gradients by their size, so that rounding noise of 1e-5 stays 1e-5 in every step; 20 steps add up.
CURVE_TOLERANCE = 2e-4


def run(model, **inputs):
    """The output of a forward, and every gradient of its loss by name."""
    model.zero_grad()
    output = model(**inputs)
    output.loss.backward()
    return output, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_close(actual, expected, tolerance=TOLERANCE):
    """Every element to `tolerance` of itself and of a usual one: a sum that cancels is as exact as its terms."""
    assert actual.shape == expected.shape
    size = expected.abs() + expected.square().mean().sqrt()
    excess = ((actual - expected).abs() - tolerance * size).max().item()
    assert excess <= 0, (
        f"an element differs by {excess:.3g} more than {tolerance:.3g} of its size; the largest is "
        f"{expected.abs().max():.3g}"
    )


def assert_same(model, reference, inputs):
    """The loss and the gradients of a step."""
    expected, gradients = run(reference, **inputs)
    output, found = run(model, **inputs)
    torch.testing.assert_close(output.loss, expected.loss, rtol=TOLERANCE, atol=0)
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert_close(found[name], gradient)


def assert_rounded_alike(actual, expected, part=0.01):
    """Equal but for the last bits of a `part` of the elements: of sums in another order, or functions computed
    otherwise."""
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    assert (actual != expected).float().mean() <= part
    assert_close(actual.float(), expected.float(), 4 * torch.finfo(expected.dtype).eps)


class Ran(TorchDispatchMode):
    """How often each operator ran, forward and backward, by its name without an overload's."""

    def __init__(self):
        super().__init__()
        self.counts = collections.Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.counts[function.__name__.partition(".")[0]] += 1
        return function(*args, **(kwargs or {}))


def assert_same_step(model, reference, **inputs):
    """Patched and unpatched model agree in loss and in every gradient; the patched one makes no logits."""
    expected, expected_gradients = run(reference, **inputs)
    output, gradients = run(model, **inputs)
    assert_close(output.loss, expected.loss)
    assert gradients.keys() == expected_gradients.keys()
    for name, gradient in expected_gradients.items():
        assert_close(gradients[name], gradient)
    return output


# One of each thing that a row can say: a scale, a softcap, a router's loss, a head in a model in the model, deferred
# swaps, composites, and each formula of the rotary embedding.
REPRESENTATIVES = (
    "granite gemma3 mixtral llama4 nemotron llava gpt_oss glm4 phi3 qwen2_5_vl paligemma falcon_h1 gemma4_text".split()
)


def pytest_addoption(parser):
    parser.addoption(
        "--families",
        default=",".join(REPRESENTATIVES),
        help="families of test_families.py, with commas between, or 'all'",
    )


def pytest_generate_tests(metafunc):
    if "case" in metafunc.fixturenames:
        chosen = metafunc.config.getoption("--families")
        named = list(TINY_MODELS) if chosen == "all" else chosen.split(",")
        if "lm_head" not in names_in(transformers.Qwen2AudioForConditionalGeneration.forward):
            named = [name for name in named if name != "qwen2_audio"]  # the model that it holds has the head
        there = [name for name in named if can_be_made(name)]
        wanted = getattr(metafunc.function, "wanted", lambda row: True)
        cases = [(name, kind) for name in there if wanted(FAMILIES[name]) for kind in kinds_of(name)]
        metafunc.parametrize("case", cases, ids=[kind for _, kind in cases])


@pytest.fixture(params=ENGINE)
def family(request):
    return request.param


@pytest.fixture
def fused(monkeypatch):
    """The arguments of the losses that are computed in a head."""
    calls, loss = [], loss_utils.LigerForCausalLMLoss
    monkeypatch.setattr(loss_utils, "LigerForCausalLMLoss", lambda **kwargs: calls.append(kwargs) or loss(**kwargs))
    return calls


@pytest.fixture
def available(monkeypatch):
    """transformers looks for an installed distribution; packaging is not what is tested here."""
    for name in ("transformers.trainer", "transformers.integrations.liger"):
        if name in sys.modules:
            monkeypatch.setattr(sys.modules[name], "is_liger_kernel_available", lambda: True, raising=False)


@contextlib.contextmanager
def restored():
    """Every class and modeling module is afterwards what it was, also where a patch was not undone."""
    modules = [
        modeling(name) for name in FAMILIES if importlib.util.find_spec(FAMILIES[name].module.rpartition(".")[0])
    ]
    owners = [
        *modules,
        *(cls for m in modules for cls in vars(m).values() if isinstance(cls, type) and cls.__module__ == m.__name__),
    ]
    kept = [(owner, dict(vars(owner))) for owner in owners]
    try:
        yield
    finally:
        for owner, before in kept:
            for name in vars(owner).keys() - before.keys():
                delattr(owner, name)
            for name, value in before.items():
                if vars(owner).get(name) is not value:
                    setattr(owner, name, value)


@pytest.fixture(autouse=True)
def unpatched():
    """A test that fails hands no patched class on to the next."""
    with restored():
        yield


@pytest.fixture
def patched():
    """patch(), undone at the end of the test."""
    reports = []

    def apply(*args, **kwargs):
        reports.append(patch(*args, **kwargs))
        return reports[-1]

    yield apply
    for report in reversed(reports):
        report.undo()


@pytest.fixture
def pair(family, patched):
    """A patched model and its unpatched copy; without rope, which is a function that the copy would share."""
    reference = make(family)
    model = copy.deepcopy(reference)
    patched(family, model, rope=False)
    return model, reference


def modeling(family):
    return importlib.import_module(FAMILIES[family].module)


@pytest.fixture
def calls(monkeypatch):
    """The longest document and the window of each call of the attention for documents, which short rows have too."""
    found, original = [], packed.attention_with_sinks

    def attention(q, k, v, sinks, boundaries, longest, window, scale, causal):
        found.append((longest, window) if causal else (longest, window, "both sides"))
        return original(q, k, v, sinks, boundaries, longest, window, scale, causal)

    monkeypatch.setattr(packed, "attention_with_sinks", attention)
    monkeypatch.setattr(packed, "SHORTEST_ON_CPU", 0)
    return found
