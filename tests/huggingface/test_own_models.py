"""Models without a row: a row of the caller's own, an entry in the mapping of types, single modules, and patching by
structure."""

import copy
import importlib.util
import pathlib
import re
import sys

import pytest
import torch
from conftest import COMMON, assert_close, assert_same_step, batch
from liger_kernel.transformers import (
    LigerGEGLUMLPForGemma4,
    LigerSwiGLUMLP,
    apply_liger_kernel_by_structure,
    monkey_patch,
)
from liger_kernel.transformers.layer_norm import LigerLayerNorm
from liger_kernel.transformers.patching.families import RMS_NORM, ROPE, SWIGLU, CausalLM, Family, Swap
from liger_kernel.transformers.rms_norm import (
    LigerRMSNorm,
    LigerRMSNormForGemma,
    LigerRMSNormForGemma4,
    LigerRMSNormForOlmo2,
)
from torch import nn

FUSED = "fused_linear_cross_entropy"
SOURCE = """
import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel, PretrainedConfig
from transformers.modeling_outputs import CausalLMOutputWithPast


class MyConfig(PretrainedConfig):
    model_type = "mine"

    def __init__(self, hidden_size=64, vocab_size=128, scale=3.0, **kwargs):
        super().__init__(**kwargs)
        self.hidden_size, self.vocab_size, self.scale = hidden_size, vocab_size, scale


class MyNorm(nn.Module):
    def __init__(self, width, eps=0.03):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.rand(width) + 0.5), eps

    def forward(self, x):
        return WEIGHTED


class MyMLP(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(width, 96, bias=False), nn.Linear(width, 96, bias=False)
        self.down_proj = nn.Linear(96, width, bias=False)
        self.act_fn = nn.SiLU()

    def forward(self, x):
        return self.down_proj(self.up_proj(x) * self.act_fn(self.gate_proj(x))FACTOR)


def rotate_half(x):
    a, b = x.chunk(2, dim=-1)
    return torch.cat((-b, a), dim=-1)


def apply_rotary_pos_emb(q, k, cos, sin):
    return q * cos[:, None] + rotate_half(q) * sin[:, None], k * cos[:, None] + rotate_half(k) * sin[:, None]


class MyAttention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)

    def forward(self, x):
        q, k, v = (t.view(*x.shape[:2], 4, 16).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        frequency = torch.rand(8, generator=torch.Generator().manual_seed(0)).repeat(2)
        angle = torch.arange(x.shape[1])[None, :, None] * frequency
        q, k = apply_rotary_pos_emb(q, k, angle.cos(), angle.sin())
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


class MyModelForCausalLM(PreTrainedModel):
    config_class = MyConfig

    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.norm, self.mlp = MyNorm(config.hidden_size), MyMLP(config.hidden_size)
        self.attention = MyAttention(config.hidden_size)
        self.output = nn.Linear(config.hidden_size, config.vocab_size, bias=True)
        self.post_init()

    def get_input_embeddings(self):
        return self.embed

    def get_output_embeddings(self):
        return self.output

    def forward(self, input_ids=None, labels=None, **kwargs):
        x = self.embed(input_ids)
        x = x + self.attention(self.norm(x))
        logits = self.output(self.norm(x + self.mlp(x))) / self.config.scale
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
            EXTRA
        return CausalLMOutputWithPast(loss=loss, logits=logits)
"""
_ROUNDED = "self.weight * (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)"
_IN_FLOAT = (
    "(self.weight.float() * x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)"
)
_OFFSET = _IN_FLOAT.replace("self.weight.float()", "(1 + self.weight.float())")


@pytest.fixture
def write(tmp_path, monkeypatch):
    """A module of a user's own, with its norm, a factor in its feed-forward block and a line after its loss."""
    count = iter(range(100))

    def write(norm=_ROUNDED, factor="", extra="pass"):
        name = f"my_modeling_{next(count)}"
        (tmp_path / f"{name}.py").write_text(
            SOURCE.replace("WEIGHTED", norm).replace("FACTOR", factor).replace("EXTRA", extra)
        )
        spec = importlib.util.spec_from_file_location(name, tmp_path / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        return module

    return write


def _row(module):
    return Family(
        "mine",
        {"MyNorm": RMS_NORM, "MyMLP": SWIGLU, **ROPE},
        {"MyModelForCausalLM": CausalLM("output")},
        modeling=module.__name__,
    )


def _model(module):
    torch.manual_seed(0)
    return module.MyModelForCausalLM(module.MyConfig()).train()


@pytest.mark.parametrize("level", ["class", "instance"])
def test_a_row_of_the_callers_own(write, patched, level):
    module = write()
    row = _row(module)
    reference = _model(module)
    model = copy.deepcopy(reference) if level == "instance" else None
    report = patched(row, model, strict=True)
    assert {entry.switch for entry in report.replaced} == {"rms_norm", "swiglu", "rope", "layers", FUSED}
    if level == "class":
        model = _model(module)
        model.load_state_dict(reference.state_dict())
        reference_cls = type(reference)
        reference.forward = reference_cls.forward.liger_original.__get__(reference)
    assert isinstance(model.norm, LigerRMSNorm) and isinstance(model.mlp, LigerSwiGLUMLP)
    assert assert_same_step(model, reference, **batch()).logits is None


@pytest.mark.parametrize("level", ["class", "instance"])
def test_a_part_that_computes_something_else_is_kept(write, patched, level):
    module = write(norm=f"2 * {_ROUNDED}", factor=" * 1.01")
    row = _row(module)
    reference = _model(module)
    model = copy.deepcopy(reference) if level == "instance" else None
    report = patched(row, model, rope=False)
    if level == "class":
        model = _model(module)
        model.load_state_dict(reference.state_dict())
    else:
        assert {entry.name for entry in report.skipped} == {"MyNorm", "MyMLP"}
    assert not isinstance(model.norm, LigerRMSNorm) and not isinstance(model.mlp, LigerSwiGLUMLP)
    assert_close(model(**batch()).loss, reference(**batch()).loss)


@pytest.mark.parametrize(
    "norm, part", [(_ROUNDED, LigerRMSNorm), (_IN_FLOAT, LigerRMSNormForOlmo2), (_OFFSET, LigerRMSNormForGemma)]
)
def test_by_structure(write, norm, part):
    reference = _model(write(norm))
    model = copy.deepcopy(reference)
    report = apply_liger_kernel_by_structure(model)
    assert [entry.name for entry in report.skipped] == ["apply_rotary_pos_emb"]
    assert [entry.count for entry in report.replaced] == [1, 1, 1]
    assert (
        isinstance(model.norm, part)
        and type(model.norm).__name__ == part.__name__
        and isinstance(model.mlp, LigerSwiGLUMLP)
    )
    assert assert_same_step(model, reference, **batch()).logits is None
    report.undo()
    assert [type(m) for m in model.modules()] == [type(m) for m in reference.modules()]
    assert not apply_liger_kernel_by_structure(
        model, rms_norm=False, mlp=False, fused_linear_cross_entropy=False
    ).replaced


def test_by_structure_keeps_what_computes_something_else(write):
    reference = _model(write(norm=f"{_ROUNDED} + 0.1", factor=" * 1.01"))
    model = copy.deepcopy(reference)
    report = apply_liger_kernel_by_structure(model)
    assert {entry.name for entry in report.skipped} == {"MyNorm", "MyMLP", "apply_rotary_pos_emb"}
    assert [entry.switch for entry in report.replaced] == [FUSED]
    assert_same_step(model, reference, **batch())


def test_by_structure_compares_the_loss(write):
    """A forward that asks what its logits are takes another way, which the promise of logits cannot see."""
    for asks, reason in (
        ("isinstance(logits, torch.Tensor)", "its forward may ask whether its logits are a tensor"),
        ("logits.__class__ is torch.Tensor", "its loss without logits is another"),
    ):
        reference = _model(write(extra=f"loss = loss if {asks} else 2 * loss"))
        model = copy.deepcopy(reference)
        report = apply_liger_kernel_by_structure(model, rope=False)
        assert {entry.switch: entry.reason for entry in report.skipped} == {FUSED: reason}
        assert type(model) is type(reference) and model(**batch()).logits is not None
    with pytest.raises(TypeError, match="str"):
        apply_liger_kernel_by_structure("a model")


def test_by_structure_of_transformers_models():
    from transformers import CohereConfig, CohereForCausalLM, StableLmConfig, StableLmForCausalLM

    for config, cls in ((StableLmConfig, StableLmForCausalLM), (CohereConfig, CohereForCausalLM)):
        torch.manual_seed(0)
        reference = cls(config(**COMMON)).train()
        model = copy.deepcopy(reference)
        report = apply_liger_kernel_by_structure(model)
        assert {"swiglu", FUSED} <= {entry.switch for entry in report.replaced}
        assert assert_same_step(model, reference, **batch()).logits is None


def test_an_entry_in_the_mapping(write, monkeypatch):
    """As docs/families.md has it, block after block."""
    module = write()
    name = module.__name__
    page = (pathlib.Path(__file__).parents[2] / "docs" / "families.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.S)
    assert len(blocks) == 4
    model, other = _model(module), _model(module)
    monkeypatch.setitem(monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN, "mine", None)  # undone at the end
    layer = nn.Module()
    layer.norm, layer.mlp = other.norm, other.mlp
    names = {"model": model, "layer": layer}
    expected = model(**batch()).loss
    for block in blocks:
        exec(block.replace("my_package.modeling", name).replace("CausalLM()", 'CausalLM("output")'), names)
    assert (
        isinstance(model.norm, LigerRMSNorm)
        and isinstance(other.norm, LigerRMSNorm)
        and isinstance(other.mlp, LigerSwiGLUMLP)
    )
    assert_close(other(**batch()).loss, expected)
    third = _model(module)
    report = monkey_patch._apply_liger_kernel_to_instance(model=third, rope=False)
    assert {entry.switch for entry in report.replaced} == {"rms_norm", "layers", "swiglu", FUSED}
    assert_close(third(**batch()).loss, expected)
    assert third(**batch()).logits is None


def test_a_layer_norm_by_hand():
    norm, x = nn.LayerNorm(64, eps=0.03), torch.randn(3, 64)
    with torch.no_grad():
        norm.weight.normal_()
        norm.bias.normal_()
    expected = norm(x)
    monkey_patch._patch_layer_norm_module(norm)
    assert isinstance(norm, LigerLayerNorm) and isinstance(norm, nn.LayerNorm) and "LigerLayerNorm" in repr(norm)
    assert_close(norm(x), expected)


def test_targets_of_a_swap_are_tried_in_order(write, patched):
    module = write(_IN_FLOAT)
    row = Family("mine", {"MyNorm": Swap("rms_norm", "rms_norm.LigerRMSNormForOlmo2")}, modeling=module.__name__)
    model = _model(module)
    patched(row, model, strict=True)
    assert isinstance(model.norm, LigerRMSNormForOlmo2)


def test_parts_of_gemma4():
    """The modules under the API's names, as they stand in a model and as somebody makes them."""
    modeling = pytest.importorskip("transformers.models.gemma4.modeling_gemma4")
    from transformers import Gemma4TextConfig

    x = torch.randn(3, 64, dtype=torch.bfloat16)
    for with_scale in (True, False):
        ours, theirs = (
            cls(64, eps=0.03, with_scale=with_scale) for cls in (LigerRMSNormForGemma4, modeling.Gemma4RMSNorm)
        )
        assert ours.state_dict().keys() == theirs.state_dict().keys() and ours.with_scale == with_scale
        assert torch.equal(ours.bfloat16()(x), theirs.bfloat16()(x))
    config = Gemma4TextConfig(hidden_size=64, intermediate_size=32, num_hidden_layers=2, num_kv_shared_layers=1,
                              use_double_wide_mlp=True, layer_types=["full_attention", "full_attention"])  # fmt: skip
    for layer in (0, 1):
        ours, theirs = LigerGEGLUMLPForGemma4(config, layer), modeling.Gemma4TextMLP(config, layer)
        assert ours.up_proj.weight.shape == theirs.up_proj.weight.shape == (32 * (layer + 1), 64)
        ours.load_state_dict(theirs.state_dict())
        assert_close(ours(x.float()), theirs(x.float()))


def test_a_composite_models_switches_reach_the_model_in_it(patched):
    import inspect

    from tiny import TINY_MODELS, model_of

    model = model_of("llava", "LlavaForConditionalGeneration")
    report = monkey_patch._apply_liger_kernel_to_instance(model=model, rope=False, rms_norm=False)
    # The vision model has no row: its LayerNorms are replaced by source.
    assert {entry.switch for entry in report.replaced} == {
        "swiglu",
        "layer_norm",
        "layers",
        "masks",
        FUSED,
    } and "llava" in TINY_MODELS
    report.undo()
    assert monkey_patch.switches_of(monkey_patch.apply_liger_kernel_to_llava) >= {"rope", "swiglu", FUSED}
    with pytest.raises(TypeError, match="str"):
        monkey_patch.apply_liger_kernel_to_llava(model="no model")
    assert "kwargs" in inspect.signature(monkey_patch.apply_liger_kernel_to_llava).parameters


def test_a_model_of_another_family_is_either_error():
    from conftest import make

    for error in (TypeError, ValueError):
        with pytest.raises(error, match="use apply_liger_kernel_to_llama"):
            monkey_patch.apply_liger_kernel_to_pixtral(model=make("llama"))
