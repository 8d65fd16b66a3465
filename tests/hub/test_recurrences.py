"""Short convolutions and recurrences of hybrid models under use_as_hub_kernels(): whole models against untouched ones.
`make test-hub`."""

import importlib
import re

import pytest
import tagged
import torch
import transformers
from liger_kernel.hub import layers
from liger_kernel.transformers import use_as_hub_kernels
from liger_kernel.transformers.patching import hub as hub_kernels
from shrink import VOCABULARY, shrunk
from tagged import close
from test_use_kernels import on_layers
from tiny import randomised

SCAN = {"LigerMamba2ChunkScan", "LigerMamba2Parts"}
KINDS = {
    "qwen3_next": {"LigerChunkGatedDeltaRule"},
    "qwen3_5_text": {"LigerChunkGatedDeltaRule"},
    "olmo_hybrid": {"LigerChunkGatedDeltaRule"},
    "bamba": SCAN,
    "nemotron_h": SCAN,
    "lfm2": set(),
}
LENGTHS = (5, 1, 8)
# Float sums of some hundred terms in another order. Gradients of gates are sums of up to 14 differences that cancel.
TOLERANCE, GATES = 2.0**-13, 2.0**-9
OF_MIXERS = {layer.__name__ for layer in layers.MIXERS}


def made(kind):
    torch.manual_seed(0)
    return randomised(transformers.AutoModelForCausalLM.from_config(shrunk(kind))).train()


def ids(rows=1):
    return torch.randint(3, VOCABULARY, (rows, sum(LENGTHS)), generator=torch.Generator().manual_seed(0))


def step(model, tokens, labels=None, **more):
    model.zero_grad()
    output = model(input_ids=tokens, labels=tokens if labels is None else labels, **more)
    output.loss.backward()
    return output.loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(found, expected):
    assert close(found[0][None], expected[0][None], TOLERANCE) and found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        tolerance = GATES if re.search(r"A_log|dt_bias|in_proj|\.a_proj", name) else TOLERANCE
        assert close(found[1][name].flatten(), gradient.flatten(), tolerance), name


@pytest.fixture
def installed():
    handle = use_as_hub_kernels()
    yield handle
    handle.undo()


@pytest.mark.parametrize("kind", KINDS)
def test_same_step(kind, installed):
    """In training, and the same tokens in generation; undo takes it back."""
    model, reference = made(kind), made(kind)
    expected = step(reference, ids(2))
    model.set_use_kernels(True)
    assert OF_MIXERS & on_layers(model).keys() == {"LigerCausalConv1d", *KINDS[kind]}
    assert_same(step(model, ids(2)), expected)
    texts = []
    for each in (model, reference):  # whose functions are the same ones of the modeling module
        texts.append(each.eval().generate(ids(2)[:, :6], max_new_tokens=5, do_sample=False, pad_token_id=0))
    assert torch.equal(*texts)
    installed.undo()
    assert not OF_MIXERS & on_layers(model).keys()
    assert_same(step(model.train(), ids(2)), expected)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "lfm2"])
def test_packed_equals_alone(kind, installed):
    """Boundaries that collators give reach the operators; transformers refuses them without other packages."""
    reference, tokens, counted = made(kind), ids(), sum(n - 1 for n in LENGTHS)
    for part in tokens.split(LENGTHS, 1):
        if part.shape[1] > 1:
            (reference(input_ids=part, labels=part).loss * (part.shape[1] - 1) / counted).backward()
    alone = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
    model, ends, labels = made(kind), torch.tensor([0, *LENGTHS]).cumsum(0).int(), tokens.clone()
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    model.set_use_kernels(True)
    labels[0, ends[:-1].long()] = -100
    found = step(model, tokens, labels, position_ids=positions, cu_seq_lens_q=ends)[1]
    assert_same((torch.zeros(()), found), (torch.zeros(()), alone))


def test_switch():
    handle, model = use_as_hub_kernels(mixers=False), made("qwen3_5_text")
    model.set_use_kernels(True)
    assert on_layers(model) and not OF_MIXERS & on_layers(model).keys()
    handle.undo()


def test_float64_runs_their_own(installed):
    model, reference = made("qwen3_5_text").double(), made("qwen3_5_text").double()
    expected = step(reference, ids())
    model.set_use_kernels(True)
    assert_same(step(model, ids()), expected)


def test_every_tagged_function_has_a_layer():
    """Of these tags, in all modeling modules of the installed transformers."""
    tags, found = "|".join(hub_kernels._MIXERS), 0
    for module, path in tagged.modeling_files().items():
        for name in re.findall(rf'_with_fallback\("(?:{tags})",[^)]*\)\ndef (\w+)', path.read_text()):
            function = hub_kernels.tagged_function(type(getattr(importlib.import_module(module), name)))
            assert hub_kernels._layer_of(function) in layers.MIXERS, f"{module}.{name}"
            found += 1
    assert found > 30
