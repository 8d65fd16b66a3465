"""A replaced part has the dtypes of the original, whatever its input, its parameters and autocast have; routers, which
choose any of equal experts, are in test_routers.py, and functions of mixers in test_mixers.py."""

import copy
import functools
import importlib
import importlib.util
import inspect
import itertools
import types

import every_type
import pytest
import torch
import transformers
from conftest import assert_close
from liger_kernel.hub import layers
from liger_kernel.transformers.patching import hub as hub_kernels
from liger_kernel.transformers.patching.apply import ReplacedModule, _class_called, patch
from liger_kernel.transformers.patching.by_source import row_of
from liger_kernel.transformers.patching.families import FAMILIES, GATED_RMS_NORM
from liger_kernel.transformers.patching.formulas import as_written, find, fingerprint, is_known
from liger_kernel.transformers.patching.part import unfit
from liger_kernel.transformers.patching.place import Edits, instead_of, own_attributes, replace_class
from packaging.version import parse
from tiny import TINY_MODELS, model_of, swaps_in
from torch import nn

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
TOKENS = 96


def _short(dtype):
    return {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16", None: "off"}[dtype]


@functools.cache
def originals():
    """(original, target) -> the original class's module, or the function itself, and what replaces it: every source of
    the installed transformers that a row of the table of families replaces."""
    found = {}
    for family, row in FAMILIES.items():
        if not importlib.util.find_spec(row.module.rpartition(".")[0]):
            continue
        modules = [m for kind in TINY_MODELS[family] for m in model_of(family, kind).modules()]
        for name, swap in swaps_in(family):
            if swap.switch in ("router", "mixers"):
                continue
            original = None if "." in name else getattr(row.namespace(), name, None)
            if original is not None and not isinstance(original, type):
                found.update(
                    ((fingerprint(original), target), (as_written(original), swap, target))
                    for target in swap.targets
                    if is_known(target, original)
                )
                continue
            for module in modules:
                cls = _class_called(name, row.modules, module)
                normless = "RMSNorm" in name and getattr(module, "weight", None) is None
                if cls is None or normless:
                    continue
                targets = [t for t in swap.targets if is_known(t, cls)]
                found.update(((fingerprint(cls) or name, target), (module, swap, target)) for target in targets[:1])
    if parse(transformers.__version__) >= parse("5.19"):
        for kind in WITHOUT_ROW:
            found.update(_by_source(every_type.model_of(kind)))
    return {f"{target.rpartition('.')[2]}-{key}": value for (key, target), value in sorted(found.items(), key=str)}


# Model types whose parts no row names.
WITHOUT_ROW = (
    "aria bamba cohere deepseek_v2 deepseek_v3 ernie4_5 granitemoeshared kimi_linear lfm2 nanochat olmo olmoe"
).split()


def _by_source(model):
    """What stands for the parts of a model whose type has no row."""
    swaps = [(name, swap) for name, swap in row_of(model).pairs() if swap.switch not in ("router", "mixers")]
    for module in model.modules():
        values = getattr(inspect.unwrap(type(module).forward), "__globals__", {})
        for name, swap in swaps:
            of_class = type(module).__name__ == name
            original = type(module) if of_class else as_written(values.get(name))
            usable = of_class or inspect.isfunction(original)
            targets = [t for t in swap.targets if usable and is_known(t, original)]
            if targets and not (of_class and unfit(module, swap.load(targets[0]), swap.activations)):
                yield (fingerprint(original), targets[0]), (module if of_class else original, swap, targets[0])


def layer_of(original):
    """The layer for `use_as_hub_kernels` that stands for a module's class or a function, or None."""
    layer = hub_kernels._layer_of(type(original) if isinstance(original, nn.Module) else original)
    return layer if layer is not layers.LigerGatedMLP or layers.gate_of(original) else None


def inputs_of(module):
    """The tensors that a module takes, in float64."""
    experts = getattr(module, "gate_up_proj", None)
    if isinstance(experts, nn.Parameter):
        width = module.down_proj.shape[2] if experts.shape[1] == module.down_proj.shape[1] else experts.shape[2]
        routing = torch.rand(TOKENS, len(experts)).topk(2)
        return torch.randn(TOKENS, width, dtype=torch.float64), routing.indices, routing.values
    linear = next((m for m in module.modules() if isinstance(m, nn.Linear)), None)
    weight = getattr(module, "weight", None)
    width = linear.in_features if linear is not None else 64 if weight is None else weight.shape[0]
    given = 2 if "gate" in inspect.signature(type(module).forward).parameters else 1
    return tuple(torch.randn(TOKENS, width, dtype=torch.float64) for _ in range(given))


def rotary_inputs(function):
    """q and k in float64, the tables, and what else the function needs."""
    random = functools.partial(torch.randn, dtype=torch.float64)
    name, code = function.__name__, function.__code__.co_names
    if name == "apply_rotary_emb" and "unsqueeze" in code:  # DeepSeek-V2's
        return (
            [random(2, 4, 24, 32), random(2, 2, 24, 32)],
            [torch.polar(torch.ones(2, 24, 16), torch.randn(2, 24, 16))],
            [],
        )
    if name in ("apply_rotary_emb", "vision_apply_rotary_emb"):
        turns = torch.polar(torch.ones(2, 24, 16), torch.randn(2, 24, 16))
        return [random(2, 24, 4, 32), random(2, 24, 4, 32)], [turns if name[0] == "a" else turns[0][:, None]], []
    if name.endswith("vision"):
        return [random(24, 4, 32), random(24, 4, 32)], [random(24, 16).repeat(1, 2) for _ in range(2)], []
    q, k = random(2, 4, 24, 32), random(2, 2, 24, 32)
    if "multimodal" in name:
        return [q, k], [random(3, 2, 24, 16).repeat(1, 1, 1, 2) for _ in range(2)], [[4, 6, 6]]
    if find(function).tables == "pairs":
        return [q, k], [random(2, 24, 16).repeat_interleave(2, -1) for _ in range(2)], []
    half = "chunk" in code or "_apply_rotary_emb" in code
    return [q, k], [random(2, 24, 16).repeat(1, 1, 1 if half else 2) for _ in range(2)], []


def step(call, tensors, parameters, autocast, device):
    """(results, gradients) of a call under autocast, for an upstream gradient that does not depend on dtypes; the
    exception's class where it raises."""
    try:
        with torch.autocast(device, autocast, enabled=autocast is not None):
            results = call(*tensors)
    except (RuntimeError, TypeError, ValueError) as error:
        return type(error)
    results = results if isinstance(results, tuple) else (results,)
    leaves = [t for t in (*tensors, *parameters) if isinstance(t, torch.Tensor) and t.requires_grad]
    if not leaves:
        return results, ()
    generator = torch.Generator().manual_seed(1)
    upstream = [torch.randn(r.shape, generator=generator).bfloat16().half().to(r) for r in results]
    return results, torch.autograd.grad(results, leaves, upstream)


def relative_error(tensors, exact):
    """The RMS error of some tensors, each in units of its own RMS."""
    pairs = [(t.double(), true) for t, true in zip(tensors, exact) if t.numel()]
    squares = [((t - true).square().mean() / true.square().mean()).item() for t, true in pairs]
    return (sum(squares) / max(1, len(squares))) ** 0.5


def assert_as_original(ours, theirs, exact, what):
    if isinstance(theirs, type):  # what the original cannot compute may work
        return
    assert not isinstance(ours, type), f"{what}: raises {ours}"
    for kind, a, b, c in zip(("result", "gradient"), ours, theirs, exact):
        assert [(t.dtype, t.shape) for t in a] == [(t.dtype, t.shape) for t in b], f"{what}: {kind}"
        error, allowed = relative_error(a, c), relative_error(b, c)
        # Sums in float32 may be in another order.
        assert error <= 1.1 * allowed + 2.0**-20, f"{what}: {kind} off by {error:.3g}, not {allowed:.3g}"


def _leaf(t, dtype, grad):
    return t.to(dtype).requires_grad_(grad) if t.is_floating_point() else t


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", originals())
def test_every_combination(kind, device):
    original, swap, target = originals()[kind]
    part = swap.load(target)
    is_module = isinstance(original, nn.Module)
    replaced = functools.partial(with_part, part=part) if is_module else functools.partial(instead_of, part)
    check(original, replaced, device)


def check(original, replaced, device):
    """`replaced(original)` against the original, for every combination of dtypes, autocast and gradients."""
    run = check_module if isinstance(original, nn.Module) else check_function
    for x, p, autocast, grad in itertools.product(FLOATS, FLOATS, (None, *FLOATS[1:]), (True, False)):
        torch.manual_seed(0)
        what = f"input {_short(x)}, parameters {_short(p)}, autocast {_short(autocast)}"
        run(original, replaced, x, p, autocast, grad, device, what)


def with_part(module, part):
    replace_class(module, ReplacedModule(part), Edits(), **own_attributes(module, part))
    return module


def check_module(module, replaced, x, p, autocast, grad, device, what):
    module = copy.deepcopy(module).to(device, p).requires_grad_(grad)
    inputs = [t.to(device) for t in inputs_of(module)]
    ours, true = copy.deepcopy(module), copy.deepcopy(module).double()
    if hasattr(true, "config"):
        true.config._experts_implementation = "eager"  # grouped GEMMs know no float64
    ours = replaced(ours)
    gated = len(inputs) == 2  # a gate is what a Linear gives, and x what no Linear does
    tensors = [inputs[0].to(x), *(t.to(p if gated else x) if t.is_floating_point() else t for t in inputs[1:])]

    def run(m, dtype):
        more = (_leaf(t, dtype or t.dtype, grad and gated) for t in tensors[1:])
        leaves = [_leaf(tensors[0], dtype or x, grad), *more]
        return step(m, leaves, m.parameters(), None if dtype else autocast, device)

    assert_as_original(run(ours, None), run(module, None), run(true, torch.float64), what)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", [kind for kind, (original, *_) in originals().items() if layer_of(original)])
def test_every_combination_of_the_hubs_layers(kind, device):
    original, *_ = originals()[kind]
    check(original, bound(layer_of(original)), device)


def bound(layer):
    """What `kernels` makes of a layer: its forward on a module, or on a module that stands for a function."""

    def of_module(module):
        module.forward = types.MethodType(layer.forward, module)
        return module

    def of_function(function):
        tagged = type("Tagged", (nn.Module,), {"forward": lambda self, *args: function(*args)})()
        return lambda *args: layer.forward(tagged, *args)

    return of_function if layer in layers.ROTARIES else of_module


def check_function(function, replaced, x, p, autocast, grad, device, what):
    heads, tables, rest = rotary_inputs(function)
    heads = [t.to(device, x) for t in heads]
    tables = [t.to(device) if t.is_complex() else t.to(device, p) for t in tables]

    def run(f, dtype):
        leaves = [_leaf(t, dtype or x, grad) for t in heads]
        wide = [t.to(torch.complex128) if t.is_complex() else t.double() for t in tables] if dtype else tables
        return step(f, [*leaves, *wide, *rest], (), None if dtype else autocast, device)

    exact = run(function, torch.float64)
    assert not isinstance(exact, type)
    assert_as_original(run(replaced(function), None), run(function, None), exact, what)


def _trained(model, autocast, **inputs):
    """(loss, last hidden states, all gradients as one vector) of a step."""
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        output = model(**inputs, output_hidden_states=True)
    output.loss.backward()
    gradients = torch.cat([p.grad.double().flatten() for p in model.parameters() if p.grad is not None])
    return output.loss, output.hidden_states[-1], gradients


def _error(vector, exact):
    return ((vector - exact).norm() / exact.norm()).item()


def assert_trains_as_original(family, prepare, autocast, **inputs):
    """A patched model's loss has the original's dtype; its gradients and those of the original are equally far from
    those of the same numbers in float64."""
    kind = next(iter(TINY_MODELS[family]))
    reference = prepare(model_of(family, kind))
    exact, model = copy.deepcopy(reference).double(), copy.deepcopy(reference)
    exact.config._experts_implementation = "eager"  # grouped GEMMs know no float64
    patch(family, model, rope=False)
    ours, theirs = _trained(model, autocast, **inputs), _trained(reference, autocast, **inputs)
    true = _trained(exact, False, **{name: t.double() if t.is_floating_point() else t for name, t in inputs.items()})
    assert [t.dtype for t in ours] == [t.dtype for t in theirs]
    assert _error(ours[2], true[2]) <= 1.1 * _error(theirs[2], true[2])
    assert_close(ours[0], theirs[0], 2.0**-8)


@pytest.mark.parametrize("family", "llama qwen3 gemma2 phi3 olmo2 exaone4 mistral mixtral".split())
def test_float_embeddings_beside_16_bit_weights(family):
    """A residual stream in float32, as embeddings that a caller makes in float32 give it."""
    labels = torch.arange(20).view(2, 10)
    embeds = torch.randn(2, 10, 64, generator=torch.Generator().manual_seed(0))
    assert_trains_as_original(family, lambda m: m.bfloat16(), True, inputs_embeds=embeds, labels=labels)


@pytest.mark.parametrize("family", ["llama", "exaone4", "glm4"])
def test_float_norms_in_a_16_bit_model(family):
    """The norms' weights promote: hidden states, and EXAONE 4's and GLM-4's residual stream, are float32 after them."""
    ids = torch.arange(3, 23).view(2, 10)

    def prepare(model):
        model.bfloat16()
        for name, module in model.named_modules():
            if "norm" in name:
                module.float()
        return model

    assert_trains_as_original(family, prepare, True, input_ids=ids, labels=ids)


@pytest.mark.parametrize(
    "model,name,options",
    [
        ("falcon_h1", "FalconH1RMSNormGated", dict(n_groups=2)),
        ("falcon_h1", "FalconH1RMSNormGated", dict(n_groups=2, norm_before_gate=False)),
        ("mamba2", "MambaRMSNormGated", dict(group_size=16)),
    ],
)
def test_options_of_gated_norms(model, name, options):
    cls = getattr(importlib.import_module(f"transformers.models.{model}.modeling_{model}"), name)
    part = find(cls)
    if part is None or not options.keys() <= inspect.signature(cls).parameters.keys():
        pytest.skip("another version's")
    torch.manual_seed(0)
    module = cls(64, eps=0.03, **options)
    nn.init.normal_(module.weight)
    replaced = functools.partial(with_part, part=GATED_RMS_NORM.load(part.targets[0]))
    check(module, replaced, "cpu")
    x, without_gate = torch.randn(2, 3, 64), replaced(copy.deepcopy(module))
    for arguments in ((x,), (x, None)):
        assert torch.equal(without_gate(*arguments), module(*arguments))
