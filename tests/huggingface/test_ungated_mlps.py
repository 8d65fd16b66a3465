"""MLPs of transformers without a gate: a layer, an activation and a layer, of which the last two are one operator."""

import copy

import peft
import pytest
import torch
from conftest import TOLERANCE, assert_close, batch, make, run
from liger_kernel import patch as patch_model
from liger_kernel.transformers import mlp
from liger_kernel.transformers.patching.apply import patch
from liger_kernel.transformers.patching.by_source import row_of
from transformers import CLIPVisionConfig, GPTNeoXConfig, NemotronConfig, PhiConfig, SiglipVisionConfig
from transformers.models.clip.modeling_clip import CLIPMLP
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXMLP
from transformers.models.nemotron.modeling_nemotron import NemotronMLP
from transformers.models.phi.modeling_phi import PhiMLP
from transformers.models.siglip.modeling_siglip import SiglipMLP

TOKENS, HIDDEN, WIDTH = 5, 16, 24
SIZES = dict(hidden_size=HIDDEN, intermediate_size=WIDTH, num_attention_heads=4)
#: what makes a module, its activation, the layers that it calls
MODULES = {
    "siglip": (lambda: SiglipMLP(SiglipVisionConfig(**SIZES)), "gelu_tanh", ("fc1", "fc2")),
    "clip": (lambda: CLIPMLP(CLIPVisionConfig(**SIZES, hidden_act="gelu")), "gelu_erf", ("fc1", "fc2")),
    "phi": (lambda: PhiMLP(PhiConfig(**SIZES)), "gelu_tanh", ("fc1", "fc2")),
    "silu": (lambda: PhiMLP(PhiConfig(**SIZES, hidden_act="silu")), "silu", ("fc1", "fc2")),
    "nemotron": (lambda: NemotronMLP(NemotronConfig(**SIZES)), "relu_squared", ("up_proj", "down_proj")),
    "gpt_neox": (lambda: GPTNeoXMLP(GPTNeoXConfig(**SIZES)), "gelu_erf", ("dense_h_to_4h", "dense_4h_to_h")),
}
FORMULAS = {
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "gelu_erf": torch.nn.functional.gelu,
    "silu": torch.nn.functional.silu,
    "relu_squared": lambda x: x.relu().square(),
}


@pytest.fixture(params=MODULES)
def sample(request):
    torch.manual_seed(0)
    return (module_of(request.param), *MODULES[request.param][1:])


def module_of(name):
    return MODULES[name][0]()


def put_in(module, **switches):
    return patch(row_of(module), module, fused_linear_cross_entropy=False, **switches)


def results(forward, module, x):
    x = x.clone().requires_grad_()
    y = forward(x)
    return [y.detach(), *torch.autograd.grad(y.square().sum(), [x, *module.parameters()])]


def kept_bytes(module, x):
    """Of the tensors that a forward keeps for backward, parameters apart."""
    weights, found = {p.data_ptr() for p in module.parameters()}, {}

    def keep(t):
        if t.numel() and t.data_ptr() not in weights:
            found[t.untyped_storage().data_ptr()] = t, t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        module(x)
    return sum(size for _, size in found.values())


def test_results_and_gradients(sample):
    module, activation, (first, last) = sample
    exact = copy.deepcopy(module).double()
    layers = [exact.get_submodule(name) for name in (first, last)]
    x = torch.randn(2, TOKENS, HIDDEN)
    expected = results(lambda x: layers[1](FORMULAS[activation](layers[0](x))), exact, x.double())
    report = put_in(module)
    assert [entry.by for entry in report.replaced if entry.switch == "layers"] == ["activated_linear"]
    assert not report.skipped and isinstance(module, mlp.LigerUngatedMLP)
    for actual, wanted in zip(results(module, module, x), expected):
        assert_close(actual.double(), wanted)
    with torch.no_grad():
        assert_close(module(x).double(), expected[0])


def test_the_activation_is_not_kept(sample):
    module, *_ = sample
    x = torch.randn(TOKENS, HIDDEN)
    before = kept_bytes(module, x)
    put_in(module)
    assert kept_bytes(module, x) == 4 * TOKENS * (HIDDEN + WIDTH) <= before - 4 * TOKENS * WIDTH


def test_without_the_switch(sample):
    module, *_ = sample
    cls = type(module)
    report = put_in(module, layers=False)
    assert type(module) is cls and not any(entry.switch == "layers" for entry in report.replaced)


def test_another_activation_keeps_the_forward():
    module = CLIPMLP(CLIPVisionConfig(**SIZES, hidden_act="quick_gelu"))
    report = put_in(module)
    assert type(module) is CLIPMLP
    (skip,) = report.skipped
    assert (skip.name, skip.reason) == ("CLIPMLP", "its activation is QuickGELUActivation, not gelu")


def test_a_hook_of_the_activation_runs():
    """And an activation that was exchanged since."""
    module, x, seen = module_of("siglip"), torch.randn(TOKENS, HIDDEN), []
    put_in(module)
    handle = module.activation_fn.register_forward_hook(lambda module, args, result: seen.append(1))
    module(x).sum().backward()
    assert seen == [1]
    handle.remove()
    module.activation_fn = torch.nn.Tanh()
    assert_close(module(x), module.fc2(module.fc1(x).tanh()))


def test_compiled():
    """The compiler sees torch's activation, which it fuses and recomputes."""
    torch.manual_seed(0)
    module, x, seen = module_of("siglip"), torch.randn(TOKENS, HIDDEN), []
    expected = results(module, module, x)
    put_in(module)

    def backend(graph, inputs):
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    compiled = torch.compile(module, backend=backend, fullgraph=True)
    for actual, wanted in zip(results(compiled, module, x), expected):
        assert_close(actual, wanted)
    assert any("gelu" in target for target in seen) and not any("liger" in target for target in seen)


@pytest.mark.parametrize("name", ["siglip", "nemotron"])
def test_autocast(name):
    module, x = module_of(name), torch.randn(TOKENS, HIDDEN)
    original = copy.deepcopy(module)
    put_in(module)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected, actual = (results(m, m, x) for m in (original, module))
    for a, e in zip(actual, expected):
        assert a.dtype == e.dtype
        assert_close(a.float(), e.float(), 2.0**-5)  # some roundings of 2^-9, among them torch's of the activation


def test_an_adapter_is_a_part_of_it():
    """LoRA on both layers of a Nemotron."""
    torch.manual_seed(0)
    model = peft.get_peft_model(make("nemotron"), peft.LoraConfig(target_modules=["up_proj", "down_proj"], r=3))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter.data, std=0.1)
    plain = copy.deepcopy(model)
    report = patch_model(model)
    (entry,) = (entry for entry in report.replaced if entry.name == "MLP with adapters")
    assert (entry.by, entry.count) == ("activated_linear", 2)
    (output, gradients), (wanted, expected) = (run(m, **batch()) for m in (model, plain))
    assert_close(output.loss, wanted.loss)
    assert gradients.keys() == expected.keys() and len(gradients) == 8
    for name in gradients:
        assert_close(gradients[name], expected[name], 4 * TOLERANCE)
