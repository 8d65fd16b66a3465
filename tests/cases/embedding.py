import torch
import torch.nn.functional as F
from liger_kernel._library import ops
from liger_kernel.ops import LigerEmbeddingFunction

from cases import Case


def make(shape, options):
    """A table of shape[1:] and shape[0] ids; `hot` of them share one row."""
    tokens, classes, cols = shape
    ids = torch.randint(0, classes, (tokens,))
    return torch.randn(classes, cols), torch.where(torch.rand(tokens) < options.get("hot", 0.3), classes // 2, ids)


def op(w, ids, padding_idx=-1, hot=0.0):
    return LigerEmbeddingFunction.apply(w, ids, padding_idx)


def reference(w, ids, padding_idx=-1, hot=0.0):
    return F.embedding(ids, w, None if padding_idx < 0 else padding_idx)


BENCH = (16384, 128256, 4096)

CASES = [
    Case(
        name="embedding",
        op=op,
        reference=reference,
        make=make,
        many_rows=(70000, 5, 8),
        emulated=300_000,
        shapes=[
            (1, 1, 1),
            (9, 5, 7),
            (60, 5, 36),
            (300, 7, 129),
            (70, 3, 4104),
            (400, 3, 4104),
            (200, 2, 12),
            (300, 300, 3),
            (500, 2, 12),
            (1500, 40, 3),
            (5000, 5, 3),
            (17000, 5, 3),
        ],
        options=[{}, dict(padding_idx=0), dict(hot=1.1), dict(hot=0.0)],
        schema=lambda inputs, options: (ops.embedding, (*inputs, options.get("padding_idx", -1))),
        bench=[(BENCH, dict(hot=0.0)), (BENCH, dict(hot=0.2))],
        bench_cpu=[((4096, 32000, 1024), dict(hot=0.0))],
        bytes=lambda shape, options, e: (2 * e * shape[0] * shape[2], e * (shape[0] + shape[1]) * shape[2]),
        errors=[
            (
                lambda d: ops.embedding(torch.randn(4, device=d), torch.tensor([0], device=d)),
                RuntimeError,
                "weight must be",
            ),
            (
                lambda d: ops.embedding(torch.randn(4, 2, device=d), torch.tensor([0], device=d), 4),
                ValueError,
                "padding_idx must be",
            ),
            (
                lambda d: ops.embedding(torch.randn(4, 2, device=d), torch.tensor([0.0], device=d)),
                TypeError,
                "ids must be",
            ),
        ],
    )
]
