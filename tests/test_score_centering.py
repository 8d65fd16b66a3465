"""The policy gradient centred on the sampler's distribution, against plain torch in float64."""

import pytest
import torch
from liger_kernel.operators import soft_targets
from liger_kernel.transformers import ISCorrection, LigerFusedLinearScoreCenteringLoss
from liger_kernel.transformers.functional import liger_fused_linear_score_centering

EPS = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
CORRECTIONS = (
    None, ISCorrection(), ISCorrection(0.7, 1.3), ISCorrection(0.7, 1.3, "clamp"),
    ISCorrection(0.8, 1.2, "drop", "ppo"), ISCorrection(0.8, 1.2, "clamp", "ppo"),
)  # fmt: skip


def draw(device, dtype=torch.float32, hidden=16, classes=37, k=5, far=0.5):
    """Two rows of four tokens, of a sampler whose logits are `far` off; three do not count, and hold what is no id."""
    torch.manual_seed(0)
    x, w = torch.randn(2, 4, hidden, device=device).to(dtype), (torch.randn(classes, hidden, device=device) / 4)
    sampler = (x.float() @ w.t() + far * torch.randn(2, 4, classes, device=device)).log_softmax(-1)
    ids, top = torch.randint(classes, (2, 4), device=device), sampler.topk(k, -1)
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]], device=device)
    drawn = sampler.gather(-1, ids[..., None]).squeeze(-1)
    ids[mask == 0], drawn[mask == 0] = -100, float("nan")
    return x, w.to(dtype), ids, mask, torch.randn(2, 4, device=device), drawn, top.indices, top.values


def weight(r, advantage, correction):
    if correction is None:
        return torch.ones_like(r), torch.zeros_like(r)
    outside = (r < correction.low) | (r > correction.high)
    if correction.sign == "ppo":
        outside = r > correction.high if advantage > 0 else (r < correction.low) | (r > 3)
    bound = r.clamp(correction.low, correction.high) if correction.outside == "clamp" else torch.zeros_like(r)
    return torch.where(outside, bound, r), outside.double() * (correction.outside == "drop")


def exact(x, w, bias, given, center=True, correction=None, temperature=1.0, eps=1e-6, items=None):
    """Token by token, with the weights of classes written out."""
    ids, mask, advantages, drawn, top, logq = given
    total, metrics, count = 0, torch.zeros(3, dtype=torch.float64, device=x.device), mask.sum().clamp(min=1)
    for place in mask.nonzero():
        i = tuple(place)
        logits = x[i] @ w.t() if bias is None else x[i] @ w.t() + bias
        logp, a = (logits / temperature).log_softmax(-1), advantages[i]
        p, q, k = logp.detach().exp(), logq[i].double().exp(), top[i]
        others = torch.ones_like(p, dtype=torch.bool).scatter(0, k, False)
        rest_p, rest_q = p[others].sum().clamp(min=eps), 1 - q.sum()
        c = p * others * rest_q / rest_p * weight(rest_p / rest_q, a, correction)[0]
        c[k] = q * weight(p[k] / q, a, correction)[0]
        factor, dropped = weight((logp[ids[i]].detach() - drawn[i]).exp(), a, correction)
        total = total - a * (factor * logp[ids[i]] - (c * logp).sum() * center)
        divergence = (q * (q / p[k]).log()).sum() + rest_q * (rest_q / rest_p).log()
        metrics += torch.stack([-(p * p.log()).sum(), divergence, dropped])
    return total / (count if items is None else items), metrics / count


@pytest.mark.parametrize("dtype", EPS, ids=str)
@pytest.mark.parametrize("correction", CORRECTIONS, ids=str)
@pytest.mark.parametrize("chunk", [None, 3], ids=["one chunk", "chunks"])
def test_score_centering(chunk, correction, dtype, device):
    x, w, *given = draw(device, dtype)
    options = dict(temperature=0.7, correction=correction, eps=0.6)  # more than most tokens give to other classes
    bias = torch.randn(len(w), device=device)
    leaves = [x.requires_grad_(), w.requires_grad_(), bias.requires_grad_()]
    loss, metrics = LigerFusedLinearScoreCenteringLoss(chunk_size=chunk, **options)(
        *leaves[:2], *given, bias, num_items_in_batch=9
    )
    found = [loss.detach(), *torch.autograd.grad(3 * loss, leaves)]
    doubles = [leaf.detach().double().requires_grad_() for leaf in leaves]
    true, expected = exact(*doubles, given, items=9, **options)
    assert [t.dtype for t in found] == [torch.float32, dtype, dtype, torch.float32]
    # Logits and their gradients are rounded to the dtype, as a head rounds them: some units in the last place. A ratio
    # may round across a bound, which changes a term: none is that near here.
    for a, b in zip(found, [true.detach(), *torch.autograd.grad(3 * true, doubles)]):
        assert (a - b).norm() <= 8 * EPS[dtype] * (b.norm() if b.dim() else max(1, b.abs()))  # the loss cancels
    assert list(metrics) == ["entropy", "kl_head", "frac_masked"]
    for value, b in zip(metrics.values(), expected):
        assert not value.requires_grad and abs(value - b) <= 8 * EPS[dtype] * max(1, abs(b))


def test_uncentred(device):
    """Without a centre it is the policy gradient, by the number of tokens in the mask; a row may have one advantage."""
    x, w, ids, mask, advantages, *sampler = draw(device)
    loss, _ = liger_fused_linear_score_centering(x, w, ids, mask, advantages[:, 0], *sampler, score_center=False)
    logp = (x @ w.t()).log_softmax(-1).gather(-1, ids.clamp(min=0)[..., None]).squeeze(-1)
    torch.testing.assert_close(loss, -(advantages[:, :1] * logp * mask).sum() / mask.sum())


def test_centre_of_every_class(device):
    """A sampler that gives the policy's own probabilities, all or all but what eps bounds, has a score of mean 0."""
    x, w, ids, mask, advantages, drawn, *_ = draw(device, far=0.0)
    x.requires_grad_()
    for k in (37, 36, 3):
        top = (x @ w.t()).detach().log_softmax(-1).topk(k, -1)
        ratio = ISCorrection()  # makes c to p
        loss, metrics = liger_fused_linear_score_centering(
            x, w, ids, mask, advantages, drawn, top.indices, top.values, correction=ratio
        )
        plain, _ = liger_fused_linear_score_centering(
            x, w, ids, mask, advantages, drawn, top.indices, top.values, correction=ratio, score_center=False
        )
        gradients = [torch.autograd.grad(value, x, retain_graph=True)[0] for value in (loss, plain)]
        torch.testing.assert_close(*gradients)
        assert metrics["kl_head"].abs() < 1e-5


def test_chunks_of_memory(device, monkeypatch):
    x, w, *given = draw(device)
    whole = liger_fused_linear_score_centering(x, w, *given)
    monkeypatch.setattr(soft_targets, "CHUNK", 100)
    torch.testing.assert_close(liger_fused_linear_score_centering(x, w, *given), whole)


def test_nothing_in_the_mask(device):
    x, w, ids, mask, *given = draw(device)
    loss, metrics = liger_fused_linear_score_centering(x.requires_grad_(), w, ids, mask * 0, *given)
    assert loss == 0 and not any(metrics.values()) and not torch.autograd.grad(loss, x)[0].any()


def test_refusals():
    x, w, ids, mask, advantages, drawn, top, logq = draw("cpu")
    names = "_input weight selected_token_ids attention_mask advantages sampler_token_logps".split()
    given = dict(zip((*names, "sampler_topk_ids", "sampler_topk_logps"), draw("cpu")))
    for name, wrong in [
        ("weight", w[:, :3]), ("selected_token_ids", ids[:, :3]), ("attention_mask", mask[:1]),
        ("advantages", advantages[:, 0][:1]), ("sampler_token_logps", drawn[0]), ("sampler_topk_logps", logq[..., :2]),
        ("sampler_topk_ids", top[0]),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=f"{name} must be"):
            liger_fused_linear_score_centering(**{**given, name: wrong})
    with pytest.raises(ValueError, match="temperature must be positive"):
        liger_fused_linear_score_centering(**given, temperature=0.0)
    for wrong in (ISCorrection(outside="keep"), ISCorrection(sign="left")):
        with pytest.raises(AssertionError, match="must be"):
            liger_fused_linear_score_centering(**given, correction=wrong)
