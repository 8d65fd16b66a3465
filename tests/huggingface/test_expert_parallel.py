"""Mixtures whose experts transformers spreads over two processes: whole experts on each rank, which tokens reach by
all-to-all or as one batch that all ranks share, or a part of each expert. The operator runs on each rank, and loss and
gradients are those of the model that is not patched."""

import copy
import functools
import itertools
import pathlib
import sys

import pytest
import transformers
from conftest import Ran, assert_close, run
from liger_kernel.transformers import monkey_patch
from liger_kernel.transformers.patching.apply import patch
from packaging import version
from test_distributed import RANKS, gradients_of, of_transformers
from test_experts import experts_of, operator_calls
from tiny import model_of, text

sys.path.append(str(pathlib.Path(__file__).parents[1]))
from ranks import each_on_ranks  # noqa: E402

pytestmark = pytest.mark.skipif(
    version.parse(transformers.__version__) < version.parse("5.22"), reason="transformers spreads experts since 5.22"
)
#: how -> options of transformers' DistributedConfig.
SPREAD = {
    "parts of experts": dict(tp_size=2),
    "all to all": dict(tp_size=2, ep_size=2, ep_implementation="all_to_all"),
    "all to all, own batches": dict(fsdp_size=2, ep_size=2, ep_implementation="all_to_all"),
    "shared batch": dict(tp_size=2, ep_size=2, ep_implementation="all_reduce"),
    "equal sizes": dict(tp_size=2, ep_size=2, ep_implementation="liger"),
    "equal sizes, own batches": dict(fsdp_size=2, ep_size=2, ep_implementation="liger"),
}
KINDS = {"qwen3_moe": "Qwen3MoeForCausalLM", "gpt_oss": "GptOssForCausalLM", "nemotron_h": "NemotronHForCausalLM"}
CHANGED = {"nemotron_h"}  # its loss is another one once transformers has saved and loaded it, on one rank too
ROWS = 4


def step(model, inputs):
    """The loss, every gradient, and how often the operator ran."""
    with Ran() as ran:
        loss = model(**inputs).loss
    loss.backward()
    return loss.detach(), gradients_of(model), operator_calls(ran)


def compare(rank, family, how, before):
    spread = SPREAD[how]
    reference, inputs = model_of(family, KINDS[family]).train(), text(rows=ROWS)
    expected, expected_gradients = run(copy.deepcopy(reference), **inputs)
    build = functools.partial(of_transformers, **spread)
    if how.endswith("own batches"):
        rows = slice(rank * ROWS // RANKS, (rank + 1) * ROWS // RANKS)
        inputs = {name: value[rows] for name, value in inputs.items()}
    plain_loss, plain_gradients, calls = step(build(copy.deepcopy(reference)), inputs)
    assert calls == 0
    if before:
        report = getattr(monkey_patch, f"apply_liger_kernel_to_{family}")()
        model = build(copy.deepcopy(reference))
    else:
        model = build(copy.deepcopy(reference))
        report = patch(family, model)
    try:
        loss, gradients, calls = step(model, inputs)
    finally:
        report.undo()
    experts = experts_of(model)
    assert calls == len(experts) != 0, f"{calls} calls of the operator for {len(experts)} modules\n{report}"
    assert not report.skipped, report
    assert_close(loss, plain_loss)
    assert gradients.keys() == plain_gradients.keys() == expected_gradients.keys()
    for name, gradient in plain_gradients.items():
        assert_close(gradients[name], gradient)
    if not how.endswith("own batches") and family not in CHANGED:
        assert_close(loss, expected.loss.detach())
    assert step(model, inputs)[2] == (calls if before else 0)  # what was undone runs transformers' forward again


@pytest.fixture(scope="module")
def found():
    return each_on_ranks(list(itertools.product([compare], KINDS, SPREAD, (False, True))))


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("how", SPREAD)
@pytest.mark.parametrize("family", KINDS)
def test_spread_experts(found, family, how, before):
    assert not found[compare, family, how, before], found[compare, family, how, before]
