import math

import torch
from liger_kernel._library import ops
from liger_kernel.operators.router import liger_expert_load, liger_route

from cases import Case

SCORES = {
    "softmax": lambda z: z.softmax(-1),
    "sigmoid": torch.sigmoid,
    "sqrt_softplus": lambda z: torch.nn.functional.softplus(z).sqrt(),
}


def make(shape, options):
    """Logits on a grid that every dtype has, each value once in a row, so that no rounding changes their order; with
    ties, few values. A bias of the size of the scores' differences, or None, and the experts that are given, or None:
    of the dtype that `given` names, every third row of none that count."""
    *tokens, experts = shape
    rank = torch.rand(shape).argsort(-1).float()
    rank = rank % 5 if options.get("ties") else rank - experts // 2
    bias = torch.rand(experts) * 0.3 if options.get("biased") else None
    return rank / 2 ** max(4, math.ceil(math.log2(experts)) - 3), bias, given_ids(shape, options)


def given_ids(shape, options):
    """Of each row top_k different experts in any order; in every third row one is given twice, is no expert, or, of a
    signed dtype, all are -1."""
    if "given" not in options:
        return None
    *tokens, experts = shape
    ids = torch.rand(shape).argsort(-1)[..., : options["top_k"]].flatten(0, -2)
    ids[::9, -1] = experts if options["top_k"] == 1 or not options["given"].is_signed else ids[::9, 0]
    ids[3::9, -1] = experts
    ids[6::9] = -1 if options["given"].is_signed else experts
    return ids.to(options["given"]).reshape(*tokens, -1)


def counts_as_given(ids, experts):
    """The rows whose ids are different experts."""
    ids = ids.long().sort(-1).values
    return ((ids >= 0) & (ids < experts)).all(-1) & (ids.diff(dim=-1) > 0).all(-1)


def by_sort(keys, k):
    """The places of the largest keys: of equal ones, the lower number first."""
    return keys.sort(dim=-1, descending=True, stable=True).indices[..., :k]


def by_topk(keys, k):
    """As transformers has it; of equal keys torch takes any."""
    return keys.topk(k).indices


def chosen(keys, k, groups, kept_groups, group_best, largest=by_sort):
    """The experts with the largest keys."""
    if groups > 1:
        of_group = keys.unflatten(-1, (groups, -1))
        best = of_group.topk(group_best).values.sum(-1)
        kept = largest(best, kept_groups)
        out = torch.ones_like(best, dtype=torch.bool).scatter(-1, kept, False)
        keys = of_group.masked_fill(out[..., None], -math.inf).flatten(-2)
    return largest(keys, k)


def reference(
    logits, bias, ids, top_k, score="softmax", normalise=False, epsilon=0.0, least_sum=0.0, scale=1.0, groups=1,
    kept_groups=1, group_best=2, dtype=None, largest=by_sort, **made,
):  # fmt: skip
    z = logits.to(torch.promote_types(logits.dtype, torch.float32))
    s = SCORES[score](z)
    keys = (s if bias is None else s + bias) if groups > 1 or bias is not None else z
    index = chosen(keys.detach(), top_k, groups, kept_groups, group_best, largest)
    if ids is not None:
        index = index.where(~counts_as_given(ids, logits.shape[-1])[..., None], ids.long())
    weights = s.gather(-1, index)
    if normalise:
        weights = weights / (weights.sum(-1, keepdim=True).clamp(min=least_sum) + epsilon)
    counts = index.flatten().bincount(minlength=logits.shape[-1]).int()
    weights = weights * scale
    return weights.to(dtype) if dtype is not None and logits.dtype != torch.float64 else weights, index, counts


def op(logits, bias, index, top_k, biased=False, ties=False, given=None, **options):
    return tuple(liger_route(logits, top_k, bias, index=index, **options))


DEFAULTS = dict(
    score="softmax", normalise=False, epsilon=0.0, least_sum=0.0, scale=1.0, groups=1, kept_groups=1, group_best=2,
    dtype=None,
)  # fmt: skip


def schema(inputs, options):
    values = {name: options.get(name, default) for name, default in DEFAULTS.items()}
    values["score"] = list(SCORES).index(values["score"])
    return ops.route, (*inputs, options["top_k"], *values.values())


def rivals(inputs, options):
    def plain(*given):
        return reference(*given, largest=by_topk, **options)

    compiled = torch.compile(plain, dynamic=False)
    return {"topk": lambda: plain(*inputs), "topk, compiled": lambda: compiled(*inputs)}


def floor(shape, options, e):
    tokens, experts = shape
    return tokens * (e * experts + 12 * options["top_k"]), tokens * (2 * e * experts + 12 * options["top_k"])


def wrong(d, *shape, top_k=1, bias=None, index=None, **options):
    bias, index = (t if t is None else t.to(d) for t in (bias, index))
    return liger_route(torch.randn(*shape, device=d), top_k, bias, index=index, **options)


def make_load(shape, options):
    """Logits as route has them, and which tokens count, or None."""
    logits, *_ = make(shape, options)
    return logits, torch.rand(shape[:-1]) < 0.7 if options.get("masked") else None


def load_reference(logits, mask, top_k, masked=False, ties=False):
    z = logits.to(torch.promote_types(logits.dtype, torch.float32))
    of_token = z.softmax(-1), torch.zeros_like(z).scatter(-1, chosen(z.detach(), top_k, 1, 1, 2), 1)
    load, counts = (t.flatten(0, -2) if mask is None else t[mask] for t in of_token)
    return load.sum(0), counts.sum(0).int()


def wrong_load(d, mask=None, top_k=1):
    return liger_expert_load(torch.randn(2, 4, device=d), top_k, mask if mask is None else mask.to(d))


DEEPSEEK_V2 = dict(top_k=3, groups=4, kept_groups=2, group_best=1, scale=16.0)
DEEPSEEK_V3 = dict(
    top_k=3, score="sigmoid", normalise=True, epsilon=1e-20, scale=2.5, groups=4, kept_groups=2, biased=True
)
ERNIE = dict(top_k=4, normalise=True, least_sum=0.9, biased=True)

#: Every option together with another, and no scores that are equal in float alone.
FUZZ = dict(fit=lambda shape: (*shape[:-1], -(-shape[-1] // 32) * 32), scales=(1, 1, 1, 0.125))

CASES = [
    Case(
        name="route",
        op=op,
        reference=reference,
        make=make,
        schema=schema,
        keep=(1,),
        shapes=[(2, 16), (5, 24), (9, 128), (3, 4, 260), (3, 1500)],
        options=[
            dict(top_k=2),
            dict(top_k=4, normalise=True, ties=True),
            DEEPSEEK_V3,
            DEEPSEEK_V2,
            ERNIE,
            dict(top_k=1, score="sigmoid", biased=True),
            dict(top_k=5, score="sqrt_softplus", normalise=True, epsilon=1e-20, scale=1.5, biased=True),
            dict(top_k=16, normalise=True, groups=2, kept_groups=2, score="sigmoid"),
            dict(top_k=7, normalise=True, scale=0.25, score="sigmoid"),
            dict(top_k=4, normalise=True, given=torch.int16),
            {**DEEPSEEK_V3, "given": torch.int64},
            dict(top_k=3, normalise=True, given=torch.uint8),
            dict(top_k=1, score="sigmoid", biased=True, given=torch.int32),
            dict(top_k=2, ties=True, given=torch.uint16),
            dict(top_k=2, given=torch.uint32),
        ],
        many_rows=(70000, 8),
        **FUZZ,
        rivals=rivals,
        bytes=floor,
        bench=[
            ((16384, 128), dict(top_k=8, normalise=True)),
            ((16384, 8), dict(top_k=2, normalise=True)),
            ((16384, 512), dict(top_k=10, normalise=True)),
            ((16384, 256), {**DEEPSEEK_V3, "top_k": 8, "groups": 8, "kept_groups": 4}),
        ],
        bench_cpu=[
            ((4096, 128), dict(top_k=8, normalise=True)),
            ((4096, 128), dict(top_k=8, normalise=True, given=torch.uint8)),
        ],
        errors=[
            (lambda d: wrong(d, 2, 4, top_k=5), ValueError, "top_k must be 1 to 4"),
            (lambda d: wrong(d, 2, 4, top_k=0), ValueError, "top_k must be 1 to 4"),
            (lambda d: wrong(d, 2, 8, top_k=3, groups=4, kept_groups=1), ValueError, "top_k must be 1 to 2"),
            (lambda d: wrong(d, 2, 8, groups=3), ValueError, "groups must divide the 8 experts"),
            (lambda d: wrong(d, 2, 8, groups=2, kept_groups=3), ValueError, "kept_groups must be 1 to groups"),
            (lambda d: wrong(d, 2, 8, groups=8), ValueError, "group_best must be 1"),
            (lambda d: wrong(d, 2, 8, bias=torch.zeros(7)), RuntimeError, r"bias must be \[8\]"),
            (lambda d: wrong(d, 2, 8, top_k=2, index=torch.zeros(2, 3).int()), RuntimeError, r"index must be \[2, 2\]"),
            (lambda d: wrong(d, 2, 8, index=torch.zeros(2, 1)), TypeError, "index must be .* of an integer type"),
            (lambda d: wrong(d, 2, 8, score="tanh"), ValueError, "score must be one of"),
            (lambda d: wrong(d, 2, 8, dtype=torch.float64), TypeError, "dtype must be"),
        ],
    ),
    Case(
        name="expert_load",
        op=lambda logits, mask, top_k, masked=False, ties=False: liger_expert_load(logits, top_k, mask),
        reference=load_reference,
        make=make_load,
        schema=lambda inputs, options: (ops.expert_load, (*inputs, options["top_k"])),
        shapes=[(2, 16), (5, 24), (90, 128), (3, 4, 260), (3, 1500)],
        options=[
            dict(top_k=2),
            dict(top_k=4, masked=True),
            dict(top_k=1, ties=True),
            dict(top_k=16, masked=True, ties=True),
        ],
        many_rows=(70000, 8),
        **FUZZ,
        bytes=lambda shape, options, e: (e * shape[0] * shape[1], 2 * e * shape[0] * shape[1]),
        bench=[((16384, 128), dict(top_k=8)), ((16384, 8), dict(top_k=2))],
        bench_cpu=[((4096, 128), dict(top_k=8))],
        errors=[
            (lambda d: wrong_load(d, top_k=5), ValueError, "top_k must be 1 to 4"),
            (lambda d: wrong_load(d, torch.ones(3, dtype=torch.bool)), RuntimeError, r"mask must be \[2\]"),
            (lambda d: wrong_load(d, torch.ones(2)), TypeError, "mask must be .* of bool"),
        ],
    ),
]
