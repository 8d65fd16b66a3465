"""Router replay over two processes: DDP, FSDP2, and experts that transformers spreads, each with the ids of its own
tokens. Loss and gradients are those of one process that replays the whole batch."""

import copy
import functools
import itertools
import pathlib
import sys

import pytest
import torch
import transformers
from conftest import assert_close
from liger_kernel import routing
from liger_kernel._routing.routers import routers_of
from liger_kernel.operators.router import Replayable
from liger_kernel.transformers.patching.apply import patch
from packaging import version
from test_distributed import RANKS, fsdp2, gradients_of, of_transformers
from test_routing import other_ids
from tiny import model_of, text
from torch import nn

sys.path.append(str(pathlib.Path(__file__).parents[1]))
from ranks import each_on_ranks  # noqa: E402

pytestmark = pytest.mark.skipif(
    version.parse(transformers.__version__) < version.parse("5.22"), reason="transformers spreads experts since 5.22"
)
ROWS, LENGTH = 4, 10
#: how -> (what makes a model one over the ranks, whether each rank has its own rows)
MODES = {
    "ddp": (nn.parallel.DistributedDataParallel, True),
    "fsdp2": (fsdp2, True),
    "fsdp2, checkpointed": (functools.partial(fsdp2, checkpointed=True), True),
    "experts, all to all": (
        functools.partial(of_transformers, fsdp_size=2, ep_size=2, ep_implementation="all_to_all"), True,
    ),
    "experts, shared batch": (
        functools.partial(of_transformers, tp_size=2, ep_size=2, ep_implementation="all_reduce"), False,
    ),
}  # fmt: skip
KINDS = {"qwen3_moe": "Qwen3MoeForCausalLM", "gpt_oss": "GptOssForCausalLM"}


def step(model, ids, inputs, scale=1.0):
    """The loss and every gradient of a step whose backward pass runs behind the context."""
    with routing.replay(model, ids):
        loss = model(**inputs, output_router_logits=False).loss * scale
    loss.backward()
    return loss.detach(), gradients_of(model)


def compare(rank, family, mode, patched):
    wrap, own_rows = MODES[mode]
    reference, inputs = model_of(family, KINDS[family]).train(), text(rows=ROWS)
    inputs["num_items_in_batch"] = (inputs["labels"][:, 1:] != -100).sum()
    ids = other_ids(ROWS * LENGTH, 2, 4, 2, dtype=torch.uint8)
    expected, wanted = step(copy.deepcopy(reference), ids, inputs)
    live = copy.deepcopy(reference)(**inputs, output_router_logits=False).loss
    assert not torch.equal(live, expected)
    model, scale = copy.deepcopy(reference), 1.0
    if patched and not mode.startswith("experts"):
        patch(family, model)
    model = wrap(model)
    if patched and mode.startswith("experts"):  # whose weights are loaded into another model
        patch(family, model)
    kinds = {isinstance(router.module, Replayable) for router in routers_of(model).each}
    assert kinds == {patched}
    if own_rows:
        rows = slice(rank * ROWS // RANKS, (rank + 1) * ROWS // RANKS)
        inputs = {name: value[rows] if value.dim() else value for name, value in inputs.items()}
        ids, scale = ids.view(ROWS, LENGTH, 2, 2)[rows], float(RANKS)
    loss, gradients = step(model, ids, inputs, scale)
    if own_rows:
        torch.distributed.all_reduce(loss)
        loss /= RANKS
    assert_close(loss, expected)
    assert gradients.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert_close(gradients[name], gradient)


@pytest.fixture(scope="module")
def found():
    return each_on_ranks(list(itertools.product([compare], KINDS, MODES, (False, True))))


@pytest.mark.parametrize("patched", (False, True), ids=("plain", "patched"))
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", KINDS)
def test_ranks(found, family, mode, patched):
    assert not found[compare, family, mode, patched], found[compare, family, mode, patched]
