"""The engine: what is replaced and reported, undo, errors, signatures, and the seams that integrators use."""

import importlib
import inspect
import sys
from types import SimpleNamespace

import liger_kernel.transformers
import pytest
import torch
from conftest import COMMON, assert_close, batch, class_of, config_of, make, modeling, restored
from liger_kernel.transformers import monkey_patch
from liger_kernel.transformers.model import loss_utils
from liger_kernel.transformers.patching.apply import Report, patch
from liger_kernel.transformers.patching.families import FAMILIES, MODEL_TYPES, RMS_NORM, ROPE, SWIGLU, CausalLM, Family
from liger_kernel.transformers.rms_norm import LigerRMSNorm
from test_layers import nodes
from tiny import swaps_in
from torch import nn
from transformers import LlamaForCausalLM, PreTrainedModel

FUSED = "fused_linear_cross_entropy"


def _function(family):
    return getattr(monkey_patch, f"apply_liger_kernel_to_{family}")


def _state(family, model=None):
    """Everything that a patch may touch, by identity."""
    modules = [] if model is None else list(model.modules())
    cls = class_of(family)
    return [*vars(modeling(family)).items(), *vars(cls).items(), *[(type(m), [*vars(m)]) for m in modules]]


def _gate(family):
    return next(name for name in ("swiglu", "geglu") if name in FAMILIES[family].switches)


def test_class_level_replaces_names_and_undo_restores_them(family, patched):
    before = _state(family)
    everything = dict(vars(nn.functional)), dict(vars(nn)), dict(vars(torch))
    report = patched(family, strict=True)
    for name, swap in swaps_in(family):
        part, now, original = swap.load(), getattr(modeling(family), name), dict(before)[name]
        if isinstance(part, type):
            assert issubclass(now, part) and issubclass(now, original)
            assert inspect.signature(now) == inspect.signature(original)
        else:
            assert now.__wrapped__ is part and now.liger_original is original
    assert (dict(vars(nn.functional)), dict(vars(nn)), dict(vars(torch))) == everything
    report.undo()
    assert _state(family) == before
    report.undo()
    assert _state(family) == before


def test_instance_level_changes_this_model_only(family, patched):
    model, other = make(family), make(family)
    before, others, loss = _state(family, model), _state(family, other), model(**batch()).loss
    report = patched(family, model, strict=True, rope=False)
    assert _state(family, other) == others
    assert isinstance(model, class_of(family)) and isinstance(model.lm_head, nn.Linear)
    assert model(**batch()).logits is None
    report.undo()
    assert _state(family, model) == before
    assert torch.equal(model(**batch()).loss, loss) and model(**batch()).logits is not None


REWRITTEN = ("gated_mlp", "fused_add_rms_norm", "qkv")


def test_report(family, patched):
    model = make(family)
    report = patched(family, model)
    assert not report.skipped
    norms = sum("RMSNorm" in type(module).__name__ for module in make(family).modules())
    layers = {entry.by: entry.count for entry in report.replaced if entry.by in REWRITTEN}
    assert layers == dict.fromkeys(REWRITTEN, 2)
    counts = {entry.switch: entry.count for entry in report.replaced if entry.by not in REWRITTEN}
    rotating = {"qk_norm": 2} if family == "qwen3" else {}
    assert counts == {"rope": 2, "rms_norm": norms, _gate(family): 2, **rotating, "masks": 1, FUSED: 1}
    text = str(report)
    assert text.splitlines()[1].split() == ["module", "operator", "replaced", "by"]
    assert family in text and f"({norms} modules)" in text and class_of(family).__name__ in text
    assert "LigerRMSNorm" in repr(model)


def test_applying_twice_changes_nothing_more(family, patched):
    for model in (None, make(family)):
        first = patched(family, model)
        once = _state(family, model)
        second = patched(family, model)
        assert second.replaced == first.replaced and not second.skipped
        second.undo()
        assert _state(family, model) == once
        first.undo()
    # A model that was created from patched classes has nothing left to patch.
    patched(family)
    model = class_of(family)(config_of(family)).train()
    kinds = [type(module) for module in model.modules()]
    report = patched(family, model, strict=True)
    rotating = ["qk_norm"] if family == "qwen3" else []
    # parts, attention that rotates, layers and attention, masks, the loss
    switches = ["rms_norm", _gate(family), "rope", *rotating, *(3 * ["layers"]), "masks", FUSED]
    assert [entry.switch for entry in report.replaced if entry.count] == switches
    assert [type(module) for module in model.modules()] == kinds
    assert model(**batch()).logits is None


def test_switches_that_are_off(family, patched):
    before = _state(family)
    off = dict.fromkeys(FAMILIES[family].switches, None)
    assert not patched(family, **off).replaced
    assert _state(family) == before
    model = make(family)
    patched(family, model, **{**off, "rms_norm": True})
    assert model(**batch()).logits is not None and isinstance(model.model.norm, LigerRMSNorm)


def test_annotations(family):
    function = _function(family)
    parameters = inspect.signature(function).parameters
    assert all(p.annotation is bool for name, p in parameters.items() if name != "model")
    assert parameters["model"].annotation is PreTrainedModel
    assert inspect.isfunction(function) and function.__doc__ and function.__name__ in repr(function)


def test_functions_and_mapping_agree():
    functions = {v for k, v in vars(monkey_patch).items() if k.startswith("apply_liger_kernel_to_")}
    assert functions == set(monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN.values())
    assert monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN.keys() == MODEL_TYPES.keys()


def test_model_comes_first_or_by_keyword(family, patched):
    for call in (lambda f, m: f(m), lambda f, m: f(m, False), lambda f, m: f(rope=False, model=m)):
        model = make(family)
        report = call(_function(family), model)
        assert isinstance(report, Report) and isinstance(model.model.norm, LigerRMSNorm)
        report.undo()


def test_errors(family):
    function, model = _function(family), make(family)
    before = _state(family, model)
    with pytest.raises(TypeError, match=f"unexpected keyword 'rmsnorm'.*rope.*{_gate(family)}.*model"):
        function(model, rmsnorm=True)
    with pytest.raises(TypeError, match="rope twice"):
        function(True, rope=True)
    with pytest.raises(AssertionError, match="cannot both be True: choose fused_linear_cross_entropy"):
        function(model, cross_entropy=True, fused_linear_cross_entropy=True)
    other = next(name for name in FAMILIES if name != family)
    with pytest.raises(TypeError, match=f"{class_of(other).__name__}.*use apply_liger_kernel_to_{other}"):
        function(model=make(other))
    with pytest.raises(TypeError, match="Linear.*not supported"):
        function(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="str"):
        function(model="a path")
    with pytest.raises(TypeError, match="at most 6"):
        function(*[True] * 7)
    assert _state(family, model) == before


def test_a_loss_that_is_on_by_default_gives_way(family):
    for losses, found in (
        ({}, "fused_linear_cross_entropy"),
        ({"cross_entropy": True}, "cross_entropy"),
        ({"cross_entropy": True, "fused_linear_cross_entropy": False}, "cross_entropy"),
    ):
        report = _function(family)(make(family), **losses)
        assert {entry.switch for entry in report.replaced if "cross_entropy" in entry.switch} == {found}


def test_a_row_of_the_callers_own(patched):
    from transformers import SmolLM3Config, SmolLM3ForCausalLM

    swaps = {"SmolLM3RMSNorm": RMS_NORM, "SmolLM3MLP": SWIGLU, **ROPE}
    model = SmolLM3ForCausalLM(SmolLM3Config(**{**COMMON, "head_dim": 16})).train()
    expected = model(**batch()).loss
    patched(Family("smollm3", swaps, {"SmolLM3ForCausalLM": CausalLM()}), model, strict=True)
    output = model(**batch())
    assert output.logits is None
    assert_close(output.loss, expected)


def test_unknown_family():
    with pytest.raises(ValueError, match="gpt17.*llama"):
        patch("gpt17")


class _Relu(nn.Module):
    def forward(self, x):
        return torch.relu(x)


def test_skips_and_strict(family, patched):
    model = make(family)
    model.model.layers[0].mlp.act_fn = _Relu()
    before, expected = _state(family, model), model(**batch()).loss
    with pytest.raises(RuntimeError, match="_Relu"):
        patch(family, model, strict=True)
    assert _state(family, model) == before
    report = patched(family, model)
    assert [entry.switch for entry in report.skipped] == [_gate(family)] and "_Relu" in str(report)
    assert {entry.switch: entry.count for entry in report.replaced}[_gate(family)] == 1
    assert_close(model(**batch()).loss, expected)


def test_parts_with_a_forward_of_their_own_keep_it(family, patched):
    model = make(family)
    own = type("OwnNorm", (type(model.model.norm),), {"forward": lambda self, x: 0 * x})
    model.model.norm.__class__ = own
    owner = type("Own", (type(model),), {"forward": lambda self, **kwargs: "own"})
    model.__class__ = owner
    report = patched(family, model)
    assert {entry.switch for entry in report.skipped} == {"rms_norm", FUSED}
    assert type(model.model.norm) is own and model() == "own"


def test_a_dtype_without_kernels_is_left_alone(family, patched):
    model = make(family).double()
    before, expected = _state(family, model), model(**batch()).loss
    report = patched(family, model)
    assert not report.replaced
    assert {entry.switch for entry in report.skipped} == {
        "rope",
        "rms_norm",
        _gate(family),
        FUSED,
        "layers",
        "qk_norm",
        "masks",
        "attention",
        "mixers",
        "lora",
    }
    assert "float64" in str(report)
    assert _state(family, model) == before and torch.equal(model(**batch()).loss, expected)
    # The same, for a model that changes its type after the patch at class level.
    patched(family, rms_norm=False, rope=False, **{_gate(family): False})
    assert torch.equal(model(**batch()).loss, expected)


def test_a_model_without_a_head(family, patched):
    base = make(family).model
    report = patched(family, base)
    assert [entry.switch for entry in report.skipped] == [FUSED]
    assert base(batch()["input_ids"]).last_hidden_state.shape[-1] == 64


@pytest.mark.parametrize("fused", [True, False])
def test_a_loss_function_of_the_model_wins(family, patched, fused):
    model = make(family)
    model.loss_function = lambda logits, labels, vocab_size, **kwargs: logits.mean()
    expected = model(**batch()).loss
    report = patched(family, model, fused_linear_cross_entropy=fused, cross_entropy=not fused)
    assert len(report.skipped) == 1
    assert_close(model(**batch()).loss, expected)
    patched(family)
    assert_close(model(**batch()).loss, expected)


def test_forwards_have_our_source_and_the_signature_of_the_model(family, patched):
    model, plain = make(family), make(family)
    forward = importlib.import_module(f"liger_kernel.transformers.model.{family}").lce_forward
    assert inspect.getsource(model.forward) != inspect.getsource(forward)
    patched(family, model)
    assert inspect.getsource(model.forward) == inspect.getsource(forward)
    assert inspect.getsource(model.model.norm.forward) == inspect.getsource(LigerRMSNorm.forward)
    swap = next(swap for _, swap in swaps_in(family) if swap.switch == _gate(family))
    assert inspect.getsource(model.model.layers[0].mlp.forward) == inspect.getsource(swap.load().forward)
    original = inspect.signature(plain.forward).parameters
    parameters = inspect.signature(model.forward).parameters
    assert list(parameters) == [*list(original)[:-1], "skip_logits", "kwargs"]
    assert {"labels", "logits_to_keep"} <= parameters.keys()
    assert not hasattr(type(model).forward, "__wrapped__")


def test_importable_forward_works_when_it_is_assigned(family, monkeypatch):
    model = make(family)
    expected = model(**batch(), output_hidden_states=True)
    module = importlib.import_module(f"liger_kernel.transformers.model.{family}")
    monkeypatch.setattr(class_of(family), "forward", module.lce_forward)
    output = model(**batch())
    assert output.logits is None
    assert_close(output.loss, expected.loss)
    ids, labels = batch().values()
    output = model(
        ids, None, None, None, None, labels, None, None, True, skip_logits=True, cache_position=None, return_dict=True
    )
    assert output.logits is None and len(output.hidden_states) == len(expected.hidden_states)
    assert isinstance(model(ids, labels=labels, return_dict=False), tuple)


def test_importable_forward_has_the_parameters_of_the_api(family):
    first = (
        "self input_ids attention_mask position_ids past_key_values inputs_embeds labels use_cache output_attentions "
        "output_hidden_states"
    )
    last = (
        "cache_position logits_to_keep skip_logits return_dict"
        if family == "qwen3"
        else "return_dict cache_position logits_to_keep skip_logits"
    )
    forward = importlib.import_module(f"liger_kernel.transformers.model.{family}").lce_forward
    parameters = inspect.signature(forward).parameters
    own = inspect.signature(LlamaForCausalLM.forward).parameters
    renamed = [name for name in ("cache",) if name in own]  # past_key_values, since 5.24
    assert list(parameters) == [*first.split(), *last.split(), *renamed, "kwargs"]
    empty = inspect.Parameter.empty
    defaults = {name: p.default for name, p in parameters.items() if name not in ("self", "kwargs")}
    assert {name for name, default in defaults.items() if default is not None} == {"logits_to_keep"} and defaults[
        "logits_to_keep"
    ] == 0
    assert parameters["self"].default is empty


def test_seams_are_looked_up_at_every_call(family, patched, monkeypatch):
    model = make(family)
    patched(family, model)
    loss = model(**batch()).loss
    functional = liger_kernel.transformers.functional
    flce, seen = functional.liger_fused_linear_cross_entropy, []

    def spy(*args, **kwargs):
        seen.append(kwargs)
        return 2 * flce(*args, **kwargs)

    monkeypatch.setattr(functional, "liger_fused_linear_cross_entropy", spy)
    assert_close(model(**batch(), label_smoothing=0.0).loss, 2 * loss)
    assert "label_smoothing" in seen[0]
    for_causal_lm = loss_utils.LigerForCausalLMLoss
    monkeypatch.setattr(loss_utils, "LigerForCausalLMLoss", lambda *args, **kwargs: 3 * for_causal_lm(*args, **kwargs))
    assert_close(model(**batch()).loss, 6 * loss)


@pytest.mark.parametrize("level", ["class", "instance"])
def test_cross_entropy_goes_through_the_models_own_loss_function(family, patched, monkeypatch, level):
    functional, shapes = liger_kernel.transformers.functional, []
    model, other = make(family), make("qwen2" if family == "llama" else "llama")
    cross_entropy = functional.liger_cross_entropy

    def spy(logits, *args, **kwargs):
        shapes.append(logits.shape)
        return cross_entropy(logits, *args, **kwargs)

    monkeypatch.setattr(functional, "liger_cross_entropy", spy)
    patched(family, None if level == "class" else model, cross_entropy=True, fused_linear_cross_entropy=False)
    output = model(**batch())
    assert shapes == [(20, 128)] and output.logits is not None
    other(**batch())
    make(family)(**batch())
    assert len(shapes) == (2 if level == "class" else 1)


def test_a_stand_in_for_the_modeling_module_takes_the_assignments(family, monkeypatch):
    package = importlib.import_module(FAMILIES[family].module.rpartition(".")[0])
    real = modeling(family)
    before = _state(family)
    copied = {name: type(name, (getattr(real, name),), {}) for name in FAMILIES[family].loss}
    stand_in = SimpleNamespace(**vars(real) | copied)
    monkeypatch.setattr(package, f"modeling_{family}", stand_in)
    _function(family)()
    assert stand_in.apply_rotary_pos_emb.liger_original is real.apply_rotary_pos_emb
    assert _state(family) == before


def test_a_patch_that_is_left_does_not_reach_the_next_test(family):
    before = _state(family)
    with restored():
        _function(family)()
        class_of(family).another = modeling(family).another = 1
        assert _state(family) != before
    assert _state(family) == before


def test_reload_undoes_and_can_be_patched_again():
    name = FAMILIES["llama"].module
    kept = importlib.import_module(name)
    del sys.modules[name]
    package = importlib.import_module(name.rpartition(".")[0])
    try:
        module = importlib.import_module(name)
        package.modeling_llama = module
        old = make("llama")
        _function("llama")()
        assert issubclass(module.LlamaRMSNorm, LigerRMSNorm)
        importlib.reload(module)
        assert not issubclass(module.LlamaRMSNorm, LigerRMSNorm)
        _function("llama")(old)
        assert isinstance(old.model.norm, LigerRMSNorm) and old(**batch()).logits is None
        _function("llama")()
        assert issubclass(module.LlamaRMSNorm, LigerRMSNorm) and make("llama")(**batch()).logits is None
    finally:
        sys.modules[name] = package.modeling_llama = kept


def test_by_model_type(family, patched, caplog):
    model = make(family)
    caplog.set_level("INFO")
    report = monkey_patch._apply_liger_kernel_to_instance(model=model, rope=False, layer_norm=True)
    assert isinstance(model.model.norm, LigerRMSNorm) and "layer_norm" in caplog.text
    report.undo()
    report = monkey_patch._apply_liger_kernel(family, rms_norm=False)
    assert "rms_norm" not in {entry.switch for entry in report.replaced}
    report.undo()


def test_mapping_entries_may_be_replaced(monkeypatch):
    calls = []

    def stand_in(**kwargs):
        calls.append(kwargs)

    stand_in.__signature__ = inspect.signature(_function("llama"))
    monkeypatch.setitem(monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN, "llama", stand_in)
    monkey_patch._apply_liger_kernel("llama", rope=False, layer_norm=False)
    assert calls == [{"rope": False}]


def test_auto_model(family, tmp_path, monkeypatch):
    reports = []
    apply = _function(family)

    def record(**kwargs):
        reports.append(apply(**kwargs))

    record.__signature__ = inspect.signature(apply)
    monkeypatch.setitem(monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN, family, record)
    auto = liger_kernel.transformers.AutoLigerKernelForCausalLM
    plain = make(family)
    plain.save_pretrained(tmp_path)
    expected = plain(**batch()).loss
    try:
        for arguments in ({"rope": False}, {"rms_norm": False, "rope": False}):
            model = auto.from_pretrained(tmp_path, attn_implementation="eager", **arguments).train()
            assert isinstance(model.model.norm, LigerRMSNorm) == arguments.get("rms_norm", True)
            assert_close(model(**batch()).loss, expected)
            assert model(**batch()).logits is None
            reports.pop().undo()
        model = auto.from_config(config_of(family))
        assert isinstance(model.model.norm, LigerRMSNorm)
    finally:
        for report in reports:
            report.undo()


def test_patching_one_module(patched):
    norm = make("llama").model.norm
    x = torch.randn(3, 64)
    expected = norm(x)
    monkey_patch._patch_rms_norm_module(norm)
    assert isinstance(norm, LigerRMSNorm) and "LigerRMSNorm" in repr(norm)
    assert_close(norm(x), expected)
    for family, name in (("llama", "variance_epsilon"), ("gemma", "eps")):
        norm = make(family, rms_norm_eps=0.0).model.norm
        patched(family, make(family, rms_norm_eps=0.0))
        monkey_patch._patch_rms_norm_module(norm, eps=0.5)
        assert getattr(norm, name) == norm.variance_epsilon == 0
    mlp = make("gemma").model.layers[0].mlp
    expected = mlp(x)
    monkey_patch._patch_geglu_module(mlp)
    assert_close(mlp(x), expected)
    linear = nn.Linear(2, 2)
    monkey_patch._bind_method_to_module(linear, "forward", lambda self, x: self.in_features)
    assert linear(x) == 2 and "forward" in linear.__dict__


@pytest.mark.parametrize("level", ["class", "instance"])
def test_a_head_that_the_forward_does_not_run(level, patched):
    """As Qwen2-Audio of transformers 4.57: the loss is made from the logits of another model."""
    row = Family("llama", {"LlamaRMSNorm": RMS_NORM}, {"LlamaForCausalLM": CausalLM("output")})
    reference = make("llama")
    model = make("llama") if level == "instance" else None
    report = patched(row, model)
    model = model or make("llama")
    model.load_state_dict(reference.state_dict())
    assert [(entry.switch, entry.reason) for entry in report.skipped] == [(FUSED, "its forward has no output")]
    assert_close(model(**batch()).loss, reference(**batch()).loss)


def test_fused_layers_have_a_switch(family, patched):
    """And rope=False changes the rotary embedding alone."""
    by = lambda report: {entry.by for entry in report.replaced if entry.switch == "layers"}
    for switches, expected in (
        ({"rope": False}, {"gated_mlp", "fused_add_rms_norm", "qkv"}),
        ({"layers": False}, set()),
        ({"rms_norm": False}, {"gated_mlp", "qkv"}),
    ):
        for level in ("instance", "class"):
            model = make(family) if level == "instance" else None
            report = patched(family, model, **switches)
            assert by(report) == expected, (switches, level)
            model = model or make(family)
            output = model(**batch())
            graph = " ".join(nodes(output.loss))
            ran = {name for name in ("linear::GatedMLP", "linear::QKV", "FusedAddRMSNorm") if name in graph}
            names = {"linear::GatedMLP": "gated_mlp", "linear::QKV": "qkv", "FusedAddRMSNorm": "fused_add_rms_norm"}
            assert {names[name] for name in ran} == expected
            report.undo()
