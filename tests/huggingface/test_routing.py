"""Router replay: every class of routers of transformers, whole models, and what runs a router again.

Record, then replay with the same weights, gives every bit of loss and gradients. What the chosen experts' weights and
gradients are is compared with plain torch and with finite differences in float64.
"""

import copy
import functools

import every_type
import pytest
import router_classes
import torch
import transformers
from conftest import assert_close
from liger_kernel import memory, routing
from liger_kernel._routing.routers import routers_of
from liger_kernel.operators.router import Replayable
from liger_kernel.transformers.monkey_patch import _apply_liger_kernel_to_instance
from liger_kernel.transformers.patching.apply import ReplacedModule
from liger_kernel.transformers.patching.by_source import swaps_of
from liger_kernel.transformers.patching.formulas import find
from liger_kernel.transformers.patching.place import Edits, replace_class
from packaging import version
from router_classes import EXPERTS, TOP_K, WIDTH
from tiny import model_of, text
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.skipif(
    version.parse(transformers.__version__) < version.parse("5.19"), reason="the configurations have other fields"
)
SOME = {"Qwen3MoeTopKRouter", "DeepseekV3TopkRouter", "DeepseekV2TopkRouter", "GptOssTopKRouter", "Llama4Router"}
SOME |= {
    "ZayaRouter",
    "InklingTopkRouter",
    "Gemma4TextRouter",
    "DbrxFFN",
    "LongcatFlashTopkRouter",
    "Lfm2MoeTopKRouter",
}
CLASSES = [
    pytest.param(*place, id=place[1], marks=() if place[1] in SOME else pytest.mark.full())
    for place in router_classes.names()
    if not router_classes.why_not(place[1]) and "HashRouter" not in place[1]
]
KINDS = (
    "afmoe aria_text axk1 cohere2_moe deepseek_v2 deepseek_v3 dots1 ernie4_5_moe exaone_moe flex_olmo flint glm4_moe "
    "gpt_oss granitemoe hy_v3 inkling_text jamba kimi_linear lfm2_moe llama4_text longcat_flash minimax minimax_m2 "
    "mistral4 mixtral nemotron_h olmoe qwen2_moe qwen3_moe qwen3_next qwen3_vl_moe solar_open zaya"
).split()
SOME_KINDS = ("qwen3_moe", "deepseek_v3", "gpt_oss", "llama4_text", "zaya")


def other_ids(rows, layers=1, experts=EXPERTS, k=TOP_K, seed=3, dtype=torch.long):
    """Different experts in any order, as no router has chosen them."""
    made = torch.rand(rows, layers, experts, generator=torch.Generator().manual_seed(seed))
    return made.argsort(-1)[..., :k].to(dtype)


def outputs(model, x):
    """What a router returns, and the gradients of the sum of its squares."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    results = model(x)
    # Llama 4's scores of experts that are not chosen are σ(-inf).
    sum((r.float() ** 2).sum() for r in results if r.requires_grad).backward()
    return [*results, x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]


def same(actual, expected):
    return len(actual) == len(expected) and all(torch.equal(a, b) for a, b in zip(actual, expected))


def replaced(model, cls):
    """A copy whose router is this library's, or None."""
    if (formula := find(cls)) is None:
        return None
    twin = copy.deepcopy(model)
    (swap,) = swaps_of(cls, cls.__name__)
    replace_class(twin.router, ReplacedModule(swap.load(formula.targets[0])), Edits())
    return twin


@pytest.mark.parametrize("family, name", CLASSES)
def test_class(family, name):
    """As it is and replaced: the same choice gives the same bits, and another one is taken in its order. Rows that are
    no different experts choose by their own scores. Both ways agree on another choice, and gradients with differences.
    """
    cls = router_classes.class_of(family, name)
    plain = router_classes.alone(cls)
    assert plain is not None, "router_classes.CONFIG lacks what its constructor reads"
    torch.manual_seed(1)
    x = torch.randn(2, 8, WIDTH)
    ids, found = other_ids(16), []
    if name == "Llama4Router":  # whose experts read a score of each expert, in no order
        ids = ids.sort(-1).values
    for model in (plain, replaced(plain, cls)):
        if model is None:
            continue
        live = outputs(model, x)
        with routing.record(model) as recorded:
            assert same(outputs(model, x), live)
        assert recorded.ids.shape == (16, 1, TOP_K)
        for given in (recorded.ids, recorded.ids.long().view(2, 8, 1, TOP_K), torch.full((16, 1, TOP_K), -1)):
            with routing.replay(model, given):
                assert same(outputs(model, x), live)
        wrong = ids.clone()
        wrong[:4], wrong[4:8, 0, 1], wrong[8:, 0, 0] = 0, wrong[4:8, 0, 0], 99
        with routing.replay(model, wrong.to(torch.uint8)):
            assert same(outputs(model, x), live)
        with routing.replay(model, ids.to(torch.uint8)), routing.record(model) as used:
            found.append(outputs(model, x))
        assert torch.equal(used.ids.long(), ids)
        assert not same(found[-1], live)
        assert same(outputs(model, x), live) and not {"forward", "liger_replay"} & vars(model.router).keys()
    for ours, theirs in zip(found[0], found[-1]):
        assert_close(ours, theirs)
    check_differences(plain, x, ids)


def check_differences(model, x, ids):
    """d/dt of Σ weights² along a random direction of the router's parameters, at fixed ids, in float64.

    Some forwards compute in float: the value is rounded to 2^-24 of itself, which the step 2^-8 makes 2^-17; what is
    left of the second order is 2^-16 times a third derivative, which a few factors of a direction's length make large.
    """

    def value():
        with routing.replay(model, ids):
            results = [r for r in model(x) if r.requires_grad]
        weights = [r for r in results if r.shape[-1] == TOP_K] or results
        return sum((r[r.isfinite()].double() ** 2).sum() for r in weights)

    try:
        model, x = model.double(), x.double()
        value()
    except RuntimeError:  # a forward that makes a float of its input alone
        model, x = model.float(), x.float()
    parameters = [p for p in model.parameters() if p.requires_grad]
    model.zero_grad()
    value().backward()
    torch.manual_seed(2)
    directions = [torch.randn_like(p) * 0.1 for p in parameters]
    slope = sum((p.grad * d).sum() for p, d in zip(parameters, directions) if p.grad is not None).double()
    assert slope != 0
    step, sides, kept = 2.0**-8, [], [p.detach().clone() for p in parameters]
    for sign in (1, -1):
        for p, k, d in zip(parameters, kept, directions):
            p.data.copy_(k + sign * step * d)
        sides.append(value().detach())
    torch.testing.assert_close(
        (sides[0] - sides[1]) / (2 * step), slope, rtol=2.0**-8, atol=2.0**-12 * sides[0].abs().item()
    )


def gradients(model):
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def step(model, ids, inside=False, **inputs):
    """The loss and every gradient of a step that replays ids."""
    model.zero_grad()
    with routing.replay(model, ids):
        loss = model(**(inputs or text())).loss
        if inside:
            loss.backward()
    if not inside:
        loss.backward()
    return [loss.detach(), *gradients(model)]


@pytest.mark.parametrize("kind", [pytest.param(k, marks=() if k in SOME_KINDS else pytest.mark.full()) for k in KINDS])
def test_model(kind):
    """As it is and patched: every bit of loss and gradients is that of the model that chooses itself."""
    if kind not in every_type.types():
        pytest.skip("this transformers does not have it")
    model = every_type.model_of(kind)
    for patched in (False, True):
        if patched:
            report = _apply_liger_kernel_to_instance(model=model)
        try:
            loss, wanted, _ = every_type.step(model)
            with routing.record(model) as recorded:
                every_type.step(model)
            ids, found = recorded.ids, routers_of(model)
            assert ids.shape[1] == found.layers and ids.dtype == torch.int16
            routed = [router.layer for router in found.each]
            for given in (ids, ids[:, routed], ids.view(2, -1, *ids.shape[1:])):
                with routing.replay(model, given):
                    again, gradients, _ = every_type.step(model)
                assert torch.equal(again, loss) and gradients.keys() == wanted.keys()
                assert all(torch.equal(gradients[name], wanted[name]) for name in wanted)
            other = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))]
            with routing.replay(model, other), routing.record(model) as used:
                every_type.step(model)
            assert torch.equal(used.ids, other)
        finally:
            if patched and report is not None:
                report.undo()


@pytest.fixture(params=(False, True), ids=("plain", "patched"))
def model(request, patched):
    made = model_of("qwen3_moe", "Qwen3MoeForCausalLM")
    if request.param:
        patched("qwen3_moe", made)
        assert all(isinstance(router.module, Replayable) for router in routers_of(made).each)
    return made


IDS = functools.partial(other_ids, 20, 2, 4, 2)


@pytest.mark.parametrize("reentrant", (False, True))
def test_checkpoints(model, reentrant):
    """Layers that run again in backward have the ids of their forward pass, also where others are replayed since."""
    plain = dict(output_router_logits=False)  # reentrant checkpoints give that loss no gradient
    first, second = IDS(dtype=torch.uint8), IDS(seed=5)

    def of_both():
        """The gradients of one backward pass through two forward passes, each with other ids."""
        model.zero_grad()
        losses = []
        for ids, seed in ((first, 0), (second, 1)):
            with routing.replay(model, ids):
                losses.append(model(**text(seed), **plain).loss)
        sum(losses).backward()
        return gradients(model)

    expected = step(model, first, **text(), **plain)
    accumulated = of_both()
    assert not same(expected, step(model, second, **text(), **plain))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    compared = same if not reentrant else lambda a, b: [assert_close(*pair) for pair in zip(a, b, strict=True)]
    for inside in (False, True):
        assert compared(step(model, first, inside, **text(), **plain), expected)
    assert compared(of_both(), accumulated)


def test_other_checkpoints(model):
    """A function that nobody knows needs backward inside, and says so elsewhere; the next step without ids is free."""
    ids = IDS()
    expected = step(model, ids)
    for layer in model.model.layers:
        own = functools.partial(lambda forward, *args, **kwargs: checkpoint(
            forward, *args, use_reentrant=False, **kwargs), layer.forward)  # fmt: skip
        layer.forward = own
    assert same(step(model, ids, inside=True), expected)
    with pytest.raises(RuntimeError, match=r"layers\.1\.mlp\.gate runs again in backward.*Call backward inside"):
        step(model, ids)
    model(**text()).loss.backward()
    assert not any("liger_replay" in vars(module) for module in model.modules())


def test_layers_that_keep_less(model):
    ids = IDS()
    expected = step(model, ids)
    for level in ("cheap", "input"):
        kept = memory.keep(model, level)
        assert same(step(model, ids), expected)
        kept.undo()
    with routing.replay(model, ids):
        inside = memory.plan(model, text(), budget=1 << 40)
    for plan in (inside, memory.plan(model, text(), budget=1 << 40)):
        assert same(step(model, ids), expected)
        plan.undo()


def test_keyword(model):
    """Calls of the model take ids, with the fused loss of a patched one."""
    ids = IDS()
    expected, live = step(model, ids), model(**text()).loss
    accepting = routing.accept(model)
    model.zero_grad()
    output = model(**text(), routed_experts=ids)
    output.loss.backward()
    assert same([output.loss.detach(), *gradients(model)], expected)
    assert (output.logits is None) == isinstance(routers_of(model).each[0].module, Replayable)
    assert torch.equal(model(**text(), routed_experts=None).loss, live)
    with pytest.raises(ValueError, match="routes 20 tokens"):
        model(**text(), routed_experts=ids[:5])
    assert torch.equal(model(**text()).loss, live)
    accepting.remove()
    assert not any(vars(module).get("liger_replay") for module in model.modules())


def test_auxiliary_loss_is_that_of_live_logits(model):
    """The model's one router has the same logits whatever is chosen, and its loss counts their own top k."""
    live = model(**text(), output_router_logits=True)
    with routing.replay(model, IDS()):
        replayed = model(**text(), output_router_logits=True)
    (logits,) = replayed.router_logits
    assert torch.equal(live.router_logits[0], logits) and torch.equal(live.aux_loss, replayed.aux_loss)
    assert not torch.equal(live.loss, replayed.loss)
    share = torch.nn.functional.one_hot(logits.topk(2).indices, 4).sum(1).float().mean(0)
    assert_close(replayed.aux_loss, 4 * (share * logits.softmax(-1).mean(0)).sum())


def test_lora(model):
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    ids = IDS()
    with routing.replay(adapted, ids), routing.record(adapted) as used:
        adapted(**text()).loss.backward()
    assert torch.equal(used.ids[:, 1].long(), ids[:, 1])


def test_compiled(model):
    """Patched, in one graph; a router's own forward breaks the graph. Nothing is compiled again for other ids."""
    torch._dynamo.reset()
    graphs, counts = [], []
    backend = lambda graph, inputs: graphs.append(graph) or graph.forward
    patched = isinstance(routers_of(model).each[0].module, Replayable)
    compiled = torch.compile(model, backend=backend, fullgraph=patched)
    for seed in (3, 5, 3):
        ids = IDS(seed=seed)
        expected = step(model, ids)  # transformers installs at first what a compiler cannot trace
        actual = step(compiled, ids)
        assert_close(actual[0], expected[0])
        for ours, theirs in zip(actual[1:], expected[1:], strict=True):
            assert_close(ours, theirs)
        counts.append(len(graphs))
    assert counts[1:] == counts[:-1] and (not patched or counts[0] == 1)


def test_ids_in_place(model):
    """Another choice in the same storage, as a CUDA graph reads it."""
    ids, other = IDS(), IDS(seed=5)
    expected = [step(model, each) for each in (ids, other)]
    static = ids.clone()
    for each, wanted in zip((ids, other), expected):
        static.copy_(each)
        assert same(step(model, static), wanted)
    with routing.replay(model, static), torch.no_grad():
        second = model(**text()).loss
        static.copy_(ids)
        first = model(**text()).loss
    assert torch.equal(first, expected[0][0]) and torch.equal(second, expected[1][0])


def test_what_does_not_fit(model):
    with pytest.raises(ValueError, match="ids are those of 3 layers, and the model has 2, of which 1 have a router"):
        routing.replay(model, torch.zeros(20, 3, 2, dtype=torch.long)).__enter__()
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.gate chooses 2 experts, and ids have 3"):
        routing.replay(model, torch.zeros(20, 2, 3, dtype=torch.long)).__enter__()
    with pytest.raises(ValueError, match=r"must be \[tokens, layers, k\]"):
        routing.replay(model, torch.zeros(20, 2, dtype=torch.long)).__enter__()
    with pytest.raises(TypeError, match="ids must be integers"):
        routing.replay(model, torch.zeros(20, 2, 2)).__enter__()
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.gate routes 20 tokens"), routing.replay(model, IDS()[:7]):
        model(**text())
    with pytest.raises(RuntimeError, match="no router has run"), routing.record(model) as recorded:
        recorded.ids  # noqa: B018
    assert not any("liger_replay" in vars(module) or "liger_record" in vars(module) for module in model.modules())


@pytest.mark.parametrize(
    "kind, why", (("phimoe", "sparsemixer"), ("jetmoe", "a router of attention"), ("llama", "has no routers"))
)
def test_what_cannot_be_replayed(kind, why):
    with pytest.raises(ValueError, match=why):
        routing.replay(every_type.model_of(kind), IDS()).__enter__()


def test_own_forward_of_a_patched_router(patched):
    """In float64 and under autocast, where the operator leaves a router to its own forward."""
    reference = model_of("deepseek_v3", "DeepseekV3ForCausalLM")
    reference.set_experts_implementation("eager")  # a grouped product takes no float64
    model, found = copy.deepcopy(reference), routers_of(reference)
    patched("deepseek_v3", model)
    experts = found.each[0].module.weight.shape[0]
    ids = other_ids(20, found.layers, experts, found.each[0].module.top_k)
    for dtype, autocast in ((torch.float64, False), (torch.float32, True)):
        losses = []
        for each in (model.to(dtype), reference.to(dtype)):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast), routing.replay(each, ids):
                with routing.record(each) as used:
                    losses.append(each(**text()).loss.float())
            assert torch.equal(used.ids[:, found.each[0].layer].long(), ids[:, found.each[0].layer])
        assert_close(*losses, 2.0**-7 if autocast else 2.0**-14)  # bfloat16 rounds in other places


@pytest.mark.skipif(
    transformers.__version__ != router_classes.documented()[0], reason="the page is of another transformers"
)
def test_page():
    assert router_classes.table() == router_classes.documented()[1], "router_classes.py --write"
