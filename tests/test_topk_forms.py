"""The losses on few classes of other tools, written on logits as they have them, against the calls that docs/losses.md
names for each. In float64; the bound is that of float sums of some tens of terms."""

import pytest
import torch
from liger_kernel.chunked_loss import LigerFusedLinearTopKDistillationLoss
from liger_kernel.ops.topk_distillation import class_logits, topk_divergence

N, WIDTH, V, K = 24, 16, 50, 6
FLOAT = 64 * torch.finfo(torch.float32).eps


def inputs(device):
    g = torch.Generator().manual_seed(8)
    hidden, weight = torch.randn(N, WIDTH, generator=g), torch.randn(V, WIDTH, generator=g) / 2
    teacher_logits = 2 * torch.randn(N, V, generator=g)
    target = torch.randint(0, V, (N,), generator=g)
    target[::5] = -100
    hidden, weight = (t.to(device).requires_grad_() for t in (hidden, weight))
    return hidden, weight, teacher_logits.to(device), target.to(device)


def compare(device, theirs, ours):
    """Both of (hidden, weight, logits' K largest of the teacher, their log-probabilities, their ids, target)."""
    hidden, weight, teacher, target = inputs(device)
    top, ids = teacher.topk(K)
    logp = teacher.log_softmax(-1).gather(1, ids)
    results = []
    for form, leaves in (
        (ours, (hidden, weight)),
        (theirs, [t.detach().double().requires_grad_() for t in (hidden, weight)]),
    ):
        dtype = leaves[0].dtype
        loss = form(*leaves, top.to(dtype), logp.to(dtype), ids, target)
        results.append((loss, *torch.autograd.grad(loss, leaves)))
    for found, exact in zip(*results, strict=True):
        size = exact.abs().max().item()
        assert size > 1e-3
        torch.testing.assert_close(found.double(), exact, rtol=0, atol=FLOAT * max(1, size))


def of_class(**options):
    loss_of = LigerFusedLinearTopKDistillationLoss(**options)
    return lambda hidden, weight, top, logp, ids, target: loss_of(weight, hidden, ids, logp, target)[0]


def kl(log_p, log_q):
    return (log_p.exp() * (log_p - log_q)).sum(-1)


@pytest.mark.parametrize("clamp", (-10.0, -3.0))
def test_verl(device, clamp):
    def theirs(hidden, weight, top, logp, ids, target):
        student = (hidden @ weight.T).log_softmax(-1).gather(1, ids).clamp_min(clamp)
        each = kl(logp.clamp_min(clamp), student).clamp(max=2.0)
        return each[target != -100].mean()

    compare(device, theirs, of_class(tail="drop", log_prob_min=clamp, loss_max=2.0))


def test_megatron_with_a_ghost_token(device):
    def theirs(hidden, weight, top, logp, ids, target):
        student = (hidden @ weight.T).log_softmax(-1).gather(1, ids)
        rest = [(1 - t.exp().sum(-1, keepdim=True)).clamp_min(1e-8).log() for t in (logp, student)]
        return kl(torch.cat([logp, rest[0]], -1), torch.cat([student, rest[1]], -1))[target != -100].mean()

    compare(device, theirs, of_class(tail="bucket"))


@pytest.mark.parametrize("beta", (0.0, 0.3, 1.0))
def test_ms_swift(device, beta):
    temperature = 0.7

    def theirs(hidden, weight, top, logp, ids, target):
        student = ((hidden @ weight.T).gather(1, ids) / temperature).log_softmax(-1)
        teacher = (logp / temperature).log_softmax(-1)
        mixture = (beta * teacher.exp() + (1 - beta) * student.exp()).log()
        each = {0.0: kl(teacher, student), 1.0: kl(student, teacher)}.get(
            beta, beta * kl(teacher, mixture) + (1 - beta) * kl(student, mixture)
        )
        return each[target != -100].mean()

    loss = of_class(beta=beta, tail="renormalise", temperature=temperature)
    compare(device, theirs, lambda h, w, top, logp, ids, target: loss(h, w, top, logp / temperature, ids, target))


def test_nemo_rl_normalised_over_the_classes(device):
    def theirs(hidden, weight, top, logp, ids, target):
        student, teacher = (hidden @ weight.T).gather(1, ids).log_softmax(-1), top.log_softmax(-1)
        return (0.3 * kl(teacher, student) + 0.7 * kl(student, teacher))[target != -100].mean()

    def ours(hidden, weight, top, logp, ids, target):
        student = class_logits(hidden, weight, ids)
        forward, reverse = (topk_divergence(student, top, beta=beta, tail="renormalise") for beta in (0.0, 1.0))
        return (0.3 * forward + 0.7 * reverse)[target != -100].mean()

    compare(device, theirs, ours)


def test_nemo_rl_with_zeros_outside(device):
    """Forward: the student is normalised over all classes, the teacher over its own."""

    def theirs(hidden, weight, top, logp, ids, target):
        student = (hidden @ weight.T).log_softmax(-1).gather(1, ids)
        return kl(top.log_softmax(-1), student)[target != -100].mean()

    loss = of_class(tail="drop")
    compare(device, theirs, lambda h, w, top, logp, ids, target: loss(h, w, top, top.log_softmax(-1), ids, target))


@pytest.mark.parametrize("normalise", (True, False))
@pytest.mark.parametrize("beta", (0.0, 1.0, 0.5))
def test_axolotl(device, normalise, beta):
    """Its logprobs are normalised already where it normalises."""
    kd_alpha, ce_alpha = 0.8, 0.3

    def theirs(hidden, weight, top, logp, ids, target):
        z = hidden @ weight.T
        student = z.log_softmax(-1).gather(1, ids)
        teacher = top.log_softmax(-1) if normalise else logp
        student = student.log_softmax(-1) if normalise else student
        mixture = ((1 - beta) * student.exp() + beta * teacher.exp()).log()
        each = {0.0: kl(teacher, student), 1.0: kl(student, teacher)}.get(
            beta, beta * kl(teacher, mixture) + (1 - beta) * kl(student, mixture)
        )
        hard = torch.nn.functional.cross_entropy(z, target, reduction="sum")
        return kd_alpha * each[target != -100].sum() + ce_alpha * hard

    options = dict(weight_soft_loss=kd_alpha, weight_hard_loss=ce_alpha, reduction="sum", beta=beta)
    compare(device, theirs, of_class(tail="renormalise" if normalise else "drop", **options))
