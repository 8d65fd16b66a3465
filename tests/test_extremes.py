"""Numbers at the edges of their types, against float64 or what the formula says."""

import math
import subprocess
import sys

import pytest
import torch
from cases import all_cases
from conftest import EMULATED
from liger_kernel._library import ops
from liger_kernel.operators.activation import ACTIVATIONS, SILU
from liger_kernel.ops.linear_distillation import linear_distillation
from liger_kernel.transformers import functional as LF

F = torch.nn.functional
CASES = all_cases()


@pytest.mark.parametrize("value", [0.1, 999.7, 1000.1, 3.3e5])
@pytest.mark.parametrize("cols", [7, 77, 1000, 4099, 9001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_constant_rows(value, cols, dtype, device):
    """The deviation of a constant row is 0, whatever its mean was rounded by."""
    if dtype == torch.float16 and value > 6e4:
        value = 6e4
    x = torch.full((3, 2, cols), value, device=device, dtype=dtype)
    assert not ops.layer_norm(x, None, None, 1e-6).any()
    assert not ops.group_norm(x, None, None, 2, 1e-6).any()


@pytest.mark.parametrize("softcap", [None, 30.0])
def test_prediction_of_strange_rows(softcap, device):
    """As torch.argmax: NaN before all others, the first of equals; never outside the vocabulary."""
    x = torch.randn(5, 5000)
    x[1, 3] = x[1, 4] = math.nan
    x[2] = -math.inf
    x[3, 4999] = math.inf
    x[4, 7:9] = 50.0
    for function, inputs in (
        (LF.liger_cross_entropy, (x,)),
        (LF.liger_fused_linear_cross_entropy, (x, torch.eye(5000))),
    ):
        if function is LF.liger_fused_linear_cross_entropy and EMULATED:
            continue
        rows = x if function is LF.liger_cross_entropy else x[[0, 4]]  # products with 0 make NaN of infinities
        inputs = (rows, *inputs[1:])
        out = function(
            *(t.to(device) for t in inputs),
            torch.zeros(len(rows), dtype=torch.long, device=device),
            softcap=softcap,
            return_predicted_tokens=True,
        )
        assert torch.equal(out.predicted_tokens.cpu(), rows.argmax(-1))


def test_infinite_softcap(device):
    """It means none."""
    x, y = torch.randn(4, 9, device=device, requires_grad=True), torch.arange(4, device=device)
    capped, plain = LF.liger_cross_entropy(x, y, softcap=math.inf), LF.liger_cross_entropy(x, y)
    assert torch.equal(capped, plain)
    assert torch.equal(*(torch.autograd.grad(loss, x)[0] for loss in (capped, plain)))


def head(dtype, device, tokens=9, autocast=False):
    torch.manual_seed(0)
    shapes = (tokens, 64), (50, 64), (50,)
    own = [torch.float32 if autocast and i else dtype for i in range(3)]
    return [torch.randn(shape, device=device).to(d).requires_grad_() for shape, d in zip(shapes, own)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", [0, 9])
@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(reduction="sum"),
        dict(reduction="none"),
        dict(normalizer=0.0),
        dict(normalizer=0.0, reduction="none"),
        dict(valid_count=0),
    ],
    ids=str,
)
def test_nothing_to_learn(options, tokens, dtype, device):
    """Only ignored labels, no tokens or a normalizer of 0: loss 0 and gradients 0."""
    for autocast in (False, True) if dtype == torch.float16 else (False,):
        hidden, weight, bias = head(dtype, device, tokens, autocast)
        known = "normalizer" in options
        target = torch.full((tokens,), 7 if known else -100, device=device)
        given = {**options, **({"normalizer": torch.tensor(options["normalizer"], device=device)} if known else {})}
        with torch.autocast(torch.device(device).type, dtype=torch.float16, enabled=autocast):
            loss = LF.liger_fused_linear_cross_entropy(hidden, weight, target, bias, **given)
        loss.sum().backward()
        assert not loss.any() and all(t.grad.shape == t.shape and not t.grad.any() for t in (hidden, weight, bias))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gates_at_their_limit(dtype, device):
    """torch.clamp says whether a value at its limit has a gradient: before 2.14 it does."""
    values = torch.tensor([-9, -7.0625, -7, -6.9375, 0, 6.9375, 7, 7.0625, 9], dtype=dtype, device=device)
    gate, up = (t.clone().requires_grad_() for t in torch.meshgrid(values, values, indexing="ij"))
    below = gate.clamp(max=7)
    plain = (up.clamp(-7, 7) + 1) * (below * torch.sigmoid(1.702 * below))
    ours = ops.gated(gate, up, SILU, 1.0, 7.0, 1.702, 1.0)
    for got, expected in zip(*(torch.autograd.grad(y.sum(), (gate, up)) for y in (ours, plain))):
        assert torch.equal(got == 0, expected == 0)


def test_normalizer_without_reduction(device):
    """Each loss and each gradient is divided by it."""
    hidden, weight, bias = head(torch.float32, device)
    target, n, g = torch.arange(9, device=device), torch.tensor(7.0, device=device), torch.rand(9, device=device)
    LF.liger_fused_linear_cross_entropy(hidden, weight, target, bias, reduction="none", normalizer=n).backward(g)
    exact = [t.detach().double().requires_grad_() for t in (hidden, weight, bias)]
    (F.cross_entropy(F.linear(*exact), target, reduction="none") / 7).backward(g.double())
    for a, b in zip((hidden, weight, bias), exact):
        torch.testing.assert_close(a.grad.double(), b.grad, rtol=1e-5, atol=1e-6)


def test_half_sums_do_not_overflow(device):
    """A sum over tokens is beyond float16 where their mean is not: of the weight, and of the bias."""
    torch.manual_seed(0)
    hidden, weight = (
        (torch.randn(8192, 16) + 10).to(device).half().requires_grad_(),
        (torch.randn(50, 16) * 0.02).to(device).half().requires_grad_(),
    )
    bias, target = (
        torch.zeros(50, device=device).half().requires_grad_(),
        torch.zeros(8192, dtype=torch.long, device=device),
    )
    exact = [t.detach().double().requires_grad_() for t in (hidden, weight, bias)]
    F.cross_entropy(F.linear(*exact), target).backward()
    for max_bytes in (0, 1000 * 50 * 2):
        for t in (hidden, weight, bias):
            t.grad = None
        LF.liger_fused_linear_cross_entropy(hidden, weight, target, bias, max_bytes=max_bytes).backward()
        for a, b in zip((hidden, weight, bias), exact):
            # Logits and their gradient are rounded to 11 bits, the result once more, or to a unit of the least numbers.
            torch.testing.assert_close(
                a.grad.double(), b.grad, rtol=4 * 2**-11, atol=max(4 * 2**-11 * b.grad.abs().max().item(), 2**-24)
            )


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_half_gradients_do_not_vanish(reduction, weighted, device):
    """What waits for a loss scale of 2¹⁴ is kept to what float16 holds of the product."""
    torch.manual_seed(0)
    x, y = (
        torch.randn(1024, 1000, device=device).half().requires_grad_(),
        torch.randint(0, 1000, (1024,), device=device),
    )
    w = torch.rand(1000, device=device) * 100 if weighted else None
    exact = x.detach().double().requires_grad_()
    losses = (
        LF.liger_cross_entropy(x, y, w, reduction=reduction),
        F.cross_entropy(exact, y, None if w is None else w.double(), reduction=reduction),
    )
    for loss in losses:
        loss.backward(torch.full_like(loss, 2.0**14 if reduction == "mean" else 1.0))
    # Of float16's rounding, and of one unit of its least numbers.
    torch.testing.assert_close(x.grad.double(), exact.grad, rtol=2 * 2**-11, atol=2**-24)


@pytest.mark.parametrize("upstream", [1e-6, 1.0, 2.0**14])
@pytest.mark.parametrize("name", ["log_prob", "entropy", "cross_entropy"])
def test_half_upstream_gradients(name, upstream, device):
    """A gradient for each token, as small as a mean's or multiplied by a loss scale: nothing on the way to hidden and
    weight vanishes or overflows."""
    from liger_kernel.ops.linear_log_prob import linear_log_prob

    torch.manual_seed(0)
    hidden, weight = (
        torch.randn(64, 32, device=device).half().requires_grad_(),
        torch.randn(300, 32, device=device).half().requires_grad_(),
    )
    ids, g = torch.randint(0, 300, (64,), device=device), torch.rand(64, device=device) * upstream
    exact = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    logp = F.linear(*exact).log_softmax(-1)
    if name == "entropy":
        linear_log_prob(hidden, weight, ids, entropy=True)[1].backward(g)
        (-(logp.exp() * logp).sum(-1)).backward(g.double())
    else:
        ours = (
            linear_log_prob(hidden, weight, ids)
            if name == "log_prob"
            else LF.liger_fused_linear_cross_entropy(hidden, weight, ids, reduction="none")
        )
        ours.backward(g)
        F.nll_loss(logp, ids, reduction="none").backward(g.double() * (-1 if name == "log_prob" else 1))
    for a, b in zip((hidden, weight), exact):
        if b.grad.abs().max() < 6e4:
            # Logits rounded to 11 bits, and the result, which float16 may not hold normally.
            torch.testing.assert_close(
                a.grad.double(), b.grad, rtol=16 * 2**-11, atol=max(32 * 2**-11 * b.grad.abs().max().item(), 2**-24)
            )


@pytest.mark.parametrize("max_bytes", [0, 1000])
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_mixed_dtypes_of_the_head(dtype, weight_dtype, max_bytes, device):
    """It computes in the dtype of the hidden states, and the weight's gradient is rounded once, to its own."""
    from liger_kernel.ops.linear_log_prob import linear_log_prob

    torch.manual_seed(0)
    hidden, weight = (
        torch.randn(64, 32, device=device).to(dtype).requires_grad_(),
        torch.randn(300, 32, device=device).to(weight_dtype).requires_grad_(),
    )
    ids, g = torch.randint(0, 300, (64,), device=device), torch.randn(64, device=device)
    linear_log_prob(hidden, weight, ids, max_bytes=max_bytes).backward(g)
    exact = [t.detach().to(dtype).double().requires_grad_() for t in (hidden, weight)]
    F.linear(*exact).log_softmax(-1).gather(-1, ids[:, None])[:, 0].backward(g.double())
    for a, b in zip((hidden, weight), exact):
        assert a.grad.dtype == a.dtype
        inner = 2e-6 if dtype == torch.float32 else 8 * 2**-8  # of logits and their gradient, in the dtype of the GEMMs
        torch.testing.assert_close(
            a.grad.double(), b.grad, rtol=torch.finfo(a.dtype).eps / 2 + inner, atol=inner * b.grad.abs().max().item()
        )


@pytest.mark.parametrize("scale", [1e-4, 0.1])
def test_half_z_loss_does_not_overflow(scale, device):
    """The gradient of the z-loss grows with the logits, and with them what is stored until backward divides it."""
    torch.manual_seed(0)
    hidden, weight = (
        (torch.randn(30, 16) * 20).to(device).half().requires_grad_(),
        (torch.randn(50, 16) * 20).to(device).half().requires_grad_(),
    )
    target, n = torch.randint(0, 50, (30,), device=device), torch.tensor(1000.0, device=device)
    LF.liger_fused_linear_cross_entropy(hidden, weight, target, lse_square_scale=scale, normalizer=n).backward()
    exact = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    z = F.linear(*exact)
    ((F.cross_entropy(z, target, reduction="sum") + scale * torch.logsumexp(z, -1).square().sum()) / 1000).backward()
    for a, b in zip((hidden, weight), exact):
        torch.testing.assert_close(
            a.grad.double(), b.grad, rtol=4 * 2**-11, atol=16 * 2**-11 * b.grad.abs().max().item()
        )  # of logits rounded to 11 bits


@pytest.mark.skipif(EMULATED, reason="of CPU kernels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_subnormal_gradients(dtype):
    """GEMMs over subnormal numbers, of which a confident model's gradients are full, take several times as long."""
    torch.manual_seed(0)
    x = (torch.randn(64, 4096) * 16).to(dtype).requires_grad_()
    for options in ({}, dict(softcap=200.0), dict(label_smoothing=1e-40)):
        (gradient,) = torch.autograd.grad(LF.liger_cross_entropy(x, torch.zeros(64, dtype=torch.long), **options), x)
        assert not ((gradient != 0) & (gradient.abs() < torch.finfo(torch.float32).smallest_normal)).any()


@pytest.mark.skipif(EMULATED, reason="of CPU kernels")
def test_bits_do_not_depend_on_threads():
    """In a process that has not met OpenMP yet: the one thread's loop and the team's are two copies of the code."""
    code = """
import torch
from liger_kernel._library import ops
from liger_kernel.ops.linear_distillation import linear_distillation
def gradient(threads):
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    a, b, g = (torch.randn(1000, 77) for _ in range(3))
    return [t for activation in range(4) for t in ops.gated_backward(g, a, b, activation, 1.0)]
one = gradient(1)
for threads in (2, 3, 4):
    assert all(torch.equal(a, b) for a, b in zip(one, gradient(threads))), threads
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("ignored", [0.0, 0.01, 0.5])
@pytest.mark.parametrize("max_bytes", [0, 1])
def test_first_of_the_largest(max_bytes, ignored, device):
    """linear_log_prob's is_top1, of labels of which half are the largest logit's, among equals the first; False where
    ignored."""
    from liger_kernel.ops.linear_log_prob import linear_log_prob

    torch.manual_seed(0)
    hidden, weight = torch.randn(400, 16), torch.randn(50, 16)
    weight[7] = weight[3]
    top = (hidden @ weight.T).argmax(-1)
    ids = torch.where(torch.rand(400) < 0.5, top, torch.randint(0, 50, (400,)))
    ids[torch.rand(400) < ignored] = -100
    logp, found = linear_log_prob(
        *(t.to(device) for t in (hidden, weight, ids)), outputs=("is_top1",), max_bytes=max_bytes
    )
    assert torch.equal(found.cpu(), top == ids) and found.any() and not found.requires_grad and not logp.requires_grad


def test_logits_of_any_rank(device):
    torch.manual_seed(0)
    x, y = torch.randn(2, 3, 7, device=device), torch.randint(0, 7, (2, 3), device=device)
    y[0, 1] = -100
    for layout in (x, x.transpose(0, 1).contiguous().transpose(0, 1)):
        for reduction in ("mean", "sum", "none"):
            leaf = layout.detach().requires_grad_()
            out = LF.liger_cross_entropy(
                leaf, y, reduction=reduction, return_predicted_tokens=True, return_z_loss=True, lse_square_scale=0.1
            )
            flat = LF.liger_cross_entropy(
                x.flatten(0, 1),
                y.flatten(),
                reduction=reduction,
                return_predicted_tokens=True,
                return_z_loss=True,
                lse_square_scale=0.1,
            )
            shape = y.shape if reduction == "none" else ()
            assert out.loss.shape == out.z_loss.shape == shape and out.predicted_tokens.shape == y.shape
            for name in ("loss", "z_loss", "predicted_tokens"):
                assert torch.equal(getattr(out, name).flatten(), getattr(flat, name).flatten())
            (gradient,) = torch.autograd.grad(out.loss, leaf, torch.ones_like(out.loss))
            exact = x.double().requires_grad_()
            loss = F.cross_entropy(exact.flatten(0, 1), y.flatten(), reduction="none")
            lse = torch.where(y.flatten() != -100, 0.1 * torch.logsumexp(exact.flatten(0, 1), -1).square(), 0)
            ((loss + lse).sum() / (5 if reduction == "mean" else 1)).backward()
            torch.testing.assert_close(gradient.double(), exact.grad, rtol=1e-5, atol=1e-6)
    single = LF.liger_cross_entropy(x[0, 0], torch.tensor(3, device=device))
    torch.testing.assert_close(single, F.cross_entropy(x[0, 0], torch.tensor(3, device=device)))


@pytest.mark.parametrize("kind", ["jsd", "forward_kl", "reverse_kl", "tvd"])
@pytest.mark.parametrize(
    "dtype, temperature, scale, softcap",
    [
        (torch.float32, 0.7, 1.0, None),
        (torch.float32, 0.7, 1.7, None),
        (torch.float32, 0.7, 1.7, 30000.0),
        (torch.bfloat16, 1.0, 1.0, None),
        (torch.bfloat16, 0.7, 1.7, None),
    ],
    ids=str,
)
def test_distillation_of_one_sure_class(kind, dtype, temperature, scale, softcap, device):
    """Logits of thousands, rounded by a temperature: the largest class's probability is 1. Its logarithm is 0, and not
    what the maximum was rounded by, which would be multiplied by the other model's logarithm."""
    if EMULATED:
        pytest.skip("heads need GEMMs")
    torch.manual_seed(0)
    student, teacher = torch.randn(64, 96), torch.randn(64, 96) * 3000
    teacher[range(64), teacher.argmax(-1)] += 500
    if kind == "reverse_kl":
        student, teacher = teacher, student
    student, teacher = student.to(dtype).requires_grad_(), teacher.to(dtype)

    def loss(x, t, divergence):
        x, t = ((softcap * torch.tanh(z * scale / softcap) if softcap else z * scale) / temperature for z in (x, t))
        return divergence(torch.log_softmax(x, -1), torch.log_softmax(t, -1)).sum(-1).mean()

    def divergence(x, t):
        if kind == "tvd":
            return 0.5 * (x.exp() - t.exp()).abs()
        if kind == "reverse_kl":
            return x.exp() * (x - t)
        return t.exp() * (t - x)  # of jsd with beta 0 as well

    eye = torch.eye(96, device=device, dtype=dtype)
    x, t = student.detach().to(device).requires_grad_(), teacher.detach().to(device)
    ours = linear_distillation(
        x,
        eye,
        t,
        eye,
        kind=kind,
        beta=0.0,
        temperature=temperature,
        student_scale=scale,
        student_softcap=softcap,
        teacher_scale=scale,
        teacher_softcap=softcap,
    )[0]
    ours.backward()
    expected = loss(student.double(), teacher.double(), divergence)
    (gradient,) = torch.autograd.grad(expected, student)
    # Sums of 96 floats; what is beside the sure class has no weight that a float could show.
    torch.testing.assert_close(ours.detach().cpu().double(), expected.detach(), rtol=4e-6, atol=1e-6)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(x.grad.cpu(), gradient, rtol=max(2e-5, eps), atol=max(1e-8, 1e-5 * eps))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_cross_entropy_of_one_sure_class(dtype, device):
    """0, whatever the largest logit times log2(e) is rounded by."""
    x = torch.zeros(40, 4096, dtype=dtype)
    x[:, 7] = torch.linspace(90, 60000, 40)
    loss = LF.liger_cross_entropy(x.to(device), torch.full((40,), 7, device=device), reduction="none").float()
    assert loss.abs().max() < 1e-6


@pytest.mark.parametrize("keep", [False, True], ids=["once", "retain_graph"])
def test_small_upstream_gradients_in_float16(keep, device):
    """Forward keeps gradients times a power of two. What takes them back is less than float16 can hold."""
    torch.manual_seed(0)
    x, labels = torch.randn(4, 70).half(), torch.randint(70, (4,))
    ours, plain = x.to(device).requires_grad_(), x.double().requires_grad_()
    for upstream in (torch.tensor(0.37).half(), torch.tensor(3e-4).half()):
        out, expected = LF.liger_cross_entropy(ours, labels.to(device)), F.cross_entropy(plain, labels)
        (found,) = torch.autograd.grad(out, ours, upstream.to(device), retain_graph=keep)
        (wanted,) = torch.autograd.grad(expected, plain, upstream.double())
        torch.testing.assert_close(found.cpu().double(), wanted, rtol=2**-10, atol=2**-25)


@pytest.mark.parametrize("options", [dict(activation="relu_squared"), dict(limit=1.0)], ids=str)
def test_a_gate_without_a_slope_has_no_gradient(options, device):
    """Also in float16 where the upstream gradient times up overflows: as the mask of ReLU and of clamp has it."""
    a, b, dy = (torch.full((3, 40), v, device=device, dtype=torch.float16) for v in (0.0, 884.0, 166.0))
    a += -3.0 if "activation" in options else 5.0
    a.requires_grad_(), b.requires_grad_()
    number = ACTIVATIONS[options["activation"]] if "activation" in options else SILU
    ops.gated(a, b, number, 1.0, *((options["limit"],) if "limit" in options else ())).backward(dy)
    assert torch.equal(a.grad, torch.zeros_like(a)) and b.grad.isfinite().all()
