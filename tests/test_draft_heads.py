"""The loss of EAGLE-3's draft head over unrolled steps, from hidden states and heads, against its form on logits."""

import pytest
import torch
from liger_kernel.ops.linear_distillation import linear_distillation
from liger_kernel.ops.linear_log_prob import linear_log_prob
from liger_kernel.transformers.functional import liger_fused_linear_kl_div
from torch.nn.functional import pad

B, T, H, V, STEPS = 2, 9, 16, 60, 3
FLOAT = 64 * torch.finfo(torch.float32).eps  # sums of some tens of terms


def inputs(device):
    g = torch.Generator().manual_seed(7)
    drafted, draft_weight = torch.randn(STEPS, B, T, H, generator=g), torch.randn(V // 3, H, generator=g) / 2
    teacher, head = torch.randn(B, T, 24, generator=g), torch.randn(V, 24, generator=g) / 2
    t2d, mask = torch.randperm(V, generator=g)[: V // 3].sort()[0], torch.rand(B, T, generator=g) > 0.2
    drafted, draft_weight = (t.to(device).requires_grad_() for t in (drafted, draft_weight))
    return drafted, draft_weight, teacher.to(device), head.to(device), t2d.to(device), mask.to(device)


def plain(drafted, draft_weight, teacher, head, t2d, mask):
    """−Σ mask Σ q ln p / (B T) of each step, weighted by 0.8^step, in the dtype given; also the teacher's entropies."""
    logits = teacher @ head.T
    target = logits[..., t2d].softmax(-1)
    mask = mask * torch.isin(logits.argmax(-1), t2d)
    loss = entropy = 0
    for step in range(STEPS):
        q, counts = pad(target[:, step:], (0, 0, 0, step)), pad(mask[:, step:], (0, step))
        share = 0.8**step * counts / (B * T)
        logp = (drafted[step] @ draft_weight.T).log_softmax(-1)
        loss = loss - (share * (q * logp).sum(-1)).sum()
        entropy = entropy - (share * torch.xlogy(q, q).sum(-1)).sum()
    return loss, entropy


def ours(drafted, draft_weight, teacher, head, t2d, mask, form):
    best = linear_log_prob(teacher, head, torch.zeros_like(mask, dtype=torch.long), outputs=("argmax",))[1]
    counts = (mask & torch.isin(best, t2d)).float()
    target = (teacher @ head[t2d].T).softmax(-1)  # made once
    total = 0
    for step in range(STEPS):
        weights = 0.8**step * pad(counts[:, step:], (0, step))
        later = lambda t: pad(t[:, step:], (0, 0, 0, step))
        if form == "given probabilities":
            rows = (drafted[step].flatten(0, 1), draft_weight, later(target).flatten(0, 1))
            total = total + liger_fused_linear_kl_div(*rows, reduction="batchmean", token_weight=weights.flatten())
        elif form == "of each token":
            each = linear_distillation(
                drafted[step], draft_weight, later(teacher), head[t2d], kind="forward_kl", reduction="none"
            )[0]
            total = total + (weights * each).sum() / weights.numel()
        else:
            total = total + linear_distillation(
                drafted[step], draft_weight, later(teacher), head[t2d], kind="forward_kl", token_weight=weights,
                num_items=weights.numel(),
            )[0]  # fmt: skip
    return total


@pytest.mark.parametrize("form", ["weighted", "of each token", "given probabilities"])
def test_eagle_3(form, device):
    given = inputs(device)
    loss = ours(*given, form)
    found = (loss, *torch.autograd.grad(loss, given[:2]))
    doubles = [t.detach().double() if t.is_floating_point() else t for t in given]
    for t in doubles[:2]:
        t.requires_grad_()
    cross_entropy, entropy = plain(*doubles)
    exact = (cross_entropy - entropy, *torch.autograd.grad(cross_entropy, doubles[:2]))
    for numbers, truth in zip(found, exact, strict=True):
        size = truth.abs().max().item()
        assert size > 1e-3
        torch.testing.assert_close(numbers.double(), truth, rtol=0, atol=FLOAT * max(1, size))


def test_tokens_that_do_not_count_have_no_gradient(device):
    drafted, draft_weight, teacher, head, t2d, mask = inputs(device)
    for reduction in ("sum", "none"):
        loss, soft, _ = linear_distillation(
            drafted[0], draft_weight, teacher, head[t2d], kind="forward_kl", token_weight=mask.float(),
            reduction=reduction,
        )  # fmt: skip
        (gradient,) = torch.autograd.grad(loss.sum(), drafted)
        assert (gradient[0][~mask] == 0).all() and (gradient[0][mask] != 0).any(-1).all() and not soft.requires_grad


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_compiled(reduction, device):
    """One graph; the gradients are those of the operator itself."""
    drafted, draft_weight, teacher, head, t2d, mask = inputs(device)

    def loss_of(states, weight):
        return linear_distillation(
            states, weight, teacher, head[t2d], kind="forward_kl", token_weight=mask.float(), reduction=reduction
        )[0].sum()

    states = drafted[0].detach().requires_grad_()
    expected = torch.autograd.grad(loss_of(states, draft_weight), (states, draft_weight))
    compiled = torch.compile(loss_of, fullgraph=True, backend="aot_eager")
    for ours, theirs in zip(torch.autograd.grad(compiled(states, draft_weight), (states, draft_weight)), expected):
        torch.testing.assert_close(ours, theirs)


def test_shapes_alone():
    """On the meta device."""
    given = [t.to("meta") for t in inputs("cpu")[:4]]
    for reduction, shape in (("none", (B, T)), ("mean", ())):
        results = linear_distillation(given[0][0], given[1], given[2], given[3][: V // 3], reduction=reduction)
        assert all(t.shape == shape and t.device.type == "meta" for t in results)
