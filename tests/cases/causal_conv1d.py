import torch
import torch.nn.functional as F
from liger_kernel._library import ops
from liger_kernel.transformers.functional import liger_causal_conv1d

from cases import Case

WIDTH = 4


def document_starts(batch, tokens, documents):
    """starts [batch, tokens] of documents of the lengths 1, 2, 3, ..., or of as many tokens as `documents` says; with
    "gaps" every third of them is no document."""
    rows = []
    for row in range(batch):
        starts, length = [], row
        while len(starts) < tokens:
            length = documents if isinstance(documents, int) else length + 1
            gap = documents == "gaps" and length % 3 == 0
            starts += [-1 if gap else len(starts)] * length
        rows.append(starts[:tokens])
    return torch.tensor(rows, dtype=torch.int32).view(batch, tokens)


def make(shape, options):
    batch, channels, tokens = shape
    x = torch.randn(shape)
    if options.get("layout") != "time":  # as projections give it: neighbouring channels
        x = torch.randn(batch, tokens, channels).transpose(1, 2)
    width, documents = options.get("width", WIDTH), options.get("documents")
    return (
        x,
        torch.randn(channels, width) / width**0.5,
        torch.randn(channels) if options.get("biased", True) else None,
        None if documents is None else document_starts(batch, tokens, documents),
    )


def op(x, weight, bias, starts, activation="silu", **_):
    return liger_causal_conv1d(x, weight, bias, activation, starts=starts)


def reference(x, weight, bias, starts, activation="silu", **_):
    """Hugging Face's torch_causal_conv1d, on one document at a time."""
    work, width = weight.dtype, weight.shape[1]

    def convolved(x):
        y = F.conv1d(x.to(work), weight.unsqueeze(1), bias, padding=width - 1, groups=x.shape[1])[..., : x.shape[2]]
        return (F.silu(y) if activation else y).to(x.dtype)

    if starts is None or not len(x):
        return convolved(x)
    rows = []
    for row, of_row in zip(x.split(1), starts.tolist()):
        lengths = torch.tensor(of_row).unique_consecutive(return_counts=True)[1].tolist()
        documents, at = [], 0
        for document in row.split(lengths, 2):
            documents.append(convolved(document) if of_row[at] >= 0 else document * 0)
            at += document.shape[2]
        rows.append(torch.cat(documents, 2))
    return torch.cat(rows)


def schema(inputs, options):
    return ops.causal_conv1d, (*inputs, options.get("activation", "silu") is not None)


def rivals(inputs, options):
    x, weight, bias, starts = inputs
    if not x.is_cuda or weight.dtype != x.dtype or weight.shape[1] > 4:
        return {}
    try:
        from causal_conv1d import causal_conv1d_fn
    except ImportError:
        return {}
    # Where a document begins is its number, too.
    more = dict(seq_idx=starts, activation=options.get("activation", "silu"))
    return {"causal-conv1d": lambda: causal_conv1d_fn(x, weight, bias, **more)}


def errors():
    def call(text, exception=RuntimeError, x=(2, 8, 5), weight=(8, 4), **more):
        def run(d):
            tensors = {name: value.to(d) if torch.is_tensor(value) else value for name, value in more.items()}
            return liger_causal_conv1d(torch.randn(x, device=d), torch.randn(weight, device=d), **tensors)

        return run, exception, text

    return [
        call("x must be .batch, channels, time.", x=(8, 5)),
        call("width of 1 to 8", weight=(8, 9)),
        call("width of 1 to 8", weight=(8, 0)),
        call("weight must be", weight=(8, 1, 4)),
        call("weight must be", weight=(7, 4)),
        call("bias must be", bias=torch.ones(7)),
        call("starts must be", starts=torch.zeros(2, 4, dtype=torch.int32)),
        call("starts must be int32", TypeError, starts=torch.zeros(2, 5, dtype=torch.long)),
        call("activation is one of", ValueError, activation="gelu"),
        call("batch of 1", ValueError, cu_seqlens=torch.tensor([0, 5])),
    ]


def draw(pick):
    return dict(
        width=pick.randint(1, 8),
        biased=pick.choice((True, False)),
        activation=pick.choice(("silu", None)),
        layout=pick.choice(("channels", "time")),
        documents=pick.choice((None, "grow", "gaps", 1, 5, 70)),
    )


COMMON = dict(op=op, reference=reference, make=make, schema=schema, differentiable=(0, 1, 2), terms_of_order_one=1)

CASES = [
    Case(
        name="causal_conv1d",
        **COMMON,
        draw=draw,
        # Fewer tokens than taps; a channel; packs, and what does not fill them; several strips and partial sums.
        shapes=[
            (2, 3, 2),
            (2, 8, 21),
            (1, 1, 9),
            (3, 40, 70),
            (2, 136, 33),
            (1, 64, 200),
            (1, 24, 1100),
            (2, 264, 130),
            (2, 7, 776),
        ],
        options=[
            {},
            dict(documents="grow"),
            dict(documents="grow", layout="time"),
            dict(layout="time", biased=False, activation=None),
            dict(biased=False, activation=None, width=3, documents="gaps"),
            dict(width=7, documents="gaps", layout="time"),
            dict(width=8, documents=5),
            dict(width=2, documents=1),
            dict(width=7, biased=False, activation=None, documents=70),
            dict(width=3, biased=False, activation=None, layout="time"),
        ],
        many_rows=(70000, 2, 3),
        emulated=80_000,
        rivals=rivals,
        # Qwen3.5 9B and 27B, Nemotron-H 8B, LFM2 and LFM3.
        bench=[
            ((1, 8192, 8192), dict(biased=False)),
            ((4, 8192, 8192), dict(biased=False)),
            ((1, 10240, 32768), dict(biased=False)),
            ((1, 10240, 8192), {}),
            ((1, 8192, 8192), dict(biased=False, documents=1024)),
            ((1, 8192, 8192), dict(biased=False, layout="time")),
            ((1, 8192, 8192), dict(biased=False, layout="time", documents=1024)),
            ((1, 8192, 8192), dict(biased=False, activation=None, width=3)),
            ((1, 8192, 8192), dict(biased=False, activation=None, width=7)),
            ((1, 2048, 8192), dict(biased=False, activation=None, width=3)),
            ((1, 2048, 8192), dict(biased=False, activation=None, width=7)),
        ],
        bench_cpu=[((1, 8192, 2048), dict(biased=False)), ((1, 8192, 2048), dict(biased=False, layout="time"))],
        bytes=lambda shape, options, e: tuple(n * e * torch.Size(shape).numel() for n in (2, 3)),
        errors=errors(),
    ),
    Case(
        name="causal_conv1d_float_weight",
        **COMMON,
        keep=(1, 2),
        dtypes=(torch.bfloat16, torch.float16),
        shapes=[(2, 5, 6), (2, 48, 37)],
        options=[{}, dict(documents="grow", layout="time", width=3)],
    ),
]
