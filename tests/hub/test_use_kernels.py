"""use_as_hub_kernels() with a transformers and a `kernels` that fit each other: whole models against untouched ones.
`make test-hub`."""

import copy
import gc
import inspect
import pathlib
import types
import weakref

import kernels
import liger_kernel.hub
import pytest
import tiny
import torch
import transformers
from liger_kernel.hub import layers
from liger_kernel.transformers import _apply_liger_kernel_to_instance, use_as_hub_kernels
from peft import LoraConfig, get_peft_model
from random_models import TEXT
from tagged import close
from tiny import text as batch
from torch import nn
from transformers import PreTrainedModel
from transformers.integrations import hub_kernels as transformers_hub
from transformers.models.llama import modeling_llama

# One with everything, one with norms of heads, one that rounds like Gemma under a tag, one with untagged norms and a
# softcap, and one without a row.
NAMES = ("Llama", "Qwen3", "Olmo2", "Gemma2", "Helium")
# Float sums of some hundred terms in another order; gradients of queries and keys are differences.
TOLERANCE = 2.0**-14


def make(name, **fields):
    if name != "Helium":
        return tiny.make(name.lower(), **fields)
    torch.manual_seed(0)
    return tiny.randomised(transformers.HeliumForCausalLM(transformers.HeliumConfig(**TEXT))).train()


def step(model):
    model.zero_grad()
    output = model(**batch(4))
    output.loss.backward()
    return output, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_step(model, reference):
    (output, gradients), (expected, expected_gradients) = step(model), step(reference)
    assert close(output.loss[None], expected.loss[None], TOLERANCE)
    assert gradients.keys() == expected_gradients.keys()
    for name, gradient in expected_gradients.items():
        # Of a gradient that is a sum over tokens a usual element is one of the whole.
        assert close(gradients[name].flatten(), gradient.flatten(), TOLERANCE), name
    return output


def on_layers(model):
    """Layer -> number of modules and functions whose forward is its."""
    found = {}
    for module in model.modules():
        for owner in (module, *getattr(module, "_kernel_funcs", {}).values()):
            function = getattr(vars(owner).get("forward"), "__func__", None)
            name = getattr(function, "__qualname__", "").partition(".")[0]
            if function is not None and getattr(layers, name, None) or name == "_causal_lm":
                found[name] = found.get(name, 0) + 1
    return found


@pytest.fixture
def installed():
    handle = use_as_hub_kernels()
    yield handle
    handle.undo()


@pytest.fixture(params=NAMES)
def name(request):
    return request.param


def test_a_model_is_the_one_that_it_replaces(name, installed):
    reference = make(name)
    model = copy.deepcopy(reference)
    model.set_use_kernels(True)
    for training in (True, False, True):
        model.train(training), reference.train(training)
        output = assert_same_step(model, reference)
        assert (output.logits is None) == (training and name != "Helium")
        if not training:
            assert close(output.logits, reference(**batch(4)).logits, TOLERANCE)


def test_what_runs_on_layers(installed):
    expected = {
        "Llama": {"LigerRMSNorm": 5, "LigerRotaryEmbedding": 2, "LigerGatedMLP": 2, "_causal_lm": 1},
        "Qwen3": {"LigerRMSNorm": 9, "LigerRotaryEmbedding": 2, "LigerGatedMLP": 2, "_causal_lm": 1},
        "Gemma2": {"LigerZeroCenteredRMSNorm": 9, "LigerRotaryEmbedding": 2, "LigerGatedMLP": 2, "_causal_lm": 1},
    }
    for name, layers_of in expected.items():
        model = make(name)
        model.set_use_kernels(True)
        for _ in range(2):
            assert on_layers(model) == layers_of
            model.eval()
    olmo = make("Olmo2")
    olmo.set_use_kernels(True)
    assert on_layers(olmo)["LigerFloatRMSNorm"] == 9 and on_layers(olmo)["LigerFloatRotaryEmbedding"] == 2


def test_the_classic_patch_replaces_the_same_modules(installed):
    """One model in both ways; what each does with a rotary function has its own name, and only the classic patch
    computes steps of a layer by one operator and makes masks without a search."""

    def modules(report):
        return {r.name: r.count for r in report.replaced if r.switch not in ("rope", "layers", "qk_norm", "masks")}

    for name in set(NAMES) - {"Helium"}:
        model = make(name)
        classic = modules(_apply_liger_kernel_to_instance(copy.deepcopy(model)))
        model.set_use_kernels(True)
        assert modules(installed.reports[-1]) == classic and len(classic) == 3, name


def test_from_pretrained(tmp_path, installed):
    reference = make("Llama")
    reference.save_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, use_kernels=True, attn_implementation="eager")
    assert not model.training and on_layers(model)["LigerGatedMLP"] == 2
    assert_same_step(model.train(), reference)
    assert model.state_dict().keys() == reference.state_dict().keys()


def test_classes_carry_their_own_tags_afterwards(installed):
    before = (
        dict(vars(modeling_llama.LlamaRMSNorm)),
        dict(vars(modeling_llama.LlamaMLP)),
        dict(vars(modeling_llama.LlamaForCausalLM)),
    )
    tag = type(modeling_llama.apply_rotary_pos_emb).kernel_layer_name
    make("Llama").set_use_kernels(True)
    after = (
        dict(vars(modeling_llama.LlamaRMSNorm)),
        dict(vars(modeling_llama.LlamaMLP)),
        dict(vars(modeling_llama.LlamaForCausalLM)),
    )
    assert after == before
    assert type(modeling_llama.apply_rotary_pos_emb).kernel_layer_name == tag == "rotary_pos_emb"


def test_undo_gives_everything_back():
    original = PreTrainedModel.set_use_kernels
    reference = make("Llama")
    model = copy.deepcopy(reference)
    expected, expected_gradients = step(reference)
    handle = use_as_hub_kernels()
    model.set_use_kernels(True)
    assert use_as_hub_kernels() is handle
    handle.undo()
    assert PreTrainedModel.set_use_kernels is original
    assert on_layers(model) == {} and type(model.lm_head) is nn.Linear
    for _ in range(2):
        output, gradients = step(model)
        assert torch.equal(output.logits, expected.logits) and all(
            torch.equal(gradients[n], g) for n, g in expected_gradients.items()
        )
        model.eval(), model.train()  # transformers binds forwards again: its own
    assert use_as_hub_kernels() is not handle
    use_as_hub_kernels().undo()


def test_switches():
    model = make("Llama")
    handle = use_as_hub_kernels(rms_norm=False, fused_linear_cross_entropy=False)
    try:
        model.set_use_kernels(True)
        assert on_layers(model) == {"LigerRotaryEmbedding": 2, "LigerGatedMLP": 2}
        handle = use_as_hub_kernels(mlp=False, rope=False)
        other = make("Qwen3")
        other.set_use_kernels(True)
        assert on_layers(other) == {"LigerRMSNorm": 9, "_causal_lm": 1}
    finally:
        handle.undo()


def test_the_handle_lists_what_was_done(installed):
    assert "no model" in str(installed)
    model = make("Llama")
    model.set_use_kernels(True)
    text = str(installed)
    for part in (
        "LlamaForCausalLM",
        "LlamaRMSNorm",
        "LigerRMSNorm",
        "5 modules",
        "LlamaMLP",
        "LigerGatedMLP",
        "LigerRotaryEmbedding",
        "LigerCausalLM",
    ):
        assert part in text
    del model
    gc.collect()
    assert "LlamaForCausalLM" not in str(installed)  # the list holds no model in memory


def test_two_models_of_a_family(installed):
    reference = make("Llama")
    model, other, untouched = (copy.deepcopy(reference) for _ in range(3))
    model.set_use_kernels(True)
    other.set_use_kernels(True)
    other.eval()  # the rotary embedding is one for the family: it must be differentiable in every mode
    assert "_causal_lm" not in on_layers(untouched) and "LigerRMSNorm" not in on_layers(untouched)
    assert_same_step(model, reference)
    assert_same_step(untouched, reference)
    assert_same_step(other.train(), reference)


@pytest.mark.parametrize("name", ["Llama", "Qwen3", "Gemma2", "Olmo2"])
def test_compiled_as_one_graph(name, installed):
    reference = make(name)
    model = copy.deepcopy(reference)
    model.set_use_kernels(True)
    torch.compiler.reset()
    assert_same_step(
        torch.compile(model, fullgraph=True, backend="aot_eager"),
        torch.compile(reference, fullgraph=True, backend="aot_eager"),
    )


def test_lora(installed):
    reference = make("Llama")
    model = copy.deepcopy(reference)
    model.set_use_kernels(True)
    adapted = []
    for base in (model, reference):
        torch.manual_seed(1)
        lora = LoraConfig(
            r=4, target_modules=["q_proj", "gate_proj", "down_proj"], init_lora_weights=False, task_type="CAUSAL_LM"
        )
        adapted.append(get_peft_model(base, lora).train())
    assert_same_step(*adapted)
    adapted[0].eval(), adapted[1].eval()
    assert_same_step(*adapted)
    assert "gate_proj.lora_A.default.weight" in str(dict(adapted[0].named_parameters()).keys())


def test_bfloat16_rounds_where_the_model_does(installed):
    norm = make("Olmo2").model.norm.bfloat16()
    holder = make("Olmo2").bfloat16()
    holder.set_use_kernels(True)
    x = torch.randn(64, 64).bfloat16()
    own, ours = norm(x), holder.model.norm(x)
    holder.model.norm.load_state_dict(norm.state_dict())
    ours = holder.model.norm(x)
    assert (own != ours).float().mean() <= 0.02
    assert vars(holder.model.norm)["forward"].__func__ is layers.LigerFloatRMSNorm.forward


def test_an_unknown_activation_keeps_its_mlp(installed):
    reference = make("Llama", hidden_act="relu")
    model = copy.deepcopy(reference)
    model.set_use_kernels(True)
    assert "LigerGatedMLP" not in on_layers(model)
    assert "no layer for its activation" in str(installed)
    assert_same_step(model, reference)


def test_a_forward_that_somebody_has_replaced_stays(installed):
    model = make("Llama")
    replaced = types.MethodType(lambda self, *args, **kwargs: "mine", model)
    model.forward = replaced
    model.model.layers[0].mlp.forward = lambda x: x
    model.set_use_kernels(True)
    assert model.forward is replaced and on_layers(model)["LigerGatedMLP"] == 1
    assert "somebody has replaced its forward" in str(installed)


class Doubling(modeling_llama.LlamaRMSNorm):
    """Inherits the tag, and computes something else."""

    def forward(self, hidden_states):
        return 2 * super().forward(hidden_states)


class DoublingMLP(modeling_llama.LlamaMLP):
    def forward(self, x):
        return 2 * super().forward(x)


def test_a_subclass_with_its_own_forward_keeps_it(installed):
    reference = make("Llama")
    reference.model.norm.__class__ = Doubling
    reference.model.layers[0].mlp.__class__ = DoublingMLP
    model = copy.deepcopy(reference)
    model.set_use_kernels(True)
    found = on_layers(model)
    assert found["LigerRMSNorm"] == 4 and found["LigerGatedMLP"] == 1
    assert_same_step(model, reference)
    assert "none of those that a layer was compared with" in str(installed)
    assert "kernel_layer_name" not in vars(DoublingMLP) and not hasattr(DoublingMLP, "kernel_layer_name")


def test_hooks_of_accelerate_stay_around_layers(installed):
    from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module

    seen = []

    class Seeing(ModelHook):
        def pre_forward(self, module, *args, **kwargs):
            seen.append(type(module).__name__)
            return args, kwargs

    reference = make("Llama")
    model = copy.deepcopy(reference)
    hooked = (model.model.norm, model.model.layers[0].mlp, model)
    for module in hooked:
        add_hook_to_module(module, Seeing())
    model.set_use_kernels(True)
    model.eval(), model.train()
    output = assert_same_step(model, reference)
    assert output.logits is None and sorted(seen) == ["LlamaForCausalLM", "LlamaMLP", "LlamaRMSNorm"]
    assert vars(model.model.norm)["_old_forward"].__func__ is layers.LigerRMSNorm.forward
    installed.undo()
    for module in hooked:
        assert vars(module)["_old_forward"].__func__ is type(module).forward
        remove_hook_from_module(module)


def test_a_mapping_that_does_not_inherit_is_left_alone(installed):
    config = transformers.KernelConfig({}, inherit_mapping=False)
    model = make("Llama")
    model.set_use_kernels(True, config)
    assert on_layers(model) == {} and str(installed).startswith("liger_kernel: no model")


def test_a_layer_of_the_callers_own_goes_first(installed):
    class Config(transformers.KernelConfig):
        def sanitize_kernel_mapping(self, model):
            pass

        def create_compatible_mapping(self, model):
            pass

    class Own(nn.Module):
        def forward(self, hidden_states):
            return hidden_states

    class Repository:
        def load(self):
            return Own

    config = Config({"RMSNorm": {"cpu": Repository()}})
    model = make("Llama")
    model.set_use_kernels(True, config)
    assert "LigerRMSNorm" not in on_layers(model) and on_layers(model)["LigerGatedMLP"] == 2
    assert vars(model.model.norm)["forward"].__func__ is Own.forward


def test_signatures_are_the_models(installed):
    reference = make("Llama")
    model = copy.deepcopy(reference)
    model.set_use_kernels(True)
    assert inspect.signature(model.forward) == inspect.signature(reference.forward)
    expected = reference.generate(batch(4)["input_ids"], max_new_tokens=4, do_sample=False)
    assert torch.equal(model.generate(batch(4)["input_ids"], max_new_tokens=4, do_sample=False), expected)


def test_the_folder_is_a_local_kernel():
    kernel = kernels.get_local_kernel(pathlib.Path(liger_kernel.hub.__path__[0]))
    assert kernel.layers.LigerRMSNorm.can_torch_compile and kernel.__name__ == "liger_kernel_hub"


def test_a_switched_off_hub_is_said(monkeypatch):
    monkeypatch.setattr(transformers_hub, "_kernels_enabled", False)
    with pytest.raises(ImportError, match="USE_HUB_KERNELS"):
        use_as_hub_kernels()


def test_a_model_that_uses_kernels_is_collected(installed):
    """With its report, which lives as long as the model."""

    def use():
        model = make("Llama")
        model.set_use_kernels(True)
        assert any(report.family == type(model).__name__ for report in installed.reports)
        step(model)
        return [weakref.ref(module) for module in model.modules()]

    references = use()
    gc.collect()
    assert not any(reference() for reference in references) and not installed.reports
