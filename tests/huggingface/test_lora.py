"""PEFT's LoRA layers in patched models, against PEFT's own."""

import collections
import copy
import io
import pickle
import types

import peft
import pytest
import torch
from conftest import TOLERANCE, batch, make
from liger_kernel.transformers.lora import LoRALinear, fuse_adapters
from liger_kernel.transformers.patching.place import is_variant
from liger_kernel.transformers.patching.report import Report
from peft import LoraConfig, get_peft_model
from peft.tuners.lora.gptq import GPTQLoraLinear
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.pytorch_utils import Conv1D

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

#: What runs of two layers, each with one group of projections, an output projection and an MLP; and where one
#: projection makes q, k and v, and another gate and up.
EACH = {"qkv": 2, "linear": 2, "gated_mlp": 2}
PACKED = {"linear": 6, "gated_linear": 2}


class Ran(TorchDispatchMode):
    """How often each operator for adapters ran forward."""

    def __init__(self):
        super().__init__()
        self.counts = collections.Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._opname.removesuffix("_forward")
        if function.namespace == "liger" and name in {**EACH, **PACKED}:
            self.counts[name] += 1
        return function(*args, **kwargs or {})


def adapters(**fields):
    return LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": ALL, "init_lora_weights": False, **fields})


def adapted(family="llama", dtype=torch.float32, model=None, **fields):
    """A model with random adapters, whose weights are frozen as PEFT freezes them."""
    torch.manual_seed(1)
    return get_peft_model(make(family) if model is None else model, adapters(**fields)).to(dtype).train()


def step(model, autocast=None, seed=3, **inputs):
    """(loss, the gradients by name) of one step."""
    model.zero_grad()
    torch.manual_seed(seed)
    with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
        loss = model(**{**batch(), **inputs}).loss
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_same(model, reference, counts=None, **options):
    """Both take the same step in float32, up to the tolerance; where the reference's own rounding exceeds that, the
    first is as close to float64's. `counts` are the operators that ran in the first."""
    expected_loss, expected = step(reference, **options)
    with Ran() as ran:
        loss, found = step(model, **options)
    assert counts is None or dict(ran.counts) == counts
    torch.testing.assert_close(loss, expected_loss, rtol=TOLERANCE, atol=TOLERANCE)
    assert found.keys() == expected.keys() and expected
    exact = None
    for name, gradient in expected.items():
        bound = TOLERANCE * max(gradient.abs().max(), 1e-3)
        if (found[name] - gradient).abs().max() > bound:
            exact = exact or step(copy.deepcopy(reference).double(), **options)[1]
            assert (found[name] - exact[name]).abs().max() <= bound, name


def patched_copy(model, patched, family="llama", **switches):
    ours = copy.deepcopy(model)
    return ours, patched(family, ours, **switches)


@pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma", "gemma2", "phi3"])
def test_precision(family, autocast, patched):
    """The loss and the gradients are at most 1.1 times as far from float64's as PEFT's own are."""
    base = make(family)
    if autocast is not None:
        base = base.to(autocast)
    model = get_peft_model(base, adapters(r=8, target_modules=[*ALL, "qkv_proj", "gate_up_proj"])).train()
    assert {p.dtype for name, p in model.named_parameters() if "lora" in name} == {torch.float32}
    exact_model, theirs = copy.deepcopy(model).double(), patched_copy(model, patched, family, lora=False)[0]
    ours = patched_copy(model, patched, family)[0]
    errors = {"ours": [], "theirs": [], "size": []}
    for seed in range(6):  # one batch's rounding is chance
        inputs = batch(seed)
        exact_loss, exact = step(exact_model, **inputs)
        their_loss, their_gradients = step(theirs, autocast, **inputs)
        with Ran() as ran:
            loss, gradients = step(ours, autocast, **inputs)
        assert ran.counts == (PACKED if family == "phi3" else EACH)
        assert gradients.keys() == their_gradients.keys() == exact.keys()
        assert all(gradient.dtype == torch.float32 for gradient in gradients.values())
        errors["ours"] += [(gradients[name] - exact[name]).square().sum() for name in exact]
        errors["theirs"] += [(their_gradients[name] - exact[name]).square().sum() for name in exact]
        errors["size"] += [exact[name].square().sum() for name in exact]
        rounding = torch.finfo(autocast or torch.float32).eps
        assert abs(loss - exact_loss) <= max(2 * abs(their_loss - exact_loss), rounding * exact_loss)
    ours, theirs, size = (torch.stack(squares).sum().sqrt() for squares in errors.values())
    assert ours <= max(1.1 * theirs, rounding / 8 * size)


@pytest.mark.parametrize(
    "fields, counts",
    [
        ({}, EACH),
        ({"use_rslora": True, "r": 7}, EACH),
        ({"rank_pattern": {"q_proj": 2, "up_proj": 9}, "alpha_pattern": {"k_proj": 3, "down_proj": 1}}, EACH),
        ({"r": 1}, EACH),
        ({"r": 256}, EACH),
        ({"lora_dropout": 0.3}, {"linear": 14}),
        ({"target_modules": ["k_proj", "v_proj"]}, {"qkv": 2}),
        ({"target_modules": ["gate_proj"]}, {"gated_mlp": 2}),
        ({"target_modules": ALL, "layers_to_transform": [1]}, {"qkv": 1, "linear": 1, "gated_mlp": 1}),
        ({"modules_to_save": ["lm_head", "embed_tokens"]}, EACH),
        ({"target_modules": [*ALL, "embed_tokens"]}, EACH),
        ({"target_modules": [*ALL, "lm_head"]}, EACH | {"linear": 3}),
        ({"bias": "all"}, EACH),
        ({"bias": "lora_only"}, EACH),
        ({"trainable_token_indices": [1, 5]}, EACH),
        ({"use_dora": True}, {}),
        ({"lora_bias": True}, {}),
    ],
    ids=str,
)
def test_configurations(fields, counts, patched):
    reference = adapted("qwen2" if "bias" in fields else "llama", **fields)
    ours, report = patched_copy(reference, patched, "qwen2" if "bias" in fields else "llama")
    assert_same(ours, reference, counts)
    reasons = [entry.reason for entry in report.skipped if entry.switch == "lora"]
    if fields.get("use_dora"):
        assert reasons == ["its adapter is DoRA or another variant"]
    elif fields.get("lora_bias"):
        assert reasons == ["its adapter has a bias"]


def test_dtypes_without_autocast(patched):
    """Adapters of the weights' dtype are fused; float ones beside 16-bit weights compute in float, as PEFT does."""
    reference = adapted(dtype=torch.bfloat16)
    ours, _ = patched_copy(reference, patched)
    with Ran() as ran:
        step(ours)
    assert ran.counts == EACH
    mixed = get_peft_model(make("llama").to(torch.bfloat16), adapters()).train()
    ours, _ = patched_copy(mixed, patched)
    with Ran() as ran:
        _, found = step(ours)
    assert not ran.counts
    with Ran():  # under which each module runs, there too
        _, expected = step(patched_copy(mixed, patched, lora=False)[0])
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_input_is_not_cast_under_autocast(patched, monkeypatch):
    """What PEFT's own forward computes is the same to the bit without the cast to float that autocast takes back."""
    model = get_peft_model(make("llama").to(torch.bfloat16), adapters()).train()
    _, expected = step(patched_copy(model, patched, lora=False)[0], torch.bfloat16)
    monkeypatch.setattr("liger_kernel.transformers.lora._adapter_of", lambda module, x: None)
    seen = set()
    ours, _ = patched_copy(model, patched)
    for module in ours.modules():
        if is_variant(type(module), LoRALinear):
            module.lora_A["default"].register_forward_hook(lambda m, args, y: seen.add(args[0].dtype))
    _, found = step(ours, torch.bfloat16)
    assert seen == {torch.bfloat16}
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_dropout_draws_the_same_masks(patched):
    model = get_peft_model(make("llama").to(torch.bfloat16), adapters(lora_dropout=0.5)).train()
    expected = step(patched_copy(model, patched, lora=False)[0], torch.bfloat16)[1]
    found = step(patched_copy(model, patched)[0], torch.bfloat16)[1]
    for name, gradient in expected.items():
        assert torch.nn.functional.cosine_similarity(gradient.flatten(), found[name].flatten(), 0) > 0.99, name


def test_adapters_come_and_go(patched):
    """Decided at each call: switched, disabled, merged, several, taken off."""
    reference = adapted()
    ours, _ = patched_copy(reference, patched)
    models = reference, ours
    both = lambda act: [act(model) for model in models]
    assert_same(ours, reference, EACH)
    with reference.disable_adapter(), ours.disable_adapter(), torch.no_grad():
        with Ran() as ran:
            a, b = both(lambda model: model(**batch()).loss)
        torch.testing.assert_close(a, b, rtol=TOLERANCE, atol=0)
        assert not ran.counts
    torch.manual_seed(2)
    reference.add_adapter("other", adapters(r=3, target_modules=["q_proj", "o_proj", "up_proj"]))
    ours.add_adapter("other", adapters(r=3, target_modules=["q_proj", "o_proj", "up_proj"]))
    ours.load_state_dict(reference.state_dict())
    both(lambda model: model.set_adapter("other"))
    assert_same(ours, reference, {"qkv": 2, "linear": 2, "gated_mlp": 2})
    both(lambda model: model.base_model.set_adapter(["default", "other"]))
    assert_same(ours, reference, {"linear": 8})  # of layers with one active adapter: k, v, gate and down
    both(lambda model: model.set_adapter("default"))
    assert_same(ours, reference, EACH)
    both(lambda model: model.merge_adapter())
    with torch.no_grad():
        torch.testing.assert_close(*both(lambda model: model(**batch()).loss), rtol=TOLERANCE, atol=0)
    both(lambda model: model.unmerge_adapter())
    assert_same(ours, reference, EACH)
    merged = both(lambda model: model.merge_and_unload())
    assert not any(isinstance(module, peft.tuners.lora.LoraLayer) for module in merged[1].modules())
    with torch.no_grad():
        torch.testing.assert_close(merged[1](**batch()).loss, merged[0](**batch()).loss, rtol=TOLERANCE, atol=0)


@pytest.mark.parametrize("past_hooks", [False, True])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("level", ["instance", "class"])
def test_adapters_after_the_patch(level, fused, past_hooks, patched, monkeypatch):
    """With the loss in the head, and with the model's own forward, which PEFT before 0.21 calls past its hooks."""
    if past_hooks:
        call = lambda self, *args, **kwargs: self.get_base_model().forward(*args, **kwargs)
        monkeypatch.setattr(peft.PeftModel, "forward", call)
    reference = make("llama")
    if level == "instance":
        ours = copy.deepcopy(reference)
        report = patched("llama", ours, fused_linear_cross_entropy=fused)
    else:
        report = patched("llama", fused_linear_cross_entropy=fused)
        ours = make("llama")
        ours.load_state_dict(reference.state_dict())
        if fused:
            report.undo()  # the model keeps what it was made with
        patched("llama", reference, lora=False)
    reference, ours = (adapted(model=model) for model in (reference, ours))
    ours.load_state_dict(reference.state_dict())
    if level == "class" and not fused:
        assert_same(ours, reference, EACH)
        report.undo()
    if level == "instance":
        assert_same(ours, reference, EACH)
        assert [entry.count for entry in report.replaced if entry.switch == "lora"] == [14, 2]
        report.undo()
        assert not any(is_variant(type(module), LoRALinear) for module in ours.modules())
    assert_same(ours, reference)


def test_undo_and_switch(patched):
    reference = adapted()
    ours, report = patched_copy(reference, patched)
    assert "linear" in str(report) and "gated_mlp" in str(report)
    report.undo()
    assert [type(m) for m in ours.modules()] == [type(m) for m in reference.modules()]
    assert_same(ours, reference, {})
    ours, report = patched_copy(reference, patched, lora=False)
    assert not [entry for entry in report.replaced if entry.switch == "lora"]
    assert_same(ours, reference, {})


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "save"])
def test_copies(how, patched):
    reference = adapted()
    ours, _ = patched_copy(reference, patched)
    if how == "deepcopy":
        ours = copy.deepcopy(ours)
    elif how == "pickle":
        ours = pickle.loads(pickle.dumps(ours))
    else:
        file = io.BytesIO()
        torch.save(ours, file)
        file.seek(0)
        ours = torch.load(file, weights_only=False)
    assert_same(ours, reference, EACH)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(reentrant, patched):
    reference = adapted()
    ours, _ = patched_copy(reference, patched)
    for model in (reference, ours):
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert_same(ours, reference)


def attention_of(model, layer=0):
    return next(m for name, m in model.named_modules() if name.endswith(f"layers.{layer}.self_attn"))


def test_hooks(patched):
    """A hook on a matrix of an adapter, its dropout or its base runs."""
    for inner in ("lora_A.default", "lora_B.default", "lora_dropout.default", "base_layer"):
        reference = adapted()
        ours, _ = patched_copy(reference, patched)
        for model in (reference, ours):
            module = attention_of(model).k_proj.get_submodule(inner)
            module.register_forward_hook(lambda module, args, y: 2 * y)
        assert_same(ours, reference)


class Packed(torch.nn.Module):
    """A linear layer whose package multiplies by its weight: 8 bits and one scale per row."""

    def __init__(self, columns, rows):
        super().__init__()
        self.in_features, self.out_features = columns, rows
        self.register_buffer("weight", torch.randint(-127, 128, (rows, columns), dtype=torch.int8))
        self.register_buffer("scale", torch.rand(rows, 1) / 127)

    def forward(self, x):
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype
        return torch.nn.functional.linear(x.to(dtype), (self.weight * self.scale).to(dtype))


@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["Conv1D", "Packed", "hook"])
def test_other_bases(kind, autocast, dropout):
    """The adapter of a base that keeps its forward: results and gradients are at most 1.1 times as far from float64's
    as PEFT's own are, with the same masks."""
    torch.manual_seed(4)
    base = {"Conv1D": Conv1D(48, 32), "Packed": Packed(32, 48), "hook": torch.nn.Linear(32, 48)}[kind].requires_grad_(
        False
    )
    make = GPTQLoraLinear if kind == "Packed" else peft.tuners.lora.layer.Linear
    config = adapters(lora_dropout=dropout)
    theirs = make(base, "default", config=config, r=4, lora_alpha=8, fan_in_fan_out=kind == "Conv1D")
    ours = copy.deepcopy(theirs)
    called = []
    if kind == "hook":
        ours.base_layer.register_forward_hook(lambda *_: called.append(1))
    fuse_adapters(torch.nn.ModuleList([ours]), report := Report("adapters"))
    expected = [(f"{'Linear' if kind == 'hook' else kind} with an adapter", "addmm")]
    assert [(entry.name, entry.by) for entry in report.replaced if entry.by == "addmm"] == expected
    assert not report.skipped
    x, dy = torch.randn(3, 25, 32), torch.randn(3, 25, 48)

    def run(layer, double=False):
        x_, dy_ = (t.double() if double else t.to(autocast or t.dtype) for t in (x, dy))
        x_ = x_.clone().requires_grad_()
        torch.manual_seed(9)
        with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None and not double):
            y = layer(x_)
        parameters = [p for p in layer.parameters() if p.requires_grad]
        gradients = torch.autograd.grad(y, (x_, *parameters), dy_.to(y.dtype))
        assert len(parameters) == 2 and all(g.dtype == p.dtype for g, p in zip(gradients[1:], parameters))
        return y.detach(), *gradients

    found, own = run(ours), run(theirs)
    assert found[0].dtype == own[0].dtype == (autocast or torch.float32)
    assert kind != "hook" or called == [1]
    if dropout:  # the masks of float64 are others: own results are the reference, within the rounding of both
        tolerance = 4 * torch.finfo(autocast or torch.float32).eps
        for a, b in zip(found, own):
            assert (a - b).norm() <= tolerance * b.norm()
        return
    exact = run(copy.deepcopy(theirs).double(), double=True)
    for a, b, c in zip(found, own, exact):
        error, allowed = (a - c).norm(), (b - c).norm()
        assert error <= max(1.1 * allowed, torch.finfo(a.dtype).eps / 8 * c.norm())


def test_matrices_that_ms_swift_moves_inputs_to(patched, monkeypatch):
    """Their forward is replaced on the instance; x is where they are."""
    reference = adapted()
    ours, _ = patched_copy(reference, patched)

    def keep_device_forward(self, *args, **kwargs):
        return self.forward_origin(*args, **kwargs)

    for model in (reference, ours):
        for name, module in model.named_modules():
            if name.endswith((".lora_A.default", ".lora_B.default")):
                module.forward_origin = module.forward
                module.forward = types.MethodType(keep_device_forward, module)
    assert_same(ours, reference, {})
    keep_device_forward.__module__ = "swift.tuners.peft"
    assert_same(ours, reference, EACH)


def test_compiled(patched):
    torch._dynamo.reset()
    reference = adapted()
    ours, _ = patched_copy(reference, patched)
    expected_loss, expected = step(reference)
    loss, found = step(torch.compile(ours, backend="aot_eager"))
    torch.testing.assert_close(loss, expected_loss, rtol=TOLERANCE, atol=TOLERANCE)
    for name, gradient in expected.items():
        found_gradient = found["_orig_mod." + name]
        assert (found_gradient - gradient).abs().max() <= TOLERANCE * max(gradient.abs().max(), 1e-3), name
