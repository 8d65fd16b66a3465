"""Losses between a student's and a teacher's head, against plain torch in float64."""

import pytest
import torch
from cases import linear_distillation as cases
from liger_kernel import ops as liger_ops
from liger_kernel._library import ops
from liger_kernel.chunked_loss import cosine_similarity_loss, fused_linear_distillation, jsd_loss
from liger_kernel.chunked_loss.fused_linear_distillation import LigerFusedLinearDistillationBase
from liger_kernel.operators import distillation
from liger_kernel.transformers import LigerFusedLinearJSD
from liger_kernel.transformers.functional import liger_fused_linear_jsd
from policy_reference import BOUNDS, check

N, H, H_TEACHER, V = 37, 16, 24, 53
JSD, Cosine = jsd_loss.LigerFusedLinearJSDLoss, cosine_similarity_loss.LigerFusedLinearCosineSimilarityLoss
NAMES = "loss", "student_input", "student_weight", "student_bias"


def heads(device="cpu", dtype=torch.float32, tokens=(N,), vocabulary=V, teacher_vocabulary=V):
    """(student: input, weight, bias), (teacher: input, weight, bias), labels of which a third is ignored."""
    g = torch.Generator().manual_seed(1)
    draw = lambda *shape: torch.randn(*shape, generator=g).to(device, dtype)
    student = [draw(*tokens, H) * 0.7, draw(vocabulary, H) * 0.5, draw(vocabulary) * 0.3]
    teacher = [
        draw(*tokens, H_TEACHER) * 0.7,
        draw(teacher_vocabulary, H_TEACHER) * 0.5,
        draw(teacher_vocabulary) * 0.3,
    ]
    labels = torch.randint(0, vocabulary, tokens, generator=g)
    labels[torch.rand(tokens, generator=g) < 0.3] = -100
    return [t.requires_grad_() for t in student], teacher, labels.to(device)


def divergence(s, t, beta):
    """Of each row of probabilities' logarithms."""
    kl = lambda p, q: (p.exp() * (p - q)).sum(-1)
    if beta in (0, 1):
        return kl(t, s) if beta == 0 else kl(s, t)
    m = ((1 - beta) * s.exp() + beta * t.exp()).log()
    return beta * kl(t, m) + (1 - beta) * kl(s, m)


def jsd(s, t, labels, beta):
    each = divergence(torch.log_softmax(s, -1), torch.log_softmax(t, -1), beta)
    return each.masked_fill(labels == -100, 0).sum()


def cosine(s, t, labels, beta):
    return beta * (1 - torch.nn.functional.cosine_similarity(s, t, -1)).sum()


def expected_of(
    student, teacher, labels, soft_of, temperature=1.0, weights=(0.5, 0.5), beta=0.5, scale=1.0, with_ce=True
):
    """([loss, gradients of the student], soft, hard) in float64."""
    exact = [None if t is None else t.detach().double().requires_grad_(t.requires_grad) for t in student]
    logits = lambda x, w, b: x.flatten(0, -2) @ w.T + (0 if b is None else b)
    s, t, labels = logits(*exact), logits(*(None if t is None else t.double() for t in teacher)), labels.flatten()
    count = (labels != -100).sum().clamp(min=1)
    hard = torch.nn.functional.cross_entropy(s, labels, ignore_index=-100, reduction="sum") / count * with_ce
    padded = torch.nn.functional.pad(s / temperature, (0, t.shape[-1] - s.shape[-1]))
    soft = soft_of(padded, t / temperature, labels, beta) / count
    loss = weights[0] * hard + weights[1] * soft
    gradients = torch.autograd.grad(loss * scale, [t for t in exact if t is not None and t.requires_grad])
    return [loss, *gradients], soft, hard


def test_chunks(monkeypatch):
    """The numbers do not depend on the sizes of chunks, and a 3-d batch is the same tokens; strides are free. The
    losses in one operator, and those in a loop."""
    monkeypatch.setattr(distillation, "CPU_BYTES", 0)
    for extra in (0, 9):  # a larger vocabulary of the teacher's takes the loop
        student, teacher, labels = heads(tokens=(5, 23), teacher_vocabulary=V + extra)
        student[0] = student[0].detach()[:, :-1].requires_grad_()
        leaf, labels, teacher[0] = student[0], labels[:, 1:], teacher[0][:, :-1]
        expected, *_ = expected_of(student, teacher, labels, jsd)
        for chunk, rows, size in ((4096, 512, 1024), (4096, 7, 1024), (13, 5, 1), (1, 1, 2)):
            monkeypatch.setattr(distillation, "CPU_CHUNK", chunk), monkeypatch.setattr(distillation, "ROWS", rows)
            for t in student:
                t.grad = None
            loss = JSD(chunk_size=size)(student[0], student[1], teacher[0], teacher[1], labels, student[2], teacher[2])
            loss.backward()
            assert leaf.grad.shape == leaf.shape
            check((loss, *(t.grad for t in student)), expected, NAMES, BOUNDS[torch.float32])
        flat = JSD()(
            student[0].flatten(0, 1),
            student[1],
            teacher[0].flatten(0, 1),
            teacher[1],
            labels.flatten(),
            student[2],
            teacher[2],
        )
        torch.testing.assert_close(flat, loss)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_weight_gradient_is_summed_in_float(dtype):
    """Its error does not grow with the number of chunks."""
    student, teacher, labels = heads(dtype=dtype, tokens=(600,))
    expected, *_ = expected_of(student, teacher, labels, jsd)
    errors = []
    for chunk in (600, 3):
        loss = JSD(chunk_size=chunk)(student[0], student[1], teacher[0], teacher[1], labels, student[2], teacher[2])
        (gradient,) = torch.autograd.grad(loss, student[1])
        errors.append((gradient.double() - expected[2]).norm() / expected[2].norm())
    assert errors[1] < 1.2 * errors[0]


def test_the_cosine_of_nothing():
    assert not ops.cosine_distance(torch.zeros(2, 3), torch.ones(2, 3)).sub(1).any()


def test_larger_student_vocabulary():
    student, teacher, labels = heads(vocabulary=V + 9)
    with pytest.raises(ValueError, match="vocabulary"):
        JSD()(student[0], student[1], teacher[0], teacher[1], labels)


def test_ignored_tokens():
    """All ignored: 0 with gradients of 0. What stands at ignored places is not read."""
    student, teacher, labels = heads()
    nothing = JSD()(
        student[0], student[1], teacher[0], teacher[1], torch.full_like(labels, -100), student[2], teacher[2]
    )
    nothing.backward()
    assert nothing == 0 and all(t.grad.count_nonzero() == 0 for t in student)
    plain = JSD()(student[0], student[1], teacher[0], teacher[1], labels, student[2], teacher[2])
    with torch.no_grad():
        student[0][labels == -100] = torch.nan
    for t in student:
        t.grad = None
    loss = JSD()(student[0], student[1], teacher[0], teacher[1], labels, student[2], teacher[2])
    loss.backward()
    torch.testing.assert_close(loss, plain)
    assert plain > 1e-3 and all(t.grad.isfinite().all() and t.grad.abs().max() > 1e-5 for t in student)
    own = JSD(ignore_index=5)(
        teacher[0], teacher[1], teacher[0] * 0.5, teacher[1], torch.where(labels == -100, 5, labels)
    )
    other = labels.masked_fill(labels == 5, -100)
    torch.testing.assert_close(own, JSD()(teacher[0], teacher[1], teacher[0] * 0.5, teacher[1], other))


def test_gradients_of_forward():
    student, teacher, labels = heads()
    run = lambda: JSD()(student[0], student[1], teacher[0], teacher[1], labels, student[2], teacher[2])
    loss = run()
    once = torch.autograd.grad(loss, student, retain_graph=True)
    whole, student[1].data = student[1].data, torch.empty(0)  # as ZeRO-3 leaves it
    twice = torch.autograd.grad(loss * 2, student)
    student[1].data = whole
    for a, b in zip(once, twice):
        assert a.abs().max() > 1e-5
        torch.testing.assert_close(2 * a, b)
    for _ in range(3):
        run().backward()
    for t, a in zip(student, once):
        torch.testing.assert_close(t.grad, 3 * a)
    with torch.no_grad():
        without = run()
    assert not without.requires_grad
    torch.testing.assert_close(without, loss.detach())
    with pytest.raises(RuntimeError, match="second derivative"):
        torch.autograd.grad(run(), student[0], create_graph=True)[0].sum().backward()
    student[1].requires_grad_(False)
    frozen = run()
    gradients = torch.autograd.grad(frozen, (student[0], student[2]))
    for a, b in zip(gradients, (once[0], once[2])):
        torch.testing.assert_close(a, b)


def test_no_gradient_is_made_where_none_is_wanted(monkeypatch):
    student, teacher, labels = heads()
    run = lambda: JSD()(student[0], student[1], teacher[0], teacher[1], labels)
    original = fused_linear_distillation.forward_with_gradients

    def recorded(*args):
        found = original(*args)
        made.append([g is not None for g in found[-2]])
        return found

    monkeypatch.setattr(fused_linear_distillation, "forward_with_gradients", recorded)
    made = []
    with torch.no_grad():
        run()
    student[1].requires_grad_(False)
    run()
    assert made == [[False, False, False], [True, False, False]]


def test_in_a_compiled_function():
    """The graph breaks at the loss; its gradients are the same."""
    student, teacher, _ = heads()
    run = lambda x: LigerFusedLinearJSD()(x * 2, student[1], teacher[0], teacher[1], None)
    expected = torch.autograd.grad(run(student[0]), student[:2])
    torch._dynamo.reset()
    for got, right in zip(torch.autograd.grad(torch.compile(run, backend="eager")(student[0]), student[:2]), expected):
        assert right.abs().max() > 1e-5
        torch.testing.assert_close(got, right)


def test_own_loss_on_the_base():
    """A user's own loss on logits, with a keyword of its own; weights and all else are the base's."""

    class SquaredError(LigerFusedLinearDistillationBase):
        @staticmethod
        def distillation_loss_fn(student_logits, teacher_logits, target=None, ignore_index=None, beta=1.0, power=1):
            kept = target != ignore_index
            return beta * (student_logits - teacher_logits)[kept].abs().pow(power).sum()

        @classmethod
        def forward(
            cls,
            ctx,
            student_input,
            student_weight,
            teacher_input,
            teacher_weight,
            target,
            student_bias,
            teacher_bias,
            with_ce,
        ):
            return super().forward(
                cls,
                ctx,
                student_input,
                student_weight,
                teacher_input,
                teacher_weight,
                target,
                student_bias,
                teacher_bias,
                chunk_size=4,
                beta=0.3,
                compute_ce_loss=with_ce,
                temperature=1.5,
                power=2,
            )

        @staticmethod
        def backward(ctx, grad_output):
            return *LigerFusedLinearDistillationBase.backward(ctx, grad_output)[:6], None, None

    soft_of = lambda s, t, labels, beta: beta * (s - t)[labels != -100].pow(2).sum()
    for with_ce in (True, False):
        student, teacher, labels = heads()
        loss = SquaredError.apply(
            student[0], student[1], teacher[0], teacher[1], labels, student[2], teacher[2], with_ce
        )
        loss.backward()
        expected, *_ = expected_of(student, teacher, labels, soft_of, 1.5, beta=0.3, with_ce=with_ce)
        check((loss, *(t.grad for t in student)), expected, NAMES, BOUNDS[torch.float32])
    with pytest.raises(NotImplementedError):
        LigerFusedLinearDistillationBase.distillation_loss_fn(None, None)


def test_parts_of_the_base():
    """chunk_forward and _compute_loss are differentiable on their own."""
    student, teacher, labels = heads()
    arguments = student[0], student[1], teacher[0], teacher[1], labels, student[2], teacher[2]
    s, t, ce = LigerFusedLinearDistillationBase.chunk_forward(*arguments)
    torch.testing.assert_close(s, student[0] @ student[1].T + student[2])
    torch.testing.assert_close(t, teacher[0] @ teacher[1].T + teacher[2])
    torch.testing.assert_close(ce, torch.nn.functional.cross_entropy(s, labels, reduction="sum"))
    loss, (soft, hard, *_) = LigerFusedLinearDistillationBase._compute_loss(
        *arguments, jsd_loss.LigerFusedLinearJSDFunction.distillation_loss_fn, temperature=1.2, beta=0.3
    )
    loss.backward()
    expected, soft_, hard_ = expected_of(student, teacher, labels, jsd, 1.2, beta=0.3)
    check(
        (loss, *(t.grad for t in student), soft, hard),
        (*expected, soft_, hard_),
        (*NAMES, "soft", "hard"),
        BOUNDS[torch.float32],
    )
    fn = jsd_loss.LigerFusedLinearJSDFunction.distillation_loss_fn
    torch.testing.assert_close(fn(s.view(1, N, V), t.view(1, N, V), 0.3), jsd(s, t, labels * 0, 0.3))


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("labelled", [True, False])
def test_fused_linear_jsd(device, dtype, beta, labelled):
    student, teacher, labels = heads(device, dtype)
    labels = labels if labelled else None
    loss = LigerFusedLinearJSD(beta, temperature=1.3)(student[0], student[1], teacher[0], teacher[1], labels)
    (loss * 1.7).backward()
    expected, *_ = expected_of(
        [*student[:2], None],
        [*teacher[:2], None],
        torch.zeros(N, dtype=torch.long, device=device) if labels is None else labels,
        jsd,
        1.3,
        (0, 1),
        beta,
        1.7,
    )
    check((loss, student[0].grad, student[1].grad), expected, NAMES, BOUNDS[dtype])
    assert loss.dtype == torch.float32 and loss.ndim == 0 and student[0].grad.dtype == dtype == student[1].grad.dtype
    arguments = student[0], student[1], teacher[0], teacher[1], labels, beta, -100
    torch.testing.assert_close(liger_fused_linear_jsd(*arguments, 1.3), loss, rtol=0, atol=0)
    loss_, *gradients = liger_ops.fused_linear_jsd_forward(*arguments, labelled, 1.3)
    gradients = liger_ops.fused_linear_jsd_backward(torch.tensor(1.7), *gradients)
    torch.testing.assert_close(loss_, loss, rtol=0, atol=0)
    for got, t in zip(gradients, student):
        # Both scale one gradient, and round it once or twice, by half an eps each time, or by the smallest number.
        precision = torch.finfo(dtype)
        torch.testing.assert_close(got.to(dtype), t.grad, rtol=precision.eps, atol=precision.tiny * precision.eps)


@pytest.mark.parametrize("temperature", [1.0, 1.7])
@pytest.mark.parametrize("kind, beta", [("jsd", 0.0), ("jsd", 1.0), ("jsd", 0.3), ("tvd", 0.5), ("cosine", 0.5)])
def test_rows_that_shared_memory_cannot_keep(kind, beta, temperature):
    """Two rows of float logits of a usual vocabulary are more than a cluster has room for.

    A logarithm of a probability is off by some roundings of 2^-24 of numbers up to 2^4. The gradient of the student's
    input is a GEMM's sum of 70,000 terms in float, off by up to 2^11 roundings. Twice the same bits.
    """
    device, vocabulary = "cuda" if torch.cuda.is_available() else "cpu", 70_000
    torch.manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, device=device)
    labels = torch.tensor([5, -100, 69_999], device=device)
    given = [draw(3, 8), draw(vocabulary, 8), draw(vocabulary), draw(3, 8), draw(vocabulary, 8), draw(vocabulary)]
    options = dict(kind=kind, beta=beta, temperature=temperature, hard_weight=0.5)
    found = []
    for dtype, op in ((torch.float64, cases.reference), (torch.float32, cases.op), (torch.float32, cases.op)):
        tensors = [t.to(dtype, copy=True).requires_grad_(i < 3) for i, t in enumerate(given)]
        loss = op(*tensors, labels, None, **options)[0]
        loss.backward()
        found.append([loss, *(t.grad for t in tensors[:3])])
    for i, (expected, ours, again) in enumerate(zip(*found, strict=True)):
        assert torch.equal(ours, again)
        assert (ours - expected).abs().max() <= 2.0 ** (-13 if i == 1 else -19) * expected.abs().max()


def test_fused_linear_jsd_contract():
    student, teacher, labels = heads()
    run = lambda labels=labels, **kw: LigerFusedLinearJSD(**kw)(student[0], student[1], teacher[0], teacher[1], labels)
    nothing = run(torch.full_like(labels, -100))
    nothing.backward()
    assert nothing == 0 and student[0].grad.count_nonzero() == 0 == student[1].grad.count_nonzero()
    loss = run(accum_dtype=torch.float32)
    once = torch.autograd.grad(loss, student[:2], retain_graph=True)
    for a, b in zip(once, torch.autograd.grad(loss * 3, student[:2])):
        assert a.abs().max() > 1e-5
        torch.testing.assert_close(3 * a, b)
    with torch.no_grad():
        assert not run().requires_grad
    with pytest.raises(RuntimeError, match="second derivative"):
        torch.autograd.grad(run(), student[0], create_graph=True)[0].sum().backward()
    student[1].requires_grad_(False)
    torch.testing.assert_close(torch.autograd.grad(run(), student[0])[0], once[0])
    assert (
        liger_ops.fused_linear_jsd_forward(
            student[0], student[1], teacher[0], teacher[1], labels, 0.5, -100, True, 1.0
        )[2]
        is None
    )
    with pytest.raises(AssertionError):
        LigerFusedLinearJSD(temperature=0.0)
    with pytest.raises(AssertionError, match="shift_labels"):
        run(labels[:-1])
    with pytest.raises(ValueError, match="beta"):
        run(jsd_beta=1.5)


def test_half_precision_gradients_neither_vanish_nor_overflow():
    """A mean's terms are below float16's smallest number until the loss scale reaches them, and their sum over tokens
    is above its largest."""
    student, teacher, labels = heads(dtype=torch.float16, tokens=(2500,), vocabulary=3000, teacher_vocabulary=3000)
    loss = JSD(temperature=4.0)(student[0], student[1], teacher[0] * 0.1, teacher[1], labels, student[2], teacher[2])
    (loss * 2.0**14).backward()
    teacher[0] = teacher[0] * 0.1
    expected, *_ = expected_of(student, teacher, labels, jsd, 4.0, scale=2.0**14)
    # The gradients of logits are rounded, and so are their sums: half an eps each, of an element or of the largest.
    eps = torch.finfo(torch.float16).eps
    check([t.grad for t in student], expected[1:], NAMES[1:], dict(rtol=eps, atol=eps))
