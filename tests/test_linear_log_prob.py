"""What linear_log_prob offers besides the numbers of tests/cases, against plain torch in float64."""

import pytest
import torch
from liger_kernel._library import ops
from liger_kernel.memory import head_peak_bytes, set_memory_budget
from liger_kernel.ops.linear_log_prob import linear_log_prob
from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy
from torch._subclasses.fake_tensor import FakeTensorMode

N, H, R, V = 40, 24, 4, 91


def logit_error(dtype):
    """By how much a logit of H products may err, of its size: a float sum by √H units of rounding, half an eps each; in
    a 16-bit type by one unit, when it is rounded."""
    return torch.finfo(dtype).eps / 2 * (H**0.5 if dtype == torch.float32 else 1)


#: Of results divided by the largest of them. Logits of standard normal inputs are of size √H; what a logit errs by, the
#: probabilities err by in proportion to themselves, and so do the terms of gradients.
BOUNDS = {
    dtype: dict.fromkeys(("rtol", "atol"), H**0.5 * logit_error(dtype))
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
}


def tensors(device="cpu", dtype=torch.float32, n=N):
    """hidden, weight, ids of which a quarter is ignored."""
    g = torch.Generator().manual_seed(3)
    draw = lambda *shape: torch.randn(*shape, generator=g).to(device, dtype).requires_grad_()
    ids = torch.randint(0, V, (n,), generator=g)
    ids[torch.rand(n, generator=g) < 0.25] = -100
    return draw(n, H), draw(V, H), ids.to(device)


def exact_log_softmax(hidden, weight, ids):
    """(ln p [N, V], ln p at ids), 0 where ignored, in float64."""
    all_logp = torch.log_softmax(hidden @ weight.T, -1)
    return all_logp, torch.where(ids == -100, 0, all_logp.gather(1, ids.clamp(min=0)[:, None])[:, 0])


def assert_exact(got, want, dtype=torch.float32):
    scale = want.abs().max()
    torch.testing.assert_close(got.double() / scale, want.double() / scale, **BOUNDS[dtype])


def doubles(*leaves):
    return [t.detach().double().requires_grad_() for t in leaves]


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("max_bytes", [0, 1])
@pytest.mark.parametrize("frozen", [True, False])
def test_lora(device, dtype, max_bytes, frozen):
    hidden, weight, ids = tensors(device, dtype)
    g = torch.Generator().manual_seed(4)
    a, b = ((torch.randn(*shape, generator=g) * 0.3).to(device, dtype).requires_grad_() for shape in ((R, H), (V, R)))
    weight.requires_grad_(not frozen)
    upstream = torch.randn(N, generator=g).to(device)
    logp = linear_log_prob(hidden, weight, ids, lora=(a, b, 0.5), max_bytes=max_bytes)
    leaves = [hidden, a, b] + [weight] * (not frozen)
    gradients = torch.autograd.grad(logp, leaves, upstream)
    h, w, a_, b_ = doubles(hidden, weight, a, b)
    exact = exact_log_softmax(h, w + 0.5 * b_ @ a_, ids)[1]
    expected = torch.autograd.grad(exact, [h, a_, b_] + [w] * (not frozen), upstream.double())
    for got, want, leaf in zip((logp, *gradients), (exact, *expected), (logp, *leaves)):
        assert got.dtype == leaf.dtype and want.abs().max() > 1e-3
        assert_exact(got, want, dtype)


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("max_bytes", [0, 1])
def test_main_grad(device, dtype, max_bytes):
    """It grows by the gradient, in float, with every backward pass, a second one through a graph included; weight.grad
    stays as it is."""
    hidden, weight, ids = tensors(device, dtype)
    main = torch.ones(V, H, device=device)
    loss = linear_log_prob(hidden, weight, ids, main_grad=main, max_bytes=max_bytes).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    h, w = doubles(hidden, weight)
    exact_log_softmax(h, w, ids)[1].sum().backward()
    assert weight.grad is None and w.grad.abs().max() > 0.5
    scale = w.grad.abs().max()
    torch.testing.assert_close((main.double() - 1) / scale, 2 * w.grad / scale, **BOUNDS[dtype])
    with pytest.raises(TypeError, match="main_grad"):
        linear_log_prob(hidden, weight, ids, main_grad=main.half())


def test_label_smoothing_and_z_loss(device):
    """Both are formulas of lse and mean_logits; a class's weight and a token's are factors."""
    hidden, weight, ids = tensors(device)
    classes, tokens = torch.rand(V, device=device), torch.rand(N, device=device)
    logp, lse, mean = linear_log_prob(hidden, weight, ids, outputs=("lse", "mean_logits"))
    loss = (tokens * (classes[ids.clamp(min=0)] * -0.9 * logp + 0.1 * (lse - mean) + 1e-3 * lse**2)).sum()
    gradients = torch.autograd.grad(loss, (hidden, weight))
    h, w = doubles(hidden, weight)
    z, valid = h @ w.T, ids != -100
    smooth = torch.nn.functional.cross_entropy(z, ids.clamp(min=0), reduction="none", label_smoothing=0.1)
    plain = torch.nn.functional.cross_entropy(z, ids.clamp(min=0), reduction="none")
    exact = (
        tokens.double()
        * valid
        * (smooth - 0.9 * plain + classes.double()[ids.clamp(min=0)] * 0.9 * plain + 1e-3 * z.logsumexp(-1) ** 2)
    ).sum()
    for got, want in zip((loss, *gradients), (exact, *torch.autograd.grad(exact, (h, w)))):
        assert_exact(got, want)


@pytest.mark.parametrize("max_bytes", [0, 1])
def test_largest_classes(device, max_bytes):
    hidden, weight, ids = tensors(device)
    logp, top, argmax, values, classes = linear_log_prob(
        hidden, weight, ids, softcap=5.0, outputs=("is_top1", "argmax"), top_k=3, max_bytes=max_bytes
    )
    h, w = doubles(hidden, weight)
    exact = torch.log_softmax(5 * torch.tanh(h @ w.T / 5), -1)
    kept = ids != -100
    want_values, want_classes = exact.topk(3, -1)
    assert (
        torch.equal(classes[kept], want_classes[kept])
        and torch.equal(argmax[kept], exact.argmax(-1)[kept])
        and torch.equal(top[kept], (argmax == ids)[kept])
    )
    assert_exact(values[kept], want_values[kept])
    for t in (logp, top, argmax, values, classes):
        assert t[~kept].count_nonzero() == 0
    with pytest.raises(ValueError, match="top_k"):
        linear_log_prob(hidden, weight, ids, top_k=V + 1)


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("max_bytes", [0, 1 << 17])
def test_batch_invariance(device, dtype, max_bytes):
    """A sequence's results have the same bits alone, and anywhere in a larger batch."""
    hidden, weight, ids = tensors(device, dtype, 1300)
    run = lambda rows: linear_log_prob(
        hidden[rows], weight, ids[rows], outputs=("entropy", "lse"), batch_invariant=True, max_bytes=max_bytes
    )
    whole = run(slice(None))
    for rows in (
        slice(0, 1),
        slice(0, 17),
        slice(700, 1213),
        slice(1299, 1300),
        torch.randperm(1300, generator=torch.Generator().manual_seed(1)),
    ):
        for got, want in zip(run(rows), whole):
            assert torch.equal(got, want[rows])
    h, w = doubles(hidden, weight)
    exact, largest = exact_log_softmax(h, w, ids)[1], (h @ w.T).abs().max()
    # Errors dz of logits change ln p_y by Σ_j p_j (dz_y − dz_j): by two logits' errors, times 1 − p_y, as the term of
    # j = y is 0; and 1 − p_y is at most |ln p_y|. Besides, lse is a float of the size of a logit.
    allowed = 2 * largest * logit_error(dtype) * exact.abs().clamp(max=1)
    assert ((whole[0] - exact).abs() <= allowed + largest * torch.finfo(torch.float32).eps / 2).all()


@pytest.mark.parametrize("softcap", [3.0, 30.0])
def test_softcap_is_rounded_once(device, softcap):
    """In bfloat16 the error against float64 is eager torch's, whose logits are capped in float, within a tenth."""
    hidden, weight, ids = tensors(device, torch.bfloat16, 400)
    loss = lambda logp: logp.sum() / 100
    got = torch.autograd.grad(loss(linear_log_prob(hidden, weight, ids, softcap=softcap)), (hidden, weight))

    def eager(h, w, capped_in):
        z = (h @ w.T).to(capped_in)
        return torch.autograd.grad(
            loss(
                torch.where(
                    ids == -100,
                    0,
                    torch.log_softmax(softcap * torch.tanh(z / softcap), -1).gather(1, ids.clamp(min=0)[:, None])[:, 0],
                )
            ),
            (h, w),
        )

    exact, other = eager(*doubles(hidden, weight), torch.float64), eager(hidden, weight, torch.float32)
    for ours, theirs, want in zip(got, other, exact):
        error, allowed = ((t.double() - want).norm() for t in (ours, theirs))
        assert error <= 1.1 * allowed and want.norm() > 0.1


def test_memory_budget_of_the_process(device):
    """What does not fit is recomputed in backward."""
    hidden, weight, ids = tensors(device)
    kept = lambda: ops.linear_log_prob_forward(hidden, weight, None, ids, None, None, None, None, -1)[-1].shape[0]
    assert kept() == N
    before = set_memory_budget(100)
    try:
        assert kept() == 0
        small = torch.autograd.grad(linear_log_prob(hidden, weight, ids).sum(), (hidden, weight))
    finally:
        assert set_memory_budget(before) == 100
    for a, b in zip(small, torch.autograd.grad(linear_log_prob(hidden, weight, ids).sum(), (hidden, weight))):
        assert_exact(a, b)
    with pytest.raises(ValueError, match="bytes must be"):
        set_memory_budget(-1)


def measured_peak(run, device):
    """The most bytes that a second run() allocates at once; the first one makes what is made once, such as a workspace
    of cuBLAS."""
    if device == "cuda":
        run()
        torch.ones((), device=device, requires_grad=True).mul(
            2
        ).backward()  # autograd's thread holds the last gradients until the next
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    run()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    now = most = 0
    for event in sorted(
        (e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"), key=lambda e: e.start_ns()
    ):
        now += event.nbytes()
        most = max(most, now)
    return most


def test_default_follows_the_memory_of_the_device(device):
    """A GPU keeps logits of a sixteenth of its memory, and not more than 4 GiB."""
    limit = min(4 << 30, torch.cuda.mem_get_info()[1] // 16) if device == "cuda" else 256 << 20
    classes = 1 << 15
    fits = limit // (2 * classes)
    peak = lambda tokens: head_peak_bytes(tokens, 64, classes, device=device, trains_weight=False)
    assert peak(fits) >= 2 * classes * fits and peak(fits + 1) < limit


def test_a_compiler_sees_which_logits_are_kept(device):
    """More than a CPU keeps, and less than a GPU: what waits for backward has the shape that a compiler was told."""
    tokens, classes = 512, 140000
    real = [torch.randn(tokens, 4, device=device), torch.randn(classes, 4, device=device)]
    ids = torch.zeros(tokens, dtype=torch.long, device=device)

    def saved(hidden, weight, ids):
        shapes = []
        keep = lambda t: shapes.append(tuple(t.shape)) or t
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            linear_log_prob(hidden.requires_grad_(), weight.requires_grad_(), ids)
        return shapes

    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(t) for t in (*real, ids)]
        told = saved(*fakes)
    assert told == saved(*real, ids)
    assert ((tokens, classes) in told) == (device == "cuda")


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize(
    "keeps, max_bytes, trains_weight",
    [(True, 0, True), (True, 1 << 20, True), (True, 1 << 20, False), (False, 0, True), (False, 1 << 20, True)],
)
@pytest.mark.full(when=lambda p: p["device"] == "cpu" and p["dtype"] != torch.float32)  # which is what it takes there
def test_predicted_peak(device, dtype, keeps, max_bytes, trains_weight):
    """Within 5 % of what is allocated. On a CPU the GEMMs of 16-bit types take scratch memory of the library's, which
    nobody can predict."""
    dtype = torch.float32 if device == "cpu" else dtype
    tokens, width, classes = 700, 256, 6000
    hidden = torch.randn(tokens, width, device=device, dtype=dtype, requires_grad=True)
    weight = torch.randn(classes, width, device=device, dtype=dtype, requires_grad=trains_weight)
    ids = torch.randint(0, classes, (tokens,), device=device)

    def run():
        if keeps:
            loss = linear_log_prob(hidden, weight, ids, max_bytes=max_bytes).mean()
        else:
            loss = (
                liger_fused_linear_cross_entropy(hidden, weight, ids, max_bytes=max_bytes)
                if max_bytes
                else liger_fused_linear_cross_entropy(hidden, weight, ids)
            )
        return torch.autograd.grad(loss, [t for t in (hidden, weight) if t.requires_grad])

    peak = measured_peak(run, device)
    predicted = head_peak_bytes(
        tokens, width, classes, dtype, device, trains_weight=trains_weight, keeps_logits=keeps, max_bytes=max_bytes
    )
    assert abs(peak - predicted) <= 0.05 * predicted, (peak, predicted)


LOSSES = {
    "linear_log_prob": lambda h, w, ids, n: linear_log_prob(h, w, ids, max_bytes=n).float().mean(),
    "fused_linear_cross_entropy": lambda h, w, ids, n: -liger_fused_linear_cross_entropy(h, w, ids, max_bytes=n),
}


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_errors_do_not_grow_with_chunks(device, dtype, loss):
    """Within 1.2 of one chunk's from 1 to 1024 chunks, because sums over chunks are kept in float. That is the dtype of
    float32's own gradients: theirs may err as a float sum of all tokens does. The loss is one number: half a unit in
    its last place."""
    tokens, classes = 1024, 91
    g = torch.Generator().manual_seed(5)
    draw = lambda *shape: torch.randn(*shape, generator=g).to(device, dtype).requires_grad_()
    hidden, weight, ids = (
        draw(tokens, H),
        draw(classes, H),
        torch.randint(0, classes, (tokens,), generator=g).to(device),
    )
    h, w = doubles(hidden, weight)
    exact = exact_log_softmax(h, w, ids)[1].mean()
    expected = torch.autograd.grad(exact, (h, w))
    row = classes * hidden.element_size()
    errors = {}
    for chunks in (1, 4, 32, 1024):
        value = loss(hidden, weight, ids, tokens // chunks * row)
        gradients = torch.autograd.grad(value, (hidden, weight))
        assert abs(value.item() - exact.item()) <= 2.0 ** -(22 if dtype == torch.float32 else 8) * abs(exact.item())
        errors[chunks] = [((got.double() - want).norm() / want.norm()).item() for got, want in zip(gradients, expected)]
        of_sum = 2.0**-24 * tokens**0.5 if dtype == torch.float32 else 0
        assert all(0 < error < max(1.2 * one, of_sum) for error, one in zip(errors[chunks], errors[1])), errors
