"""A representative of each layer of liger_kernel.hub against transformers' own code; all of them, and whole models, are
in tests/hub."""

import importlib.metadata
import inspect
import json
import linecache
import pathlib
import sys
import textwrap

import liger_kernel.hub
import pytest
import torch
import transformers
from liger_kernel.hub import layers
from liger_kernel.transformers.patching import hub as hub_kernels
from liger_kernel.transformers.patching.formulas import FORMULAS
from liger_kernel.transformers.patching.hub import use_as_hub_kernels
from torch import nn

sys.path.insert(0, str(pathlib.Path(__file__).parent / "hub"))

from checks import check_gated_mlp, check_norm, check_rotary_embedding  # noqa: E402
from tagged import load, rotary_inputs  # noqa: E402

NORMS = {
    "llama.LlamaRMSNorm": layers.LigerRMSNorm,
    "llama4.Llama4TextRMSNorm": layers.LigerRMSNorm,
    "olmo2.Olmo2RMSNorm": layers.LigerFloatRMSNorm,
    "nemotron_h.NemotronHRMSNorm": layers.LigerFloatRMSNorm,
    "qwen3_5.Qwen3_5RMSNorm": layers.LigerZeroCenteredRMSNorm,
}
ROTARIES = {
    "llama": layers.LigerRotaryEmbedding,
    "olmo2": layers.LigerFloatRotaryEmbedding,
    "esm": layers.LigerFloatRotaryEmbedding,
    "gpt_oss": layers.LigerHalfTableRotaryEmbedding,
    "nanochat": None,
    "openai_privacy_filter": None,
    "hunyuan_vl": None,
}


def part(package, name):
    return load(f"transformers.models.{package}.modeling_{package}", name)


@pytest.mark.parametrize("name", NORMS)
def test_norm(name, monkeypatch):
    cls = part(*name.split("."))
    assert hub_kernels._layer_of(cls) is NORMS[name]
    check_norm(cls, NORMS[name], monkeypatch)


@pytest.mark.parametrize("package", ROTARIES)
@pytest.mark.parametrize("unsqueeze_dim", [0, 1, 2])
def test_rotary_embedding(package, unsqueeze_dim):
    assert hub_kernels._layer_of(part(package, "apply_rotary_pos_emb")) is ROTARIES[package]
    if ROTARIES[package]:
        check_rotary_embedding(part(package, "apply_rotary_pos_emb"), ROTARIES[package], unsqueeze_dim)


@pytest.mark.parametrize("activation", ["silu", "swish", "gelu_pytorch_tanh", "gelu_new"])
def test_gated_mlp(activation, monkeypatch):
    check_gated_mlp(part("llama", "LlamaMLP"), activation, monkeypatch)


class Host(nn.Module):
    """Says when its own forward runs."""

    weight, variance_epsilon = torch.ones(32), 1e-6

    def forward(self, *arguments):
        return "its own"


def cases_for_the_replaced_code():
    double = torch.randn(2, 32, dtype=torch.float64)
    q, k, cos, sin = rotary_inputs(torch.bfloat16)
    yield "a norm in float64", layers.LigerRMSNorm, (double,)
    yield "float64 in a norm that multiplies in float", layers.LigerFloatRMSNorm, (double,)
    yield "an MLP in float64", layers.LigerGatedMLP, (double,)
    yield (
        "tables of another dtype, which make the result one of float",
        layers.LigerRotaryEmbedding,
        (q, k, cos.float(), sin.float()),
    )
    yield "tables of a part of a head", layers.LigerRotaryEmbedding, (q, k, cos[..., :16], sin[..., :16])
    yield (
        "tables as wide as a head where half as wide ones are known",
        layers.LigerHalfTableRotaryEmbedding,
        (q, k, cos, sin),
    )
    yield "tables without a batch", layers.LigerRotaryEmbedding, (q, k, cos[0], sin[0])
    yield "tables of one position", layers.LigerRotaryEmbedding, (q, k, cos[:, :1], sin[:, :1])
    yield "heads without a batch", layers.LigerRotaryEmbedding, (q[0], k[0], cos, sin)
    yield "an unknown layout", layers.LigerRotaryEmbedding, (q, k, cos, sin, -2)


@pytest.mark.parametrize(
    "layer, arguments", [pytest.param(*rest, id=name) for name, *rest in cases_for_the_replaced_code()]
)
def test_what_no_operator_covers_runs_the_replaced_code(layer, arguments):
    assert layer.forward(Host(), *arguments) == "its own"


@pytest.mark.parametrize("layer", [*layers.NORMS, *layers.ROTARIES, layers.LigerGatedMLP])
def test_a_layer_is_one_for_kernels(layer):
    """What kernels 0.17 checks: no constructor, no member but the two that say what it can, the parameters of the code
    it replaces."""
    assert layer.__init__ is nn.Module.__init__
    members = {name for name, _ in inspect.getmembers(layer)} - {name for name, _ in inspect.getmembers(nn.Module)}
    assert members == {"can_torch_compile", "has_backward"} and layer.can_torch_compile and layer.has_backward
    replaced = (
        part("llama", "LlamaRMSNorm").forward
        if layer not in layers.ROTARIES
        else lambda self, q, k, cos, sin, unsqueeze_dim=1: None
    )
    kinds = [[p.kind for p in inspect.signature(forward).parameters.values()] for forward in (layer.forward, replaced)]
    assert kinds[0] == kinds[1]


def test_the_folder_describes_itself():
    folder = pathlib.Path(liger_kernel.hub.__file__).parent
    metadata = json.loads((folder / "metadata.json").read_text())
    assert metadata["id"] == "liger_kernel_hub" and metadata["license"] == "BSD-2-Clause"
    named = {part.layer for part in FORMULAS.values()} - {None}
    every = (*layers.NORMS, *layers.ROTARIES, layers.LigerGatedMLP, *layers.MIXERS)
    assert named == {layer.__name__ for layer in every}


def test_changed_code_has_no_layer():
    namespace = {"torch": torch}
    source = inspect.getsource(part("llama", "LlamaRMSNorm").forward).replace(
        "variance_epsilon)", "variance_epsilon * 2)"
    )
    path = pathlib.Path(__file__).parent / "changed"
    code = textwrap.dedent(source)
    linecache.cache[str(path)] = (len(code), None, code.splitlines(True), str(path))
    exec(compile(code, str(path), "exec"), namespace)
    changed = type("Changed", (nn.Module,), {"forward": namespace["forward"]})
    assert hub_kernels._layer_of(changed) is None
    assert hub_kernels._layer_of(part("llama", "LlamaRMSNorm")) is layers.LigerRMSNorm


def fits():
    from transformers.utils.import_utils import is_kernels_available

    return hasattr(transformers.PreTrainedModel, "set_use_kernels") and is_kernels_available()


def test_without_a_fitting_kernels_one_message_says_which(monkeypatch):
    if fits():
        monkeypatch.setattr("transformers.utils.import_utils.is_kernels_available", lambda: False)
    with pytest.raises(ImportError) as error:
        use_as_hub_kernels()
    message = str(error.value)
    assert transformers.__version__ in message and "apply_liger_kernel_to_" in message
    try:
        installed = f"kernels {importlib.metadata.version('kernels')} is installed"
    except importlib.metadata.PackageNotFoundError:
        installed = "no kernels is installed"
    assert installed in message and "pip install 'kernels>=" in message
    assert not hasattr(getattr(transformers.PreTrainedModel, "set_use_kernels", None), "liger_hub_kernels")


TOO_OLD = f"needs transformers>=5.18, and transformers {transformers.__version__} is installed; apply_liger_kernel_to_"


def test_a_transformers_without_set_use_kernels_is_said(monkeypatch):
    monkeypatch.delattr(transformers.PreTrainedModel, "set_use_kernels")
    with pytest.raises(ImportError, match=TOO_OLD):
        use_as_hub_kernels()


@pytest.mark.parametrize("highest", ["0.17.0", "0.13", None])
def test_a_transformers_whose_kernels_knows_no_conditions_is_said(highest, monkeypatch):
    """It would bind layers to modules that they do not stand for. `pip install kernels` is no advice there: some break
    on it."""
    if highest:
        monkeypatch.setattr("transformers.utils.import_utils.KERNELS_MAX_VERSION", highest)
    else:
        monkeypatch.delattr("transformers.utils.import_utils.KERNELS_MAX_VERSION")
    with pytest.raises(ImportError, match=TOO_OLD):
        use_as_hub_kernels()
