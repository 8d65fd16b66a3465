"""The table of families: the API's functions, what a row relies on in the installed transformers, and the
table in the docs."""

import importlib
import importlib.util
import inspect
import json
import pathlib
import re
import time

import every_family
import liger_kernel.transformers
import pytest
import torch
import transformers
from conftest import COMMON, batch, make, modeling
from liger_kernel.transformers import model as forwards
from liger_kernel.transformers import monkey_patch
from liger_kernel.transformers.causal_lm import hands_logits_over, original_forward
from liger_kernel.transformers.model import output_classes
from liger_kernel.transformers.patching import formulas
from liger_kernel.transformers.patching.apply import patch
from liger_kernel.transformers.patching.families import FAMILIES, RMS_NORM, Family, table
from liger_kernel.transformers.patching.formulas import is_known
from packaging import version
from tiny import TINY_MODELS, swaps_in

ROOT = pathlib.Path(__file__).parents[2]
MORE_TYPES = (
    "qwen3_5_text qwen3_5_moe_text llama4_text mllama_text_model qwen2_vl_text qwen2_5_vl_text qwen3_vl_text "
    "qwen3_vl_moe_text"
).split()


# MLPs without a gate, and one that changes the width.
UNKNOWN = {"DiTMLP", "Qwen3OmniMoeTalkerResizeMLP", "Phi4MultimodalAudioMLP"}
UNKNOWN |= {f"{name}VisionMLP" for name in ("MuseGlimmer", "Kimi_K25", "Phi4Multimodal", "Qwen3OmniMoe")}
if version.parse(transformers.__version__) < version.parse("5.16"):
    # Routers that give logits only, experts of other shapes, a gated norm of another order.
    UNKNOWN |= {f"{name}TopkRouter" for name in ("Glm4vMoeText", "DeepseekV3", "Glm4Moe", "Glm4MoeLite", "GlmMoeDsa")}
    UNKNOWN |= {"NemotronHTopkRouter", "Ernie4_5_MoeTopKRouter", "FalconH1RMSNormGated"}
    UNKNOWN |= {f"GraniteMoe{name}ParallelExperts" for name in ("", "Shared", "Hybrid")}
    UNKNOWN |= {"apply_rotary_pos_emb_vision"}  # Qwen2.5-Omni's, of one tensor
if version.parse(transformers.__version__) < version.parse("5.7"):
    UNKNOWN |= {"apply_rotary_pos_emb"}  # GLM-5's and, of transformers 4, Phi-3.5-MoE's
if version.parse(transformers.__version__) < version.parse("5"):  # these take a weight of each expert there
    UNKNOWN |= {"GptOssExperts", "Qwen3VLMoeTextExperts", "Qwen2MoeMLP"}
    UNKNOWN |= {"GptOssTopKRouter"}  # gives scores of all experts
    UNKNOWN |= {"apply_multimodal_rotary_pos_emb"}  # GLM-4V's, whose tables have another order
# What a family's function has a switch for, and its models have not, or only some versions have.
ABSENT = {
    **dict.fromkeys(("cohere", "cohere2", "phimoe", "smolvlm"), {"rms_norm"}),
    **dict.fromkeys(("kimi_linear", "nemotron_h"), {"rope"}),
    "deepseek_v2": {"router"},
}


def _there(row):
    return importlib.util.find_spec(row.module.rpartition(".")[0])


def test_every_function_of_the_api():
    recorded = json.loads((ROOT / "tests" / "api.json").read_text())["liger_kernel.transformers.monkey_patch"]
    names = [f"apply_liger_kernel_to_{name}" for name in FAMILIES]
    assert {*names} == {name for name in recorded if name.startswith("apply_")} and len(names) == 78
    for family, name in zip(FAMILIES, names):
        function = getattr(monkey_patch, name)
        assert getattr(liger_kernel.transformers, name) is function and inspect.isfunction(function)
        # Also where tests/test_api.py does not run: with other versions of transformers.
        plain = [p.replace(annotation=p.empty) for p in inspect.signature(function).parameters.values()]
        assert str(inspect.Signature(plain)) == recorded[name]
        assert monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN.get(family, function) is function
    assert monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN.keys() >= {*FAMILIES, *MORE_TYPES}


def test_every_part_that_has_a_kernel_is_replaced_by_default():
    """A trainer sets no switches."""
    for name, row in FAMILIES.items():
        off = {switch for switch, on in row.switches.items() if not on} - {"cross_entropy"}
        assert off <= {*row.without, *({"layer_norm"} if name == "gemma4" else ())}, name  # Gemma 4 has no LayerNorm


def test_both_losses_are_refused_before_anything_is_patched():
    for name, row in FAMILIES.items():
        if row.loss:
            with pytest.raises(AssertionError, match="cannot both be True"):
                getattr(monkey_patch, f"apply_liger_kernel_to_{name}")(
                    cross_entropy=True, fused_linear_cross_entropy=True
                )


@pytest.mark.parametrize("name", FAMILIES)
def test_what_a_row_names_is_there_and_known(name):
    """Fails when the installed transformers renames or rewrites something that a row relies on."""
    row = FAMILIES[name]
    if not _there(row):
        with pytest.raises(ImportError, match=f"transformers {transformers.__version__} has no {name}"):
            getattr(monkey_patch, f"apply_liger_kernel_to_{name}")()
        return
    namespace = row.namespace()
    for part, swap in swaps_in(name):
        if "." not in part and part not in UNKNOWN:
            assert any(is_known(target, getattr(namespace, part)) for target in swap.targets), part
    assert not row.keeps or any(re.fullmatch(row.keeps, part) for part in vars(namespace))
    if not row.holds and not row.composite:
        found = {swap.switch for _, swap in swaps_in(name)}
        wanted = row.switches.keys() - row.without.keys() - ABSENT.get(name, set())
        everywhere = {"cross_entropy", "fused_linear_cross_entropy", *every_family.WHOLE, "lora"}
        assert wanted - everywhere <= found
    heads = [getattr(namespace, part) for part in row.loss if hasattr(namespace, part)]
    assert heads or not row.loss
    assert all(hands_logits_over(original_forward(cls)) for cls in heads)
    assert {cls.__name__ for cls in heads} <= TINY_MODELS[name].keys()


def test_the_table_in_the_docs():
    page = (ROOT / "docs" / "families.md").read_text()
    assert table() in page, (
        "python -c 'from liger_kernel.transformers.families import table; print(table())' prints what belongs into "
        "docs/families.md"
    )
    readme = (ROOT / "README.md").read_text()
    assert re.search(rf"\b{len(FAMILIES)} model families\b", readme) and "docs/families.md" in readme


FORWARDS = {
    **dict.fromkeys(
        "deepseek_v4 exaone4 falcon_h1 gemma gemma2 glm4 glm4v glm4v_moe gpt_oss hunyuan_v1 internvl llama llama4 "
        "llava ministral mistral mixtral mllama nemotron olmo2 olmo3 paligemma phi3 qwen2 qwen2_5_vl qwen2_vl qwen3 "
        "qwen3_5 qwen3_5_moe qwen3_moe qwen3_next qwen3_vl qwen3_vl_moe smollm3 smolvlm".split(), ("lce_forward",)),
    **dict.fromkeys(("gemma3", "gemma4"), ("causal_forward", "multimodal_forward")),
    "pixtral": (),
}  # fmt: skip


def test_importable_forwards():
    more = {"qwen3_5": "lce_forward_for_multimodal", "qwen3_5_moe": "lce_forward_conditional_generation"}
    for name, attributes in FORWARDS.items():
        module = importlib.import_module(f"liger_kernel.transformers.model.{name}")
        assert getattr(forwards, name) is module
        family = next((family for family in (name, f"{name}_text", f"{name}_dense") if family in FAMILIES))
        if not _there(FAMILIES[family]):
            continue
        for attribute in (*attributes, *([more[name]] if name in more else [])):
            parameters = inspect.signature(getattr(module, attribute)).parameters
            assert {"self", "input_ids", "labels", "skip_logits", "kwargs"} <= parameters.keys()
            assert [p for p in parameters if "label" in p] == ["labels"]
        with pytest.raises(AttributeError):
            module.nothing
    assert list(inspect.signature(forwards.mixtral.lce_forward).parameters)[8:14] == [
        *"output_attentions output_hidden_states output_router_logits return_dict cache_position logits_to_keep".split()
    ]
    assert list(inspect.signature(forwards.llava.lce_forward).parameters)[1:4] == [
        "input_ids",
        "pixel_values",
        "attention_mask",
    ]


def test_the_loss_of_a_head_by_itself():
    model = make("llama")
    hidden, labels = torch.randn(2, 10, 64), batch()["labels"]
    expected = model.loss_function(model.lm_head(hidden), labels, 128)
    for module in (forwards.llama, forwards.smollm3):
        loss = module.lce_maybe_trainable_lm_head(model, hidden, hidden_size=64, labels=labels, shift_labels=None)
        torch.testing.assert_close(loss, expected)
        assert (
            module._liger_for_causal_lm_loss(
                model.lm_head, hidden, 64, labels, None, return_token_accuracy=True
            ).token_accuracy
            is not None
        )
    with pytest.raises(TypeError, match="Embedding"):
        forwards.llama._liger_for_causal_lm_loss(model.model.embed_tokens, hidden, 64, labels, None)


def test_outputs_with_two_more_fields():
    stems = (
        "Gemma3 Gemma4 Glm4vMoe InternVL Llava PaliGemma Qwen2VL Qwen2_5_VL Qwen3VL Qwen3VLMoe Qwen3_5 Qwen3_5Moe"
    ).split()
    found = [stem for stem in stems if hasattr(output_classes, f"Liger{stem}CausalLMOutputWithPast")]
    assert {"Gemma3", "Llava", "PaliGemma"} <= set(found)
    for stem in found:
        cls = getattr(output_classes, f"Liger{stem}CausalLMOutputWithPast")
        assert {"token_accuracy", "predicted_tokens", "logits"} <= cls.__dataclass_fields__.keys() and cls.__mro__[
            1
        ].__name__ == cls.__name__[5:]


# What follows is of the check of sources.


def test_code_that_nobody_has_read_keeps_its_forward(patched, monkeypatch, tmp_path):
    namespace = modeling("llama")
    path = tmp_path / "changed.py"
    path.write_text(
        "import torch\n"
        "class LlamaRMSNorm(torch.nn.Module):\n"
        "    def __init__(self, hidden_size, eps=1e-6):\n"
        "        super().__init__()\n"
        "        self.weight, self.variance_epsilon = torch.nn.Parameter(torch.ones(hidden_size)), eps\n"
        "    def forward(self, hidden_states):\n"
        "        return 2 * self.weight * hidden_states\n"
        "LlamaRMSNorm.__module__ = 'transformers.models.llama.modeling_llama'\n"
        "def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):\n"
        "    return 2 * q, k\n"
    )
    spec = importlib.util.spec_from_file_location("changed", path)
    changed = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(changed)
    monkeypatch.setattr(namespace, "LlamaRMSNorm", changed.LlamaRMSNorm)
    monkeypatch.setattr(namespace, "apply_rotary_pos_emb", changed.apply_rotary_pos_emb)
    model = make("llama")
    expected = model(**batch()).loss
    for target in (None, model):
        report = patched("llama", target)
        skipped = {entry.name: entry.reason for entry in report.skipped}
        assert skipped.keys() == {"LlamaRMSNorm", "apply_rotary_pos_emb"} and "source" in skipped["LlamaRMSNorm"]
        assert (
            namespace.LlamaRMSNorm is changed.LlamaRMSNorm
            and namespace.apply_rotary_pos_emb is changed.apply_rotary_pos_emb
        )
    torch.testing.assert_close(model(**batch()).loss, expected)


def test_a_fingerprint_is_of_what_is_computed(tmp_path):
    def one(x, scale: float = 2.0) -> torch.Tensor:
        """Doubles."""
        return _twice(x) * scale  # twice

    def two(x, scale=2.0):
        return _twice(x) * scale

    def three(x, scale=2.0):
        return _twice(x) / scale

    two.__name__ = three.__name__ = "one"
    names = [formulas.fingerprint(function) for function in (one, three)]
    assert names[0] != names[1] and len(names[0]) == 16
    text = [inspect.getsource(function) for function in (one, two)]
    assert text[0] != text[1]
    rename = (tmp_path / "renamed.py", tmp_path / "helped.py")
    rename[0].write_text("def one(x, scale=2.0):\n    return _twice(x) * scale\ndef _twice(x):\n    return x + x\n")
    rename[1].write_text("def one(x, scale=2.0):\n    return _twice(x) * scale\ndef _twice(x):\n    return x + x + 1\n")
    loaded = []
    for path in rename:
        spec = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        loaded.append(formulas.fingerprint(module.one))
    assert loaded[0] == names[0] and loaded[1] != names[0]
    assert formulas.fingerprint(eval("lambda x: x")) is None


def _twice(x):
    return x + x


def test_a_family_that_transformers_lacks():
    with pytest.raises(ImportError, match=f"transformers {transformers.__version__} has no glm17"):
        patch(Family("glm17", {"Glm17RMSNorm": RMS_NORM}))


def test_patching_is_fast(patched):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        **{
            **COMMON,
            "num_hidden_layers": 100,
            "hidden_size": 8,
            "intermediate_size": 8,
            "head_dim": 4,
            "num_attention_heads": 2,
        }
    )
    taken = []
    for _ in range(3):  # the best of three: another process may run
        model = LlamaForCausalLM(config)
        begin = time.perf_counter()
        report = patched("llama", model, strict=True)
        taken.append(time.perf_counter() - begin)
        assert {entry.count for entry in report.replaced} == {201, 100, 1}
    assert min(taken) < 0.2
