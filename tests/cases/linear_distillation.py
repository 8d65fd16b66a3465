import torch
import torch.nn.functional as F
from liger_kernel._library import ops
from liger_kernel.ops.linear_distillation import KINDS, linear_distillation

from cases import Case
from cases.cross_entropy import IGNORE, V, head_make


def make(shape, options):
    """The teacher is wider than the student."""
    hidden, weight, bias, labels, _ = head_make(shape, options)
    teacher = torch.randn(shape[0], 2 * shape[1])
    teacher_weight, teacher_bias = (
        torch.randn(shape[2], 2 * shape[1]) * shape[1] ** -0.5,
        None if bias is None else torch.randn(shape[2]),
    )
    token_weight = torch.rand(shape[0]) if options.get("weighted") else None
    if token_weight is not None:
        token_weight[::3] = 0
    return (
        hidden,
        weight,
        bias,
        teacher,
        teacher_weight,
        teacher_bias,
        None if options.get("unlabelled") and not options.get("hard_weight") else labels,
        token_weight,
    )


NAMES = (
    "kind",
    "beta",
    "temperature",
    "soft_weight",
    "hard_weight",
    "student_scale",
    "student_softcap",
    "teacher_scale",
    "teacher_softcap",
    "max_bytes",
    "num_items",
    "reduction",
)


def op(hidden, weight, bias, teacher, teacher_weight, teacher_bias, labels, token_weight, **options):
    known = {name: value for name, value in options.items() if name in NAMES}
    return linear_distillation(
        hidden, weight, teacher, teacher_weight, labels, student_bias=bias, teacher_bias=teacher_bias,
        token_weight=token_weight, **known,
    )  # fmt: skip


def divergence(kind, z, t, beta):
    """Of logits [tokens, V]."""
    if kind == "cosine":
        return 1 - (F.normalize(z, dim=-1) * F.normalize(t, dim=-1)).sum(
            -1
        )  # F.cosine_similarity bounds lengths at 1e-8
    s, t = torch.log_softmax(z, -1), torch.log_softmax(t, -1)
    kl = lambda p, q: (p.exp() * (p - q)).sum(-1)
    if kind == "tvd":
        return 0.5 * (s.exp() - t.exp()).abs().sum(-1)
    if kind == "forward_kl" or (kind == "jsd" and beta == 0):
        return kl(t, s)
    if kind == "reverse_kl" or beta == 1:
        return kl(s, t)
    m = torch.log((1 - beta) * s.exp() + beta * t.exp())
    return beta * kl(t, m) + (1 - beta) * kl(s, m)


def reference(
    hidden,
    weight,
    bias,
    teacher,
    teacher_weight,
    teacher_bias,
    labels,
    token_weight,
    kind="jsd",
    beta=0.5,
    temperature=1.0,
    soft_weight=1.0,
    hard_weight=0.0,
    student_scale=1.0,
    student_softcap=None,
    teacher_scale=1.0,
    teacher_softcap=None,
    num_items=None,
    reduction="mean",
    **_,
):
    def logits(x, w, b, scale, softcap):
        y = F.linear(x, w, b)
        y = y.to(torch.promote_types(y.dtype, torch.float32)) * scale
        return softcap * torch.tanh(y / softcap) if softcap else y

    z, t = (
        logits(hidden, weight, bias, student_scale, student_softcap),
        logits(teacher, teacher_weight, teacher_bias, teacher_scale, teacher_softcap).detach(),
    )
    valid = torch.ones(len(z), dtype=torch.bool, device=z.device) if labels is None else labels != IGNORE
    soft = torch.where(valid, divergence(kind, z / temperature, t / temperature, beta), 0)
    hard = soft.detach() * 0 if labels is None else F.cross_entropy(z, labels, ignore_index=IGNORE, reduction="none")
    if token_weight is not None:
        soft, hard = token_weight * soft, token_weight * hard
    if reduction != "none":
        count = 1 if reduction == "sum" else num_items or valid.sum().clamp(min=1)
        soft, hard = soft.sum() / count, hard.sum() / count
    return soft_weight * soft + hard_weight * hard, soft.detach(), hard.detach()


def schema(inputs, options):
    hidden, weight, bias, teacher, teacher_weight, teacher_bias, labels, _ = inputs
    each = torch.full((len(hidden),), 0.1, device=hidden.device)
    return ops.linear_distillation, (
        hidden,
        weight,
        bias,
        teacher,
        teacher_weight,
        teacher_bias,
        labels,
        each,
        None if labels is None else each,
        None,
        KINDS[options.get("kind", "jsd")],
        options.get("beta", 0.5),
        options.get("temperature", 1.0),
        1.0,
        0.0,
        1.0,
        0.0,
        IGNORE,
        True,
        True,
        False,
        options.get("max_bytes", 0),
    )


def draw(pick):
    # The cosine is drawn with more than two classes, between which its gradient does not vanish, in
    # tests/loss_cases.py.
    drawn = dict(
        kind=pick.choice(sorted(KINDS.keys() - {"cosine"})),
        beta=pick.choice((0.0, 0.1, 0.9, 1.0)),
        temperature=pick.choice((0.5, 2.5)),
        with_bias=True,
        max_bytes=pick.choice((1, 5000)),
        student_softcap=pick.choice((3.0, 30.0)),
        teacher_scale=pick.choice((0.25, 2.0)),
        ignored=pick.choice((0.0, 0.9, 1.1)),
    )
    return {"hard_weight": 0.5, **{name: drawn[name] for name in pick.sample(sorted(drawn), pick.randrange(5))}}


CASES = [
    Case(
        name="linear_distillation",
        op=op,
        reference=reference,
        make=make,
        draw=draw,
        differentiable=(0, 1, 2),
        # p (ln p - ln q) of a class rounds as logits of order one do, and the sum cancels to a small divergence.
        terms_of_order_one=1,
        schema=schema,
        shapes=[(1, 4, 3), (33, 16, 101), (40, 64, 1000)],
        options=[
            dict(hard_weight=0.5),
            dict(kind="forward_kl"),
            dict(kind="reverse_kl", hard_weight=0.25, temperature=2.0),
            dict(kind="tvd", with_bias=True),
            dict(kind="cosine", hard_weight=1.0),
            dict(beta=0.1, max_bytes=4000, with_bias=True, hard_weight=0.5, temperature=0.7),
            dict(beta=0.0),
            dict(beta=1.0, ignored=0.0),
            dict(ignored=1.1, hard_weight=0.5),
            dict(unlabelled=True, max_bytes=1),
            dict(soft_weight=0.0, hard_weight=1.0),
            dict(
                student_softcap=3.0,
                student_scale=2.0,
                teacher_softcap=5.0,
                teacher_scale=0.5,
                hard_weight=0.5,
                ignored=0.01,
                temperature=1.5,
            ),
            dict(kind="cosine", student_softcap=5.0, temperature=2.0),
            dict(kind="tvd", student_scale=0.5, hard_weight=0.5),
            dict(kind="forward_kl", weighted=True, num_items=50.0, unlabelled=True),
            dict(kind="forward_kl", reduction="none", unlabelled=True, with_bias=True),
            dict(reduction="none", weighted=True, hard_weight=0.5, max_bytes=4000, temperature=0.7, with_bias=True),
            dict(kind="reverse_kl", reduction="none", ignored=1.1, soft_weight=0.0, hard_weight=1.0),
            dict(kind="tvd", reduction="sum", weighted=True, hard_weight=0.5),
        ],
        bench=[
            ((8192, 2048, V), dict(unlabelled=True)),
            ((8192, 2048, V), dict(kind="forward_kl", unlabelled=True)),
            ((8192, 2048, V), dict(hard_weight=0.5, ignored=0.0)),
        ],
        bench_cpu=[((1024, 256, 32768), dict(hard_weight=0.5, ignored=0.0))],
        # Both heads forward, of which the teacher's is twice as wide; the student's twice backward.
        heads=lambda inputs: [(inputs[0], inputs[1], True), (inputs[3], inputs[4], False)],
        flops=lambda shape, options: (6 * shape[0] * shape[1] * shape[2], 4 * shape[0] * shape[1] * shape[2]),
        errors=[
            (
                lambda d: linear_distillation(
                    torch.randn(2, 4, device=d),
                    torch.randn(5, 4, device=d),
                    torch.randn(2, 3, device=d),
                    torch.randn(6, 3, device=d),
                ),
                RuntimeError,
                r"teacher_weight must be \[5, 3\]",
            ),
            (
                lambda d: linear_distillation(
                    torch.randn(2, 4, device=d),
                    torch.randn(5, 4, device=d),
                    torch.randn(3, 3, device=d),
                    torch.randn(5, 3, device=d),
                ),
                RuntimeError,
                r"teacher must be \[2, 3\]",
            ),
            (
                lambda d: linear_distillation(*(torch.randn(2, 4, device=d) for _ in range(4)), beta=1.5),
                ValueError,
                "beta must be",
            ),
            (
                lambda d: linear_distillation(*(torch.randn(2, 4, device=d) for _ in range(4)), temperature=0.0),
                ValueError,
                "temperature must be positive",
            ),
            (
                lambda d: linear_distillation(*(torch.randn(2, 4, device=d) for _ in range(4)), hard_weight=1.0),
                ValueError,
                "hard_weight needs labels",
            ),
            (
                lambda d: linear_distillation(*(torch.randn(2, 4, device=d) for _ in range(4)), reduction="max"),
                ValueError,
                "reduction must be",
            ),
        ],
    )
]
