"""Losses on a few classes per token, against plain torch on all classes in float64."""

import math

import pytest
import torch
from liger_kernel.chunked_loss import LigerFusedLinearTopKDistillationLoss
from liger_kernel.operators.topk_distillation import LEAST_TAIL, linear_topk_divergence, topk_divergence, topk_entropy
from liger_kernel.ops.linear_log_prob import linear_log_prob

N, H, V = 30, 16, 83
TAILS = ("drop", "bucket", "renormalise")
BETAS = (0.0, 0.1, 0.5, 0.9, 1.0)
#: A log-probability is a float sum of H products less the logarithm of one of V terms; a loss is of two of them.
FLOAT = dict(rtol=0, atol=2 * (H + V) ** 0.5 * torch.finfo(torch.float32).eps)


def heads(device="cpu", dtype=torch.float32, k=6, n=N):
    """hidden, weight, ids of classes, a teacher's log-probabilities at them, targets of which a quarter is ignored."""
    g = torch.Generator().manual_seed(2)
    hidden = torch.randn(n, H, generator=g).to(device, dtype).requires_grad_()
    weight = (torch.randn(V, H, generator=g) / 2).to(device, dtype).requires_grad_()
    teacher = torch.randn(n, V, generator=g).log_softmax(-1)
    ids = torch.stack([torch.randperm(V, generator=g)[:k] for _ in range(n)]) if n else torch.zeros(0, k).long()
    target = torch.randint(0, V, (n,), generator=g)
    target[torch.rand(n, generator=g) < 0.25] = -100
    return hidden, weight, ids.to(device), teacher.gather(1, ids).to(device), target.to(device)


def exact_divergence(z, ids, teacher, there, beta, tail):
    """D [N] of logits z [N, V], in float64, bucket by bucket."""
    logp = z.log_softmax(-1)
    student = logp.gather(1, ids.clamp(min=0))
    losses = []
    for row in range(len(z)):
        kept = there[row]
        s, t = student[row][kept].exp(), teacher[row][kept].double().exp()
        if tail == "renormalise" and kept.any():
            s, t = s / s.sum(), t / t.sum()
        if tail == "bucket":
            others = torch.ones(V, dtype=torch.bool, device=z.device).index_fill(0, ids[row][ids[row] >= 0], False)
            s = torch.cat([s, logp[row][others].exp().sum()[None]])
            t = torch.cat([t, (1 - t.sum()).clamp(min=LEAST_TAIL)[None]])
        if beta == 0:
            terms = t * (t / s).log()
        elif beta == 1:
            terms = s * (s / t).log()
        else:
            m = beta * t + (1 - beta) * s
            terms = beta * t * (t / m).log() + (1 - beta) * s * (s / m).log()
        losses.append(terms.sum())
    return torch.stack(losses)


def doubles(*tensors):
    return [t.detach().double().requires_grad_() for t in tensors]


def assert_exact(found, exact, **bounds):
    scale = exact.abs().max().clamp(min=1e-3)
    torch.testing.assert_close(found.double() / scale, exact / scale, **(bounds or FLOAT))


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize(
    "options",
    [{}, dict(temperature=0.7, max_bytes=1), dict(temperature=2.0, softcap=5.0), dict(max_bytes=4000)],
    ids=str,
)
def test_every_divergence(device, tail, beta, options):
    """With holes of both kinds, absent classes, ignored tokens, any upstream gradient and a bias."""
    hidden, weight, ids, teacher, target = heads(device)
    bias = torch.linspace(-1, 1, V, device=device).requires_grad_()
    ids[3, 2], ids[4], teacher[5, 1] = -1, -1, -torch.inf
    upstream = torch.rand(N, device=device)
    found, nll, masses = linear_topk_divergence(hidden, weight, ids, teacher, target, bias, beta, tail, **options)
    gradients = torch.autograd.grad((found, nll), (hidden, weight, bias), (upstream, upstream.flip(0)))
    h, w, b = doubles(hidden, weight, bias)
    z, kept = h @ w.T + b, target != -100
    if softcap := options.get("softcap"):
        z = softcap * torch.tanh(z / softcap)
    z = z / options.get("temperature", 1.0)
    there = (ids >= 0) & (teacher > -torch.inf)
    exact = torch.where(kept, exact_divergence(z, ids, teacher, there, beta, tail), 0)
    exact_nll = torch.where(kept, -z.log_softmax(-1).gather(1, target.clamp(min=0)[:, None])[:, 0], 0)
    wanted = torch.autograd.grad((exact, exact_nll), (h, w, b), (upstream.double(), upstream.flip(0).double()))
    for ours, truth in zip((found, nll, *gradients), (exact, exact_nll, *wanted), strict=True):
        assert_exact(ours, truth)
    assert (found[~kept] == 0).all() and (gradients[0][~kept] == 0).all()
    mass = (z.softmax(-1).gather(1, ids.clamp(min=0)) * there).sum(1) * kept
    assert_exact(masses["student"], mass)
    assert_exact(masses["teacher"], (teacher.double().exp() * there).sum(1) * kept)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("max_bytes", [0, 1])
def test_dtypes(device, dtype, tail, max_bytes):
    """In 16 bits a logit of size 2 is rounded to eps of itself, which the losses' gradients pass on."""
    hidden, weight, ids, teacher, _ = heads(device, dtype)
    scale = 1e-6 if dtype is torch.float16 else 1.0  # of a mean over many tokens: it must not vanish
    found = linear_topk_divergence(hidden, weight, ids, teacher, tail=tail, max_bytes=max_bytes)[0]
    gradients = torch.autograd.grad(found, (hidden, weight), torch.full_like(found, scale))
    h, w = doubles(hidden, weight)
    exact = exact_divergence(h @ w.T, ids, teacher, torch.ones_like(ids, dtype=torch.bool), 0.0, tail)
    wanted = torch.autograd.grad(exact, (h, w), torch.full_like(exact, scale))
    bound = FLOAT["atol"] if dtype is torch.float32 else 8 * torch.finfo(dtype).eps
    for ours, truth in zip((found, *gradients), (exact, *wanted), strict=True):
        size = truth.abs().max()
        # float16 itself cannot hold less than its smallest number.
        atol = bound + (torch.finfo(dtype).smallest_normal / size).item() * (dtype is torch.float16)
        torch.testing.assert_close(ours.double() / size, truth / size, rtol=0, atol=atol)


@pytest.mark.parametrize("beta", BETAS)
def test_all_classes_are_the_dense_loss(device, beta):
    """In any order, with and without the tail, of which nothing is left."""
    hidden, weight, _, _, _ = heads(device)
    teacher = torch.randn(N, V, generator=torch.Generator().manual_seed(3)).to(device).log_softmax(-1)
    ids = torch.stack([torch.randperm(V, generator=torch.Generator().manual_seed(i)) for i in range(N)]).to(device)
    h, w = doubles(hidden, weight)
    s, t = (h @ w.T).log_softmax(-1), teacher.double()
    m = torch.logaddexp(t + math.log(max(beta, 1e-300)), s + math.log(max(1 - beta, 1e-300)))
    forward = (t.exp() * (t - (m if 0 < beta < 1 else s))).sum(1)
    reverse = (s.exp() * (s - (m if 0 < beta < 1 else t))).sum(1)
    exact = forward if beta == 0 else reverse if beta == 1 else beta * forward + (1 - beta) * reverse
    wanted = torch.autograd.grad(exact.sum(), (h, w))
    for tail in TAILS:
        found = linear_topk_divergence(hidden, weight, ids, teacher.gather(1, ids), beta=beta, tail=tail)[0]
        for ours, truth in zip((found, *torch.autograd.grad(found.sum(), (hidden, weight))), (exact, *wanted)):
            assert_exact(ours, truth)
    logp, tail = linear_log_prob(hidden, weight, None, class_ids=ids, log_tail=True)[1:]
    assert (tail == -torch.inf).all()
    assert_exact(logp.gather(1, ids.argsort(1)), s)


@pytest.mark.parametrize("tail", TAILS)
def test_entropy_of_the_teacher(device, tail):
    """Of its buckets, with a class that does not count and a row without classes."""
    _, _, ids, teacher, _ = heads(device)
    there = torch.rand(ids.shape, generator=torch.Generator().manual_seed(2)).to(device) > 0.2
    teacher[3, 1], there[4] = -torch.inf, False
    for row, found in enumerate(topk_entropy(teacher, there, tail)):
        t = teacher[row][there[row] & (teacher[row] > -torch.inf)].double().exp()
        t = t / t.sum() if tail == "renormalise" else t
        t = torch.cat([t, 1 - t.sum(0, keepdim=True)]) if tail == "bucket" and len(t) else t
        assert_exact(found, -(t * t.log()).sum())


def test_one_class_is_cross_entropy(device):
    """The log-probability of the label, and its gradient."""
    hidden, weight, _, _, target = heads(device)
    target = target.clamp(min=0)
    logp, class_logp = linear_log_prob(hidden, weight, target, class_ids=target[:, None])
    torch.testing.assert_close(logp, class_logp[:, 0], rtol=torch.finfo(torch.float32).eps, atol=0)
    upstream = torch.rand(N, device=device)
    of_label, of_class = (
        torch.autograd.grad(linear_log_prob(hidden, weight, target, class_ids=target[:, None])[which].view(N),
                            (hidden, weight), upstream)
        for which in (0, 1)
    )  # fmt: skip
    for ours, theirs in zip(of_class, of_label, strict=True):
        assert_exact(ours, theirs.double())


@pytest.mark.parametrize("gap", [10.0, 20.7, 40.0])
def test_a_tail_of_next_to_nothing(device, gap):
    """One logit that is 10 to 40 larger than all others: 1 − Q would be rounded away. A logarithm of two sums of V
    terms, each to a unit of rounding of the largest exponent."""
    hidden, weight, ids, _, _ = heads(device, k=1)
    bias = torch.zeros(V, device=device).index_fill(0, ids[0], gap + 3)
    ids = ids[:1].expand(N, 1).contiguous()
    upstream = torch.rand(N, device=device)
    tail = linear_log_prob(hidden, weight, None, bias, class_ids=ids, log_tail=True)[-1]
    gradients = torch.autograd.grad(tail, (hidden, weight), upstream)
    h, w = doubles(hidden, weight)
    logp = (h @ w.T + bias.double()).log_softmax(-1)
    exact = logp.index_fill(1, ids[0], -torch.inf).logsumexp(1)
    wanted = torch.autograd.grad(exact, (h, w), upstream.double())
    for ours, truth in zip((tail, *gradients), (exact, *wanted), strict=True):
        torch.testing.assert_close(ours.double() / truth.abs().max(), truth / truth.abs().max(), rtol=1e-5, atol=1e-5)


def test_duplicates_add_up(device):
    """A class that a token has twice counts twice in the loss, once in the tail, and not at all where it is masked."""
    hidden, weight, ids, teacher, _ = heads(device)
    ids[:, 3], ids[:, 5], teacher[:, 3], teacher[:, 5] = ids[:, 1], ids[:, 1], teacher[:, 1], teacher[:, 1]
    found, tail = linear_log_prob(hidden, weight, None, class_ids=ids, log_tail=True)[1:]
    upstream = torch.rand(N, 6, device=device)
    gradients = torch.autograd.grad((found, tail), (hidden, weight), (upstream, upstream[:, 0]))
    h, w = doubles(hidden, weight)
    logp = (h @ w.T).log_softmax(-1)
    outside = logp.scatter(1, ids, -torch.inf).logsumexp(1)
    wanted = torch.autograd.grad((logp.gather(1, ids), outside), (h, w), (upstream.double(), upstream[:, 0].double()))
    for ours, truth in zip(gradients, wanted, strict=True):
        assert_exact(ours, truth)


@pytest.mark.parametrize("tail", ["bucket", "renormalise"])
@pytest.mark.parametrize("beta", BETAS)
def test_the_teacher_itself_has_no_loss(device, tail, beta):
    hidden, weight, ids, _, _ = heads(device)
    with torch.no_grad():
        teacher = linear_log_prob(hidden, weight, None, class_ids=ids)[1]
    found = linear_topk_divergence(hidden, weight, ids, teacher, beta=beta, tail=tail)[0]
    gradients = torch.autograd.grad(found.sum(), (hidden, weight))
    for numbers in (found, *gradients):
        assert numbers.abs().max() <= 64 * torch.finfo(torch.float32).eps


def test_the_gradient_of_logits_sums_to_zero(device):
    """Along a bias on all classes the loss does not change."""
    hidden, weight, ids, teacher, target = heads(device)
    bias = torch.zeros(V, device=device, requires_grad=True)
    for tail in TAILS:
        found = linear_topk_divergence(hidden, weight, ids, teacher, target, bias, 0.5, tail)[0]
        (gradient,) = torch.autograd.grad(found.sum(), bias)
        assert gradient.abs().max() > 0.01 and gradient.sum().abs() <= N * V * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_the_loss_class(device, reduction):
    hidden, weight, ids, teacher, target = heads(device)
    weights = torch.rand(N, device=device)
    options = dict(tail="drop", weight_hard_loss=0.5, weight_soft_loss=2.0, loss_max=0.1, log_prob_min=-4.0)
    loss_of = LigerFusedLinearTopKDistillationLoss(reduction=reduction, **options)
    loss, seen = loss_of(weight, hidden, ids, teacher, target, token_weight=weights)
    logp, z_ids = linear_log_prob(hidden, weight, target, class_ids=ids)
    there = (target != -100)[:, None].expand_as(ids)
    soft = topk_divergence(z_ids.clamp(min=-4), teacher.clamp(min=-4), there, 0.0, "drop").clamp(max=0.1)
    each = (2 * soft - 0.5 * logp) * weights
    kept = (target != -100).sum()
    expected = {"mean": each.sum() / kept, "sum": each.sum(), "none": each}[reduction]
    torch.testing.assert_close(loss, expected)
    assert not any(numbers.requires_grad for numbers in seen.values())
    assert seen.keys() == {"soft", "hard", "student_mass", "teacher_mass"} and (seen["soft"].amax() == 0.1).all()
    if reduction == "mean":
        half = loss_of(weight, hidden, ids, teacher, target, token_weight=weights, num_items=2 * kept)[0]
        torch.testing.assert_close(half, loss / 2)


def test_no_tokens_keep_the_graph(device):
    hidden, weight, ids, teacher, target = heads(device, n=0)
    loss = LigerFusedLinearTopKDistillationLoss()(weight, hidden, ids, teacher, target)[0]
    loss.backward()
    assert loss == 0 and (weight.grad == 0).all() and hidden.grad.shape == hidden.shape


def test_errors(device):
    hidden, weight, ids, teacher, target = heads(device)
    for options, message in (
        (dict(beta=1.5), "beta"),
        (dict(tail="rest"), "tail"),
        (dict(reduction="max"), "reduction"),
    ):
        with pytest.raises(ValueError, match=message):
            LigerFusedLinearTopKDistillationLoss(**options)
    with pytest.raises(ValueError, match="needs a target"):
        LigerFusedLinearTopKDistillationLoss(weight_hard_loss=1.0)(weight, hidden, ids, teacher)
    with pytest.raises(ValueError, match="student_tail"):
        topk_divergence(teacher, teacher, tail="bucket")
    with pytest.raises(RuntimeError, match=r"class_ids must be \[30, 6\]"):
        linear_log_prob(hidden, weight, target, class_ids=ids[1:])
    with pytest.raises(ValueError, match="log_tail is of class_ids"):
        linear_log_prob(hidden, weight, target, log_tail=True)
    with pytest.raises(TypeError, match="give ids, class_ids or both"):
        linear_log_prob(hidden, weight, None)
    if device == "cpu":
        for bad in (-2, V):
            with pytest.raises(IndexError, match=f"class {bad} is out of bounds"):
                linear_log_prob(hidden, weight, None, class_ids=ids.index_fill(1, torch.tensor([2]), bad))


def test_compiled(device):
    """One graph; the gradients are those of the operator itself."""
    hidden, weight, ids, teacher, target = heads(device)
    loss = LigerFusedLinearTopKDistillationLoss(beta=0.5)
    expected = torch.autograd.grad(loss(weight, hidden, ids, teacher, target)[0], (hidden, weight))
    compiled = torch.compile(lambda *args: loss(*args)[0], fullgraph=True, backend="aot_eager")
    for ours, theirs in zip(
        torch.autograd.grad(compiled(weight, hidden, ids, teacher, target), (hidden, weight)), expected, strict=True
    ):
        torch.testing.assert_close(ours, theirs)


def test_only_the_classes(device):
    """The loss that is normalised over the classes, from their logits alone: with holes and ignored tokens."""
    hidden, weight, ids, teacher, target = heads(device)
    ids[3, 2], ids[4], teacher[5, 1] = -1, -1, -torch.inf
    loss = LigerFusedLinearTopKDistillationLoss(beta=0.5, tail="renormalise", temperature=0.7, reduction="sum")
    found, seen = loss(weight, hidden, ids, teacher, target)
    gradients = torch.autograd.grad(found, (hidden, weight))
    h, w = doubles(hidden, weight)
    there = (ids >= 0) & (teacher > -torch.inf)
    exact = exact_divergence(h @ w.T / 0.7, ids, teacher, there, 0.5, "renormalise")[target != -100].sum()
    for ours, truth in zip((found, *gradients), (exact, *torch.autograd.grad(exact, (h, w))), strict=True):
        assert_exact(ours, truth)
    assert "student_mass" not in seen and (seen["hard"] == 0).all()
    both = LigerFusedLinearTopKDistillationLoss(
        beta=0.5, tail="renormalise", temperature=0.7, reduction="sum", weight_hard_loss=1e-30
    )
    whole, seen = both(weight, hidden, ids, teacher, target)
    assert_exact(found, whole.double())
    assert "student_mass" in seen
    with pytest.raises(ValueError, match="only_classes"):
        linear_topk_divergence(hidden, weight, ids, teacher, only_classes=True)
    if device == "cpu":
        with pytest.raises(IndexError, match=f"class {V} is out of bounds"):
            loss(weight, hidden, ids.clamp(min=0).index_fill(1, torch.tensor([2]), V), teacher)
