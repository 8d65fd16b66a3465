import torch
import torch.nn.functional as F
from liger_kernel._library import ops
from liger_kernel.operators.head import class_logits

from cases import Case
from cases.cross_entropy import head_make


def make(shape, options):
    """Few of the classes, so that tokens share them; some are absent."""
    hidden, weight, bias, _, _ = head_make(shape, options)
    ids = torch.randint(0, max(1, shape[2] // 2), (shape[0], options.get("k", 6)))
    ids[torch.rand(ids.shape) < options.get("absent", 0.1)] = -1
    if options.get("rank") == 3:
        hidden, ids = hidden[None], ids[None]
    return hidden, weight, bias, ids


def op(hidden, weight, bias, ids, **_):
    return class_logits(hidden, weight, ids, bias)


def reference(hidden, weight, bias, ids, **_):
    y = F.linear(hidden, weight, bias)
    y = y.to(torch.promote_types(y.dtype, torch.float32))
    return torch.where(ids >= 0, y.gather(-1, ids.clamp(min=0)), 0)


CASES = [
    Case(
        name="class_logits",
        op=op,
        reference=reference,
        make=make,
        differentiable=(0, 1, 2),
        schema=lambda inputs, options: (ops.class_logits, tuple(inputs)),
        draw=lambda pick: {
            "with_bias": pick.random() < 0.5,
            "k": pick.choice((1, 7, 40)),
            "absent": pick.choice((0, 1.1)),
        },
        many_rows=(70000, 4, 8),
        shapes=[(1, 3, 2), (33, 16, 101), (40, 100, 30), (5, 2056, 9)],
        options=[{}, dict(with_bias=True, k=33, absent=0.5), dict(rank=3, k=1, absent=0.0), dict(absent=1.1)],
        bench=[((8192, 4096, 151936), dict(k=k, absent=0.0)) for k in (64, 8, 128)],
        bench_cpu=[((2048, 256, 32768), dict(k=64, absent=0.0))],
        errors=[
            (
                lambda d: class_logits(
                    torch.randn(2, 4, device=d), torch.randn(5, 3, device=d), torch.zeros(2, 1).long().to(d)
                ),
                RuntimeError,
                r"weight must be \[5, 4\]",
            ),
            (
                lambda d: class_logits(
                    torch.randn(2, 4, device=d), torch.randn(5, 4, device=d), torch.zeros(2).long().to(d)
                ),
                RuntimeError,
                r"class_ids must be \[2\]",
            ),
            (
                lambda d: class_logits(
                    torch.randn(2, 4, device=d), torch.randn(5, 4, device=d).half(), torch.zeros(2, 1).long().to(d)
                ),
                TypeError,
                r"weight must be \[5, 4\] of float32",
            ),
        ],
    )
]
