"""Where there are no kernels, or something hooks into a module, a patched model computes what the original does."""

import copy

import accelerate
import pytest
import torch
from accelerate.hooks import ModelHook, SequentialHook, add_hook_to_module
from conftest import assert_same_step, batch, class_of, config_of, make, modeling, run
from liger_kernel.transformers import LigerMLP, LigerTiledSwiGLUMLP, functional
from liger_kernel.transformers.patching.families import CausalLM, Family
from liger_kernel.transformers.rms_norm import LigerRMSNorm
from liger_kernel.utils import warn_once
from tiny import swaps_in
from torch.nn.modules.module import register_module_forward_hook

FUSED, UNFUSED = "fused_linear_cross_entropy", "cross_entropy"


def assert_equal_step(model, reference, **inputs):
    expected, expected_gradients = run(reference, **inputs)
    output, gradients = run(model, **inputs)
    assert torch.equal(output.loss, expected.loss) and torch.equal(output.logits, expected.logits)
    assert gradients.keys() == expected_gradients.keys()
    assert all(torch.equal(gradients[name], gradient) for name, gradient in expected_gradients.items())


@pytest.mark.parametrize("loss", [FUSED, UNFUSED])
@pytest.mark.full(when=lambda p: p["loss"] == UNFUSED and p["family"] not in ("llama", "gemma2"))
def test_a_float64_model_of_patched_classes(family, patched, loss):
    reference = make(family).double()
    expected, expected_gradients = run(reference, **batch())
    patched(family, **{FUSED: False, loss: True})
    model = class_of(family)(config_of(family)).train().double()
    model.load_state_dict(reference.state_dict())
    output, gradients = run(model, **batch())
    assert torch.equal(output.logits, expected.logits)
    # transformers makes its own loss in float.
    torch.testing.assert_close(output.loss, expected.loss, check_dtype=False)
    for name, gradient in expected_gradients.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-5, atol=1e-7)
    if loss == UNFUSED:  # what is compiled has no loss
        torch._dynamo.reset()
        compiled = torch.compile(model.model, backend="eager", fullgraph=True)(batch()["input_ids"])
        assert torch.equal(compiled.last_hidden_state, model.model(batch()["input_ids"]).last_hidden_state)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_model_beside_a_patched_one(family, patched, dtype):
    """The rotary embedding is a function of the module, which all its models share, and only one of them is patched."""
    reference = make(family).to(dtype)
    expected, expected_gradients = run(reference, **batch())
    function = modeling(family).apply_rotary_pos_emb
    patched(family, make(family), strict=True)
    assert modeling(family).apply_rotary_pos_emb is function
    output, gradients = run(reference, **batch())
    assert torch.equal(output.loss, expected.loss)
    assert all(torch.equal(gradients[name], gradient) for name, gradient in expected_gradients.items())


def test_a_patched_model_that_becomes_float64_and_float_again(family, patched):
    reference = make(family)
    model = copy.deepcopy(reference)
    patched(family, model, rope=False, strict=True)
    assert_equal_step(model.double(), reference.double(), **batch())
    assert assert_same_step(model.float(), reference.float(), **batch()).logits is None


def test_a_norm_with_a_float64_weight_runs_the_original(family, patched):
    reference = make(family)
    model = copy.deepcopy(reference)
    patched(family, model)
    x = torch.randn(2, 64).bfloat16()
    norms = [each.model.norm.double() for each in (model, reference)]
    ours, theirs = (norm(x) for norm in norms)
    assert ours.dtype is theirs.dtype and torch.equal(ours, theirs)


def test_an_activation_without_a_kernel_keeps_the_class(family, patched, caplog):
    warn_once.cache_clear()
    fields = dict.fromkeys(("hidden_act", "hidden_activation"), "relu")
    reference = make(family, **fields)
    patched(family, rope=False)
    model = class_of(family)(config_of(family, **fields)).train()
    model.load_state_dict(reference.state_dict())
    mlp = next(name for name, _ in swaps_in(family) if name.endswith("MLP"))
    assert type(model.model.layers[0].mlp) is type(reference.model.layers[0].mlp)
    assert isinstance(model.model.norm, LigerRMSNorm)
    assert f"{mlp} is not replaced: its activation is ReLU" in caplog.text
    reference.forward = type(model).forward.liger_original.__get__(reference)
    assert_same_step(model, reference, **batch())


class Doubling(ModelHook):
    def post_forward(self, module, output):
        return _doubled(module, None, output)


def _doubled(module, args, output):
    # A hook that knows what a Linear returns, and nothing of losses.
    return 2 * output if isinstance(output, torch.Tensor) and type(module).__name__.startswith("Linear") else output


def _forward(head):
    forward = head.forward
    head.forward = lambda x: 2 * forward(x)


def _over_accelerate(head):
    add_hook_to_module(head, ModelHook())
    _forward(head)


def _under_accelerate(head):
    _forward(head)
    add_hook_to_module(head, ModelHook())


@pytest.mark.parametrize("cls", [LigerMLP, LigerTiledSwiGLUMLP])
def test_offloaded_projections(cls):
    mlp, x = cls(config_of("llama", mlp_bias=False)), torch.randn(2, 70, 64)
    with torch.no_grad():
        expected = mlp(x)
        accelerate.cpu_offload(mlp, execution_device="cpu")
        assert mlp.up_proj.weight.is_meta
        torch.testing.assert_close(mlp(x), expected)


INTERCEPTED = {
    "forward": _forward,
    "over_accelerate": _over_accelerate,
    "under_accelerate": _under_accelerate,
    "accelerate": lambda head: add_hook_to_module(head, SequentialHook(ModelHook(), Doubling())),
    "forward_hook": lambda head: head.register_forward_hook(_doubled),
    "backward_hook": lambda head: head.register_full_backward_hook(lambda m, dx, dy: (2 * dx[0],)),
    "backward_pre_hook": lambda head: head.register_full_backward_pre_hook(lambda m, dy: (2 * dy[0],)),
}


@pytest.mark.parametrize("first", ["patch", "hook"])
@pytest.mark.parametrize("kind", [*INTERCEPTED, "global_hook"])
def test_what_changes_the_heads_result_is_honoured(patched, kind, first):
    reference = make("llama", tie_word_embeddings=False)
    plain = reference(**batch()).loss
    model = copy.deepcopy(reference)
    if first == "patch":
        patched("llama", model, rope=False)
    handle = register_module_forward_hook(_doubled) if kind == "global_hook" else None
    try:
        if handle is None:
            for each in (model, reference):
                INTERCEPTED[kind](each.lm_head)
        if first == "hook":
            report = patched("llama", model, rope=False)
            assert [entry.switch for entry in report.skipped] == [FUSED] and "may change" in str(report)
        output = assert_same_step(model, reference, **batch())
        assert output.logits is not None
        assert "backward" in kind or not torch.allclose(output.loss, plain)
    finally:
        if handle is not None:
            handle.remove()


@pytest.mark.parametrize("by", ["text", "own_row"])
def test_the_loss_of_a_model_that_holds_a_language_model(patched, monkeypatch, by):
    """It hands its logits to transformers' loss itself; the language model in it makes none."""
    from transformers import CLIPVisionConfig, LlavaConfig, LlavaForConditionalGeneration

    vision = CLIPVisionConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4
    )
    model = LlavaForConditionalGeneration(
        LlavaConfig(text_config=config_of("llama"), vision_config=vision, image_token_index=127)
    )
    inputs = {name: value.clamp(max=126) for name, value in batch().items()}
    reference, shapes = copy.deepcopy(model), []
    cross_entropy = functional.liger_cross_entropy
    monkeypatch.setattr(
        functional, "liger_cross_entropy", lambda x, *a, **k: shapes.append(x.shape) or cross_entropy(x, *a, **k)
    )
    row = "llama" if by == "text" else Family("llava", {}, {"LlavaForConditionalGeneration": CausalLM()})
    report = patched(
        row, model, strict=True, **{FUSED: False, UNFUSED: True}, **({"rope": False} if by == "text" else {})
    )
    assert [str(entry.where) for entry in report.replaced if entry.by == "causal_lm_loss"] == [
        "LlavaForConditionalGeneration (1 module)"
    ]
    assert_same_step(model, reference, **inputs)
    assert shapes == [(20, 128)]


def test_a_module_tracker_leaves_the_loss_fused(patched):
    from torch.utils.module_tracker import ModuleTracker

    model = make("llama")
    patched("llama", model)
    with ModuleTracker():
        assert model(**batch()).logits is None


def test_classes_and_functions_go_through_pickle_while_their_names_are_rebound(family, patched):
    import pickle

    instance = make(family)
    patched(family, instance)
    patched(family)
    created = class_of(family)(config_of(family)).train()
    for model in (instance, created):
        other = pickle.loads(pickle.dumps(model))
        assert [type(m) for m in other.modules()] == [type(m) for m in model.modules()]
        assert torch.equal(other(**batch()).loss, model(**batch()).loss)
