"""DeepSpeed's ZeRO over two processes: a patched model takes the steps of the plain one, with no more collectives and
no logits.

`make downstream` runs this file, in an environment with DeepSpeed.
"""

import copy
import itertools
import os

import pytest
import test_distributed as distributed
import torch
from test_distributed import each_on_ranks

STAGES = {"zero1": dict(stage=1), "zero2": dict(stage=2), "zero3": dict(stage=3), "zero3_bf16": dict(stage=3)}
STEPS = 4
os.environ["DS_ACCELERATOR"] = distributed.DEVICE


def trained(name, model, rank):
    """(losses of all ranks' tokens, collectives, whether there were logits, the weights at the end)."""
    import deepspeed

    dtype = torch.bfloat16 if name.endswith("bf16") else torch.float32
    config = dict(
        train_micro_batch_size_per_gpu=distributed.ROWS // distributed.RANKS,
        bf16=dict(enabled=dtype == torch.bfloat16),
        zero_optimization=dict(STAGES[name], stage3_param_persistence_threshold=0, stage3_prefetch_bucket_size=0),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-5)
    engine, *_ = deepspeed.initialize(model=model, config=config, optimizer=optimizer, dist_init_required=False)
    inputs, losses, logits = distributed.part(distributed.batch(), rank), [], False
    with distributed.Collectives() as collectives:
        for _ in range(STEPS):
            output = engine(**inputs)
            logits = logits or output.logits is not None
            engine.backward(output.loss * distributed.RANKS)
            engine.step()
            losses.append(output.loss.detach().float())
    losses = torch.stack(losses)
    torch.distributed.all_reduce(losses)
    weights = {}
    for key, parameter in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter], enabled=STAGES[name]["stage"] == 3):
            weights[key] = parameter.detach().float().clone()
    engine.destroy()
    return losses, collectives.count, logits, weights


def compare(rank, family, name):
    reference = distributed.make(family, tie_word_embeddings=family == "gemma2")
    losses, count, logits, weights = trained(name, copy.deepcopy(reference), rank)
    report = distributed.patch(family, reference, strict=True)
    try:
        ours = trained(name, reference, rank)
    finally:
        report.undo()
    assert logits and not ours[2]
    assert 0 < ours[1] <= count
    # Of bf16 each step rounds the weights; of float Adam divides what rounding has left of small gradients.
    bound = 2.0**-6 if name.endswith("bf16") else 2.0**-12
    assert losses[0] - losses[-1] > 0.3
    assert (ours[0] - losses).abs().max() <= bound * losses.max()
    for key, weight in weights.items():
        assert (ours[3][key] - weight).norm() <= 4 * bound * weight.norm(), key


@pytest.fixture(scope="module")
def found():
    return each_on_ranks(list(itertools.product([compare], distributed.FAMILIES, STAGES)))


@pytest.mark.parametrize("name", STAGES)
@pytest.mark.parametrize("family_name", distributed.FAMILIES)
def test_zero(found, family_name, name, record_property):
    record_property("setup", f"{name}, {family_name}, 2 processes")
    record_property("result", f"{STEPS} equal losses and the same parameters, no logits, no more collectives")
    assert not found[compare, family_name, name], found[compare, family_name, name]
