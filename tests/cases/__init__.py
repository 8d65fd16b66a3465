"""One case per operator: inputs and a plain-torch reference. tests/test_ops.py and benchmarks/bench.py run over all of
them."""

import importlib
import pathlib
import pkgutil
from dataclasses import dataclass, field
from typing import Callable

import torch

# Those of the research operators are modules of this package, too.
__path__.append(str(pathlib.Path(__file__).parents[1] / "research" / "cases"))


@dataclass
class Case:
    """An operator and what it is compared with.

    op and reference take the same inputs and options; reference computes in the dtype that it is given, as eager torch
    would, so that float64 inputs give the exact result. make(shape, options) gives float inputs on the CPU: floating
    ones that are `differentiable` (by position) get gradients, but for those that the option `frozen` names. keep names
    positions that stay in float when the others are in a lower precision.
    """

    name: str
    op: Callable
    reference: Callable
    make: Callable
    shapes: list  # [...] with the columns last: the least that shows an edge each
    options: list = field(default_factory=lambda: [{}])
    differentiable: tuple = (0,)
    keep: tuple = ()
    schema: Callable = None  # (inputs, options) -> (torch operator, its arguments), for opcheck
    fit: Callable = lambda shape: shape  # any sizes -> a shape that the operator takes, for tests/fuzz.py
    draw: Callable = None  # (random.Random) -> options that tests/fuzz.py adds
    errors: list = field(default_factory=list)  # (call, exception, text)
    # Inputs, gradients and what is summed are of order one: √n units of error in a sum of n, however much cancels. How
    # many of n there are for each number of the first input; 0: they are not.
    terms_of_order_one: int = 0
    linear: bool = False  # has a second derivative
    captured: tuple = None  # (shape, dtype) that a CUDA graph captures, where not every one can be
    emulated: int = 10000  # the largest product of a shape that the emulated kernels are run on
    many_rows: tuple = None  # a shape with more than 65,535 rows
    bench: list = field(default_factory=list)  # (shape, options) to be timed on a GPU
    bench_cpu: list = field(default_factory=list)  # and on a CPU
    rivals: Callable = None  # (inputs, options) -> {name: function}
    bytes: Callable = None  # (shape, options, element size) -> (forward, backward) bytes of the floor
    flops: Callable = None  # (shape, options) -> (forward, backward) FLOP of the GEMMs
    heads: Callable = (
        None  # (inputs) -> [(hidden, weight, whether it is trained)] of the GEMMs, where there are other ones
    )
    dtypes: tuple = (torch.float32, torch.bfloat16, torch.float16)
    scales: tuple = (1, 1, 1, 1, 1e-3, 30.0)  # that tests/fuzz.py multiplies floating inputs by
    file: str = "loss_cases"  # that it is in; all_cases() says which of tests/cases

    def inputs(self, shape, options, dtype=torch.float32, device="cpu", seed=0):
        torch.manual_seed(seed)

        def cast(i, t):
            if t is None or not t.is_floating_point():
                return t if t is None else t.to(device)
            return t.to(device, torch.float32 if i in self.keep and dtype != torch.float64 else dtype)

        tensors = [cast(i, t) for i, t in enumerate(self.make(shape, options))]
        wanted = set(self.differentiable) - set(options.get("frozen", ()))
        return [t.requires_grad_() if t is not None and i in wanted else t for i, t in enumerate(tensors)]


def as_tuple(result):
    return result if isinstance(result, tuple) else (result,)


def rounded(inputs, dtype=torch.float64):
    """The same numbers in another dtype, with gradients of their own."""
    return [
        t if t is None or not t.is_floating_point() else t.detach().to(dtype).requires_grad_(t.requires_grad)
        for t in inputs
    ]


def all_cases():
    found = {}
    for module in pkgutil.iter_modules(__path__):
        for case in importlib.import_module(f"{__name__}.{module.name}").CASES:
            case.file = module.name
            found[case.name] = case
    return found
