"""Experts of a mixture: one operator where transformers' default forward would run, and transformers' own elsewhere.

test_families.py compares the models' losses, gradients, router losses and outputs; this, when they are replaced.
"""

import copy
import importlib.util

import pytest
import torch
import transformers
from conftest import TOLERANCE, Ran, assert_close, run
from liger_kernel import memory
from liger_kernel.operators import experts as experts_operator
from liger_kernel.transformers.experts import LigerClampedExperts, LigerGptOssExperts, LigerUngatedExperts
from liger_kernel.transformers.swiglu import LigerExperts
from packaging import version
from shrink import shrunk
from tiny import model_of, text

pytestmark = pytest.mark.skipif(
    version.parse(transformers.__version__) < version.parse("5"),
    reason="transformers 4 has experts in a list, or others",
)
CASES = [  # of those that the installed transformers has
    case
    for case in (
        ("mixtral", "MixtralForCausalLM", LigerExperts),
        ("gpt_oss", "GptOssForCausalLM", LigerGptOssExperts),
        ("deepseek_v4", "DeepseekV4ForCausalLM", LigerClampedExperts),
        ("nemotron_h", "NemotronHForCausalLM", LigerUngatedExperts),
    )
    if importlib.util.find_spec(f"transformers.models.{case[0]}")
]
LAYERS = {"nemotron_h": 1}  # with experts; the others have two


def layers_of(family):
    return LAYERS.get(family, 2)


def experts_of(model):
    return [module for module in model.modules() if isinstance(getattr(module, "down_proj", None), torch.nn.Parameter)]


def weights_of(part):
    return "up_proj" if part is LigerUngatedExperts else "gate_up_proj", "down_proj"


def operator_calls(ran):
    return ran.counts["fused_experts_forward"]


def sums(ran):
    """How often PEFT added an adapter to a weight."""
    return ran.counts["baddbmm"] + ran.counts["baddbmm_"]


def _calls(model, inputs):
    with Ran() as ran:
        output, gradients = run(model, **inputs)
    return operator_calls(ran), output, gradients


def _pair(patched, family, kind, part):
    reference = model_of(family, kind)
    model = copy.deepcopy(reference)
    report = patched(family, model)
    assert [entry.count for entry in report.replaced if entry.by == part.__name__] == [layers_of(family)]
    return model, reference


@pytest.mark.parametrize("family, kind, part", CASES)
def test_the_operator_runs_once_a_layer(patched, family, kind, part):
    model, reference = _pair(patched, family, kind, part)
    assert _calls(model, text())[0] == layers_of(family) and _calls(reference, text())[0] == 0


@pytest.mark.parametrize("classes", [True, False], ids=["classes", "a model"])
def test_experts_that_keep_the_name_of_their_class(patched, classes):
    """By it versions of transformers 5 find the experts of GPT-OSS that they quantise to MXFP4, in a model that has no
    weights yet. A printed model shows that they are replaced."""
    model = None if classes else model_of("gpt_oss", "GptOssForCausalLM")
    patched("gpt_oss", model)
    model = model or model_of("gpt_oss", "GptOssForCausalLM")
    experts = [type(module) for module in model.modules() if isinstance(module, LigerGptOssExperts)]
    assert [cls.__name__ for cls in experts] == ["GptOssExperts"] * 2
    assert "(experts): LigerGptOssExperts(" in str(model)
    again = patched("gpt_oss", model)
    assert "LigerGptOssExperts" in {entry.by for entry in again.replaced}


def test_experts_of_another_width(patched):
    """Those of Nemotron 3 Super take projections of the hidden states. Patched classes replace the activation that
    experts hold, too, when a model is there."""
    config = shrunk("nemotron_h")
    config.moe_latent_size = 24
    reference = model_of("nemotron_h", "NemotronHForCausalLM", copy.deepcopy(config))
    patched("nemotron_h")
    model = model_of("nemotron_h", "NemotronHForCausalLM", config)
    assert experts_of(model)[0].up_proj.shape[-1] == 24
    assert type(experts_of(model)[0].act_fn).__name__ == "LigerReLUSquared"
    calls, output, gradients = _calls(model, text())
    expected, expected_gradients = run(reference, **text())
    assert calls == 1
    assert_close(output.loss, expected.loss)
    assert gradients.keys() == expected_gradients.keys()
    for name, gradient in expected_gradients.items():
        assert_close(gradients[name], gradient)


def test_an_activation_with_a_hook_keeps_the_forward(patched):
    model, reference = _pair(patched, "nemotron_h", "NemotronHForCausalLM", LigerUngatedExperts)
    seen = []
    experts_of(model)[0].act_fn.register_forward_hook(lambda *_: seen.append(1))
    assert _calls(model, text())[0] == 0 and seen
    assert_close(model(**text()).loss, reference(**text()).loss)


def test_weights_of_all_experts():
    """As routers of transformers 5.0.0 give them: those of the chosen experts count."""
    torch.manual_seed(0)
    experts = LigerExperts(transformers.MixtralConfig(hidden_size=16, intermediate_size=8, num_local_experts=4))
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter)
    x, index = torch.randn(6, 16), torch.stack([torch.randperm(4)[:2] for _ in range(6)])
    weights = torch.rand(6, 4, requires_grad=True)
    exact = weights.detach().double().requires_grad_()
    gate_up, down = experts.gate_up_proj.double(), experts.down_proj.double()
    rows = []
    for t in range(6):
        y = torch.zeros(16, dtype=torch.float64)
        for e in index[t]:
            gate, up = (gate_up[e] @ x[t].double()).chunk(2)
            y = y + exact[t, e] * (down[e] @ (torch.nn.functional.silu(gate) * up))
        rows.append(y)
    expected, found = torch.stack(rows), experts(x, index, weights)
    assert_close(found.double(), expected)
    found.sum().backward()
    expected.sum().backward()
    assert_close(weights.grad.double(), exact.grad)


@pytest.mark.parametrize("family, kind, part", CASES)
def test_another_implementation_is_kept(patched, family, kind, part):
    """Of a choice before the patch the report says so; one that is made later counts from the next forward on."""
    model, reference = _pair(patched, family, kind, part)
    for m in (model, reference):
        m.set_experts_implementation("batched_mm")
    calls, output, _ = _calls(model, text())
    assert calls == 0
    assert_close(output.loss, reference(**text()).loss)
    for name in ("eager", "grouped_mm"):
        model.set_experts_implementation(name)
        assert _calls(model, text())[0] == layers_of(family)

    report = patched(family, reference)
    assert "experts_implementation is 'batched_mm'" in str(report)
    assert not any(isinstance(module, part) for module in reference.modules())


@pytest.mark.parametrize("family, kind, part", CASES)
def test_experts_on_several_ranks(patched, family, kind, part):
    """An id of one past the last stands for experts of other ranks, with a weight of 0: the operator leaves it out.

    transformers marks such modules from 5.19 on. test_expert_parallel.py runs them on two ranks.
    """
    model, reference = _pair(patched, family, kind, part)
    for m in (model, reference):
        for module in m.modules():
            if hasattr(module, "_is_expert_parallel"):
                module._is_expert_parallel = True
    ours, theirs = (experts_of(m)[0] for m in (model, reference))
    x, weights, index = torch.randn(16, 64), torch.rand(16, 2), torch.rand(16, 4).topk(2).indices
    index[::3, 0] = index[5] = len(ours.down_proj)
    weights[index == len(ours.down_proj)] = 0
    with Ran() as ran:
        y = ours(x, index, weights)
    assert operator_calls(ran) == 1
    assert_close(y, theirs(x, index, weights))


def _adapted(model, *names):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_parameters=[f"experts.{name}" for name in names], r=4, lora_alpha=6)
    model = peft.get_peft_model(model, config)
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(std=0.1)
    return model


@pytest.mark.parametrize("family, kind, part", CASES)
@pytest.mark.parametrize("first", ["patch", "peft"])
@pytest.mark.parametrize("both", [True, False])
def test_lora_on_the_experts(patched, family, kind, part, first, both):
    """Rows are multiplied by A and B; PEFT's own layer adds them to the weights. Two active adapters stay PEFT's."""
    model, names = model_of(family, kind), weights_of(part)[0 if both else 1 :]
    reference = _adapted(copy.deepcopy(model), *names)
    if first == "patch":
        patched(family, model)
        model = _adapted(model, *names)
    else:
        model = _adapted(model, *names)
        patched(family, model.get_base_model())
    for expected_sums in (0, None):
        with Ran() as ran:
            output, gradients = run(model, **text())
        expected, expected_gradients = run(reference, **text())
        assert operator_calls(ran) == layers_of(family) and (expected_sums is None or sums(ran) == 0)
        assert_close(output.loss, expected.loss)
        assert gradients.keys() == expected_gradients.keys() and len(gradients) >= 2 * layers_of(family) * len(names)
        for name, gradient in expected_gradients.items():
            assert_close(gradients[name], gradient, 4 * TOLERANCE)
        for m in (model, reference):
            torch.manual_seed(2)
            if "second" not in m.peft_config:
                m.add_adapter("second", m.peft_config["default"])
            m.base_model.set_adapter(["default", "second"])
    with model.disable_adapter(), reference.disable_adapter():
        assert_close(model(**text()).loss, reference(**text()).loss)


@pytest.mark.parametrize("family, kind, part", CASES)
def test_lora_in_bfloat16_is_as_exact_as_pefts(patched, family, kind, part):
    """The error of the result and of every gradient against float64's is at most 1.1 of PEFT's."""
    model = model_of(family, kind)
    reference, model = (_adapted(m, *weights_of(part)) for m in (copy.deepcopy(model), model))
    report = patched(family, model.get_base_model())
    assert [entry.count for entry in report.replaced if entry.by == "fused_experts"] == [2 * layers_of(family)]
    ours, theirs = (next(x for x in m.modules() if type(x).__name__ == "ParamWrapper") for m in (model, reference))
    torch.manual_seed(0)
    x, weights, index = torch.randn(256, 64), torch.rand(256, 2), torch.rand(256, 4).topk(2).indices
    exact = copy.deepcopy(theirs).double()
    exact.get_base_layer().config._experts_implementation = "eager"  # the default has no float64
    results = []
    for module, dtype in ((exact, torch.float64), (theirs, torch.bfloat16), (ours, torch.bfloat16)):
        module.to(dtype)
        values = [t.bfloat16().to(dtype).requires_grad_() for t in (x, weights)]
        own, given = (dict(m.named_parameters()) for m in (module, exact))  # PEFT changes their order at each call
        for name in own:
            own[name].data.copy_(given[name].data.bfloat16())
        with Ran() as ran:
            y = module(values[0], index, values[1])
        assert (sums(ran) == 0) == (module is ours)
        y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).bfloat16().to(dtype))
        trained = [own[name].grad for name in sorted(own) if own[name].requires_grad]
        assert len(trained) == 4
        results.append([y.detach(), *(v.grad for v in values), *trained])
    for expected, original, mine in zip(*results, strict=True):
        errors = [(value.double() - expected).square().mean().sqrt() for value in (original, mine)]
        assert errors[1] <= 1.1 * errors[0], errors


def test_a_sharded_or_quantised_weight_keeps_the_forward(patched):
    class Packed(torch.Tensor):
        pass

    model, reference = _pair(patched, *CASES[0])
    for m in (model, reference):
        for module in m.modules():
            if hasattr(module, "gate_up_proj"):
                module.gate_up_proj = torch.nn.Parameter(module.gate_up_proj.detach().as_subclass(Packed))
    assert _calls(model, text())[0] == 0
    assert_close(model(**text()).loss.as_subclass(torch.Tensor), reference(**text()).loss.as_subclass(torch.Tensor))


@pytest.mark.parametrize("family, kind, part", CASES)
@pytest.mark.parametrize("autocast", [True, False])
def test_bfloat16_is_as_exact_as_the_original(patched, family, kind, part, autocast):
    """The error of the result and of every gradient against float64's is at most 1.1 of the original's.

    Under autocast of eager's, which is autocast as any other matrix product is; grouped_mm stays in float32 there. The
    result is then that of a product too: rounded to bfloat16, and biases with it, which eager adds in float32.
    """
    torch.manual_seed(0)
    model, reference = _pair(patched, family, kind, part)
    ours, theirs = (experts_of(m)[0] for m in (model, reference))
    x, weights = torch.randn(64, 64), torch.rand(64, 2)
    index = torch.rand(64, 4).topk(2).indices
    exact = copy.deepcopy(theirs).double()
    exact.config._experts_implementation = "eager"  # the default has no float64
    if autocast:
        theirs.config._experts_implementation = "eager"
    results = []
    for module, dtype in ((exact, torch.float64), (theirs, torch.bfloat16), (ours, torch.bfloat16)):
        kept = torch.float32 if autocast and dtype != torch.float64 else dtype
        module.to(kept)
        values = [x.bfloat16().to(kept).requires_grad_(), weights.bfloat16().to(kept).requires_grad_()]
        for own, given in zip(module.parameters(), exact.parameters()):
            own.data.copy_(given.data.bfloat16())
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast and dtype != torch.float64):
            y = module(values[0], index, values[1])
        y.backward(torch.ones_like(y))
        results.append([y.detach(), *(v.grad for v in values), *(p.grad for p in module.parameters())])
    for expected, original, mine in zip(*results, strict=True):
        assert mine.dtype == original.dtype
        errors = [(value.double() - expected).square().mean().sqrt() for value in (original, mine)]
        rounding = 2.0**-9 * expected.square().mean().sqrt() if autocast else 0.0
        assert errors[1] <= 1.1 * errors[0] + rounding, errors


@pytest.fixture
def recomputed(monkeypatch):
    """Whether each call of the operator leaves gate and up to backward."""
    found, original = [], experts_operator.fused_experts

    def call(*args, **options):
        found.append(options["recompute"])
        return original(*args, **options)

    monkeypatch.setattr(experts_operator, "fused_experts", call)
    return found


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_layers_make_gate_and_up_twice_at_most(reentrant, patched, recomputed):
    """In the first forward of reentrant checkpointing, which keeps nothing, it does not matter."""
    model, reference = _pair(patched, *CASES[0])
    run(model, **text())
    assert recomputed == [True, True]
    del recomputed[:]
    for each in (reference, model):  # transformers' loss of the balance has no gradient under the reentrant one
        each.gradient_checkpointing_enable({"use_reentrant": reentrant})
    expected, gradients = run(reference.train(), **text())
    output, found = run(model.train(), **text())
    assert recomputed[-2:] == [False, False] and len(recomputed) == 4
    torch.testing.assert_close(output.loss, expected.loss, rtol=TOLERANCE, atol=0)
    for name, gradient in gradients.items():
        assert_close(found[name], gradient)


def test_offloaded_tensors_do_without_gate_and_up(patched, recomputed):
    model, _ = _pair(patched, *CASES[0])
    with torch.autograd.graph.save_on_cpu():
        run(model, **text())
    assert recomputed == [True, True]


def test_layers_that_keep_everything_keep_gate_and_up(patched, recomputed):
    model, reference = _pair(patched, *CASES[0])
    gradients = run(reference, **text())[1]
    for level, expected in (("all", False), ("cheap", True)):
        del recomputed[:]
        kept = memory.keep(model, level)
        found = run(model.train(), **text())[1]
        assert recomputed == [expected] * 2
        for name, gradient in gradients.items():
            assert_close(found[name], gradient)
        kept.undo()
    run(model, **text())
    assert recomputed[-2:] == [True, True]
