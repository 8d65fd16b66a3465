"""VeOmni's kernels of the backend `liger_kernel`, which is its default on a GPU, on this package."""

import functools

import pytest
import torch
import veomni
from torch import nn
from torch.nn import functional as F
from veomni.ops.config.registry import _import_entry, get_op, list_ops
from veomni.ops.kernel_registry import KERNEL_REGISTRY

TOLERANCE = 2e-5  # of float32, relative to the largest number: sums in another order


def close(ours, expected):
    torch.testing.assert_close(ours, expected, rtol=0, atol=TOLERANCE * max(1, expected.abs().max().item()))


def test_all_of_its_names_are_there():
    entries = [op.backends["liger_kernel"] for op in list_ops() if op.backends.get("liger_kernel") is not None]
    assert len(entries) >= 3
    for entry in entries:
        assert callable(_import_entry(entry.entry))
    kernels = [found["liger_kernel"] for found in KERNEL_REGISTRY._specs.values() if "liger_kernel" in found]
    assert len(kernels) >= 3
    for kernel in kernels:
        assert callable(kernel.factory())


def same_gradients(ours, expected, *tensors):
    results = []
    for function in (ours, expected):
        inputs = [t.clone().requires_grad_() for t in tensors]
        y = function(*inputs)
        y = torch.cat([t.flatten() for t in y]) if isinstance(y, tuple) else y
        upstream = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
        results.append([y, *torch.autograd.grad(y, inputs, upstream)])
    for a, b in zip(*results, strict=True):
        close(a, b)


def test_norm():
    from veomni.ops.liger import _liger_rms_norm_factory

    kernel = _liger_rms_norm_factory()
    same_gradients(
        lambda x, w: kernel(x, w, 1e-5),
        lambda x, w: F.rms_norm(x, w.shape, w, 1e-5),
        torch.randn(2, 5, 24),
        torch.randn(24),
    )


def test_rotary():
    rotate = _import_entry(get_op("rotary_pos_emb").backends["liger_kernel"].entry)
    angles = torch.rand(1, 7, 8).repeat(1, 1, 2)
    cos, sin = angles.cos(), angles.sin()
    half = lambda t: torch.cat((-t[..., 8:], t[..., :8]), -1)
    turned = lambda t: t * cos[:, None] + half(t) * sin[:, None]
    same_gradients(
        lambda q, k: rotate(q, k, cos, sin),
        lambda q, k: (turned(q), turned(k)),
        torch.randn(2, 4, 7, 16),
        torch.randn(2, 2, 7, 16),
    )


@pytest.mark.parametrize("ignored", [0, 4])
def test_loss(ignored):
    from veomni.ops.kernels.cross_entropy.liger import fused_liger_kernel_cross_entropy

    labels = torch.randint(50, (11,))
    labels[:ignored] = -100
    loss = functools.partial(fused_liger_kernel_cross_entropy, None, labels, 50)
    head = nn.Linear(16, 50, bias=False).weight.detach()
    same_gradients(
        lambda x, w: loss(hidden_states=x, weights=w)[0],
        lambda x, w: F.cross_entropy(x @ w.T, labels),
        torch.randn(11, 16),
        head,
    )


@pytest.mark.parametrize("clamp", [None, -4.0])
@pytest.mark.parametrize("shifted", [True, False])
def test_distillation_from_the_most_probable_classes(clamp, shifted):
    """All five results of VeOmni's function, and the gradients of the first three."""
    from liger_kernel.veomni import patch
    from veomni.ops.kernels import cross_entropy

    g = torch.Generator().manual_seed(3)
    hidden, weight = torch.randn(2, 9, 16, generator=g), torch.randn(50, 16, generator=g) / 2
    teacher = torch.randn(2, 9, 50, generator=g).log_softmax(-1)
    logp, ids = teacher.topk(6, -1)
    ids[0, 2], logp[0, 2] = 7, 0.0  # as verl pads: one class six times, with all of the mass each
    labels = torch.randint(0, 50, (2, 9), generator=g)
    labels[0, :3] = -100
    options = dict(chunk_size=4, temperature=0.7, log_prob_min_clamp=clamp)
    if shifted:
        options["shift_labels"] = labels
    original, report = cross_entropy.chunk_topk_distill_function, patch()
    try:
        results = []
        for function in (cross_entropy.chunk_topk_distill_function, original):
            leaves = [t.clone().requires_grad_() for t in (hidden, weight)]
            found = function(*leaves, labels, ids, logp, **options)
            upstream = [torch.randn(labels.shape, generator=torch.Generator().manual_seed(i)) for i in range(3)]
            results.append((*found, *torch.autograd.grad(found[:3], leaves, upstream)))
            assert function is original or not any(t.requires_grad for t in found[3:])
        assert cross_entropy.chunk_topk_distill_function is not original
    finally:
        report.undo()
    assert cross_entropy.chunk_topk_distill_function is original
    for ours, theirs in zip(*results, strict=True):
        close(ours, theirs)


def test_benchmarks_time_the_same_loss(timed_loss):
    """What benchmarks/bench.py takes from VeOmni, without the rest of it, has our results and gradients."""
    for ours, theirs in timed_loss("veomni", veomni, lambda rivals, folder: rivals.veomni_topk_loss(folder)):
        close(ours, theirs)
