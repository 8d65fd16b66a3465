"""Routers of transformers that are replaced, each against the original; test_families.py compares whole models."""

import copy
import importlib
import itertools
import pathlib
import re
import types

import pytest
import torch
import transformers
from collect_sources import ROUTER, ROUTER_BRANCHES, ROUTER_CONFIG, WIDTH, made
from conftest import Ran, assert_close, assert_rounded_alike, run
from liger_kernel.operators.router import LigerInkling2Router, liger_load_balancing_loss_func
from liger_kernel.transformers.patching.apply import ReplacedModule
from liger_kernel.transformers.patching.by_source import original_class, swaps_of
from liger_kernel.transformers.patching.formulas import find
from liger_kernel.transformers.patching.part import unfit
from liger_kernel.transformers.patching.place import Edits, replace_class
from packaging import version
from tiny import model_of, text

pytestmark = pytest.mark.skipif(
    version.parse(transformers.__version__) < version.parse("5"), reason="transformers 4 has no routers of known source"
)
MODELS = pathlib.Path(transformers.__file__).parent / "models"
TOKENS = 64


def router_calls(ran):
    """How often the operators of a router ran."""
    return ran.counts["route_forward"] + ran.counts["expert_load_forward"]


def known_routers():
    """(place, class) of the routers of the installed transformers whose source is known, one of each source."""
    found = {}
    for path in sorted(MODELS.glob("*/modeling_*.py")):
        for name in re.findall(r"^class (\w+)\(", path.read_text(), re.M):
            if ROUTER.search(name):
                cls = getattr(importlib.import_module(f"transformers.models.{path.parent.name}.{path.stem}"), name)
                if (part := find(cls)) is not None:
                    found.setdefault(part.targets, (f"{path.parent.name}.{name}", cls))
    return found.values()


KNOWN = [pytest.param(cls, id=place) for place, cls in known_routers()]


def pairs(cls):
    """A replaced router and the original, for each branch that the class may take."""
    for values in itertools.product(*ROUTER_BRANCHES.values()):
        yield pair(cls, **dict(zip(ROUTER_BRANCHES, values)))


def pair(cls, **config):
    original = made(cls, types.SimpleNamespace(**ROUTER_CONFIG | config))
    torch.manual_seed(0)
    for tensor in (*original.parameters(), *original.buffers()):
        tensor.data.copy_(torch.randn_like(tensor) * 0.2)
    router, (swap,) = copy.deepcopy(original), swaps_of(cls, cls.__name__)
    replace_class(router, ReplacedModule(swap.load(find(cls).targets[0])), Edits())
    return router, original


def routed(router, x):
    """Logits, and the weights of a token in a row for all experts, with the number of operators that ran."""
    extra = [torch.linspace(-0.3, 0.3, 8)] if takes_bias(router) else []
    with Ran() as ran:
        logits, weights, index = router(x, *extra)
    dense = torch.zeros(len(weights), 8, dtype=weights.dtype).scatter(1, index, weights)
    return logits, dense, router_calls(ran)


def takes_bias(router):
    return original_class(router).forward.__code__.co_argcount == 3


def without_ties(logits):
    return (logits.float().sort(-1).values.diff(dim=-1) > 0).all(-1)


def test_some_are_known():
    assert len(KNOWN) >= 5


@pytest.mark.parametrize("cls", KNOWN)
def test_router(cls):
    """Results and gradients, in float32."""
    for router, original in pairs(cls):
        x = torch.randn(TOKENS, WIDTH)
        results = []
        for r in (router, original):
            inputs = x.clone().requires_grad_()
            logits, dense, calls = routed(r, inputs)
            assert calls == (r is router)
            (dense * torch.linspace(-1, 1, 8)).sum().backward()
            results.append((logits, dense, inputs.grad, r.weight.grad))
        for ours, theirs in zip(*results):
            assert ours.dtype == theirs.dtype
            assert_close(ours, theirs)
        assert torch.equal(results[0][1] > 0, results[1][1] > 0)


FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("cls", KNOWN)
def test_every_combination_of_dtypes(cls):
    """Inputs, parameters and autocast: the same dtypes, experts and roundings as the original's, where it runs."""
    for (router, original), of_x, of_parameters, autocast in itertools.product(
        pairs(cls), FLOATS, FLOATS, (None, *FLOATS[1:])
    ):
        x = torch.randn(TOKENS, WIDTH).to(of_x)
        with torch.autocast("cpu", autocast, enabled=autocast is not None):
            try:
                expected, wanted, _ = routed(original.to(of_parameters), x)
            except RuntimeError:  # a product of two dtypes
                continue
            logits, dense, _ = routed(router.to(of_parameters), x)
        assert torch.equal(logits, expected) and logits.dtype == expected.dtype and dense.dtype == wanted.dtype
        clear = without_ties(logits)
        assert clear.sum() > 10
        assert torch.equal(dense[clear] > 0, wanted[clear] > 0)
        assert_rounded_alike(*(t[clear].to(torch.float16) for t in (dense, wanted)), 0.02)


def test_groups_that_a_router_may_lack():
    """A.X-K2's light models choose among all experts."""
    axk2 = pytest.importorskip("transformers.models.axk2.modeling_axk2", reason="this transformers has no A.X-K2")
    router, original = pair(axk2.AXK2TopkRouter, n_group=None, norm_topk_prob=True)
    x = torch.randn(TOKENS, WIDTH)
    (logits, dense, calls), (expected, wanted, _) = routed(router, x), routed(original, x)
    assert calls == 1 and torch.equal(logits, expected)
    assert_close(dense, wanted)


def test_scores_that_are_no_sigmoid_are_left_alone():
    inkling2 = pytest.importorskip("transformers.models.inkling2.modeling_inkling2", reason="it has no Inkling 2")
    for scores, reason in (("sigmoid", None), ("sqrtsoftplus", "its scores are SqrtSoftplusActivation, not Sigmoid")):
        config = types.SimpleNamespace(**ROUTER_CONFIG | {"scoring_func": scores})
        assert unfit(inkling2.Inkling2TopKRouter(config), LigerInkling2Router, ()) == reason


@pytest.mark.parametrize("cls", KNOWN[:3])
def test_other_dtypes_keep_the_original(cls):
    router, original = next(pairs(cls))
    x = torch.randn(TOKENS, WIDTH, dtype=torch.float64)
    if not takes_bias(router):
        logits, dense, calls = routed(router.double(), x)
        assert calls == 0
        assert torch.equal(dense, routed(original.double(), x)[1])


def test_the_switch(patched):
    """Routers and their loss are replaced together, and only where that is asked for."""
    reference = model_of("mixtral", "MixtralForCausalLM")
    for on in (True, False):
        model = copy.deepcopy(reference)
        report = patched("mixtral", model, router=on)
        replaced = {entry.name for entry in report.replaced if entry.switch == "router"}
        assert replaced == ({"MixtralTopKRouter", "load_balancing_loss_func"} if on else set())
        with Ran() as ran:
            output, gradients = run(model, **text(), output_router_logits=True)
        assert router_calls(ran) == (2 * model.config.num_hidden_layers if on else 0)
        expected, wanted = run(reference, **text(), output_router_logits=True)
        assert_close(output.aux_loss, expected.aux_loss)
        for name, gradient in wanted.items():
            assert_close(gradients[name], gradient)


def test_what_the_loss_does_not_take():
    """What is no tuple has no loss, as in transformers; what the operator does not take is left to the original."""
    logits = torch.randn(6, 4)
    assert liger_load_balancing_loss_func(None) == liger_load_balancing_loss_func([logits]) == 0
    for arguments in (((logits.double(),), 4), ((logits,), 5), ((logits,), 4, 2, torch.full((6,), 0.5))):
        assert liger_load_balancing_loss_func(*arguments) is NotImplemented
