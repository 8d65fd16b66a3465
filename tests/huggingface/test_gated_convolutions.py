"""Gated short convolutions of LFM's layers compute in the layout of their projection. The reference is the unpatched
model; test_mixers.py runs whole models, packed and cached."""

import copy
import types

import liger_kernel
import pytest
import torch
import transformers
from conftest import TOLERANCE, Ran, assert_close
from liger_kernel.transformers.patching import mixers
from liger_kernel.transformers.patching.ones import CACHES
from packaging.version import parse
from shrink import VOCABULARY, shrunk
from tiny import randomised
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

CALLED = parse(transformers.__version__) >= parse("5.16")  # 5.15 hides the forward in a decorator
KINDS = [kind for kind in ("lfm2", "lfm2_moe", "lfm3") if CALLED and kind in CONFIG_MAPPING]


def made(kind, dtype=torch.float32):
    torch.manual_seed(0)
    return randomised(transformers.AutoModelForCausalLM.from_config(shrunk(kind))).train().to(dtype)


def convolution(model):
    return next(module for module in model.modules() if type(module).__name__.endswith("ShortConv"))


def step(module, x, **given):
    """The result of a convolution, and the gradients of its input and parameters."""
    x = x.detach().requires_grad_()
    y = module(x, **given)
    wanted = [x, *module.parameters()]
    return y, *torch.autograd.grad(y, wanted, torch.sin(torch.arange(y.numel(), dtype=y.dtype)).view_as(y))


@pytest.mark.parametrize("kind", KINDS)
def test_steps_of_layers(kind):
    """Layers add and normalise at once, and their MLPs are one operator."""
    report = liger_kernel.patch(made(kind))
    assert not [skip for skip in report.skipped if skip.switch in ("mixers", "layers")]
    replaced = {entry.by: entry.count for entry in report.replaced}
    layers = shrunk(kind).num_hidden_layers
    assert replaced["fused_add_rms_norm"] == layers and replaced["gated_mlp"] in (1, layers)
    assert replaced["gates and convolution"] == shrunk(kind).layer_types.count("conv")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_gates_and_convolution(kind, masked, dtype):
    """Of float64, which has no kernel, too."""
    reference = made(kind, dtype)
    model = copy.deepcopy(reference)
    liger_kernel.patch(model)
    x = torch.randn(2, 9, shrunk(kind).hidden_size, dtype=dtype)
    mask = torch.tensor([[1] * 9, [0] * 4 + [1] * 5]) if masked else None
    (ours, *gradients), (theirs, *expected) = (step(convolution(m), x, attention_mask=mask) for m in (model, reference))
    # bfloat16: 2^-8 for each of the three roundings of products and sums, in which gradients take part twice.
    tolerance = TOLERANCE if dtype != torch.bfloat16 else 6 * 2.0**-8
    assert ours.dtype == dtype
    assert_close(ours, theirs, tolerance)
    for a, b in zip(gradients, expected, strict=True):
        assert_close(a, b, tolerance)


@pytest.mark.parametrize("kind", KINDS)
def test_no_tensor_is_copied_to_another_layout(kind):
    """In backward the plain module copies the gradient of its projection."""
    x, clones = torch.randn(2, 9, shrunk(kind).hidden_size), []
    for model in (made(kind), made(kind)):
        if clones:
            liger_kernel.patch(model)
        with Ran() as ran:
            step(convolution(model), x)
        clones.append(ran.counts["clone"])
    assert clones[0] > 0 and clones[1] == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_and_hooks_on_the_convolution_get_the_original(kind):
    """The original writes the cache, and runs the hooks by which accelerate brings offloaded weights."""
    model = made(kind).eval()
    plain, called = copy.deepcopy(model), []
    liger_kernel.patch(model)
    ids = torch.randint(3, VOCABULARY, (1, 7))
    told = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(ids, **told), plain.generate(ids, **told))

    class Hook:
        def pre_forward(self, module):
            called.append("before")

        def post_forward(self, module, output):
            called.append("after")

    module, x = convolution(model), torch.randn(2, 9, shrunk(kind).hidden_size)
    expected = module(x)
    module.conv._hf_hook = Hook()
    assert_close(module(x), expected)
    assert called == ["before", "after"]


@pytest.mark.parametrize("name", CACHES)
def test_a_gated_convolution_with_a_cache_is_the_original(name):
    """Whatever this version calls it: transformers 5.24 says `cache`."""
    code = (lambda self, hidden_states, **given: given).__code__
    forward = mixers._convolving(types.FunctionType(code, {"apply_mask_to_padding_states": None}))
    module, given = types.SimpleNamespace(conv=torch.nn.Identity()), {name: object()}
    assert forward(module, torch.ones(1, 2, 3), **given) == given
