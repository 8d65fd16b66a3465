"""Cases of the losses on a head without logits: classes, not operators. For test_ops.py, fuzz.py, test_large.py and
bench.py."""

import liger_kernel.chunked_loss
import policy_reference
import preference
import torch
import torch.nn.functional as F
from cases import Case

IGNORE = -100
#: Options of what the inputs are, which the losses are not given.
MADE = (
    *("with_bias", "ref_bias", "ignored", "empty_row", "nll_labels", "with_kl", "old", "ref", "ratio", "scale"),
    "more_classes",
)
TITLES = {
    "dpo": "DPO",
    "orpo": "ORPO",
    "cpo": "CPO",
    "simpo": "SimPO",
    "kto": "KTO",
    "grpo": "GRPO",
    "jsd": "JSD",
    "cosine": "CosineSimilarity",
}


def module(losses, name, options):
    """The class of a package's chunked_loss with those options that are its own."""
    return getattr(losses, f"LigerFusedLinear{TITLES[name]}Loss")(
        **{key: value for key, value in options.items() if key not in MADE}
    )


def flat(result):
    loss, *aux = result if isinstance(result, tuple) else (result,)
    return (loss, *(aux[0] if len(aux) == 1 else aux))


def head(rows, tokens, width, classes, options):
    return (
        torch.randn(rows, tokens, width) * 0.7,
        torch.randn(classes, width) * 0.6,
        torch.randn(classes) if options.get("with_bias") else None,
    )


def labels(shape, classes, options):
    ignore = options.get("ignore_index", IGNORE)
    y = torch.randint(0, classes, shape).masked_fill(torch.rand(shape) < options.get("ignored", 0.25), ignore)
    if options.get("empty_row"):
        y[-1] = ignore
    return y


def pick_some(pick, drawn, most=4):
    return {name: drawn[name] for name in pick.sample(sorted(drawn), pick.randrange(most + 1))}


# Preferences: hidden, weight, bias, labels, nll_labels, liked, ref_hidden, ref_weight, ref_bias, kl.


def preference_make(name):
    def make(shape, options):
        rows, tokens, width, classes = shape
        made = [
            *head(*shape, options),
            labels((rows, tokens), classes, options),
            None,
            torch.rand(rows) < 0.5,
            None,
            None,
            None,
            None,
        ]
        if options.get("nll_labels"):
            made[4] = labels((rows, tokens), classes, options)
        if options.get("use_ref_model", name == "dpo"):
            made[6:9] = head(
                rows, tokens, width + 3 if width < 100 else width, classes, dict(with_bias=options.get("ref_bias"))
            )
        if options.get("with_kl"):
            made[9] = torch.rand(())
        return made

    return make


def preference_call(losses, name, inputs, options):
    hidden, weight, bias, y, nll, liked, *ref, kl = inputs
    loss = module(losses, name, options)
    given = {} if ref[0] is None else dict(zip(("ref_input", "ref_weight", "ref_bias"), ref))
    if name == "kto":
        return loss(hidden, weight, y, bias, preference_labels=liked, **given, kl=kl)
    return loss(weight, hidden, y, bias, **given, **({} if nll is None else dict(nll_target=nll)))


def preference_plain(name, inputs, options, **more):
    x, w, b, y, nll, liked, *ref, kl = inputs
    own = preference.options_of(name, {key: value for key, value in options.items() if key not in MADE})
    ref, ignore = None if ref[0] is None else ref, own["ignore_index"]
    loss, aux = preference.reference(name, x, w, b, y, ignore, own, ref, nll, liked, kl, **more)
    return (loss, *(a.detach() for a in aux))


def preference_draw(name):
    def draw(pick):
        drawn = dict(
            with_bias=True, ignored=pick.choice((0.0, 0.9, 1.1)), empty_row=True, beta=pick.choice((0.05, 0.7))
        )
        if name in ("dpo", "kto"):
            drawn |= dict(use_ref_model=pick.random() < 0.5, ref_bias=True, average_log_prob=True)
        if name in ("dpo", "cpo", "simpo"):
            drawn |= dict(alpha=0.3, compute_nll_loss=True)
        if name in ("orpo", "cpo"):
            drawn |= dict(compute_nll_loss=False)
        if name in ("cpo", "simpo"):
            drawn |= dict(label_smoothing=0.2)
        drawn |= {
            "cpo": dict(average_log_prob=True),
            "simpo": dict(gamma=0.9),
            "orpo": dict(nll_labels=True),
            "kto": dict(with_kl=True),
        }.get(name, {})
        options = pick_some(pick, drawn, 6)
        if name == "dpo":
            options |= dict(loss_type=pick.choice(preference.LOSS_TYPES))
            options |= {
                "exo_pair": dict(label_smoothing=0.2),
                "robust": dict(label_smoothing=0.3),
                "discopop": dict(discopop_tau=0.3),
            }.get(options["loss_type"], {})
        return options

    return draw


#: Of each loss, the least that takes every branch; those of `draw` go on from there.
KINDS = [
    dict(loss_type=kind, beta=0.3, discopop_tau=0.7, label_smoothing=0.2 if kind in ("exo_pair", "robust") else 0.0)
    for kind in preference.LOSS_TYPES
]
PREFERENCE_OPTIONS = {
    "dpo": [
        {},
        *(kind | dict(with_bias=i % 2 == 0, ref_bias=i % 3 == 0) for i, kind in enumerate(KINDS)),
        dict(loss_type="sigmoid", label_smoothing=0.3, use_ref_model=False),
        dict(compute_nll_loss=True, alpha=0.4, average_log_prob=True, loss_type="apo_down", ignore_index=2),
    ],
    "orpo": [
        {},
        dict(beta=0.4, with_bias=True),
        dict(compute_nll_loss=False),
        dict(nll_labels=True),
        dict(nll_labels=True, ignore_index=2, with_bias=True),
    ],
    "cpo": [
        {},
        dict(beta=0.2, alpha=0.3, label_smoothing=0.1, with_bias=True),
        dict(average_log_prob=True, compute_nll_loss=False, ignore_index=0),
    ],
    "simpo": [
        {},
        dict(beta=2.0, gamma=0.4, label_smoothing=0.2, alpha=0.5, with_bias=True),
        dict(compute_nll_loss=False),
    ],
    "kto": [
        {},
        dict(use_ref_model=True, beta=0.3, with_bias=True, with_kl=True),
        dict(average_log_prob=True, with_kl=True),
        dict(use_ref_model=True, ref_bias=True, ignore_index=2),
    ],
}


# Policies: hidden, weight, bias, ids, mask, advantages, old, ref, ratio, ref_hidden, ref_weight.


def policy_make(shape, options):
    rows, tokens, width, classes = shape
    hidden, weight, bias = head(*shape, options)
    ids, mask = (
        torch.randint(0, classes, (rows, tokens)),
        (torch.rand(rows, tokens) >= options.get("ignored", 0.25)).long(),
    )
    if options.get("empty_row"):
        mask[-1] = 0
    advantages, temperature = torch.randn(rows), options.get("temperature", 1.0)
    # Of a large shape no logits are made: what the old policy thought is then like anything else.
    near = (
        policy_reference.log_probs(hidden, weight, ids, bias, temperature)
        if hidden.numel() * classes < 1e9
        else torch.full(ids.shape, -5.0)
    )
    # Where a ratio is not clipped in one precision and clipped in another there is nothing to compare: these are not
    # near a bound.
    steps = torch.tensor([-0.6, -0.04, 0.03, 0.26, 0.6, 1.5])
    moved = lambda: near + steps[torch.randint(0, len(steps), near.shape)]
    old, ref = (moved() if options.get(name) else None for name in ("old", "ref"))
    ratio = {None: None, "token": torch.rand(rows, tokens) + 0.5, "sequence": torch.rand(rows, 1) + 0.5}[
        options.get("ratio")
    ]
    other = (
        head(rows, tokens, width, classes, {})[:2]
        if options.get("use_ref_model", True) and ref is None
        else (None, None)
    )
    return hidden, weight, bias, ids, mask, advantages, old, ref, ratio, *other


def policy_call(losses, name, inputs, options):
    hidden, weight, bias, ids, mask, advantages, old, ref, ratio, *other = inputs
    return module(losses, name, options)(
        hidden,
        weight,
        ids,
        mask,
        advantages,
        bias=bias,
        ref_per_token_logps=ref,
        old_per_token_logps=old,
        vllm_is_ratio=ratio,
        **dict(zip(("ref_input", "ref_weight"), other)),
    )


def policy_plain(name, inputs, options, log_probs=policy_reference.log_probs):
    hidden, weight, bias, ids, mask, advantages, old, ref, ratio, *other = inputs
    temperature, beta, loss_type = (
        options.get("temperature", 1.0),
        options.get("beta", 0.04),
        options.get("loss_type", "dapo"),
    )
    lp = log_probs(hidden, weight, ids, bias, temperature)
    if options.get("use_ref_model", True) and ref is None:
        ref = log_probs(*other, ids, None, temperature)
    elif not options.get("use_ref_model", True):
        ref = None
    m, wide = mask.to(lp.dtype), lambda t: t if t is None else t.detach().to(lp.dtype)
    out, kl, clipped = policy_reference.terms(
        lp,
        m,
        wide(advantages),
        wide(old),
        wide(ref),
        wide(ratio),
        loss_type,
        options.get("importance_sampling_level", "token"),
        options.get("epsilon_low", 0.2),
        options.get("epsilon_high", 0.2),
        options.get("delta"),
        beta,
        options.get("use_bias_correction_kl", False),
        options.get("sapo_temperature_pos", 1.0),
        options.get("sapo_temperature_neg", 1.05),
    )
    loss = policy_reference.reduced(out, m, loss_type, options.get("max_completion_length"))
    return (
        loss,
        *([] if kl is None else [policy_reference.mean(kl, m).detach()]),
        policy_reference.mean(clipped, m).detach(),
    )


def policy_draw(pick):
    drawn = dict(
        with_bias=True,
        ignored=pick.choice((0.0, 0.9, 1.1)),
        empty_row=True,
        beta=pick.choice((0.0, 0.3)),
        old=True,
        ref=True,
        temperature=pick.choice((0.6, 1.7)),
        ratio=pick.choice(("token", "sequence")),
        use_bias_correction_kl=True,
        epsilon_high=0.4,
        delta=1.1,
        use_ref_model=False,
    )
    loss, level = pick.choice(policy_reference.LOSSES)
    return (
        pick_some(pick, drawn, 6)
        | dict(loss_type=loss, importance_sampling_level=level)
        | (dict(max_completion_length=11) if loss == "dr_grpo" else {})
        | (dict(epsilon_high=3.0) if loss == "cispo" else {})
    )


#: Each loss and level with the old policy; and each option with a loss that is clipped and two that are not.
POLICY_OPTIONS = [
    dict(old=True, ref=True),
    *(
        dict(loss_type=loss, importance_sampling_level=level, old=True, ref=True, with_bias=i % 2 == 0, temperature=0.8)
        | (dict(max_completion_length=11) if loss == "dr_grpo" else {})
        | (dict(epsilon_high=3.0) if loss == "cispo" else {})
        for i, (loss, level) in enumerate(policy_reference.LOSSES)
    ),
    *(
        dict(loss_type=loss, old=True, ref=True) | changed
        for loss in ("dapo", "cispo", "vespo")
        for changed in (dict(old=False), dict(ratio="token"), dict(beta=0.0), dict(use_bias_correction_kl=True))
    ),
    dict(old=True, delta=1.1, ratio="sequence", importance_sampling_level="sequence"),
    dict(old=True, delta=1.6, use_bias_correction_kl=True, epsilon_low=0.05, epsilon_high=0.4),
    dict(loss_type="sapo", old=True, sapo_temperature_pos=0.5, sapo_temperature_neg=2.0, use_ref_model=False),
    dict(ignored=1.1),
]

# Distillation: hidden, weight, bias, teacher's, labels.


def distillation_make(shape, options):
    """with_bias: True, or "student" or "teacher" for one of the two."""
    tokens, width, teachers, classes = shape
    biased = lambda model: dict(with_bias=options.get("with_bias") in (True, model))
    student = head(1, tokens, width, classes, biased("student"))
    teacher = head(1, tokens, teachers, classes + options.get("more_classes", 0), biased("teacher"))
    return student[0][0], *student[1:], teacher[0][0], *teacher[1:], labels((tokens,), classes, options)


def distillation_call(losses, name, inputs, options):
    hidden, weight, bias, teacher, teacher_weight, teacher_bias, y = inputs
    return module(losses, name, options)(hidden, weight, teacher, teacher_weight, y, bias, teacher_bias)


def divergence(name, student, teacher, valid, beta):
    if name == "cosine":
        return beta * (1 - (F.normalize(student, dim=-1) * F.normalize(teacher, dim=-1)).sum(-1)).sum()
    s, t = student.log_softmax(-1), teacher.log_softmax(-1)
    kl = lambda p, q: ((p.exp() * (p - q)).sum(-1) * valid).sum()
    if beta in (0, 1):
        return kl(t, s) if beta == 0 else kl(s, t)
    middle = (beta * t.exp() + (1 - beta) * s.exp()).log()
    return beta * kl(t, middle) + (1 - beta) * kl(s, middle)


def distillation_plain(name, inputs, options):
    hidden, weight, bias, teacher, teacher_weight, teacher_bias, y = inputs
    wide = lambda z: z.to(torch.promote_types(z.dtype, torch.float32))
    student, teacher = wide(F.linear(hidden, weight, bias)), wide(F.linear(teacher, teacher_weight, teacher_bias))
    ignore, temperature = options.get("ignore_index", IGNORE), options.get("temperature", 1.0)
    valid = y != ignore
    count = valid.sum().clamp(min=1)
    hard = F.cross_entropy(student, y, ignore_index=ignore, reduction="sum") / count
    padded = F.pad(student / temperature, (0, options.get("more_classes", 0)))
    soft = divergence(name, padded, teacher / temperature, valid, options.get("beta", 0.5)) / count
    loss = options.get("weight_hard_loss", 0.5) * hard + options.get("weight_soft_loss", 0.5) * soft
    return (loss, soft.detach(), hard.detach()) if options.get("return_soft_hard_loss") else (loss,)


def distillation_draw(pick):
    drawn = dict(
        with_bias=True,
        ignored=pick.choice((0.0, 0.9, 1.1)),
        beta=pick.choice((0.0, 1.0, 0.2)),
        temperature=pick.choice((0.6, 2.0)),
        weight_hard_loss=0.0,
        weight_soft_loss=0.9,
        chunk_size=pick.choice((1, 3)),
    )
    return pick_some(pick, drawn)


DISTILLATION_OPTIONS = [
    {},
    dict(weight_hard_loss=0.0, weight_soft_loss=1.0, with_bias="student"),
    dict(weight_hard_loss=1.0, weight_soft_loss=0.0, with_bias="teacher"),
    dict(beta=0.3, temperature=1.3, with_bias=True, return_soft_hard_loss=True),
    dict(weight_hard_loss=0.2, weight_soft_loss=3.0, temperature=0.8, chunk_size=3, ignore_index=2),
    dict(more_classes=9, temperature=0.8, with_bias=True),
    dict(ignored=1.1),
]
JSD_OPTIONS = [
    *DISTILLATION_OPTIONS,
    dict(beta=0.0, temperature=1.3, with_bias=True),
    dict(beta=1.0, temperature=1.3, return_soft_hard_loss=True),
]


def even(shape):
    return (2 * -(-shape[0] // 2), *shape[1:-1], max(shape[-1], 3))


def loss_case(name, call, plain, make, draw, teacher, **more):
    """teacher: the places of the hidden states and the weight of the second head, a reference or a teacher."""

    def heads(inputs):
        found = (*inputs[:2], True), (*(inputs[i] for i in teacher), False)
        return [head for head in found if head[0] is not None]

    return Case(
        name=f"linear_{name}",
        op=lambda *inputs, **options: flat(call(liger_kernel.chunked_loss, name, inputs, options)),
        make=make,
        draw=draw,
        fit=even,
        reference=lambda *inputs, **options: plain(name, inputs, options),
        differentiable=(0, 1, 2),
        heads=heads,
        **dict(shapes=[(2, 3, 4, 5), (6, 9, 24, 101), (8, 10, 40, 301)], scales=(1, 1, 1, 1e-3, 3.0)) | more,
    )


def bench(*options, shape=(8, 2048, 4096, 128256), cpu=(4, 256, 256, 32768)):
    return dict(bench=[(shape, o) for o in options], bench_cpu=[(cpu, o) for o in options])


NONE_IGNORED = dict(ignored=0.0)
TIMED = {"dpo": NONE_IGNORED, "orpo": NONE_IGNORED, "kto": NONE_IGNORED | dict(use_ref_model=True)}
SOFT = NONE_IGNORED | dict(weight_hard_loss=0.0, weight_soft_loss=1.0)
TOKENS = [(3, 4, 5, 6), (45, 24, 16, 101), (130, 40, 56, 301)]
DISTILLATION = distillation_call, distillation_plain, distillation_make, distillation_draw
#: case -> (how its class is called, the class's name in TITLES)
CALLS = {f"linear_{name}": (preference_call, name) for name in preference.MODULES}
CALLS |= {"linear_grpo": (policy_call, "grpo"), **{f"linear_{n}": (distillation_call, n) for n in ("jsd", "cosine")}}

CASES = []
for name in preference.MODULES:
    parts = preference_call, preference_plain, preference_make(name), preference_draw(name)
    timed = bench(TIMED[name]) if name in TIMED else {}
    CASES.append(loss_case(name, *parts, (6, 7), options=PREFERENCE_OPTIONS[name], **timed))
CASES += [
    # What is known of the old policy, and rewards, are in float.
    loss_case(
        "grpo",
        policy_call,
        policy_plain,
        policy_make,
        policy_draw,
        (9, 10),
        keep=(5, 6, 7, 8),
        scales=(1,),
        options=POLICY_OPTIONS,
        **bench(NONE_IGNORED | dict(old=True), NONE_IGNORED | dict(old=True, ref=True), shape=(8, 1024, 4096, 128256)),
    ),
    loss_case(
        "jsd",
        *DISTILLATION,
        (3, 4),
        options=JSD_OPTIONS,
        shapes=TOKENS,
        **bench(SOFT, SOFT | dict(beta=0.0), shape=(8192, 2048, 4096, 128256), cpu=(1024, 256, 512, 32768)),
    ),
    loss_case("cosine", *DISTILLATION, (3, 4), options=DISTILLATION_OPTIONS, shapes=TOKENS),
]
LOSSES = {case.name: case for case in CASES}
