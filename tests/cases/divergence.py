from functools import partial

import torch
from liger_kernel._library import ops
from liger_kernel.operators import loss as divergence
from liger_kernel.transformers.functional import liger_jsd, liger_kl_div, liger_tvd

from cases import Case
from cases.cross_entropy import IGNORE, labels

KINDS = dict(kl_div=divergence.KL, jsd=divergence.JENSEN_SHANNON, tvd=divergence.TOTAL_VARIATION)


def make(shape, options, name):
    """Prediction, target and labels: logarithms for jsd, probabilities for tvd; kl_div's target is what log_target
    says."""
    x, t = torch.log_softmax(torch.randn(shape), -1), torch.log_softmax(torch.randn(shape), -1)
    if name == "tvd":
        x = x.exp()
    return (
        x,
        t if name == "jsd" or options.get("log_target") else t.exp(),
        labels(shape[0], 2, options["ignored"]) if "ignored" in options else None,
    )


def reference(x, t, y, name, log_target=False, beta=0.5, reduction="mean", ignored=None):
    """The formulas as they are written, in float; jsd is always divided by the rows and rounded to x's dtype."""
    dtype, x = x.dtype, x.to(torch.promote_types(x.dtype, torch.float32))
    t = t.to(x.dtype)
    if name == "tvd":
        each = 0.5 * (x - t).abs()
    elif name == "kl_div":
        each = t.exp() * (t - x) if log_target else t * (t.clamp(min=1e-10).log() - x)
    elif beta == 0:
        each = t.exp() * (t - x)
    elif beta == 1:
        each = x.exp() * (x - t)
    else:
        log_m = (beta * t.exp() + (1 - beta) * x.exp()).log()
        each = beta * t.exp() * (t - log_m) + (1 - beta) * x.exp() * (x - log_m)
    rows = x.shape[0]
    if y is not None:
        each = torch.where((y != IGNORE)[:, None], each, 0)
        rows = (y != IGNORE).sum().clamp(min=1)
    if name == "jsd":
        return (each.sum() / rows).to(dtype)
    return each if reduction == "none" else each.sum() / dict(sum=1, mean=rows * x.shape[1], batchmean=rows)[reduction]


def op(x, t, y, name, ignored=None, **options):
    if name == "kl_div":
        return liger_kl_div(x, t, **options)
    return (liger_jsd if name == "jsd" else liger_tvd)(x, t, y, **options)


def schema(inputs, options, name):
    log_target, reduction = options.get("log_target"), options.get("reduction", "mean")
    return ops.divergence, (
        *inputs,
        divergence.LOG_KL if log_target else KINDS[name],
        options.get("beta", 1e-10),
        IGNORE,
        divergence.reduction_code(reduction),
        torch.float32,
    )


def rivals(inputs, options, name):
    x, t, _ = inputs
    return {"F.kl_div": lambda: torch.nn.functional.kl_div(x, t, reduction="mean")} if name == "kl_div" else {}


def case(name, options, errors=(), suffix="", **more):
    bound = {
        f: partial(function, name=name)
        for f, function in dict(op=op, reference=reference, make=make, schema=schema, rivals=rivals).items()
    }
    # Read both, write the gradient: in forward, unless a sum alone is wanted.
    return Case(
        name=name + suffix,
        options=options,
        shapes=[(1, 5), (5, 7), (9, 1000), (4, 4099), (3, 40000)],
        errors=list(errors),
        **bound,
        **more,
    )


def measured():
    return dict(
        bench=[((4096, 128256), {})],
        bench_cpu=[((1024, 32000), {})],
        bytes=lambda shape, options, e: (2 * e * shape[0] * shape[1], e * shape[0] * shape[1]),
        many_rows=(70000, 8),
    )


KL = [
    {},
    dict(log_target=True),
    dict(reduction="none"),
    dict(reduction="none", log_target=True),
    dict(reduction="sum"),
    dict(reduction="batchmean"),
]
JSD = [
    {},
    dict(ignored=0.25),
    dict(beta=0.0),
    dict(beta=1.0, ignored=0.25),
    dict(beta=0.1),
    dict(beta=0.9, ignored=1.1),
]
TVD = [
    {},
    dict(ignored=0.25),
    dict(reduction="none", ignored=0.25),
    dict(reduction="sum"),
    dict(reduction="batchmean", ignored=0.25),
    dict(ignored=1.1),
]


def two(d, **other):
    return torch.rand(2, 8, device=d), torch.rand(2, other.get("cols", 8), device=d)


def wrong_labels(loss):
    return [
        (lambda d: loss(*two(d), torch.zeros(3, device=d, dtype=torch.long)), AssertionError, "shift_labels must be"),
        (lambda d: loss(*two(d), torch.zeros(2, device=d)), TypeError, "labels must be .* of an integer type"),
    ]


CASES = [
    case(
        "kl_div",
        KL,
        **measured(),
        errors=[
            (lambda d: liger_kl_div(*two(d, cols=7)), RuntimeError, "target must be"),
            (
                lambda d: liger_kl_div(torch.rand(8, device=d), torch.rand(8, device=d)),
                RuntimeError,
                "x must be \\[rows, cols\\]",
            ),
            (
                lambda d: liger_kl_div(torch.rand(2, 8, device=d).double(), torch.rand(2, 8, device=d)),
                TypeError,
                "must be a tensor of float32, float16 or bfloat16",
            ),
            (lambda d: liger_kl_div(*two(d), reduction="most"), ValueError, "most"),
            (lambda d: ops.divergence(*two(d), None, 7, 0.0, -100, 1, torch.float32), ValueError, "kind is"),
            (lambda d: ops.divergence(*two(d), None, 0, 0.0, -100, 4, torch.float32), ValueError, "reduction is"),
        ],
    ),
    case(
        "jsd",
        JSD,
        **measured(),
        errors=[(lambda d: liger_jsd(*two(d), beta=1.5), ValueError, "beta must be")] + wrong_labels(liger_jsd),
    ),
    case("tvd", TVD, **measured(), errors=wrong_labels(liger_tvd)),
    # A half prediction with a float target.
    *(
        case(name, options[:3], suffix="_float_target", keep=(1,), dtypes=(torch.bfloat16, torch.float16))
        for name, options in (("kl_div", KL), ("jsd", JSD), ("tvd", TVD))
    ),
]
