"""KL divergence of a head from given probabilities, and cross entropy beside total variation distance, against plain
torch in float64."""

import pytest
import torch
from liger_kernel.operators import soft_targets
from liger_kernel.ops import LigerFusedCETVDFunction
from liger_kernel.transformers import LigerFusedCETVDLoss, LigerFusedLinearKLDivLoss
from liger_kernel.transformers.functional import liger_fused_linear_kl_div

EPS = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


@pytest.fixture(params=[1 << 26, 200], ids=["one chunk", "chunks"])
def chunk(request, monkeypatch):
    monkeypatch.setattr(soft_targets, "CHUNK", request.param)


def exact_kl(x, w, t, labels, reduction, temperature, eps):
    logp = (x @ w.t() / temperature).log_softmax(-1)
    each = (t * (t.clamp(min=eps).log() - logp)).sum(-1)
    kept = torch.ones(len(x), dtype=torch.bool, device=x.device) if labels is None else labels != -100
    total = each[kept].sum()
    if reduction == "sum":
        return total
    return total / kept.sum().clamp(min=1) / (t.shape[1] if reduction == "mean" else 1)


@pytest.mark.parametrize("dtype", EPS, ids=str)
@pytest.mark.parametrize("labelled", [False, True])
@pytest.mark.parametrize("reduction, temperature", [("batchmean", 1.0), ("mean", 0.7), ("sum", 2.0)])
def test_kl_div(reduction, temperature, labelled, dtype, device, chunk):
    torch.manual_seed(0)
    x, w = torch.randn(9, 16, device=device).to(dtype), (torch.randn(37, 16, device=device) / 4).to(dtype)
    t = torch.randn(9, 37, device=device).softmax(-1)
    t[0] = 0
    t[0, 5] = 1  # 0 ln 0 = 0
    labels = torch.tensor([3, -100, 1, 1, 0, -100, 2, 7, 9], device=device) if labelled else None
    if labelled:
        t[1] = float("nan")  # is not read
    leaves = [x.requires_grad_(), w.requires_grad_()]
    loss = LigerFusedLinearKLDivLoss(reduction, temperature=temperature)(*leaves, t, labels)
    found = (loss.detach(), *torch.autograd.grad(loss * 3, leaves))
    doubles = [leaf.detach().double().requires_grad_() for leaf in leaves]
    exact = exact_kl(*doubles, t.double().nan_to_num(0), labels, reduction, temperature, 1e-10)
    expected = (exact.detach(), *torch.autograd.grad(exact * 3, doubles))
    assert loss.dtype == torch.float32 and [g.dtype for g in found[1:]] == [dtype] * 2
    # Logits and their gradients are rounded to the dtype, as a head rounds them: some units in the last place.
    for a, b in zip(found, expected):
        assert (a - b).norm() <= 4 * EPS[dtype] * b.norm()


@pytest.mark.parametrize("dtype", EPS, ids=str)
@pytest.mark.parametrize("reduction", ["none", "sum", "batchmean"])
@pytest.mark.parametrize("upstream", [1.0, 1e-6])
def test_kl_div_of_weighted_tokens(upstream, reduction, dtype, device, chunk):
    """As a draft model weights its tokens: some count 0, and a step of the unrolled ones less than the one before."""
    torch.manual_seed(0)
    x, w = torch.randn(9, 16, device=device).to(dtype), (torch.randn(37, 16, device=device) / 4).to(dtype)
    t, weights = torch.randn(9, 37, device=device).softmax(-1), torch.rand(9, device=device)
    weights[2] = 0
    labels = torch.tensor([3, -100, 1, 1, 0, 1, 2, 7, 9], device=device)
    upstream = upstream * (torch.randn(9, device=device) if reduction == "none" else torch.ones((), device=device))
    leaves = [x.requires_grad_(), w.requires_grad_()]
    loss = LigerFusedLinearKLDivLoss(reduction, temperature=0.7)(*leaves, t, labels, weights)
    found = (loss.detach(), *torch.autograd.grad(loss, leaves, upstream))
    z, v = [leaf.detach().double().requires_grad_() for leaf in leaves]
    logp = (z @ v.t() / 0.7).log_softmax(-1)
    exact = (t.double() * (t.double().log() - logp)).sum(-1) * weights.double() * (labels != -100)
    if reduction != "none":
        exact = exact.sum() / (8 if reduction == "batchmean" else 1)
    expected = (exact.detach(), *torch.autograd.grad(exact, (z, v), upstream.double()))
    assert loss.dtype == torch.float32 and found[1].dtype == dtype and (found[1][1:3] == 0).all()
    # float16 itself cannot hold less than a multiple of its smallest number.
    least = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps * (dtype == torch.float16)
    for a, b in zip(found, expected):
        assert (a - b).norm() <= 4 * EPS[dtype] * b.norm() + least * b.numel() ** 0.5


def test_kl_div_gradients_that_are_asked_for(device):
    torch.manual_seed(0)
    x, w, t = (torch.randn(s, device=device) for s in ((5, 8), (11, 8), (5, 11)))
    t = t.softmax(-1)
    both = torch.autograd.grad(liger_fused_linear_kl_div(x.requires_grad_(), w.requires_grad_(), t), (x, w))
    (only_x,) = torch.autograd.grad(liger_fused_linear_kl_div(x, w.detach(), t), x)
    (only_w,) = torch.autograd.grad(liger_fused_linear_kl_div(x.detach(), w, t), w)
    assert torch.equal(only_x, both[0]) and torch.equal(only_w, both[1])
    loss = liger_fused_linear_kl_div(x, w, t)
    (dx,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivative"):
        torch.autograd.grad(dx.sum(), x)
    none_kept = liger_fused_linear_kl_div(x, w, t, torch.full((5,), -100, device=device))
    assert none_kept == 0 and not torch.autograd.grad(none_kept, x)[0].any()


def test_kl_div_refusals():
    x, w, t = torch.randn(5, 8), torch.randn(11, 8), torch.rand(5, 11)
    for text, arguments in [
        ("reduction must be", dict(reduction="max")),
        ("token_weight must be", dict(token_weight=torch.ones(4))),
        ("temperature must be positive", dict(temperature=0.0)),
        ("target must be", dict(target=t[:4])),
    ]:
        with pytest.raises(ValueError, match=text):
            liger_fused_linear_kl_div(x, w, **{"target": t, **arguments})


@pytest.mark.parametrize("dtype", EPS, ids=str)
@pytest.mark.parametrize("shape", [(7,), (2, 5)])
def test_ce_and_tvd(shape, dtype, device, chunk):
    torch.manual_seed(0)
    student, teacher = (2 * torch.randn(2, *shape, 41, device=device)).to(dtype)
    target = torch.randint(41, shape, device=device)
    target.view(-1)[2] = -100
    upstream = torch.randn(2, *shape, device=device)
    student.requires_grad_()
    ce, tvd = LigerFusedCETVDLoss()(student, teacher, target)
    (gradient,) = torch.autograd.grad((ce * upstream[0] + tvd * upstream[1]).sum(), student)
    z = student.detach().double().requires_grad_()
    kept = target != -100
    exact_ce = -z.log_softmax(-1).gather(-1, target.clamp(min=0)[..., None])[..., 0].where(kept, 0)
    exact_tvd = ((z.softmax(-1) - teacher.double().softmax(-1)).abs().sum(-1) / 2).where(kept, 0)
    (expected,) = torch.autograd.grad((exact_ce * upstream[0] + exact_tvd * upstream[1]).sum(), z)
    assert ce.dtype == tvd.dtype == torch.float32 and gradient.dtype == dtype
    torch.testing.assert_close(ce.double(), exact_ce, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(tvd.double(), exact_tvd, rtol=1e-5, atol=1e-6)
    assert (gradient - expected).norm() <= (EPS[dtype] if dtype != torch.float32 else 1e-6) * expected.norm()


def test_ce_and_tvd_of_an_ignored_row(device):
    """Whose logits may be anything."""
    student, teacher = torch.randn(2, 3, 5, device=device)
    target = torch.tensor([1, -100, 2], device=device)
    student[1], teacher[1] = float("nan"), float("inf")
    student.requires_grad_()
    ce, tvd = LigerFusedCETVDFunction.apply(student, teacher, target)
    (gradient,) = torch.autograd.grad(ce.sum() + tvd.sum(), student)
    assert ce[1] == tvd[1] == 0 and not gradient[1].any() and gradient.isfinite().all()
    with pytest.raises(ValueError, match="one shape"):
        LigerFusedCETVDFunction.apply(student, teacher[:2], target)
