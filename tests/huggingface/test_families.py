"""Every class of every row: a patched model computes what transformers' does. `make test` takes a representative of
each mechanism; `make test-families`, or `pytest --families all`, takes all, and `--families llama,mixtral` those."""

import copy
import inspect
import re

import pytest
import torch
import transformers
from conftest import CURVE_TOLERANCE, TOLERANCE, VOCABULARY, assert_close, assert_rounded_alike
from liger_kernel.transformers import monkey_patch
from liger_kernel.transformers.causal_lm import names_in
from liger_kernel.transformers.experts import (
    LigerClampedExperts,
    LigerGEGLUExperts,
    LigerGptOssExperts,
    LigerUngatedExperts,
)
from liger_kernel.transformers.patching.families import FAMILIES, SWITCHES
from liger_kernel.transformers.patching.formulas import find
from liger_kernel.transformers.swiglu import LigerExperts, LigerFalconH1SwiGLUMLP
from liger_kernel.transformers.xielu import LigerXIELU
from liger_kernel.utils import warn_once
from packaging import version
from tiny import TINY_MODELS, model_of, swaps_in
from torch.nn import functional as F

# The families whose loss has a part for the balance of the experts.
ROUTED = ("mixtral", "qwen3_moe", "qwen3_next", "gpt_oss", "deepseek_v4", "qwen3_vl_moe", "qwen3_5_moe", "glm4v_moe")
# Those that torch.compile(fullgraph=True) takes unpatched; with older versions of transformers it takes fewer.
COMPILED = (
    "llama mistral ministral qwen2 qwen3 smollm3 granite phi3 glm4 olmo2 olmo3 exaone4 falcon_h1 hunyuan_v1_dense "
    "hunyuan_v1_moe nemotron gemma gemma2 gemma3_text gemma3 gemma4_text gemma4 paligemma llama4 mllama smolvlm"
).split()
if version.parse(transformers.__version__) < version.parse("5.22"):
    COMPILED = ["llama", "granite", "gemma2"]
# They round less than the originals do.
ROUND_LESS = (
    LigerExperts,
    LigerGEGLUExperts,
    LigerGptOssExperts,
    LigerClampedExperts,
    LigerUngatedExperts,
    LigerFalconH1SwiGLUMLP,
    LigerXIELU,
)
FUSED, UNFUSED = "fused_linear_cross_entropy", "cross_entropy"


def switches_of(family, loss=FUSED, **others):
    """Everything that the family has, with one of the losses."""
    switches = {name: name not in FAMILIES[family].without for name in FAMILIES[family].switches}
    if FUSED in switches:
        switches |= {FUSED: loss == FUSED, UNFUSED: loss == UNFUSED}
    return {**switches, **others}


def only(wanted):
    """Run a test for the rows of which `wanted` is true."""

    def mark(test):
        test.wanted = wanted
        return test

    return mark


with_loss = only(lambda row: row.loss)


@pytest.fixture
def family(case):
    return case[0]


@pytest.fixture
def kind(case):
    return case[1]


@pytest.fixture
def apply(family):
    """The family's function, whose reports are undone at the end of the test."""
    reports = []

    def apply(model=None, **switches):
        reports.append(getattr(monkey_patch, f"apply_liger_kernel_to_{family}")(model=model, **switches))
        return reports[-1]

    yield apply
    for report in reversed(reports):
        report.undo()


@pytest.fixture
def inputs(family, kind):
    return TINY_MODELS[family][kind][1]()


def _loss(output):
    return (
        output.loss
        if "labels" in inspect.signature(type(output)).parameters or hasattr(output, "loss")
        else output.last_hidden_state.square().mean()
    )


def _step(model, inputs, **others):
    model.zero_grad()
    output = model(**inputs, **others)
    loss = _loss(output)
    loss.backward()
    return output, loss, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_gradients(actual, expected, padded=False):
    """To four times TOLERANCE (these models are deeper than those it was made for) and a rounding of the largest
    gradient of the model, in whose size the sums behind a gradient that cancels are, as that of a bias of keys. In a
    padded batch, experts in a list that only padding reaches may have gradients of zeros in place of none: no loss
    reads the hidden states of padding."""
    if padded:
        actual = {name: g for name, g in actual.items() if name in expected or ".experts." not in name or g.any()}
    assert actual.keys() == expected.keys()
    largest = max(gradient.abs().max() for gradient in expected.values())
    for name, gradient in expected.items():
        size = gradient.abs() + gradient.square().mean().sqrt()
        excess = ((actual[name] - gradient).abs() - 4 * TOLERANCE * size).max()
        assert excess <= 2.0**-24 * largest, (
            f"{name} differs by {excess} more than it may; it is up to {gradient.abs().max()}"
        )


def assert_same_step(model, reference, inputs, real=None, padded=False, **others):
    expected, expected_loss, expected_gradients = _step(reference, inputs, **others)
    output, loss, gradients = _step(model, inputs, **others)
    assert_close(loss, expected_loss)
    assert_same_gradients(gradients, expected_gradients, padded)
    assert_same_outputs(output, expected, real)
    return output


def assert_same_outputs(output, expected, real=None):
    """All that an output holds besides the loss and the cache, which transformers 5.24 also calls `cache`; and logits,
    if there are any. real [batch, tokens]: those of these tokens alone, of what has a row for each."""
    for name, value in expected.items():
        if name in ("loss", "past_key_values", "cache") or (name == "logits" and output.logits is None):
            continue
        for ours, theirs in zip(_tensors(getattr(output, name)), _tensors(value), strict=True):
            if real is not None and theirs.shape[:1] == (real.numel(),):
                ours, theirs = ours[real.flatten()], theirs[real.flatten()]
            assert_close(ours.float(), theirs.float(), 4 * TOLERANCE)


def _tensors(value):
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    return (
        [tensor for part in value for tensor in _tensors(part)]
        if isinstance(value, (list, tuple)) or hasattr(value, "__iter__")
        else []
    )


@pytest.mark.parametrize("level", ["class", "instance"])
@pytest.mark.parametrize("loss", [FUSED, UNFUSED])
def test_training(family, kind, apply, inputs, level, loss):
    """Loss, every gradient and every other output; evaluation with logits; and ten steps of AdamW."""
    reference = model_of(family, kind)
    weights = copy.deepcopy(reference.state_dict())
    model = model_of(family, kind) if level == "instance" else None
    report = apply(model, **switches_of(family, loss))
    if level == "class":
        model = model_of(family, kind)
        model.load_state_dict(weights)
    assert not _left(family, model)
    if level == "instance" and any(swap.switch == "rope" for _, swap in swaps_in(family)):
        assert "rope" in {entry.switch for entry in (*report.replaced, *report.skipped)}

    output = assert_same_step(model, reference, inputs)
    if FAMILIES[family].loss:
        assert (output.logits is None) == (loss == FUSED)
        with torch.no_grad():
            evaluation, expected = model.eval()(**inputs), reference.eval()(**inputs)
        assert_close(evaluation.loss, expected.loss)
        assert_close(evaluation.logits, expected.logits, 4 * TOLERANCE)
    assert_close(_curve(model.train(), inputs), _curve(reference.train(), inputs), CURVE_TOLERANCE)


def _left(family, model):
    """The modules of a class of known source that is still transformers', but for norms without a weight."""
    names = {name.rpartition(".")[2] for name, swap in swaps_in(family)}
    return [
        m
        for m in model.modules()
        if type(m).__name__ in names
        and "liger_part" not in vars(type(m))
        and find(type(m)) is not None
        and (getattr(m, "weight", None) is not None or "Norm" not in type(m).__name__)
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_parts_round_where_the_originals_do(family, kind, apply, inputs, dtype):
    """Every norm and feed-forward block on what it gets in the unpatched model, element by element."""
    if family == "ernie4_5_moe" and version.parse(transformers.__version__) < version.parse("5"):
        pytest.skip("the plain model multiplies float32 by 16 bits and fails")
    reference = model_of(family, kind).to(dtype)
    model = copy.deepcopy(reference)
    # test_routers.py compares routers, which choose any of equal experts.
    off = {name: False for name in ("rope", "router") if name in FAMILIES[family].switches}
    apply(model, **switches_of(family, **off))
    inputs = {name: value.to(dtype) if value.is_floating_point() else value for name, value in inputs.items()}
    seen = {}
    parts = [
        (name, m)
        for name, m in model.named_modules()
        if hasattr(m.forward, "liger_original") and not isinstance(m, transformers.PreTrainedModel)
        if not hasattr(m.forward, "liger_fuses")  # layers and attention, which hold parts
    ]
    assert parts or family == "llava"
    for name, _ in parts:
        reference.get_submodule(name).register_forward_hook(
            lambda m, x, y, name=name: seen.update({name: (copy.deepcopy(x), y.clone())})
        )
    with torch.no_grad():
        reference(**inputs)
        for name, part in parts:
            if name in seen and not isinstance(part, ROUND_LESS):
                x, y = seen[name]
                taken = len(inspect.signature(part.forward).parameters)
                ours = part(*x[:taken])
                if y.dtype == dtype:
                    assert_rounded_alike(ours, y, 0.02)
                else:  # a float state meets a norm's 16-bit gate and weight
                    assert ours.dtype == y.dtype
                    assert_close(ours, y)


def _curve(model, inputs):
    # Adam's first step moves each weight by lr * g / (|g| + eps). With the default eps of 1e-8, a gradient that cancels
    # to the rounding of its terms, whose sign is chance, would move its weight by the whole learning rate.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6)
    losses = []
    for _ in range(10):
        loss = _loss(model(**inputs))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


@with_loss
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding(family, kind, apply, inputs, side):
    reference = model_of(family, kind)
    model = copy.deepcopy(reference)
    report = apply(model, **switches_of(family))
    padded = {
        "input_ids": 0,
        "labels": -100,
        "attention_mask": 0,
        "mm_token_type_ids": 0,
        "token_type_ids": 0,
        "cross_attention_mask": 0,
    }
    inputs.setdefault("attention_mask", torch.ones_like(inputs["input_ids"]))
    sides = (3, 0) if side == "left" else (0, 3)
    for name, value in padded.items():
        if name in inputs:
            before = (0, 0) * (inputs[name].dim() - 2)
            inputs[name] = F.pad(inputs[name], (*before, *sides), value=value)
    # Padding tokens get zeros from attention with sinks, as from flash attention; eager attention has them look at the
    # tokens before.
    sinks = any(entry.switch == "attention" for entry in report.replaced)
    real = inputs["attention_mask"].bool() if sinks else None
    assert assert_same_step(model, reference, inputs, real, padded=True).logits is None


@with_loss
def test_keywords_of_the_loss(family, kind, apply, inputs):
    reference = model_of(family, kind)
    model = copy.deepcopy(reference)
    apply(model, **switches_of(family))
    for items in (7, torch.tensor(7)):
        assert assert_same_step(model, reference, inputs, num_items_in_batch=items).logits is None
    shifted = F.pad(inputs["labels"], (0, 1), value=-100)[:, 1:].contiguous()
    shifted[1, -3:] = -100
    if "loss_function" not in names_in(type(reference).forward):
        return  # it makes a loss of its own, from labels alone
    without = {name: value for name, value in inputs.items() if name != "labels"}
    if _routed(reference):
        inputs["output_router_logits"] = without["output_router_logits"] = False
    logits = reference(**inputs).logits  # labels shape the mask of some models with images
    expected = F.cross_entropy(logits.reshape(-1, VOCABULARY), shifted.reshape(-1))
    for given in (inputs, without):
        for skip_logits in (True, False):
            output = model(**given, shift_labels=shifted, skip_logits=skip_logits)
            assert_close(output.loss, expected)
            assert (output.logits is None) == skip_logits
    if "logits_to_keep" not in inspect.signature(type(reference).forward).parameters:
        return
    kept = model(**without, shift_labels=shifted[:, -4:], logits_to_keep=4)
    assert kept.logits is None
    assert_close(
        kept.loss, F.cross_entropy(logits[:, -4:].reshape(-1, VOCABULARY), shifted[:, -4:].reshape(-1)), 4 * TOLERANCE
    )


def _routed(model):
    return getattr(model.config.get_text_config(), "output_router_logits", False)


@only(lambda row: row.name in ROUTED)
def test_router_loss(family, kind, apply, inputs):
    reference = model_of(family, kind)
    model = copy.deepcopy(reference)
    apply(model, **switches_of(family))
    # Some models with images have it only where it is asked for.
    output, expected = (m(**inputs, output_router_logits=True) for m in (model, reference))
    assert output.logits is None
    if "aux_loss" not in expected:
        return  # glm4v_moe of transformers 4 leaves it out
    assert_close(output.aux_loss, expected.aux_loss)
    assert abs(expected.loss - reference(**inputs, output_router_logits=False).loss) > 0.1
    assert_close(output.loss, expected.loss)


@with_loss
def test_tuples_and_hidden_states(family, kind, apply, inputs):
    reference = model_of(family, kind)
    model = copy.deepcopy(reference)
    apply(model, **switches_of(family))
    output, expected = (m(**inputs, output_hidden_states=True, use_cache=True) for m in (model, reference))
    assert output.logits is None and ("hidden_states" in output) == ("hidden_states" in expected)
    assert type(output.past_key_values) is type(expected.past_key_values)
    assert_same_outputs(output, expected)
    as_tuple, expected_tuple = (m(**inputs, return_dict=False) for m in (model, reference))
    assert isinstance(as_tuple, tuple) and len(as_tuple) == len(expected_tuple)
    logits = list(expected).index("logits")
    assert [i for i, part in enumerate(as_tuple) if part is None] == [logits] and expected_tuple[logits].shape[
        -1
    ] == VOCABULARY
    assert_close(as_tuple[0], expected_tuple[0])
    if "loss_function" not in names_in(type(reference).forward):
        return  # it drops rows before its loss
    accurate = model(**inputs, return_token_accuracy=True, return_predicted_tokens=True)
    labels = F.pad(inputs["labels"], (0, 1), value=-100)[:, 1:].reshape(-1)
    right = expected.logits.reshape(-1, VOCABULARY).argmax(-1)
    assert_close(accurate.token_accuracy, ((right == labels).sum() / (labels != -100).sum()).float())
    assert torch.equal(accurate.predicted_tokens, right.masked_fill(labels == -100, -1))


@with_loss
def test_generation(family, kind, apply, inputs):
    reference = model_of(family, kind).eval()
    model = copy.deepcopy(reference)
    apply(model, **switches_of(family))
    inputs.pop("labels")
    if _routed(reference):
        inputs["output_router_logits"] = False  # older versions cannot make that loss over a cache
    if "mm_token_type_ids" not in inspect.signature(type(reference).forward).parameters:
        inputs.pop("mm_token_type_ids", None)  # generate() of older versions takes no more than forward()
    arguments = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "use_cache": True}
    assert torch.equal(model.generate(**inputs, **arguments), reference.generate(**inputs, **arguments))


def test_single_operators(family, kind, apply, inputs):
    reference = model_of(family, kind)
    off = dict.fromkeys(FAMILIES[family].switches, False)
    for switch in off.keys() - FAMILIES[family].without.keys():
        model = copy.deepcopy(reference)
        report = apply(model, **{**off, switch: True})
        assert {entry.switch for entry in report.replaced} <= {switch, *SWITCHES} and (
            FAMILIES[family].composite or len({e.switch for e in report.replaced}) <= 1
        )
        output = assert_same_step(model, reference, inputs)
        if FAMILIES[family].loss:
            assert (output.logits is None) == (switch == FUSED)
    model = copy.deepcopy(reference)
    if not FAMILIES[family].composite:
        assert not apply(model, **off).replaced


@only(lambda row: row.without)
def test_switches_without_effect_are_named_once(family, kind, apply, caplog):
    without = FAMILIES[family].without
    model = model_of(family, kind)
    for switch, reason in without.items():
        warn_once.cache_clear()
        for _ in range(2):
            report = apply(model, **{switch: True})
            assert (switch, reason) in {(entry.switch, entry.reason) for entry in report.skipped}
        assert (
            len([record for record in caplog.records if f"{switch}=True has no effect on {family}" in record.message])
            == 1
        )


@only(lambda row: row.keeps)
def test_what_a_row_keeps_is_no_skip(family, kind, apply):
    """A switch is not said to have left out what only looks like its parts, so that `strict` can be asked for."""
    for model in (None, model_of(family, kind)):
        report = apply(model, **switches_of(family))
        named = {entry.name for entry in (*report.replaced, *report.skipped)}
        assert report.replaced and not [name for name in named if re.fullmatch(FAMILIES[family].keeps, name)]


def test_undo(family, kind, apply, inputs):
    model = model_of(family, kind)
    plain, before = model(**inputs), [(type(module), dict(vars(module))) for module in model.modules()]
    report = apply(model, **switches_of(family))
    assert report.replaced and [type(module) for module in model.modules()] != [cls for cls, _ in before]
    report.undo()
    for module, (cls, attributes) in zip(model.modules(), before, strict=True):
        assert type(module) is cls and vars(module).keys() == attributes.keys()
    again = model(**inputs)
    assert torch.equal(_loss(again), _loss(plain)) and (
        not FAMILIES[family].loss or torch.equal(again.logits, plain.logits)
    )


def test_class_level_touches_the_familys_modules_alone(family, kind, apply):
    """Nothing that other families' models share is assigned to; what is, is as before after undo."""
    row = FAMILIES[family]
    modules = [row.namespace(), *(FAMILIES[name].namespace() for name in row.holds)]
    classes = [getattr(modules[0], name) for name in row.loss if hasattr(modules[0], name)]
    shared = [
        torch,
        torch.nn,
        F,
        torch.nn.LayerNorm,
        torch.nn.Linear,
        transformers.activations,
        transformers.PreTrainedModel,
    ]
    mine, theirs = ([dict(vars(owner)) for owner in owners] for owners in ((*modules, *classes), shared))
    activations = list(dict.items(transformers.activations.ACT2FN))
    report = apply(**switches_of(family))
    assert [dict(vars(owner)) for owner in shared] == theirs and list(
        dict.items(transformers.activations.ACT2FN)
    ) == activations
    if swaps_in(family) or row.loss:
        assert [dict(vars(owner)) for owner in (*modules, *classes)] != mine
    report.undo()
    assert [dict(vars(owner)) for owner in (*modules, *classes)] == mine


def test_gradient_checkpointing(family, kind, apply, inputs):
    reference = model_of(family, kind)
    if not reference.supports_gradient_checkpointing:
        pytest.skip("the plain model cannot checkpoint")
    model = copy.deepcopy(reference)
    apply(model, **switches_of(family))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert_same_step(model, reference, inputs)


@only(lambda row: row.name in COMPILED)
@pytest.mark.full(when=lambda p: p["case"][0] not in ("granite", "nemotron", "llama4"))
def test_compile(family, kind, apply, inputs):
    reference = model_of(family, kind)
    model = copy.deepcopy(reference)
    apply(model, **switches_of(family))
    torch._dynamo.reset()
    output = torch.compile(model, backend="eager", fullgraph=True)(**inputs)
    assert output.logits is None
    assert_close(output.loss, reference(**inputs).loss)


@with_loss
def test_lora(family, kind, apply, inputs):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        target_modules=r"(?!.*vision).*\.(q_proj|v_proj|q_b_proj|qkv_proj|gate_proj|up_proj|down_proj|gate_up_proj)"
    )
    model = peft.get_peft_model(model_of(family, kind), config)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    reference = copy.deepcopy(model)
    apply(model.get_base_model(), **switches_of(family))
    output = assert_same_step(model, reference, inputs)
    assert output.logits is None
