"""Routers and the load-balancing loss, beyond what every operator promises (tests/cases/route.py): ties, numbers that
are none, the module, and the loss against its definition."""

import math

import pytest
import torch
from cases.route import chosen, reference
from liger_kernel.transformers import LigerRouter
from liger_kernel.transformers.functional import liger_expert_load, liger_load_balancing_loss, liger_route

CLOSE = dict(rtol=2.0**-20, atol=2.0**-24)  # a dozen roundings of 2^-24


@pytest.mark.parametrize("experts", (1, 2, 7, 8, 9, 63, 128, 200, 257, 512, 513, 1031))
@pytest.mark.parametrize("score", ("softmax", "sigmoid", "sqrt_softplus"))
def test_every_number_of_experts(experts, score, device):
    """One expert, all of them, and some, in the order of torch.topk."""
    logits = torch.randn(37, experts, device=device)
    for top_k in {1, min(3, experts), min(experts, 64)}:
        weights, index, counts = liger_route(logits, top_k, score=score)
        values, places = logits.topk(top_k)
        assert torch.equal(index, places) and index.dtype == torch.int64
        exact = reference(logits.double(), None, None, top_k, score=score)[0]
        torch.testing.assert_close(weights.double(), exact, **CLOSE)
        assert torch.equal(counts, places.flatten().bincount(minlength=experts).int())


def test_equal_keys_take_the_lower_number(device):
    logits = torch.zeros(3, 70, device=device)
    logits[1, 40:50] = 1
    logits[2, [3, 69]] = -0.0
    assert liger_route(logits, 4).index.tolist() == [[0, 1, 2, 3], [40, 41, 42, 43], [0, 1, 2, 3]]
    groups = dict(groups=7, kept_groups=3, score="sigmoid")
    index = liger_route(logits[:2], 12, **groups).index
    assert index.tolist() == [[*range(12)], [*range(40, 50), 0, 1]]


def test_groups_that_are_out_are_never_chosen(device):
    """Even where all that takes part is -inf."""
    bias = torch.full((16,), -math.inf, device=device)
    bias[4:8] = torch.tensor([5.0, 5.0, -math.inf, -math.inf])
    index = liger_route(torch.randn(5, 16, device=device), 4, bias, score="sigmoid", groups=4, kept_groups=1).index
    assert (index.sort(-1).values == torch.arange(4, 8, device=device)).all()


def test_not_a_number(device):
    """NaN and infinity reach the weights of their token, as in torch, and no other one."""
    logits = torch.randn(5, 40, device=device)
    logits[1, 7], logits[2, 9], logits[3], logits[4, 5] = math.nan, math.inf, -math.inf, -math.inf
    for score in ("softmax", "sigmoid"):
        weights, index, counts = liger_route(logits, 3, score=score, normalise=True)
        s = reference(logits.double(), None, None, 3, score=score, normalise=True)[0]
        assert (index[1, 0], index[2, 0]) == (7, 9) and not (index[4] == 5).any()
        torch.testing.assert_close(weights[[0, 2, 4]].double(), s[[0, 2, 4]], equal_nan=True, **CLOSE)
        assert weights[1].isnan().any() and weights[3].isnan().all()
        assert counts.sum() == 15


def test_gradient_where_scores_are_zero(device):
    """sqrt(softplus) of a very negative logit is 0, and its derivative infinite: no gradient, instead of NaN."""
    logits = torch.full((2, 4), -200.0, device=device, requires_grad=True)
    liger_route(logits, 2, score="sqrt_softplus", normalise=True, epsilon=1e-20).weights.sum().backward()
    assert not logits.grad.any()


def test_weights_that_add_up_to_one_give_others_no_gradient(device):
    logits = torch.randn(6, 30, device=device, requires_grad=True)
    weights, index, _ = liger_route(logits, 4, normalise=True)
    (weights * torch.randn(6, 4, device=device)).sum().backward()
    others = torch.ones_like(logits, dtype=torch.bool).scatter(1, index, False)
    assert not logits.grad[others].any() and logits.grad[~others].all()


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
def test_dtype_of_weights(dtype, device):
    """Rounded once, from float."""
    logits = torch.randn(9, 20, device=device).bfloat16().requires_grad_()
    weights = liger_route(logits, 3, dtype=dtype).weights
    assert weights.dtype == dtype and torch.equal(weights, liger_route(logits, 3).weights.to(dtype))
    weights.sum().backward()
    assert logits.grad.dtype == torch.bfloat16


def test_layouts(device):
    """Columns of a larger matrix, and leading dimensions."""
    wide = torch.randn(3, 4, 50, device=device)
    results = liger_route(wide[..., 5:25], 3)
    for a, b in zip(results, liger_route(wide[..., 5:25].contiguous().view(12, 20), 3)):
        assert torch.equal(a.reshape(b.shape), b)
    assert results.index.shape == (3, 4, 3) and results.counts.shape == (20,)


def test_module(device):
    """The module against plain torch, with a bias of both kinds."""
    router = LigerRouter(16, 12, 3, bias=True, selection_bias=True, score="sigmoid", normalise=True, scale=2.5).to(
        device
    )
    with torch.no_grad():
        router.e_score_correction_bias.copy_(torch.randn(12))
    x = torch.randn(4, 5, 16, device=device)
    logits, weights, index = router(x)
    assert torch.equal(logits, torch.nn.functional.linear(x, router.weight, router.bias))
    scores = logits.sigmoid()
    assert torch.equal(index, (scores + router.e_score_correction_bias).topk(3).indices)
    picked = scores.gather(-1, index)
    torch.testing.assert_close(weights, 2.5 * picked / picked.sum(-1, keepdim=True), **CLOSE)
    assert {*router.state_dict()} == {"weight", "bias", "e_score_correction_bias"}
    assert "top_k=3, score=sigmoid" in repr(router)
    assert {*LigerRouter(16, 12, 3).state_dict()} == {"weight"}


def plain_loss(layers, top_k, mask):
    """E · Σ f P of one-hot vectors, over all layers' tokens that count."""
    experts = layers[0].shape[-1]
    keep = torch.ones(len(layers[0]), dtype=torch.bool) if mask is None else mask.reshape(-1) != 0
    logits = torch.cat([layer[keep] for layer in layers])
    picked = chosen(logits.detach(), top_k, 1, 1, 2)
    f = torch.nn.functional.one_hot(picked, experts).sum(1).to(logits).mean(0)
    return experts * (f * logits.softmax(-1).mean(0)).sum()


@pytest.mark.parametrize("masked", (False, True))
@pytest.mark.parametrize("layers, top_k, experts", ((1, 1, 8), (3, 2, 60), (2, 8, 128), (2, 3, 700)))
def test_load_balancing_loss(layers, top_k, experts, masked, device):
    logits = [torch.randn(6 * 7, experts, device=device, requires_grad=True) for _ in range(layers)]
    mask = torch.rand(6, 7, device=device).gt(0.3).long() if masked else None
    exact = [layer.detach().cpu().double().requires_grad_() for layer in logits]
    loss = liger_load_balancing_loss(tuple(logits), top_k, mask)
    expected = plain_loss(exact, top_k, None if mask is None else mask.cpu())
    assert loss.dtype == torch.float32 and loss.shape == ()
    torch.testing.assert_close(loss.cpu().double(), expected, **CLOSE)
    (2 * loss).backward()
    (2 * expected).backward()
    for layer, wanted in zip(logits, exact):
        # p (g − Σ p g), whose terms are up to p · top_k / tokens and cancel.
        term = wanted.detach().softmax(-1).max() * top_k / len(layer)
        torch.testing.assert_close(layer.grad.cpu().double(), wanted.grad, rtol=2.0**-18, atol=2.0**-20 * term.item())


def test_masks_select(device):
    """Any number but 0 keeps a token: ids of packed documents too."""
    logits = torch.randn(12, 5, device=device)
    ids = torch.tensor([1, 1, 2, 2, 3, 0] * 2, device=device)
    assert torch.equal(
        liger_load_balancing_loss(logits, 2, ids), liger_load_balancing_loss(logits, 2, (ids > 0).float())
    )
    load, counts = liger_expert_load(logits, 2, ids > 0)
    torch.testing.assert_close(load, logits[ids > 0].softmax(-1).sum(0), **CLOSE)
    assert counts.sum() == 20
