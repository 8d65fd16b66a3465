import math

import torch
import torch.nn.functional as F
from liger_kernel._library import ops
from liger_kernel.operators.head import OUTPUTS
from liger_kernel.operators.topk_distillation import LEAST_TAIL, linear_topk_divergence

from cases import Case
from cases.cross_entropy import IGNORE, V, head_make


def make(shape, options):
    """A teacher's log-probabilities at K classes of each token, of which some are absent."""
    hidden, weight, bias, target, _ = head_make(shape, options)
    count = min(options.get("k", 5), shape[2])
    teacher = torch.randn(shape[0], count).sub(1).log_softmax(-1) - 0.1
    # The first class of each token anywhere, the others after it: none twice.
    ids = (torch.randint(0, shape[2], (shape[0], 1)) + torch.arange(count)) % shape[2]
    if options.get("absent"):
        ids[torch.rand(ids.shape) < options["absent"]] = -1
    return hidden, weight, bias, target, ids, teacher


NAMES = ("beta", "tail", "temperature", "softcap", "max_bytes", "only_classes")


def op(hidden, weight, bias, target, ids, teacher, **options):
    known = {name: value for name, value in options.items() if name in NAMES}
    if known.get("only_classes"):  # a random trial may draw what does not go with it
        left_out = "max_bytes" if known.get("tail") == "renormalise" else "only_classes"
        known.pop(left_out, None)
    return linear_topk_divergence(hidden, weight, ids, teacher, target, bias, **known)[0]


def reference(hidden, weight, bias, target, ids, teacher, beta=0.0, tail="bucket", temperature=1.0, softcap=None, **_):
    y = F.linear(hidden, weight, bias)
    if softcap:
        y = softcap * torch.tanh(y / softcap)
    logp = torch.log_softmax(y.to(torch.promote_types(y.dtype, torch.float32)) / temperature, -1)
    there = ids >= 0
    student = logp.gather(1, ids.clamp(min=0)).masked_fill(~there, 0)
    teacher = teacher.to(logp.dtype).masked_fill(~there, 0)
    of = lambda t: t.masked_fill(~there, -torch.inf).logsumexp(-1, keepdim=True)
    if tail == "renormalise":
        any_there = there.any(-1, keepdim=True)
        student, teacher = (t - torch.where(any_there, of(t), 0) for t in (student, teacher))
    elif tail == "bucket":
        inside = torch.zeros_like(logp, dtype=torch.long).scatter_add(1, ids.clamp(min=0), there.long())
        outside = logp.masked_fill(inside > 0, -torch.inf).logsumexp(-1, keepdim=True)
        left = of(teacher).clamp(max=math.log1p(-LEAST_TAIL)).expm1().neg().log()
        has = outside > -torch.inf
        student, teacher = torch.cat([student, outside.masked_fill(~has, 0)], -1), torch.cat([teacher, left], -1)
        there = torch.cat([there, has], -1)
    s, t = student.exp(), teacher.exp()
    if beta == 0:
        terms = t * (teacher - student)
    elif beta == 1:
        terms = s * (student - teacher)
    else:
        m = (beta * t + (1 - beta) * s).log()
        terms = beta * t * (teacher - m) + (1 - beta) * s * (student - m)
    return torch.where(target == IGNORE, 0, terms.masked_fill(~there, 0).sum(-1))


def schema(inputs, options):
    """Of what the loss is made of: the log-probabilities at the classes, and of all others."""
    hidden, weight, bias, target, ids, _ = inputs
    numbers = options.get("temperature", 1.0), options.get("softcap", 0.0), 1.0, IGNORE
    return ops.linear_log_prob, (
        *(hidden, weight, bias, target, None, None, ids, None, None, *numbers),
        *(False,) * len(OUTPUTS),
        *(0, True, -1, options.get("max_bytes", 0), False),
    )


def draw(pick):
    drawn = dict(
        with_bias=True,
        beta=pick.choice((0.1, 0.5, 1.0)),
        tail=pick.choice(("drop", "renormalise")),
        temperature=pick.choice((0.5, 2.0)),
        softcap=30.0,
        absent=0.3,
        k=pick.choice((1, 2, 17)),
        max_bytes=pick.choice((1, 5000)),
        ignored=pick.choice((0.0, 0.9, 1.1)),
    )
    return {name: drawn[name] for name in pick.sample(sorted(drawn), pick.randrange(5))}


WHOLE = dict(ignored=0.0, k=64)
CASES = [
    Case(
        name="linear_topk_divergence",
        op=op,
        reference=reference,
        make=make,
        draw=draw,
        differentiable=(0, 1, 2),
        keep=(5,),
        schema=schema,
        scales=(1, 1, 1, 1),
        many_rows=(70000, 4, 8),
        shapes=[(1, 4, 7), (33, 16, 101), (40, 64, 1000)],
        options=[
            {},
            dict(beta=0.5, absent=0.3),
            dict(beta=1.0, tail="drop", with_bias=True),
            dict(tail="renormalise", temperature=0.7, max_bytes=4000),
            dict(softcap=5.0, max_bytes=40000, ignored=1.1),
            dict(tail="renormalise", only_classes=True, absent=0.3, softcap=5.0, with_bias=True),
            dict(tail="renormalise", only_classes=True, beta=0.5, temperature=2.0, k=40),
            dict(frozen=[1], tail="drop"),
        ],
        bench=[
            ((8192, 4096, 151936), WHOLE),
            ((8192, 4096, 151936), dict(WHOLE, max_bytes=1 << 28)),
            ((8192, 4096, 151936), dict(WHOLE, k=8)),
            ((8192, 4096, 151936), dict(WHOLE, k=128)),
            ((8192, 4096, 151936), dict(WHOLE, frozen=[1])),
            *(((8192, 4096, 151936), dict(WHOLE, tail="drop", k=k)) for k in (8, 64, 128)),
            ((8192, 4096, 151936), dict(WHOLE, tail="drop", max_bytes=1 << 28)),
            *(((8192, 4096, 151936), dict(WHOLE, tail="renormalise", only_classes=True, k=k)) for k in (8, 64, 128)),
            ((8192, 2048, V), dict(WHOLE, k=8)),
        ],
        bench_cpu=[((2048, 256, 32768), dict(ignored=0.0, k=64))],
        flops=lambda shape, options: (
            2 * shape[0] * shape[1] * shape[2],
            (2 if options.get("frozen") else 4) * shape[0] * shape[1] * shape[2],
        ),
    )
]
