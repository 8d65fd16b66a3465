"""What the papers of the preference losses say, in float64, and a batch to compare on."""

import inspect
import math

import torch
import torch.nn.functional as F
from liger_kernel.chunked_loss import (
    LigerFusedLinearCPOLoss,
    LigerFusedLinearDPOLoss,
    LigerFusedLinearKTOLoss,
    LigerFusedLinearORPOLoss,
    LigerFusedLinearSimPOLoss,
)

N, T, H, V = 3, 7, 10, 23
LOSS_TYPES = [
    "sigmoid",
    "hinge",
    "exo_pair",
    "nca_pair",
    "robust",
    "bco_pair",
    "sppo_hard",
    "apo_zero",
    "apo_down",
    "discopop",
]


def tokens(x, w, b, y):
    logits = F.linear(x, w, b)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits, logits.log_softmax(-1).gather(-1, y.clamp_min(0)[..., None])[..., 0]


def sequences(x, w, b, y, ignore, average, tokens=tokens):
    logits, logp = tokens(x, w, b, y.where(y != ignore, 0))
    mask = y != ignore
    total = (logp * mask).sum(1)
    return logits, total / mask.sum(1).clamp_min(1) if average else total


def nll_of(x, w, b, y, ignore, tokens=tokens):
    _, logp = tokens(x, w, b, y.where(y != ignore, 0))
    mask = y != ignore
    return -(logp * mask).sum() / mask.sum().clamp_min(1)


ln_sigma, sigma = F.logsigmoid, torch.sigmoid


def dpo_terms(loss_type, w, l, beta, e, tau):
    rw, rl = beta * w, beta * l
    h = rw - rl
    return {
        "sigmoid": lambda: -ln_sigma(h),
        "hinge": lambda: (1 - h).clamp_min(0),
        "exo_pair": lambda: sigma(h) * (ln_sigma(h) - math.log(1 - e)) + sigma(-h) * (ln_sigma(-h) - math.log(e)),
        "nca_pair": lambda: -ln_sigma(rw) - 0.5 * ln_sigma(-rw) - 0.5 * ln_sigma(-rl),
        "robust": lambda: (-(1 - e) * ln_sigma(h) + e * ln_sigma(-h)) / (1 - 2 * e),
        "bco_pair": lambda: -ln_sigma(rw) - ln_sigma(-rl),
        "sppo_hard": lambda: (w - 1 / (2 * beta)) ** 2 + (l + 1 / (2 * beta)) ** 2,
        "apo_zero": lambda: 1 - sigma(rw) + sigma(rl),
        "apo_down": lambda: sigma(rw) + 1 - sigma(h),
        "discopop": lambda: -ln_sigma(h) * (1 - sigma(h / tau)) + torch.exp(-h) * sigma(h / tau),
    }[loss_type]()


def reference(name, x, w, b, y, ignore, options, ref=None, nll_y=None, liked=None, kl=None, tokens=tokens):
    """(loss, aux) for one of the five losses, by tokens(x, w, b, y) -> (logits, log-probabilities)."""
    beta = options.get("beta", 0.1)
    average = name in ("orpo", "simpo") or options.get("average_log_prob", False)
    logits, logp = sequences(x, w, b, y, ignore, average, tokens)
    ref_logp = torch.zeros_like(logp) if ref is None else sequences(*ref, y, ignore, average, tokens)[1]
    if name == "kto":
        delta, sign = logp - ref_logp, torch.where(liked, 1.0, -1.0)
        loss = (1 - sigma(beta * (delta - (0 if kl is None else kl)) * sign)).mean()
        split = [(v[liked].sum(), v[~liked].sum()) for v in (logp, logits.sum((1, 2)), beta * delta)]
        return loss, [s for pair in split for s in pair]
    pw, pl = logp.chunk(2)
    nll = (
        nll_of(x[: len(x) // 2], w, b, (y if nll_y is None else nll_y)[: len(x) // 2], ignore, tokens)
        if options["compute_nll_loss"]
        else logp.new_zeros(())
    )
    e = options.get("label_smoothing", 0.0)
    if name == "dpo":
        dw, dl = (logp - ref_logp).chunk(2)
        terms = dpo_terms(options.get("loss_type", "sigmoid"), dw, dl, beta, e, options.get("discopop_tau", 0.05))
        loss, extra = terms.mean(), [beta * dw, beta * dl]
    elif name == "orpo":
        g = pw - pl - (torch.log1p(-pw.exp()) - torch.log1p(-pl.exp()))
        loss, extra = -beta * ln_sigma(g).mean(), [beta * pw, beta * pl, ln_sigma(g).mean(), g.mean()]
    else:
        u = beta * (pw - pl) - (options.get("gamma", 0.5) if name == "simpo" else 0)
        loss, extra = (-(1 - e) * ln_sigma(u) - e * ln_sigma(-u)).mean(), [beta * pw, beta * pl]
    means = [part.mean() for part in logits.chunk(2)]
    return options.get("alpha", 1.0) * nll + loss, [pw, pl, *means, nll, *extra]


MODULES = {
    "dpo": LigerFusedLinearDPOLoss,
    "orpo": LigerFusedLinearORPOLoss,
    "cpo": LigerFusedLinearCPOLoss,
    "simpo": LigerFusedLinearSimPOLoss,
    "kto": LigerFusedLinearKTOLoss,
}


class Batch:
    """Hidden states that are a slice, labels of unequal lengths with holes, a reference of another width."""

    def __init__(
        self,
        dtype=torch.float32,
        ignore=-100,
        bias=True,
        ref_bias=True,
        frozen=(),
        weight_dtype=None,
        rows=2 * N,
        device="cpu",
    ):
        def to(t, dtype=dtype):
            return t.to(device, dtype)

        self.x = to(torch.randn(rows, T + 1, H) * 0.7)[:, :-1].requires_grad_("x" not in frozen)
        self.w = to(torch.randn(V, H) * 0.6, weight_dtype or dtype).requires_grad_("w" not in frozen)
        self.b = to(torch.randn(V), weight_dtype or dtype).requires_grad_("b" not in frozen) if bias else None
        self.y = torch.randint(1, V, (rows, T)).to(device)
        for row, length in enumerate((T, 3, 5, 4, T, 1)[:rows]):
            self.y[row, length:] = ignore
        self.y[0, 2] = self.y[4 % rows, 1] = ignore
        self.ref = (
            to(torch.randn(rows, T + 1, H + 3) * 0.7)[:, :-1],
            to(torch.randn(V, H + 3) * 0.5),
            to(torch.randn(V)) if ref_bias else None,
        )
        self.liked = torch.tensor([True, False, True, False, False, True], device=device)[:rows]
        self.leaves = [t for t in (self.x, self.w, self.b) if t is not None and t.requires_grad]

    def call(self, module, name, ref=False, **extra):
        given = dict(zip(("ref_input", "ref_weight", "ref_bias"), self.ref)) if ref else {}
        if name == "kto":
            return module(
                _input=self.x,
                lin_weight=self.w,
                target=self.y,
                bias=self.b,
                preference_labels=self.liked,
                **given,
                **extra,
            )
        return module(self.w, self.x, self.y, self.b, **given, **extra)

    def expected(self, name, options, ignore=-100, ref=False, **extra):
        """(loss, aux, gradients), in float64."""
        copies = {id(t): t.detach().double().requires_grad_() for t in self.leaves}
        x, w, b = (None if t is None else copies.get(id(t), t.detach().double()) for t in (self.x, self.w, self.b))
        loss, aux = reference(
            name,
            x,
            w,
            b,
            self.y,
            ignore,
            options,
            tuple(None if t is None else t.double() for t in self.ref) if ref else None,
            liked=self.liked,
            **extra,
        )
        return loss, aux, torch.autograd.grad(loss, [copies[id(t)] for t in self.leaves])


def close(ours, plain, bound, least=1e-6):
    assert ours.shape == plain.shape
    scale = max(plain.abs().max().item(), least)
    assert (ours.detach().double() - plain.detach()).abs().max().item() <= bound * scale, (ours, plain)


def check(batch, ours, expected, bound):
    loss, aux = ours
    assert loss.dtype == torch.float32 and loss.ndim == 0 and loss.requires_grad and abs(loss.item()) > 1e-3
    gradients = torch.autograd.grad(loss, batch.leaves, retain_graph=True)
    close(loss, expected[0], bound, 1)  # terms of that size cancel
    assert (
        len(aux) == len(expected[1])
        and not any(a.requires_grad for a in aux)
        and all(a.dtype == torch.float32 for a in aux)
    )
    for a, plain in zip(aux, expected[1]):
        close(a, plain, bound, 0.1)
    for leaf, gradient, plain in zip(batch.leaves, gradients, expected[2]):
        assert gradient.dtype == leaf.dtype and gradient.abs().max() > 1e-5
        close(gradient, plain, bound)
    return gradients


def options_of(name, options):
    """The options with the defaults of the module, which the reference needs."""
    parameters = inspect.signature(MODULES[name].__init__).parameters
    return {n: p.default for n, p in parameters.items() if n != "self"} | options
