"""Every class and function of the installed transformers that is tagged for `use_kernels=True`, and every gated MLP:
its layer against its own code, values and gradients, in float and in bfloat16. Needs no `kernels`: part of `make
test-families`, and of `make test-hub`."""

import pytest
import tagged
import torch
from checks import check_gated_mlp, check_norm, check_rotary_embedding
from liger_kernel.hub import layers
from liger_kernel.transformers.patching import hub as hub_kernels
from tagged import WIDTH, load, rotary_inputs

# What no layer stands for: an opposite sign, adjacent columns, and tables whose halves differ.
WITHOUT = {"modeling_nanochat", "modeling_openai_privacy_filter", "modeling_hunyuan_vl"}

TAGGED = tagged.tagged()
NORMS = [(module, name) for tag, module, name in TAGGED if tag in tagged.NORMS]
ROTARIES = [(module, name) for tag, module, name in TAGGED if tag == tagged.ROTARY]
UNTAGGED = [part for part in tagged.norms() if part not in NORMS]


def parts(found):
    return pytest.mark.parametrize(
        "module, name", found, ids=[f"{module.rpartition('.')[2]}.{name}" for module, name in found]
    )


def short(module):
    return module.rpartition(".")[2]


@parts(NORMS)
def test_norm(module, name, monkeypatch):
    cls = load(module, name)
    layer = hub_kernels._layer_of(cls)
    assert layer in layers.NORMS
    check_norm(cls, layer, monkeypatch)


@parts([part for part in UNTAGGED if hub_kernels._layer_of(load(*part))])
def test_untagged_norm(module, name, monkeypatch):
    cls = load(module, name)
    check_norm(cls, hub_kernels._layer_of(cls), monkeypatch)


@parts([part for part in tagged.gated_mlps() if hub_kernels._layer_of(load(*part))])
@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
def test_gated_mlp(module, name, activation, monkeypatch):
    cls = load(module, name)
    assert hub_kernels._layer_of(cls) is layers.LigerGatedMLP
    check_gated_mlp(cls, activation, monkeypatch)


@parts([part for part in ROTARIES if short(part[0]) not in WITHOUT])
@pytest.mark.parametrize("unsqueeze_dim", [0, 1, 2])
def test_rotary_embedding(module, name, unsqueeze_dim):
    function = load(module, name)
    check_rotary_embedding(function, hub_kernels._layer_of(function), unsqueeze_dim)


@parts(ROTARIES)
def test_rotary_embedding_with_float_tables_has_the_dtype_of_the_untagged_code(module, name):
    function = load(module, name)
    layer = hub_kernels._layer_of(function) or layers.LigerRotaryEmbedding
    width = WIDTH // 2 if short(module) in ("modeling_gpt_oss", "modeling_openai_privacy_filter") else WIDTH
    arguments = rotary_inputs(torch.bfloat16, width, table_dtype=torch.float32)
    host = type("Host", (torch.nn.Module,), {"forward": lambda self, *a: function(*a)})()
    assert layer.forward(host, *arguments)[0].dtype == function(*arguments)[0].dtype


def test_what_has_no_layer_keeps_its_own_code():
    without = {short(module) for tag, module, name in TAGGED if not hub_kernels._layer_of(load(module, name))}
    assert without == WITHOUT & {short(module) for _, module, _ in TAGGED}


def test_the_comparison_tells_where_a_norm_rounds(monkeypatch):
    cls = load("transformers.models.olmo2.modeling_olmo2", "Olmo2RMSNorm")
    with pytest.raises(AssertionError):
        check_norm(cls, layers.LigerRMSNorm, monkeypatch)
