"""torch's own mechanisms over every operator: opcheck, export, compiled autograd, and derivatives that are refused."""

import pytest
import torch
from cases import all_cases, as_tuple
from conftest import EMULATED
from liger_kernel._library import ops
from packaging.version import Version
from test_ops import COMPILED
from tiers import ALL

pytestmark = pytest.mark.skipif(EMULATED, reason="says nothing about the kernels that the emulation shares")

CASES = all_cases()
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
DIFFERENTIABLE = {name: case for name, case in CASES.items() if case.differentiable}
each_gradient = pytest.mark.parametrize("case", DIFFERENTIABLE.values(), ids=DIFFERENTIABLE.keys())


def losses(out):
    return torch.stack([o.float().sum() for o in out if o.is_floating_point()]).sum()


@each_case
def test_opcheck(case, device):
    for options in case.options if ALL else case.options[:1]:
        op, args = case.schema(case.inputs(case.shapes[1], options, case.dtypes[0], device), options)
        torch.library.opcheck(op, args)


class All(torch.nn.Module):
    """Every operator, with the first of its case's options and, where all tests run, the last."""

    def __init__(self, device):
        super().__init__()
        self.calls, self.tensors = [], []
        for case in CASES.values():
            for options in (case.options[0], case.options[-1])[: 2 if ALL else 1]:
                inputs = [
                    t if t is None else t.detach() for t in case.inputs(case.shapes[1], options, case.dtypes[0], device)
                ]
                op, args = case.schema(inputs, options)
                self.calls.append((op, args))
                self.tensors += [a for a in args if isinstance(a, torch.Tensor)]

    def forward(self, *tensors):
        given = iter(tensors)
        return [
            result
            for op, args in self.calls
            for result in as_tuple(op(*(next(given) if isinstance(a, torch.Tensor) else a for a in args)))
        ]


@pytest.fixture(scope="module", params=["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"])
def exported(request):
    every = All(request.param)
    return every, torch.export.export(every, tuple(every.tensors))


def check(exported, run):
    every, _ = exported
    for a, b in zip(every(*every.tensors), run(*every.tensors), strict=True):
        assert torch.equal(a, b)


def test_export(exported):
    check(exported, exported[1].module())


# Every run compiles a model with this: tests/huggingface/test_objects.py.
@pytest.mark.full()
@pytest.mark.skipif(
    Version(torch.__version__) < Version("2.12"),
    reason="torch 2.11 was seen to crash when it loads the package of any module",
)
def test_aot_inductor(exported):
    check(exported, torch._inductor.aoti_load_package(torch._inductor.aoti_compile_and_package(exported[1])))


# The nodes of all operators are made of one template (liger/core/torch/operator.h).
@each_gradient
@pytest.mark.full(when=lambda p: p["case"].name not in COMPILED)
def test_compiled_autograd(case, device):
    """The same gradients, from a graph of the backward pass."""
    for options in case.options[: 3 if ALL else 1]:
        inputs = case.inputs(case.shapes[1], options, case.dtypes[0], device)
        wanted = [t for t in inputs if t is not None and t.requires_grad]
        expected = torch.autograd.grad(losses(as_tuple(case.op(*inputs, **options))), wanted)
        torch._dynamo.reset()
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
            losses(as_tuple(case.op(*inputs, **options))).backward()
        for t, gradient in zip(wanted, expected):
            torch.testing.assert_close(t.grad, gradient, rtol=0, atol=0)


@each_gradient
def test_second_derivative(case, device):
    """An error, never a zero: of a sum, whose upstream gradient is a constant, and of a square; also with respect to
    the upstream gradient."""
    for options in case.options[:3]:
        for function in (losses, lambda out: torch.stack([o.float().pow(2).sum() for o in out]).sum()):
            inputs = case.inputs(case.shapes[1], options, case.dtypes[0], device)
            gradients = torch.autograd.grad(
                function(as_tuple(case.op(*inputs, **options))),
                [t for t in inputs if t is not None and t.requires_grad],
                create_graph=True,
            )
            for gradient in gradients:
                if case.linear:
                    assert gradient.requires_grad == (function is not losses)
                    continue
                with pytest.raises(NotImplementedError, match="has no second derivative"):
                    torch.autograd.grad(gradient.float().sum(), inputs[0], retain_graph=True)
    if case.linear:
        return
    inputs = case.inputs(case.shapes[1], case.options[0], case.dtypes[0], device)
    out = as_tuple(case.op(*inputs, **case.options[0]))[0]
    upstream = torch.ones_like(out).requires_grad_()
    (gradient,) = torch.autograd.grad(out, inputs[:1], upstream, create_graph=True)
    with pytest.raises(NotImplementedError, match="has no second derivative"):
        torch.autograd.grad(gradient.float().sum(), upstream)


@each_gradient
def test_forward_mode(case, device):
    """A tangent is refused, not dropped."""
    options = case.options[0]
    inputs = [t if t is None else t.detach() for t in case.inputs(case.shapes[1], options, case.dtypes[0], device)]
    for i in case.differentiable:
        if inputs[i] is None:
            continue
        with torch.autograd.forward_ad.dual_level():
            duals = [
                torch.autograd.forward_ad.make_dual(t, torch.ones_like(t)) if j == i else t
                for j, t in enumerate(inputs)
            ]
            with pytest.raises(NotImplementedError, match="forward-mode derivative"):
                case.op(*duals, **options)
        with pytest.raises(NotImplementedError, match="forward-mode derivative"):
            torch.func.jvp(
                lambda t: case.op(*inputs[:i], t, *inputs[i + 1 :], **options),
                (inputs[i],),
                (torch.ones_like(inputs[i]),),
            )


class Wrapped(torch.Tensor):
    """A wrapper subclass: its own storage is empty, and what is done with it is done with `inner`."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        unwrap = lambda t: t.inner if isinstance(t, cls) else t  # noqa: E731
        return func(*torch.utils._pytree.tree_map(unwrap, args), **torch.utils._pytree.tree_map(unwrap, kwargs or {}))


@each_gradient
def test_upstream_gradient(case, device):
    """A lazily negated one, a wrapper subclass, float64, and a batch of them."""
    options = case.options[0]
    inputs = case.inputs(case.shapes[1], options, case.dtypes[0], device)
    wanted = [t for t in inputs if t is not None and t.requires_grad]

    def gradients(upstream, **more):
        return torch.autograd.grad(
            as_tuple(case.op(*inputs, **options))[0], wanted, upstream, allow_unused=True, **more
        )

    shape, dtype = as_tuple(case.op(*inputs, **options))[0].shape, as_tuple(case.op(*inputs, **options))[0].dtype
    g = torch.randn(shape, dtype=dtype, device=device)
    expected = gradients(g)
    negated = torch.imag(torch.view_as_complex(torch.stack((torch.zeros_like(g), -g.float()), -1)).conj())
    assert negated.is_neg()
    batch = torch.stack((g, 2 * g))
    for found in (
        gradients(negated.to(dtype) if dtype != torch.float32 else negated),
        gradients(Wrapped(g)),
        gradients(g.double()),
        [t if t is None else t[0] for t in gradients(batch, is_grads_batched=True)],
    ):
        for a, b in zip(found, expected, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                torch.testing.assert_close(
                    a, b, rtol=4 * torch.finfo(a.dtype).eps, atol=torch.finfo(a.dtype).eps * b.abs().max().item()
                )


def test_checkpoint_stops_before_the_last_gemm():
    """Of a layer that ends in gated_mlp, gradient checkpointing recomputes what its node keeps, not its result."""
    torch.manual_seed(0)
    tokens, hidden, width, rank = 6, 8, 12, 2
    layers = [
        (torch.randn(o, i), None, torch.randn(rank, i, requires_grad=True), torch.randn(o, rank, requires_grad=True))
        for o, i in ((width, hidden), (width, hidden), (hidden, width))
    ]
    x = torch.randn(tokens, hidden, requires_grad=True)

    def layer(x):
        return x + ops.gated_mlp(x, *(t for each in layers for t in each), None, None, None, 1.0, 1.0, 1.0)

    def run(function):
        with torch.profiler.profile() as profiler:
            y = function(x)
            gradients = torch.autograd.grad(y.sum(), [x, *(t for each in layers for t in each[2:])])
        return y, gradients, sum(event.name == "aten::addmm" for event in profiler.events())

    y, gradients, gemms = run(layer)
    again, found, more = run(lambda x: torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False))
    assert more - gemms == 4  # gate and up, each with its low-rank term
    assert torch.equal(again, y) and all(torch.equal(a, b) for a, b in zip(found, gradients))


def test_the_first_part_of_no_tokens():
    """Of nothing, too, the first part of an operator gives what linear_finish reads."""
    x, wide, down = torch.randn(0, 8), torch.randn(12, 8), torch.randn(8, 12)
    y, _, low, *_, cast, product = ops.gated_mlp_start(
        x, *(wide, None, None, None) * 2, down, *(None,) * 6, 1.0, 1.0, 1.0
    )
    ops.linear_finish(y, product, down, None, None, None, low, cast, None, 1.0)
    for start, width in ((ops.gated_linear_start, 24), (ops.activated_linear_start, 12)):
        y, low, cast, product = start(torch.randn(0, width), down, *(None,) * 4, 1.0)
        ops.linear_finish(y, product, down, None, None, None, low, cast, None, 1.0)
        assert y.shape == x.shape


@pytest.mark.parametrize("op", ["linear", "qkv", "activated_linear", "gated_linear", "gated_mlp"])
def test_lora_of_a_transposed_input(op, device):
    """The gradient of an x whose rows no single stride describes."""
    torch.manual_seed(0)
    x = torch.randn(3, 4, 8, device=device)
    layer = [torch.randn(8, 8), None, torch.randn(2, 8), torch.randn(8, 2)]
    layer = [t if t is None else t.to(device) for t in layer]
    arguments = {"linear": (*layer, None, None, 2.0)}
    arguments["activated_linear"] = (torch.randn(8, 8, device=device), None, None, None, None, 1.0)
    arguments["gated_linear"] = (torch.randn(8, 4, device=device), None, None, None, None, 1.0)
    arguments["qkv"] = arguments["gated_mlp"] = (*layer, *layer, *layer, None, None, None, 2.0, 2.0, 2.0)

    def gradient(x):
        out = as_tuple(getattr(ops, op)(x.requires_grad_(), *arguments[op]))
        assert len(out) == (3 if op == "qkv" else 1)
        return torch.autograd.grad(sum(y.square().sum() for y in out), x)[0]

    expected = gradient(x.transpose(0, 1).contiguous())
    torch.testing.assert_close(gradient(x.transpose(0, 1)), expected)
