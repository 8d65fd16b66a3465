import torch
from liger_kernel._library import ops
from liger_kernel.transformers.functional import liger_selective_log_softmax

from cases import Case
from cases.cross_entropy import IGNORE


def make(shape, options):
    ids = torch.randint(0, shape[-1], shape[:-1])
    return torch.randn(shape) * 3, torch.where(torch.rand(shape[:-1]) < options.get("ignored", 0.25), IGNORE, ids)


def reference(x, ids, temperature=1.0, ignored=None):
    logp = torch.log_softmax(x.to(torch.promote_types(x.dtype, torch.float32)) / temperature, -1)
    chosen, entropy = logp.gather(-1, ids.clamp(min=0)[..., None])[..., 0], -(logp.exp() * logp).sum(-1)
    return torch.where(ids == IGNORE, 0, chosen), torch.where(ids == IGNORE, 0, entropy)


def op(x, ids, temperature=1.0, ignored=None):
    return liger_selective_log_softmax(x, ids, temperature)


def wrong(d, ids, **options):
    return liger_selective_log_softmax(torch.randn(2, 8, device=d), ids.to(d), **options)


CASES = [
    Case(
        name="selective_log_softmax",
        draw=lambda pick: dict(temperature=pick.choice((1.0, 0.3, 2.5))),
        op=op,
        reference=reference,
        make=make,
        options=[{}, dict(temperature=0.7), dict(ignored=0.0), dict(ignored=1.1)],
        schema=lambda inputs, options: (ops.selective_log_softmax, (*inputs, options.get("temperature", 1.0), IGNORE)),
        shapes=[(2, 3, 2), (5, 7), (9, 1000), (4, 4099), (3, 40000)],
        many_rows=(70000, 8),
        bench=[((4096, 151936), dict(ignored=0.0))],
        bench_cpu=[((512, 151936), dict(ignored=0.0))],
        bytes=lambda shape, options, e: (e * shape[0] * shape[1], 2 * e * shape[0] * shape[1]),
        errors=[
            (lambda d: wrong(d, torch.zeros(3, dtype=torch.long)), RuntimeError, "ids must be"),
            (lambda d: wrong(d, torch.zeros(2)), TypeError, "ids must be .* of an integer type"),
            (
                lambda d: wrong(d, torch.zeros(2, dtype=torch.long), temperature=0.0),
                ValueError,
                "temperature must be positive",
            ),
        ],
    )
]
