import torch
import torch.nn.functional as F
from liger_kernel._library import ops
from liger_kernel.ops.cross_entropy import loss_options
from liger_kernel.transformers.functional import liger_cross_entropy, liger_fused_linear_cross_entropy

from cases import Case

IGNORE = -100


def labels(rows, classes, ignored=0.25):
    y = torch.randint(0, classes, (rows,))
    return torch.where(torch.rand(rows) < ignored, torch.full_like(y, IGNORE), y) if rows > 1 else y


def make(shape, options):
    x = torch.randn(shape) * 3
    return (
        x,
        labels(*shape, options.get("ignored", 0.25)),
        (torch.rand(shape[-1:]) + 0.5 if options.get("weighted") else None),
    )


def rows_reference(
    x, y, w=None, reduction="mean", label_smoothing=0.0, lse_square_scale=0.0, softcap=None, use_token_scaling=False
):
    """The loss per option of torch's cross entropy, plus z-loss, softcap and token scaling."""
    z = softcap * torch.tanh(x / softcap) if softcap else x
    z = z.to(torch.promote_types(z.dtype, torch.float32))  # as Hugging Face's models upcast their logits
    w = None if w is None else w.to(z.dtype)
    valid = y != IGNORE
    loss = F.cross_entropy(z, y, w, ignore_index=IGNORE, reduction="none", label_smoothing=label_smoothing)
    z_loss = torch.where(valid, lse_square_scale * torch.logsumexp(z, -1).square(), 0)
    if reduction == "mean":
        count = valid.sum()
        loss = loss / (count if w is None else torch.where(valid, w[y.clamp(min=0)], 0).sum())
        z_loss = z_loss / count
    total = loss + z_loss
    if use_token_scaling:
        total = total * torch.where(valid, z.softmax(-1).gather(-1, y.clamp(min=0)[:, None])[:, 0], 0).detach()
    return total if reduction == "none" else total.sum()


def split(options):
    """The options that the function takes, without those of the inputs."""
    return {name: value for name, value in options.items() if name not in ("weighted", "ignored", "with_bias")}


def op(x, y, w, **options):
    return liger_cross_entropy(x, y, w, **split(options))


def reference(x, y, w, **options):
    return rows_reference(x, y, w, **split(options)).to(x.dtype)


def schema(inputs, options):
    known = dict(lse_square_scale=0.0, label_smoothing=0.0, reduction="mean", softcap=None)
    known.update((k, v) for k, v in split(options).items() if k in known)
    extras = dict.fromkeys(
        ("return_z_loss", "return_token_accuracy", "return_predicted_tokens"), bool(options)
    )  # absent ones are undefined
    return ops.cross_entropy, (*inputs, *loss_options(IGNORE, **known, **extras))


def head_make(shape, options):
    tokens, width, classes = shape
    hidden, weight = torch.randn(tokens, width), torch.randn(classes, width) * width**-0.5 * 2
    bias = torch.randn(classes) if options.get("with_bias") else None
    return (
        hidden,
        weight,
        bias,
        labels(tokens, classes, options.get("ignored", 0.25)),
        torch.rand(classes) + 0.5 if options.get("weighted") else None,
    )


def head_op(hidden, weight, bias, y, w, **options):
    if "normalizer" in options:
        options["normalizer"] = torch.tensor(options["normalizer"], device=hidden.device)
    return liger_fused_linear_cross_entropy(hidden, weight, y, bias, w, **split(options))


def head_reference(hidden, weight, bias, y, w, **options):
    options.pop("max_bytes", None)
    options.pop("valid_count", None)
    normalizer = options.pop("normalizer", None)
    if normalizer is not None and options.get("reduction") != "none":
        options["reduction"] = "sum"
    loss = rows_reference(F.linear(hidden, weight, bias), y, w, **split(options))
    return loss if normalizer is None else loss / normalizer


def draw(pick):
    """Some of the options, all of which may stand together."""
    drawn = dict(
        reduction=pick.choice(("mean", "sum", "none")),
        label_smoothing=pick.random(),
        lse_square_scale=pick.random() / 10,
        softcap=pick.choice((1.0, 30.0)),
        weighted=True,
        ignored=pick.choice((0.0, 0.5, 0.9)),
    )
    return {name: drawn[name] for name in pick.sample(sorted(drawn), pick.randrange(4))}


def head_draw(pick):
    drawn = dict(
        with_bias=True,
        use_token_scaling=True,
        max_bytes=pick.choice((1, 5000)),
        normalizer=pick.choice((1.0, 7.5, 100.0)),
    )
    return {**draw(pick), **{name: drawn[name] for name in pick.sample(sorted(drawn), pick.randrange(3))}}


def head_rivals(inputs, options):
    hidden, weight, bias, y, w = inputs
    fused = getattr(F, "linear_cross_entropy", None)  # in newer torch
    return {"F.linear_cross_entropy": lambda: fused(hidden, weight, y)} if fused else {}


OPTIONS = [
    {},
    dict(reduction="sum"),
    dict(reduction="none"),
    dict(weighted=True),
    dict(label_smoothing=0.1),
    dict(weighted=True, label_smoothing=0.1),
    dict(lse_square_scale=1e-3),
    dict(softcap=5.0),
    dict(softcap=5.0, label_smoothing=0.1, lse_square_scale=1e-3, weighted=True),
]
V = 128256

CASES = [
    Case(
        name="cross_entropy",
        draw=draw,
        op=op,
        reference=reference,
        make=make,
        options=OPTIONS,
        schema=schema,
        keep=(2,),
        shapes=[(1, 3), (5, 7), (9, 1000), (4, 4099), (3, 40000)],
        many_rows=(70000, 8),
        bench=[
            ((8192, 32000), dict(ignored=0.0)),
            ((8192, V), dict(ignored=0.0)),
            ((4096, 151936), dict(ignored=0.0)),
            ((4096, 262144), dict(ignored=0.0)),
            ((512, 32000), dict(ignored=0.0)),
        ],
        bench_cpu=[((1024, 32000), dict(ignored=0.0))],
        bytes=lambda shape, options, e: (e * shape[0] * shape[1], e * shape[0] * shape[1]),
        rivals=lambda inputs, options: {"F.cross_entropy": lambda: F.cross_entropy(inputs[0], inputs[1])},
        errors=[
            (
                lambda d: liger_cross_entropy(
                    torch.randn(2, 3, 4, device=d), torch.zeros(2, device=d, dtype=torch.long)
                ),
                RuntimeError,
                r"target must be \[2, 3\] of an integer type on .*, got \[2\]",
            ),
            (
                lambda d: liger_cross_entropy(torch.randn(2, 4, device=d), torch.zeros(3, device=d, dtype=torch.long)),
                RuntimeError,
                "target must be",
            ),
            (
                lambda d: liger_cross_entropy(torch.randn(2, 4, device=d), torch.zeros(2, device=d)),
                TypeError,
                "target must be .* of an integer type",
            ),
            (
                lambda d: liger_cross_entropy(
                    torch.randn(2, 4, device=d), torch.zeros(2, device=d, dtype=torch.long), torch.ones(3, device=d)
                ),
                RuntimeError,
                "class_weight must be",
            ),
            (
                lambda d: liger_cross_entropy(
                    torch.randn(2, 4, device=d), torch.zeros(2, device=d, dtype=torch.long), label_smoothing=2.0
                ),
                ValueError,
                "label_smoothing",
            ),
        ],
    ),
    Case(
        name="fused_linear_cross_entropy",
        draw=head_draw,
        op=head_op,
        reference=head_reference,
        make=head_make,
        keep=(4,),
        differentiable=(0, 1, 2),
        options=OPTIONS
        + [
            dict(with_bias=True),
            dict(use_token_scaling=True),
            dict(max_bytes=40000),
            dict(max_bytes=40000, reduction="none", with_bias=True),
            dict(normalizer=7.5, reduction="none"),
        ],
        shapes=[(1, 4, 3), (33, 16, 101), (40, 64, 1000)],
        many_rows=(70000, 4, 8),
        schema=lambda inputs, options: (
            ops.fused_linear_cross_entropy,
            (*inputs, None, None, *schema((), options)[1], -1, 0),
        ),
        bench=[
            ((8192, 4096, V), dict(ignored=0.0)),
            ((16384, 4096, V), dict(ignored=0.0)),
            ((8192, 4096, V), dict(ignored=0.5)),
            ((8192, 2304, 256000), dict(ignored=0.0)),
            ((4096, 4096, 32000), dict(ignored=0.0)),
            ((8192, 4096, 151936), dict(ignored=0.0)),
            ((16384, 2048, 248320), dict(ignored=0.0)),
        ],
        bench_cpu=[((4096, 256, 32768), dict(ignored=0.0))],
        flops=lambda shape, options: (2 * shape[0] * shape[1] * shape[2], 4 * shape[0] * shape[1] * shape[2]),
        rivals=head_rivals,
        errors=[
            (
                lambda d: liger_fused_linear_cross_entropy(
                    torch.randn(2, 4, device=d), torch.randn(5, 3, device=d), torch.zeros(2, device=d, dtype=torch.long)
                ),
                RuntimeError,
                r"weight must be \[5, 4\] .* got \[5, 3\]",
            ),
            (
                lambda d: liger_fused_linear_cross_entropy(
                    torch.randn(2, 4, device=d),
                    torch.randn(5, 4, device=d).half(),
                    torch.zeros(2, device=d, dtype=torch.long),
                ),
                TypeError,
                "one dtype",
            ),
            (
                lambda d: liger_fused_linear_cross_entropy(
                    torch.randn(2, 4, device=d),
                    torch.randn(5, 4, device=d),
                    torch.zeros(2, device=d, dtype=torch.long),
                    torch.randn(4, device=d),
                ),
                RuntimeError,
                "bias must be",
            ),
        ],
    ),
]
