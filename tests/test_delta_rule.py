"""What the delta rule promises beside the numbers of its cases (tests/cases/gated_delta_rule.py and
channel_delta_rule.py), with a gate for each head and for each channel of the keys."""

import pytest
import torch
from cases.channel_delta_rule import reference as channel_reference
from cases.gated_delta_rule import reference as head_reference
from liger_kernel._invariance import products
from liger_kernel.transformers.functional import liger_channel_gates, liger_gated_delta_rule

LENGTHS = (5, 1, 1, 40, 70)
NAMES = ("q", "k", "v", "g", "beta", "state")
both = pytest.mark.parametrize("channels", [False, True], ids=["heads", "channels"])


def inputs(device, channels, tokens=sum(LENGTHS), documents=len(LENGTHS), K=16, V=24, dtype=torch.float32, heads=2):
    """Heads of one key head; every fifth token decays hardly at all."""
    of_gates = (1, tokens, heads, K) if channels else (1, tokens, heads)
    q, k, v = torch.randn(1, tokens, 1, K), torch.randn(1, tokens, 1, K), torch.randn(1, tokens, heads, V)
    g, beta = -torch.rand(of_gates), torch.rand(1, tokens, heads)
    g[:, ::5] *= 1e-3
    state = torch.randn(documents, heads, K, V)
    return [
        t.to(device, d) for t, d in zip((q, k, v, g, beta, state), (dtype,) * 3 + (torch.float32, dtype, torch.float32))
    ]


def starts(device, lengths=LENGTHS):
    return torch.tensor([0, *lengths[:-1]]).cumsum(0).repeat_interleave(torch.tensor(lengths))[None].int().to(device)


def with_gradients(tensors, upstreams, **more):
    """The results and the gradients of what is given."""
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    results = liger_gated_delta_rule(*leaves, **more, final_state=True)
    return [*results, *torch.autograd.grad(results, leaves, upstreams)]


@both
def test_documents_as_alone(channels, device):
    """The same bits of results and gradients, wherever a document lies."""
    given = inputs(device, channels)
    o, last = torch.randn(1, sum(LENGTHS), 2, 24, device=device), torch.randn_like(given[5])
    packed = with_gradients(given, (o, last), starts=starts(device))
    at = 0
    for i, length in enumerate(LENGTHS):
        mine, of_state = slice(at, at + length), slice(i, i + 1)
        alone = with_gradients([*(t[:, mine] for t in given[:5]), given[5][of_state]], (o[:, mine], last[of_state]))
        for name, a, b in zip(("o", "last", *NAMES), packed, alone, strict=True):
            a = a[of_state] if name in ("last", "state") else a[:, mine]
            assert torch.equal(a, b), (name, length)
        at += length


@both
def test_documents_beyond_the_states(channels, device):
    """They begin with nothing, and change nothing of the others."""
    given = inputs(device, channels)
    o, last = torch.randn(1, sum(LENGTHS), 2, 24, device=device), torch.randn_like(given[5])
    few = [*given[:5], given[5][:2]]
    found = with_gradients(few, (o, last[:2]), starts=starts(device))
    state = given[5].clone()
    state[2:], last[2:] = 0, 0
    expected = with_gradients([*given[:5], state], (o, last), starts=starts(device))
    at = torch.tensor(LENGTHS).cumsum(0)[1:-1]  # where documents begin that have no state
    for name, a, b in zip(("o", "last", *NAMES), found, expected, strict=True):
        b = b[:2] if name in ("last", "state") else b.clone()
        if name == "g":  # decays nothing
            assert not a[:, at].any()
            b[:, at] = 0
        torch.testing.assert_close(a, b, rtol=2**-20, atol=2**-20)


@both
def test_halves(channels, device):
    """A state that is handed on, with its gradient, makes two halves what the whole is: to a few units, for chunks lie
    otherwise."""
    given = inputs(device, channels, tokens=75, documents=1)
    whole, halves = ([t.detach().clone().requires_grad_() for t in given] for _ in range(2))
    expected = liger_gated_delta_rule(*whole, final_state=True)
    first, middle = liger_gated_delta_rule(*(t[:, :43] for t in halves[:5]), halves[5], final_state=True)
    second, last = liger_gated_delta_rule(*(t[:, 43:] for t in halves[:5]), middle, final_state=True)
    found = torch.cat([first, second], 1), last
    upstreams = [torch.randn_like(t) for t in expected]
    theirs, ours = torch.autograd.grad(expected, whole, upstreams), torch.autograd.grad(found, halves, upstreams)
    for name, a, b in zip(("o", "last", *NAMES), (*found, *ours), (*expected, *theirs), strict=True):
        assert (a - b).norm() <= 2**-18 * b.norm(), name


@both
@pytest.mark.parametrize("K,V", [(16, 16), (64, 64), (96, 192), (128, 128), (192, 96), (256, 256)])
def test_widths(K, V, channels, device):
    """Against float64, token by token: of results that sum up to 75 tokens in float, 2^-18; a gate's gradient is a
    difference of such sums."""
    given = inputs(device, channels, tokens=75, documents=1, K=K, V=V)
    exact = [t.double().requires_grad_() for t in given]
    upstreams = torch.randn(1, 75, 2, V, device=device), torch.randn_like(given[5])
    found = with_gradients(given, upstreams)
    reference = channel_reference if channels else head_reference
    results = reference(*exact, None)
    expected = [*results, *torch.autograd.grad(results, exact, [u.double() for u in upstreams])]
    for name, a, b in zip(("o", "last", *NAMES), found, expected, strict=True):
        assert (a - b).norm() <= 2 ** (-16 if name == "g" else -18) * b.norm(), name


@pytest.mark.parametrize("delta", [True, False])
def test_many_heads(delta, device):
    """More heads of a key head than a block works on at once: as in test_tiles."""
    given = inputs(device, False, 67, 1, 128, 64, torch.bfloat16, heads=9)
    given[1] /= 128**0.5
    o, last = torch.randn(1, 67, 9, 64, device=device).bfloat16(), torch.randn_like(given[5])
    found = with_gradients(given, (o, last), delta=delta, eps=None)
    exact = [t.double().requires_grad_() for t in given]
    results = head_reference(*exact, None, delta=delta, eps=None)
    expected = [*results, *torch.autograd.grad(results, exact, [o.double(), last.double()])]
    for name, a, b in zip(("o", "last", *NAMES), found, expected, strict=True):
        assert (a - b).norm() <= (2**-8 if a.dtype == torch.bfloat16 else 2**-13) * b.norm(), name


@pytest.mark.parametrize("K,V,delta", [(64, 64, True), (128, 64, False), (128, 128, False), (128, 128, True)])
def test_tiles(K, V, delta, device):
    """Widths that have separate kernels on Hopper. Against float64, token by token: what is bfloat16 is rounded once,
    2^-9 of each number, and float results are sums of products of two terms of 8 bits each; a document has the bits
    that it has alone."""
    lengths = (64, 1, 67)
    given = inputs(device, False, sum(lengths), 2, K, V, torch.bfloat16)
    given[1] /= K**0.5  # as they are, without a norm: longer keys let the state grow
    options = dict(delta=delta, eps=None)
    o, last = torch.randn(1, sum(lengths), 2, V, device=device).bfloat16(), torch.randn_like(given[5])
    packed = with_gradients(given, (o, last), starts=starts(device, lengths), **options)
    exact = [t.double().requires_grad_() for t in given]
    results = head_reference(*exact, starts(device, lengths), **options)
    expected = [*results, *torch.autograd.grad(results, exact, [o.double(), last.double()])]
    for name, a, b in zip(("o", "last", *NAMES), packed, expected, strict=True):
        assert (a - b).norm() <= (2**-8 if a.dtype == torch.bfloat16 else 2**-13) * b.norm(), name
    at = 0
    for i, length in enumerate(lengths):
        mine, of_state = slice(at, at + length), slice(i, i + 1)
        state = given[5][of_state] if i < 2 else torch.zeros_like(given[5][:1])
        last_alone = last[of_state] if i < 2 else torch.zeros_like(last[:1])
        alone = with_gradients([*(t[:, mine] for t in given[:5]), state], (o[:, mine], last_alone), **options)
        for name, a, b in zip(("o", "last", *NAMES), packed, alone, strict=True):
            if name in ("last", "state"):
                assert i == 2 or torch.equal(a[of_state], b), (name, length)
            else:
                a, b = a[:, mine], b.clone()
                if i == 2 and name == "g":  # decays a state of zeros, or none
                    a, b = a[:, 1:], b[:, 1:]
                assert torch.equal(a, b), (name, length)
        at += length


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("lengths", [(800,), (67, 800, 33)])
def test_few_chains(lengths, invariant, device):
    """One head of long documents, which a GPU cuts into segments, with decays of e^-0.7 in 64 tokens: as in test_tiles.
    While liger_kernel.batch_invariant is on, nothing is cut, and a document has the bits that it has alone."""
    given = inputs(device, False, sum(lengths), len(lengths), 128, 64, torch.bfloat16, heads=1)
    given[1] /= 128**0.5
    given[3] *= 0.02
    options = dict(delta=False, eps=None)
    o, last = torch.randn(1, sum(lengths), 1, 64, device=device).bfloat16(), torch.randn_like(given[5])
    i = lengths.index(max(lengths))
    mine = slice(sum(lengths[:i]), sum(lengths[: i + 1]))
    if invariant:
        products.enter()
    try:
        found = with_gradients(given, (o, last), starts=starts(device, lengths), **options)
        alone = [*(t[:, mine] for t in given[:5]), given[5][i : i + 1]]
        alone = with_gradients(alone, (o[:, mine], last[i : i + 1]), **options)
    finally:
        if invariant:
            products.leave()
    exact = [t.double().requires_grad_() for t in given]
    results = head_reference(*exact, starts(device, lengths), **options)
    expected = [*results, *torch.autograd.grad(results, exact, [o.double(), last.double()])]
    for name, a, b, c in zip(("o", "last", *NAMES), found, expected, alone, strict=True):
        assert (a - b).norm() <= (2**-8 if a.dtype == torch.bfloat16 else 2**-13) * b.norm(), name
        if invariant:
            assert torch.equal(a[i : i + 1] if name in ("last", "state") else a[:, mine], c), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gates_of_16_bits(dtype, device):
    """Gates of channels may have 16 bits: the same results, and a gradient that is rounded once."""
    given = inputs(device, True, dtype=dtype)
    given[3] = given[3].to(dtype)
    wide = [t.float() if i == 3 else t for i, t in enumerate(given)]
    upstreams = torch.randn(1, sum(LENGTHS), 2, 24, device=device).to(dtype), torch.randn_like(given[5])
    found, expected = (with_gradients(tensors, upstreams, starts=starts(device)) for tensors in (given, wide))
    for name, a, b in zip(("o", "last", *NAMES), found, expected, strict=True):
        assert torch.equal(a, b.to(dtype) if name == "g" else b), name


def test_nan_stays_in_its_document(device):
    given = inputs(device, True)
    given[3][:, 8] = torch.nan
    o, last = torch.randn(1, sum(LENGTHS), 2, 24, device=device), torch.randn_like(given[5])
    found = with_gradients(given, (o, last), starts=starts(device))
    at = sum(LENGTHS[:3])
    for name, t in zip(("o", "last", *NAMES), found, strict=True):
        others = t[[0, 1, 2, 4]] if name in ("last", "state") else torch.cat([t[:, :at], t[:, at + LENGTHS[3] :]], 1)
        assert others.isfinite().all(), name
    assert found[0][:, at + 5].isnan().any()


@pytest.mark.parametrize("low", [None, -5.0])
def test_gates_of_any_size(low, device):
    """Every gate and its derivative have all digits, from where exp(x) vanishes to where it overflows: a few units in
    the last place, beside the rounding of z = exp(A_log) x, which the sigmoid carries on as |x| units. Exponentials
    below 2^-125 may be 0."""
    x, A_log = torch.linspace(-60, 120, 721, device=device).requires_grad_(), torch.tensor([0.3], device=device)
    g = liger_channel_gates(x[None], A_log, low=low).flatten()
    slope = torch.autograd.grad(g.sum(), x)[0]
    exact, rate = x.detach().double(), A_log.double().exp()
    z = rate * exact
    if low is None:
        expected = -rate * torch.log1p((-exact.abs()).exp()) - rate * exact.clamp(min=0), -rate * exact.sigmoid()
    else:
        expected = low * z.sigmoid(), low * rate * z.sigmoid() * (-z).sigmoid()
    units = 8 + (0 if low is None else 2 * exact.abs())
    for own, wanted in zip((g, slope), expected):
        assert ((own - wanted).abs() <= units * 2.0**-23 * wanted.abs() + 2.0**-122).all()
