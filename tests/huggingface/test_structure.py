"""Patching by structure of models whose parts only look like others: they train as they did, or better said why not."""

import copy

import pytest
import test_families as families
import torch
import transformers
from conftest import COMMON, assert_same_step, batch
from liger_kernel.transformers import apply_liger_kernel_by_structure
from liger_kernel.transformers.patching import apply as patch_module
from liger_kernel.transformers.patching.apply import patch
from liger_kernel.transformers.patching.families import FAMILIES
from liger_kernel.transformers.patching.formulas import FORMULAS
from liger_kernel.transformers.rms_norm import LigerRMSNorm
from liger_kernel.transformers.swiglu import LigerSeedOssSwiGLUMLP
from test_own_models import _model, write  # noqa: F401
from tiny import TINY_MODELS, can_be_made, kinds_of, model_of, swaps_in


def _trains(family):
    return FAMILIES[family].loss and can_be_made(family)


FUSED = "fused_linear_cross_entropy"
_SSM = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_chunk_size": 8}
# family -> the fields of its config, the switches that replace something
MODELS = {
    "Mamba": ({"state_size": 8}, {"rms_norm", FUSED}),
    "FalconMamba": ({"state_size": 8}, {"rms_norm", FUSED}),
    "Mamba2": (
        {"state_size": 16, "head_dim": 16, "num_heads": 8, "n_groups": 2, "expand": 2, "chunk_size": 8},
        {"rms_norm", FUSED},
    ),
    "Bamba": (
        {"attn_layer_indices": [1], "mamba_n_groups": 2, **_SSM},
        {"rms_norm", "swiglu", "rope", FUSED},
    ),
    "GraniteMoeHybrid": (
        {"layer_types": ["mamba", "attention"], "mamba_n_groups": 1, "num_local_experts": 4, "num_experts_per_tok": 2,
         "shared_intermediate_size": 96, **_SSM},
        {"rms_norm", "swiglu", "rope", FUSED},
    ),
    "NemotronH": (
        {"layers_block_type": ["mamba", "attention"], "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2,
         "ssm_state_size": 16, "chunk_size": 8, "head_dim": 16},
        {"rms_norm", FUSED},
    ),
    "SeedOss": ({"head_dim": 16}, {"rms_norm", "swiglu", "rope", FUSED}),
}  # fmt: skip


def make(family, **fields):
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(
        getattr(transformers, f"{family}Config")(**{**COMMON, **MODELS[family][0], **fields})
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model


@pytest.mark.parametrize("family", [name for name in MODELS if hasattr(transformers, f"{name}Config")])
def test_a_family_without_a_row(family):
    reference, (_, switches) = make(family).train(), MODELS[family]
    model = copy.deepcopy(reference)
    report = apply_liger_kernel_by_structure(model)
    # The routers of older versions of transformers are unknown, and kept, as are experts in classes of their own;
    # mixers there call nothing to be replaced.
    replaced = {entry.switch for entry in report.replaced} - {"router", "layers", "qk_norm", "masks", "mixers"}
    assert replaced == switches, report
    assert {entry.name for entry in report.skipped} <= {"GraniteMoeHybridParallelExperts"}, report
    for dtype in (torch.float32, torch.bfloat16):  # in bfloat16 Mamba's residual stream stays float32
        for each in (model, reference):
            each.to(dtype)
        losses = []
        for each in (model, reference):
            torch.manual_seed(0)  # of the dropout
            losses.append(each(**batch(), use_cache=False).loss)
            losses[-1].backward()
        # bfloat16: rounding errors of 2^-9 in two layers, averaged over tokens.
        torch.testing.assert_close(*losses, rtol=2.0 ** (-18 if dtype == torch.float32 else -9), atol=0)
        model.zero_grad(), reference.zero_grad()


@pytest.mark.parametrize(
    "family, kind", [(family, kind) for family in TINY_MODELS if _trains(family) for kind in kinds_of(family)]
)
def test_by_structure_and_by_row_agree(family, kind):
    """Where both replace a module they do it by parts for the same sources, and the model trains alike."""
    reference = model_of(family, kind)
    by_row, model = copy.deepcopy(reference), copy.deepcopy(reference)
    patch(family, by_row, **({"rope": False} if "rope" in FAMILIES[family].switches else {}))
    apply_liger_kernel_by_structure(model)
    both = 0
    for modules in zip(model.modules(), by_row.modules(), strict=True):
        made = [getattr(vars(type(module)).get("liger_part"), "part", None) for module in modules]
        if all(isinstance(part, type) for part in made):
            both += 1
            assert _part_of(made[0]) == _part_of(made[1]), made
    assert both or not swaps_in(family)
    families.assert_same_step(model, reference, TINY_MODELS[family][kind][1]())


def _part_of(cls):
    """The name of the part that a class of this package computes; torch's LayerNorm needs none."""
    name_of = lambda target: target.rpartition(".")[2]
    return next((n for n, part in FORMULAS.items() if cls.__name__ in map(name_of, part.targets)), cls.__name__)


def test_dropout_is_that_of_the_original():
    model = make("SeedOss", residual_dropout=0.5).train()
    mlp, x = copy.deepcopy(model.model.layers[0].mlp), torch.randn(3, 64)
    apply_liger_kernel_by_structure(model)
    ours = model.model.layers[0].mlp
    assert isinstance(ours, LigerSeedOssSwiGLUMLP)
    for training in (True, False):
        results = []
        for module in (ours, mlp):
            torch.manual_seed(0)
            results.append(module.train(training)(x))
        torch.testing.assert_close(*results)
        assert (results[0] == 0).any() == training


def test_a_part_that_is_called_with_more_than_it_takes_runs_the_original(write):  # noqa: F811
    """The four tokens of the trial may not show every way in which a model calls a part."""
    module = write()
    module.MyNorm.forward = _gated
    model = _model(module)
    reference = copy.deepcopy(model)
    apply_liger_kernel_by_structure(model)
    assert isinstance(model.norm, LigerRMSNorm)
    x, gate = torch.randn(2, 3, 64)
    assert torch.equal(model.norm(x, gate), reference.norm(x, gate))
    assert torch.equal(model.norm(x, gate=gate), reference.norm(x, gate=gate))


def test_a_norm_of_unknown_source_that_is_called_with_a_gate_stays(write):  # noqa: F811
    module = write()
    module.MyNorm.forward = _gated
    model = _model(module)
    model.norm.register_forward_pre_hook(lambda norm, args: (args[0], args[0]))
    report = apply_liger_kernel_by_structure(model)
    assert type(model.norm) is module.MyNorm
    assert "the model calls it with 2 arguments" in [entry.reason for entry in report.skipped]


def _gated(self, x, gate=None):
    if gate is not None:
        x = x * gate
    return self.weight * (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


def test_a_forward_that_names_no_parameters(write):  # noqa: F811
    module = write()
    forward = module.MyModelForCausalLM.forward

    def unnamed(self, *args, **kwargs):
        self.loss_function  # which the real one names
        return forward(self, *args, **kwargs)

    module.MyModelForCausalLM.forward = unnamed
    reference = _model(module)
    model = copy.deepcopy(reference)
    report = apply_liger_kernel_by_structure(model)
    assert [entry.switch for entry in report.skipped] == ["rope", FUSED]
    assert {entry.switch for entry in report.replaced} == {"rms_norm", "swiglu"}
    assert_same_step(model, reference, **batch())


def test_an_error_undoes_everything(write, monkeypatch):  # noqa: F811
    model = _model(write())
    classes = [type(module) for module in model.modules()]

    def broken(*args):
        assert isinstance(model.norm, LigerRMSNorm)
        raise RuntimeError("broken")

    monkeypatch.setattr(patch_module, "prepare_head", broken)
    with pytest.raises(RuntimeError, match="broken"):
        apply_liger_kernel_by_structure(model)
    assert [type(module) for module in model.modules()] == classes


def test_no_row_of_the_report_comes_twice():
    report = apply_liger_kernel_by_structure(make("SeedOss").train())
    rows = [(entry.switch, entry.name, entry.by) for entry in report.replaced]
    assert len(rows) == len(set(rows)) and ("layers", "SeedOssMLP", "gated_mlp") in rows
