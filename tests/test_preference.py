"""The preference losses against the papers' formulas in float64."""

import pytest
import torch
from liger_kernel._library import ops
from liger_kernel.chunked_loss import (
    LigerFusedLinearDPOLoss,
    LigerFusedLinearKTOLoss,
    LigerFusedLinearORPOLoss,
    LigerFusedLinearSimPOLoss,
)
from liger_kernel.chunked_loss.fused_linear_preference import LigerFusedLinearPreferenceBase
from preference import (
    LOSS_TYPES,
    MODULES,
    Batch,
    H,
    N,
    T,
    V,
    check,
    close,
    dpo_terms,
    ln_sigma,
    options_of,
    reference,
    sigma,
)


def test_the_head_works_once_on_a_token(monkeypatch):
    """One pass for both labels of ORPO; twice only on tokens that have two."""
    from liger_kernel.chunked_loss import fused_linear_preference as module

    batch, passes = Batch(), []
    plain = module.linear_log_prob
    monkeypatch.setattr(
        module,
        "linear_log_prob",
        lambda x, w, ids, *a, **k: passes.append((ids != -100).sum().item()) or plain(x, w, ids, *a, **k),
    )
    nll_y = torch.where(batch.y == -100, 3, batch.y)
    batch.call(LigerFusedLinearORPOLoss(), "orpo", nll_target=nll_y)
    assert passes.pop() == N * T + (batch.y[N:] != -100).sum() and not passes
    nll_y[0, 0] = batch.y[0, 0] % (V - 1) + 1
    batch.call(LigerFusedLinearORPOLoss(), "orpo", nll_target=nll_y)
    assert passes.pop() == N * T + (batch.y[N:] != -100).sum() + 1 and not passes


@pytest.mark.parametrize("name", MODULES)
def test_nothing_is_recorded_under_no_grad(name, monkeypatch):
    """The same numbers, without the work of the gradients."""
    batch = Batch()
    module = MODULES[name](**({"use_ref_model": False} if name == "dpo" else {}))
    loss, aux = batch.call(module, name)
    monkeypatch.setattr(torch.autograd, "grad", None)
    with torch.no_grad():
        evaluated, same = batch.call(module, name)
    assert torch.equal(loss, evaluated) and not evaluated.requires_grad and all(map(torch.equal, aux, same))


@pytest.mark.parametrize("factor", (1e-38, 1e30))
def test_float16_gradients_of_a_tiny_or_huge_loss_are_numbers(factor):
    """The first vanish, the second are inf, and nothing is NaN."""
    batch = Batch(torch.float16)

    class Own(LigerFusedLinearPreferenceBase):
        @staticmethod
        def preference_loss_fn(chosen, rejected, full_target, beta):
            return factor * (chosen - rejected).mean()

        @classmethod
        def forward(cls, ctx, x, w, y):
            return LigerFusedLinearPreferenceBase.forward(cls, ctx, x, w, y, compute_nll_loss=False)

        @staticmethod
        def backward(ctx, *upstream):
            return LigerFusedLinearPreferenceBase.backward(ctx, upstream)[:3]

    loss, _ = Own.apply(batch.x, batch.w, batch.y)
    for gradient in torch.autograd.grad(loss, (batch.x, batch.w)):
        assert not gradient.isnan().any() and (not gradient.any() if factor < 1 else gradient.isinf().any())


def test_float16_gradients_wait_for_the_loss_scale():
    """Most gradients of a loss over many tokens are below float16's smallest number; a loss scale brings them back."""
    rows, length = 2, 600
    x = (torch.randn(rows, length, H) * 0.05).half().requires_grad_()
    w = (torch.randn(V, H) * 0.0003).half().requires_grad_()
    y = torch.randint(0, V, (rows, length))
    loss, _ = LigerFusedLinearSimPOLoss(beta=0.1)(w, x, y)
    scale = 2.0**12
    (loss * scale).backward()
    x64, w64 = (t.detach().double().requires_grad_() for t in (x, w))
    plain, _ = reference("simpo", x64, w64, None, y, -100, dict(beta=0.1, compute_nll_loss=True))
    plain.backward()
    assert (x64.grad.abs() < 2.0**-24).float().mean() > 0.05
    for ours, theirs in ((x.grad, x64.grad), (w.grad, w64.grad)):
        close(ours.double() / scale, theirs, 4e-3, 0)
    # Large sums do not overflow, where what they add up to does not.
    x = (torch.randn(rows, length, H) + 8).half().requires_grad_()
    loss, _ = LigerFusedLinearDPOLoss(use_ref_model=False, beta=1.0)(w, x, y)
    (dw,) = torch.autograd.grad(loss, w)
    plain, _ = reference("dpo", x.detach().double(), w64, None, y, -100, dict(beta=1.0, compute_nll_loss=False))
    (expected,) = torch.autograd.grad(plain, w64)
    assert expected.abs().max() > 30
    close(dw, expected, 4e-3)


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("which", ["chosen", "rejected", "all"])
def test_sequences_without_labels(name, which):
    """Such a sequence has log-probability 0, on average too; it gets no gradient, and the others finite ones."""
    batch = Batch()
    rows = {"chosen": slice(1, 2), "rejected": slice(N + 1, N + 2), "all": slice(0, 2 * N)}[which]
    batch.y[rows] = -100
    options = options_of(name, dict(use_ref_model=False) if name == "dpo" else {})
    loss, aux = batch.call(MODULES[name](**options), name)
    assert loss.isfinite() and all(a.isfinite().all() for a in aux)
    gradients = torch.autograd.grad(loss, batch.leaves)
    assert not gradients[0][rows].any() and all(g.isfinite().all() for g in gradients)
    assert all(bool(g.any()) == (which != "all") for g in gradients)
    if name != "orpo" and which != "all":  # whose odds of a certain sequence are infinite
        expected = batch.expected(name, options)
        for ours, plain in zip((loss, *gradients), (expected[0], *expected[2])):
            close(ours, plain, 2e-5)


@pytest.mark.parametrize("which", [0, 1])
def test_orpo_of_certain_sequences(which):
    """A probability that rounds to 1 gives finite odds, and the limit of the gradient."""
    chosen, rejected = torch.tensor([-0.7, -1.2]), torch.tensor([-2.0, -0.4])
    (chosen, rejected)[which][0] = -1e-9
    a, b = chosen.clone().requires_grad_(), rejected.clone().requires_grad_()
    results = ops.orpo_loss(a, b, 0.5, 0)
    a64, b64 = chosen.double().requires_grad_(), rejected.double().requires_grad_()
    g = a64 - b64 - (torch.log(-torch.expm1(a64)) - torch.log(-torch.expm1(b64)))
    (-0.5 * ln_sigma(g).mean()).backward()
    results[0].backward()
    close(results[0], -0.5 * ln_sigma(g).mean(), 1e-5)
    close(a.grad, a64.grad, 1e-5)
    close(b.grad, b64.grad, 1e-5)
    sure = torch.zeros(2, requires_grad=True)
    loss, *_, odds = ops.orpo_loss(sure, torch.full((2,), -0.5), 0.1, 0)
    (gradient,) = torch.autograd.grad(loss, sure)
    assert loss < 1e-30 and odds.isfinite() and gradient.isfinite().all()


def test_discopop_far_from_zero():
    h = torch.tensor([-3000.0, -120.0, -1.0, 0.0, 2.0, 500.0])
    ours = torch.tensor([0.0] * 6, requires_grad=True)
    loss = ops.dpo_loss(ours + h, torch.zeros(6), None, None, "discopop", 1.0, 0.0, 0.05, 1)[0]
    (gradient,) = torch.autograd.grad(loss, ours)
    x = h.double().requires_grad_()
    plain = -ln_sigma(x) * sigma(-x / 0.05) + torch.exp(ln_sigma(x / 0.05) - x)
    close(loss, plain.sum(), 1e-6)
    close(gradient, torch.autograd.grad(plain.sum(), x)[0], 1e-5)


@pytest.mark.parametrize("loss_type", [*LOSS_TYPES, "kto"])
def test_gradients_where_a_sigmoid_rounds_to_1(loss_type):
    """Each keeps its digits: float's 1 − σ(20) is 0, and float64's has eight."""
    # None of them makes two slopes cancel in a sum.
    pairs = torch.cartesian_prod(torch.tensor([-20.0, -10, -1, 2, 10, 20]), torch.tensor([-19.0, -8, 3, 7, 15]))
    chosen, rejected = pairs[(pairs[:, 0] - pairs[:, 1]).abs() <= 20].unbind(1)
    e = 0.2 if loss_type in ("exo_pair", "robust") else 0.0

    def gradients(loss, dtype):
        w, l = (t.to(dtype).requires_grad_() for t in (chosen, rejected))
        return torch.autograd.grad(loss(w, l), (w, l))

    liked = torch.arange(2 * len(chosen)) % 2 == 0
    if loss_type == "kto":
        ours = gradients(lambda *pair: ops.kto_loss(torch.cat(pair), liked, None, None, 1.0, 1)[0], torch.float32)
        exact = gradients(lambda *pair: sigma(torch.where(liked, -1, 1) * torch.cat(pair)).sum(), torch.float64)
    else:
        ours = gradients(lambda w, l: ops.dpo_loss(w, l, None, None, loss_type, 1.0, e, 1.0, 1)[0], torch.float32)
        exact = gradients(lambda w, l: dpo_terms(loss_type, w, l, 1.0, e, 1.0).sum(), torch.float64)
    for got, want in zip(ours, exact):
        torch.testing.assert_close(got.double(), want, rtol=2**-20, atol=0)  # some roundings


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_formulas_take_float64(loss_type):
    """ATen's autograd differentiates them: gradcheck, and gradgradcheck."""
    w, l, rw, rl = (torch.randn(4, dtype=torch.float64) for _ in range(4))
    e = 0.2 if loss_type in ("exo_pair", "robust") else 0.0
    f = lambda w, l: ops.dpo_loss(w, l, rw, rl, loss_type, 0.7, e, 0.6, 0)[0]  # noqa: E731
    inputs = w.requires_grad_(), l.requires_grad_()
    assert torch.autograd.gradcheck(f, inputs) and (loss_type == "hinge" or torch.autograd.gradgradcheck(f, inputs))


def test_a_reference_gets_no_gradient():
    batch = Batch()
    ref = [t.clone().requires_grad_() for t in batch.ref]
    loss, _ = LigerFusedLinearDPOLoss()(batch.w, batch.x, batch.y, batch.b, *ref)
    loss.backward()
    assert all(t.grad is None for t in ref) and batch.w.grad.any()
    kl = torch.tensor(0.1, requires_grad=True)
    batch.call(LigerFusedLinearKTOLoss(), "kto", kl=kl)[0].backward()
    assert kl.grad is None


def test_kto_details():
    batch = Batch()
    options = options_of("kto", {})
    for kl in (torch.tensor([0.2]), torch.tensor(0.2).bfloat16(), torch.zeros(1)):
        check(
            batch,
            batch.call(LigerFusedLinearKTOLoss(), "kto", kl=kl),
            batch.expected("kto", options, kl=kl.double()),
            2e-5,
        )
    with pytest.raises(ValueError, match="kl must be one number"):
        batch.call(LigerFusedLinearKTOLoss(), "kto", kl=torch.zeros(2 * N))
    with pytest.raises(AssertionError, match="preference_labels"):
        LigerFusedLinearKTOLoss()(batch.x, batch.w, batch.y)
    # References that are given and not asked for do not count.
    assert torch.equal(
        batch.call(LigerFusedLinearKTOLoss(), "kto", ref=True)[0], batch.call(LigerFusedLinearKTOLoss(), "kto")[0]
    )
    for liked in (torch.ones(2 * N, dtype=torch.bool), torch.zeros(2 * N, dtype=torch.bool)):
        batch.liked = liked
        loss, aux = batch.call(LigerFusedLinearKTOLoss(chunk_size=4), "kto")
        check(batch, (loss, aux), batch.expected("kto", options), 2e-5)
        assert all(isinstance(a, torch.Tensor) and a.ndim == 0 for a in aux) and aux[1 if liked.all() else 0] == 0


@pytest.mark.parametrize("name", MODULES)
def test_chunks_and_compiled_change_nothing(name):
    batch = Batch()
    fixed = {"use_ref_model": False} if name == "dpo" else {}
    first, *others = [
        batch.call(MODULES[name](**fixed, chunk_size=c, compiled=compiled), name)
        for c, compiled in ((1, True), (2, False), (100, True))
    ]
    for other in others:
        assert torch.equal(first[0], other[0]) and all(map(torch.equal, first[1], other[1]))


def test_more_tokens_than_a_chunk_of_logits():
    """Nothing as large as the logits is made."""
    rows, length, width, classes = 4, 1024, 16, 8192
    x, w = torch.randn(rows, length, width, requires_grad=True), torch.randn(classes, width, requires_grad=True)
    y = torch.randint(0, classes, (rows, length))
    loss, aux = LigerFusedLinearDPOLoss(use_ref_model=False, beta=0.01)(w, x, y)
    x64, w64 = (t.detach().double().requires_grad_() for t in (x, w))
    plain, expected = reference("dpo", x64, w64, None, y, -100, dict(beta=0.01, compute_nll_loss=False))
    for ours, theirs in zip(torch.autograd.grad(loss, (x, w)), torch.autograd.grad(plain, (x64, w64))):
        close(ours, theirs, 1e-4)
    for ours, theirs in zip(aux, expected):
        close(ours, theirs, 1e-4)


def test_sequence_operators():
    logp, labels = torch.randn(3, 5), torch.randint(0, 9, (3, 5))
    labels[0, 1:4] = labels[1] = 4
    mask = labels != 4
    total = torch.where(mask, logp, 0).sum(1)
    close(ops.sequence_log_prob(logp, labels, 4, False), total.double(), 1e-6)
    close(ops.sequence_log_prob(logp, labels, 4, True), (total / mask.sum(1).clamp_min(1)).double(), 1e-6)
    close(ops.token_nll(logp, labels, 4, None), -total.sum().double() / mask.sum(), 1e-6)
    close(ops.token_nll(logp, labels, 4, torch.zeros(30)), -total.sum().double() / 30, 1e-6)
    hidden, weight, bias = torch.randn(3, 4, 5), torch.randn(7, 5), torch.randn(7)
    with torch.autocast("cpu", torch.bfloat16):
        close(
            ops.logit_sums(hidden, weight, bias),
            (hidden.double() @ weight.double().T + bias.double()).sum((1, 2)),
            1e-5,
        )


def test_formulas_give_references_no_gradient():
    logp, ref, kl = (torch.randn(n, requires_grad=True) for n in ((4,), (4,), (1, 1)))
    liked = torch.tensor([True, False, True, True])
    results = (
        ops.dpo_loss(logp, logp.flip(0), ref, ref.exp(), "apo_zero", 0.3, 0.0, 0.0, 0),
        ops.kto_loss(logp, liked, ref, kl, 0.3, 0),
    )
    for loss, *rewards in results:
        assert loss.ndim == 0 and not any(r.requires_grad for r in rewards)
        loss.backward()
    assert logp.grad.any() and ref.grad is None and kl.grad is None
