"""What every operator promises, over the cases in tests/cases."""

import math
import subprocess
import sys

import liger_kernel.ops
import liger_kernel.transformers
import pytest
import torch
from cases import all_cases, as_tuple, rounded
from conftest import EMULATED
from loss_cases import LOSSES
from tiers import ALL

CASES = all_cases() | ({} if EMULATED else LOSSES)  # which have no kernels of their own
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
DIFFERENTIABLE = {name: case for name, case in CASES.items() if case.differentiable}
each_gradient = pytest.mark.parametrize("case", DIFFERENTIABLE.values(), ids=DIFFERENTIABLE.keys())
not_emulated = pytest.mark.skipif(EMULATED, reason="says nothing about the kernels that the emulation shares")


def run(f, inputs, options, upstream=None, **backward):
    """Results and gradients; the upstream gradients are drawn once and given to all that are compared."""
    out = as_tuple(f(*inputs, **options))
    if upstream is None:
        # Powers of two: a loss makes its gradient in forward, and any other factor costs a second rounding
        # (test_scaled_gradient).
        upstream = [torch.randn(o.shape, dtype=torch.float64) for o in out]
        upstream = [g.sign() * g.abs().log2().round().exp2() if o.dim() <= 1 else g for g, o in zip(upstream, out)]
    if any(t is not None and t.requires_grad for t in inputs):
        # A result may have no derivative.
        torch.autograd.backward(
            [o for o in out if o.requires_grad], [g.to(o) for g, o in zip(upstream, out) if o.requires_grad], **backward
        )
    grads = [t.grad for t in inputs if t is not None and t.requires_grad]
    return [*out, *grads], upstream


def rms(t):
    return t.double().square().mean().sqrt().item() if t.numel() else 0.0


def check(ours, eager, exact, dtype, what, gemm=False, terms=0):
    """RMS error at most 1.1 times that of eager torch in the same dtype, the largest at most twice. An error that small
    is where the two happen to round: a quarter of the dtype's unit of rounding is free, a whole one for the largest.
    Of few values both are luck: there a whole unit is free, and the ratios are 3; a unit of the root of the number
    of terms, where those are of order one and their sum may cancel. A library's GEMM sums in an order that changes
    with the chunk: twice as much."""
    assert ours.shape == exact.shape and ours.dtype == eager.dtype, what
    exact = exact.to(ours.device)
    unit = torch.finfo(dtype).eps
    e, t = ours.double() - exact, eager.double() - exact
    ratio, free = (1.1, unit / 4) if exact.numel() >= 1000 else (3, unit)
    ratio, most_ratio = (2 * ratio, 4) if gemm else (ratio, max(2, ratio))
    scale = max(rms(exact), terms**0.5 if exact.numel() < 1000 else 0)
    assert rms(e) <= ratio * rms(t) + free * scale, (
        f"{what}: RMS error {rms(e):.3g}, eager {rms(t):.3g}, values {rms(exact):.3g}"
    )
    if exact.numel():
        most = max(exact.abs().max().item(), scale)
        assert e.abs().max().item() <= most_ratio * t.abs().max().item() + unit * most, (
            f"{what}: error {e.abs().max():.3g}, eager {t.abs().max():.3g}, values {most:.3g}"
        )


def has_gemm(case):
    return case.flops is not None or case.name in LOSSES


def compare(case, inputs, options, dtype, op=None, eager=None):
    exact, upstream = run(case.reference, rounded(inputs), options)
    eager = run(eager or case.reference, [same(t) for t in inputs], options, upstream)[0]
    ours = run(op or case.op, inputs, options, upstream)[0]
    for i, (a, b, c) in enumerate(zip(ours, eager, exact)):
        terms = inputs[0].numel() * case.terms_of_order_one
        if case.name in LOSSES and i < len(upstream):  # sums of logits or log-probabilities, and their differences
            terms = inputs[0][..., 0].numel() * (len(inputs[1]) if dtype == torch.float32 else 1)
        check(
            a,
            b,
            c,
            dtype,
            f"{case.name} {options} {[tuple(t.shape) for t in inputs if t is not None]} result {i}",
            gemm=has_gemm(case) and dtype == torch.float32,
            terms=terms / (c.numel() if c.numel() > 3 else 1),
        )


def same(t):
    return t if t is None or not t.is_floating_point() else t.detach().clone().requires_grad_(t.requires_grad)


def small(case, most=2_000_000):
    most = case.emulated if ALL else min(case.emulated, most)
    return [s for s in case.shapes if math.prod(s) <= most] if EMULATED else case.shapes


def large(case):
    """A shape of some size."""
    return small(case, 500_000)[-1] if EMULATED else case.shapes[-2]


PRECISION = [(c, d) for c in CASES.values() for d in c.dtypes]


@pytest.mark.parametrize("case,dtype", PRECISION, ids=[f"{c.name}-{str(d)[6:]}" for c, d in PRECISION])
def test_exact(case, dtype, device):
    shapes = small(case)
    for shape in shapes:
        every = case.options if dtype == torch.float32 or math.prod(shape) < 5000 else case.options[:2]
        # Not every option at every shape, in the quick run and of losses: each option, and each shape.
        whole = ALL and case.name not in LOSSES or shape == shapes[min(1, len(shapes) - 1)]
        for options in every if whole else every[:1]:
            compare(case, case.inputs(shape, options, dtype, device), options, dtype)


@not_emulated
@pytest.mark.parametrize("case", LOSSES.values(), ids=LOSSES.keys())
@pytest.mark.parametrize("mixed", [False, True], ids=["autocast", "mixed"])
def test_gemms_of_16_bits(case, mixed, device):
    """Of float32 inputs under autocast, and of bfloat16 hidden states and a float32 head; gradients have their inputs'
    dtypes."""
    options = case.options[0] | dict(with_bias=True)
    inputs = case.inputs(case.shapes[1], options, torch.float32, device)
    hidden = [id(states) for states, *_ in case.heads(inputs) if mixed]
    inputs = [t.detach().bfloat16().requires_grad_(t.requires_grad) if id(t) in hidden else t for t in inputs]
    autocast = torch.autocast(torch.device(device).type, torch.bfloat16)
    compare(case, inputs, options, torch.bfloat16, case.op if mixed else autocast(case.op), autocast(case.reference))


@each_case
def test_layouts(case, device):
    """Misaligned, transposed and expanded inputs give what contiguous ones do, and no input changes."""
    options, shape = case.options[0], large(case)
    inputs = case.inputs(shape, options, case.dtypes[0], device)
    expected, upstream = run(case.op, inputs, options)
    exact = run(case.reference, rounded(inputs), options, upstream)[0]
    eager = run(case.reference, [same(t) for t in inputs], options, upstream)[0]

    def misaligned(t):
        return torch.empty(t.numel() + 1, dtype=t.dtype, device=device)[1:].view(t.shape).copy_(t)

    def transposed(t):
        return t.transpose(0, -1).contiguous().transpose(0, -1) if t.dim() > 1 else t.repeat_interleave(2)[::2]

    for change in (misaligned, transposed):
        changed = [t if t is None else change(t.detach()) for t in inputs]
        before = [t if t is None else t.clone() for t in changed]
        leaves = [
            t if t is None or not t.is_floating_point() else t.requires_grad_(i in case.differentiable)
            for i, t in enumerate(changed)
        ]
        got, _ = run(case.op, leaves, options, upstream)
        for i, (a, b) in enumerate(zip(got, expected)):
            terms = inputs[0].numel() // max(1, b.numel()) if i >= len(upstream) else 1
            # The order of a sum over rows depends on the alignment, and 16 bits round floats that differ in their last
            # place to neighbours: each is as near as `check` asks.
            if terms > 1 or b.dtype != torch.float32:
                check(
                    a,
                    eager[i],
                    exact[i],
                    case.dtypes[0],
                    f"{change.__name__} {i}",
                    gemm=has_gemm(case),
                    terms=terms if case.terms_of_order_one else 0,
                )
            else:  # a library's GEMM depends on the alignment too
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 if has_gemm(case) else 1e-6)
        for a, b in zip(changed, before):
            assert a is None or torch.equal(a, b)


@each_gradient
def test_expanded_gradient(case, device):
    options = case.options[0]
    inputs = case.inputs(case.shapes[1], options, case.dtypes[0], device)
    out = as_tuple(case.op(*inputs, **options))
    torch.stack([o.float().sum() for o in out]).sum().backward()
    exact = rounded(inputs)
    torch.stack([o.sum() for o in as_tuple(case.reference(*exact, **options))]).sum().backward()
    for a, b in zip(inputs, exact):
        if a is not None and a.requires_grad:
            torch.testing.assert_close(
                a.grad.double(),
                b.grad,
                rtol=2e-2 if case.dtypes[0] != torch.float32 else 1e-4,
                atol=1e-2 if case.dtypes[0] != torch.float32 else 1e-5,
            )


@each_case
def test_empty(case, device):
    for options in case.options[:3]:
        inputs = case.inputs((0, *case.shapes[1][1:]), options, case.dtypes[0], device)
        got, _ = run(case.op, inputs, options)
        for t, grad in zip(
            [t for t in inputs if t is not None and t.requires_grad],
            got[-sum(t is not None and t.requires_grad for t in inputs) :],
        ):
            assert grad.shape == t.shape and not grad.any()


MANY_ROWS = {name: case for name, case in CASES.items() if case.many_rows}


@not_emulated
@pytest.mark.parametrize("case", MANY_ROWS.values(), ids=MANY_ROWS.keys())
def test_many_rows(case, device):
    """More rows than a grid's y and z dimensions hold, against slices of the reference."""
    options = dict(case.options[0], **({"reduction": "none"} if "cross_entropy" in case.name else {}))
    inputs = [t.detach() if t is not None else t for t in case.inputs(case.many_rows, options, torch.float32, device)]
    for a, b in zip(as_tuple(case.op(*inputs, **options)), as_tuple(case.reference(*inputs, **options))):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


MATRICES = {name: case for name, case in CASES.items() if all(len(shape) == 2 for shape in case.shapes)}


@pytest.mark.parametrize("case", MATRICES.values(), ids=MATRICES.keys())
def test_widths(case, device):
    """Every width up to past a vector and a warp: where rows begin, end and meet."""
    for width in range(1 if case.shapes[0][1] == 1 or case.shapes[0][0] == 1 else 2, 34):
        inputs = case.inputs((5, width), case.options[0], case.dtypes[0], device)
        exact, upstream = run(case.reference, rounded(inputs), case.options[0])
        bound = max(1e-5, 2 * torch.finfo(case.dtypes[0]).eps)
        for a, b in zip(run(case.op, inputs, case.options[0], upstream)[0], exact):
            torch.testing.assert_close(a.double(), b, rtol=bound, atol=bound)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="graphs are CUDA's")
@each_case
def test_graph(case):
    """What is captured and replayed, on other numbers too, gives what a call gives."""
    options = case.options[0]
    shape, dtype = case.captured or (case.shapes[1], case.dtypes[0])
    inputs, others = (case.inputs(shape, options, dtype, "cuda", seed) for seed in (0, 1))
    leaves = [t for t in inputs if t is not None and t.requires_grad]

    def step():
        out = as_tuple(case.op(*inputs, **options))
        made = [o for o in out if o.requires_grad]  # a metric has no gradient
        return [*out, *(torch.autograd.grad(made, leaves, [torch.ones_like(o) for o in made]) if leaves else ())]

    step()
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        replayed = step()
    for numbers in (None, others):
        if numbers is not None:
            with torch.no_grad():
                for t, other in zip(inputs, numbers):
                    if t is not None:
                        t.copy_(other)
        graph.replay()
        for a, b in zip(replayed, step()):
            assert torch.equal(a, b)


# What every run compiles: one of each kind of arguments. What a compiler asks of each operator, test_opcheck checks.
COMPILED = ("rms_norm", "gated", "rope", "cross_entropy", "linear_log_prob")
COMPILED_BY = {"aot_eager": (*COMPILED, "linear_dpo"), "inductor": COMPILED}


@not_emulated
@each_case
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.full(when=lambda p: p["case"].name not in COMPILED_BY[p["backend"]])
def test_compile(case, device, backend):
    options = case.options[0]
    shapes = [case.shapes[1], (case.shapes[1][0] + 4, *case.shapes[1][1:])]
    torch._dynamo.reset()
    function = lambda *inputs: case.op(*inputs, **options)
    # A loss on a head breaks the graph: its Function makes gradients in forward.
    compiled = torch.compile(function, fullgraph=case.name not in LOSSES, backend=backend, dynamic=True)
    for shape in shapes:
        inputs = case.inputs(shape, options, case.dtypes[0], device)
        expected, upstream = run(case.op, [same(t) for t in inputs], options)
        got, _ = run(compiled, inputs, {}, upstream)
        for a, b in zip(got, expected):
            assert torch.equal(a, b) if backend == "aot_eager" else torch.allclose(a, b, rtol=1e-5, atol=1e-6)


@each_gradient
def test_backward_twice(case, device):
    for options in case.options[:3]:
        inputs = case.inputs(case.shapes[1], options, case.dtypes[0], device)
        wanted = [t for t in inputs if t is not None and t.requires_grad]
        out = [o for o in as_tuple(case.op(*inputs, **options)) if o.requires_grad]
        upstream = [torch.full_like(o, 0.75) for o in out]
        twice = [torch.autograd.grad(out, wanted, upstream, retain_graph=keep) for keep in (True, True, False)]
        for a, b, c in zip(*twice):
            assert torch.equal(a, b)
            torch.testing.assert_close(b, c, rtol=1e-2 if a.dtype != torch.float32 else 1e-6, atol=1e-7)


@each_gradient
def test_frozen_inputs(case, device):
    """Each differentiable input alone gets the gradient that it gets beside the others, and nothing else does."""
    options = case.options[0]
    inputs = case.inputs(case.shapes[1], options, case.dtypes[0], device)
    present = [i for i in case.differentiable if inputs[i] is not None]
    expected, upstream = run(case.op, inputs, options)
    grads = dict(zip(present, expected[-len(present) :]))
    for i in present:
        alone = [
            t.detach().requires_grad_(j == i) if t is not None and j in present else t for j, t in enumerate(inputs)
        ]
        run(case.op, alone, options, upstream)
        torch.testing.assert_close(alone[i].grad, grads[i], rtol=0, atol=0)
        assert all(alone[j].grad is None for j in present if j != i)
    with torch.no_grad():
        assert not any(o.requires_grad for o in as_tuple(case.op(*inputs, **options)))


@each_case
def test_deterministic(case, device):
    options, shape = case.options[0], large(case)
    threads = torch.get_num_threads()
    results, upstream = [], None
    for n in (1, 2, 2) if ALL or not EMULATED else (1, 2):  # emulated blocks are slow
        torch.set_num_threads(n)
        got, upstream = run(case.op, case.inputs(shape, options, case.dtypes[0], device), options, upstream)
        results.append(got)
    torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other))


@each_case
def test_errors(case, device):
    for call, exception, text in case.errors:
        with pytest.raises(exception, match=text):
            call(device)


@not_emulated
@pytest.mark.parametrize(
    "function,inputs,what",
    [
        (
            "liger_kernel.transformers.functional.liger_cross_entropy",
            "torch.randn(4, 5), torch.tensor([0, 1, 5, 2])",
            "label 5",
        ),
        ("liger_kernel.ops.LigerEmbeddingFunction.apply", "torch.randn(5, 4), torch.tensor([0, 1, 5, 2])", "id 5"),
        ("liger_kernel.ops.LigerEmbeddingFunction.apply", "torch.randn(5, 4), torch.tensor([0, 1, -5, 2])", "id -5"),
        (
            "liger_kernel.ops.fused_moe.fused_experts",
            "torch.randn(3, 8), torch.randn(2, 16, 8), torch.randn(2, 8, 8), torch.tensor([[0], [1], [1]]), "
            "torch.ones(3, 1), most_rows=2",
            "more pairs have an expert than most_rows",
        ),
    ],
)
def test_refused_on_the_device(function, inputs, what, device):
    """An exception on the CPU; on CUDA a device assertion, which ends the process's use of the device: a process of its
    own."""
    if device == "cpu":
        with pytest.raises((IndexError, RuntimeError), match=what):
            eval(f"{function}({inputs})", dict(torch=torch, liger_kernel=liger_kernel))
        return
    code = f"""
import torch, liger_kernel.ops.fused_moe, liger_kernel.transformers
torch.set_default_device("{device}")
print({function}({inputs}).sum().item())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode != 0 and what in done.stdout + done.stderr and "device-side assert" in done.stderr


@pytest.mark.parametrize("name", ["cross_entropy", "softmax", "sparsemax"])
def test_rows_over_several_blocks(name, device):
    """Rows of odd and even length that several blocks share on a GPU: kept on chip, and of floats some that are too
    long for that."""
    case = CASES[name]
    for shape, dtype in (((4, 140001), torch.float32), ((4, 140001), torch.bfloat16), ((3, 40000), torch.bfloat16)):
        for options in (case.options[0], case.options[-1]) if name == "cross_entropy" else case.options[:1]:
            compare(case, case.inputs(shape, options, dtype, device), options, dtype)
