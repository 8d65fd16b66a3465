"""Losses of policies in plain torch, from their definitions, and a batch for them."""

import math

import torch

B, T, H, V = 4, 7, 24, 61
CLIPPED, SOFT = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo"), ("cispo", "sapo", "vespo")
LOSSES = [
    (loss, level) for loss in CLIPPED + SOFT for level in ("token", "sequence") if level == "token" or loss in CLIPPED
]
MAX_LENGTH = 11


def _bounds(dtype):
    """Of results divided by the largest of them. A logit, of size √H, errs by √H roundings of half an eps in a float
    sum of H products, by one in a 16-bit type. Probabilities, and the terms of gradients, err as much of their size,
    and the ratio of two policies, the exponential of a difference, twice as much."""
    logit = H**0.5 * torch.finfo(dtype).eps / 2 * (H**0.5 if dtype == torch.float32 else 1)
    return dict(rtol=2 * logit, atol=logit)


BOUNDS = {dtype: _bounds(dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)}


def log_probs(x, weight, ids, bias=None, temperature=1.0):
    z = x @ weight.T if bias is None else x @ weight.T + bias
    return (
        torch.log_softmax(z.to(torch.promote_types(z.dtype, torch.float32)) / temperature, -1)
        .gather(-1, ids.unsqueeze(-1))
        .squeeze(-1)
    )


def gamma(advantages, d, mask, ratio, k_pos=2.0, lambda_pos=3.0, k_neg=3.0, lambda_neg=2.0):
    s = (d.clamp(-20, 20) * mask).sum(1)
    if ratio is not None:
        s = s + ratio.reshape(len(d), -1).log().clamp(math.log(1e-8), 20).sum(1)
    s = s.clamp(math.log(1e-8), 20)
    k = torch.where(advantages >= 0, k_pos, k_neg)
    lam = torch.where(advantages >= 0, max(lambda_pos, 1e-4), max(lambda_neg, 1e-4))
    return torch.nan_to_num(torch.exp(lam + k * s - lam * s.exp()), 0, 0, 0).unsqueeze(1)


def terms(
    lp,
    mask,
    advantages,
    old=None,
    ref=None,
    ratio=None,
    loss="dapo",
    level="token",
    low=0.2,
    high=0.2,
    delta=None,
    beta=0.0,
    unbiased=False,
    pos=1.0,
    neg=1.05,
):
    """(loss, kl, clipped) of each token or sequence, from the definitions."""
    a = advantages.unsqueeze(1)
    d = lp - (lp.detach() if old is None else old)
    w = d if level == "token" else (mask * d).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
    c = w.exp()
    clipped = torch.zeros_like(c)
    if loss in CLIPPED:
        first = c if delta is None else c.clamp(max=delta)
        out = -torch.min(first * a, c.clamp(1 - low, 1 + high) * a)
        clipped = (((c < 1 - low) & (a < 0)) | ((c > 1 + high) & (a > 0))).to(c.dtype)
    elif loss == "cispo":
        out = -c.clamp(max=high).detach() * a * lp
        clipped = ((c > high) & (a > 0)).to(c.dtype)
    elif loss == "sapo":
        tau = torch.where(a > 0, pos, neg)
        out = -a * 4 / tau * torch.sigmoid(tau * (c - 1))
    else:
        out = -gamma(advantages, d.detach(), mask, ratio) * a * lp
    if ratio is not None and loss != "vespo":
        out = out * ratio.reshape(len(lp), -1)
    kl = None
    if beta:
        x = (lp.detach() if ref is None else ref) - lp
        kl = x.exp() - x - 1
        if unbiased:
            kl = kl * c
        out = out + beta * kl
    return out, kl, clipped


def reduced(out, mask, loss, max_length, normalizer=None):
    lengths = mask.sum(1, keepdim=True)
    if loss in ("grpo", "sapo"):
        return ((out * mask).sum(1, keepdim=True) / lengths.clamp(min=1)).mean()
    if loss == "luspo":
        return (out * lengths).mean()
    total = (out * mask).sum()
    if loss == "dr_grpo":
        return total / (len(mask) * max_length)
    return total / (mask.sum().clamp(min=1) if loss == "bnpo" or normalizer is None else max(normalizer, 1))


def mean(values, mask):
    return (values * mask).sum() / mask.sum().clamp(min=1)


def batch(device, dtype=torch.float32, spread=0.5):
    """Completions of unequal lengths, one of which is all masked, one with a hole; probabilities far enough from the
    old ones that bounds hold some back."""
    g = torch.Generator().manual_seed(1)
    draw = lambda *shape: torch.randn(*shape, generator=g)
    x, weight, bias = draw(B, T + 1, H) * 0.7, draw(V, H) * 0.5, draw(V) * 0.3
    ids = torch.randint(0, V, (B, T), generator=g)
    mask = torch.tensor([[1] * 7, [1, 1, 0, 1, 1, 0, 0], [1] * 3 + [0] * 4, [0] * 7])
    advantages = torch.tensor([1.3, -0.8, 0.6, 2.0])
    lp = log_probs(x[:, :-1].to(dtype).double(), weight.to(dtype).double(), ids, bias.to(dtype).double(), 0.8)
    old, ref = (lp + draw(B, T) * spread).float(), (lp + draw(B, T) * spread).float()
    old[0] -= 0.4  # the first completion's own ratio is held back too
    ratio = torch.rand(B, T, generator=g) + 0.5
    move = lambda t, to=None: t.to(device) if to is None else t.to(device, to).requires_grad_()
    return (move(x, dtype), move(weight, dtype), move(bias, dtype)), *map(
        move, (ids, mask, advantages, old, ref, ratio)
    )


def check(got, expected, names, bounds):
    for name, a, b in zip(names, got, expected):
        assert b.abs().max() > 1e-5, f"{name} is trivially zero"
        # Against the largest element, as rounding in a sum is.
        torch.testing.assert_close(
            a.double() / b.abs().max(),
            b / b.abs().max(),
            rtol=bounds["rtol"],
            atol=bounds["atol"],
            msg=lambda m: f"{name}: {m}",
        )


def expected_of(tensors, ids, mask, advantages, temperature, scale=1.0, **options):
    """(loss, kl, clip ratio, gradients) in float64; x without the last position."""
    exact = [t.detach().double().requires_grad_() for t in tensors]
    x, weight, *bias = exact
    m = mask.double()
    lp = log_probs(x[:, :-1], weight, ids, *bias, temperature)
    wide = lambda t: t if t is None or not isinstance(t, torch.Tensor) else t.double()
    normalizer, max_length = options.pop("normalizer", None), options.pop("max_length", MAX_LENGTH)
    out, kl, clipped = terms(lp, m, advantages.double(), **{k: wide(v) for k, v in options.items()})
    loss = reduced(out, m, options.get("loss", "dapo"), max_length, normalizer)
    gradients = torch.autograd.grad(loss * scale, exact)
    return loss, None if kl is None else mean(kl, m), mean(clipped, m), gradients
