"""What full fine-tuning in eight bits would give with the operators that there are: a sketch, for
docs/decisions/0015-no-full-training-in-eight-bits.md.

    python benchmarks/eight_bit_full.py --out out/eight-bit-full.json

Weights change in every step, so that each step rounds them again. Of the three products of a linear layer, the result
and the gradient of the input are made in eight bits; that of the weight, which sums over tokens, in bfloat16
("int8", "fp8"), or of transposed copies whose rows are rounded ("int8 all", "fp8 all").

    times      ms of the seven layers of a block of Llama 8B, 8,192 tokens
    gradients  relative error of all gradients of the linear layers together, against float64, of the model of
               eight_bit.py
    trained    the mean loss of the last 50 of 300 steps on another text
"""

import argparse
import copy
import functools
import json
import statistics
import time
from pathlib import Path

import torch
from eight_bit import subject, trained
from liger_kernel import patch
from liger_kernel._library import ops
from liger_kernel.measure.machine import machine
from liger_kernel.operators.eight_bit import quantise_rows
from torch import nn

WAYS = ("bfloat16", "int8", "int8 all", "fp8", "fp8 all")
#: Out and in of a block of Llama 8B.
LAYERS = ((4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (14336, 4096), (14336, 4096), (4096, 14336))


@functools.cache
def rounding(device):
    """quantise_rows in one pass over the matrix."""
    return torch.compile(quantise_rows, dynamic=True) if device == "cuda" else quantise_rows


def product(x, rows, format):
    """x rowsᵀ in eight bits."""
    bytes, scale = rounding(x.device.type)(rows, format)
    return ops.linear(x, bytes, None, None, None, None, scale, 1.0)


class Linear(torch.autograd.Function):
    """x weightᵀ, made in one of WAYS."""

    @staticmethod
    def forward(ctx, x, weight, way):
        ctx.way = way
        ctx.save_for_backward(x, weight)
        if way == "bfloat16":
            return nn.functional.linear(x, weight)
        with torch.enable_grad():
            ctx.x = x.detach().requires_grad_()
            ctx.y = product(ctx.x, weight.detach(), way.split()[0])
        return ctx.y.detach()

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        format, _, every = ctx.way.partition(" ")
        dx = dy @ weight if format == "bfloat16" else torch.autograd.grad(ctx.y, ctx.x, dy)[0]
        dy, x = dy.flatten(0, -2), x.flatten(0, -2)
        dweight = product(dy.t().contiguous(), x.t().contiguous(), format) if every else dy.t() @ x
        return dx, dweight, None


class Layer(nn.Linear):
    way = "bfloat16"

    def forward(self, x):
        weight = self.weight
        if torch.is_autocast_enabled(x.device.type):
            x, weight = x.bfloat16(), weight.bfloat16()
        return Linear.apply(x, weight, self.way)


def timed(call, device):
    for _ in range(3):
        call()
    times = []
    for _ in range(10):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def times_of(way, device, tokens):
    """ms of forward and backward of a block's layers."""
    total = 0.0
    for rows, cols in LAYERS:
        x = torch.randn(tokens, cols, device=device, dtype=torch.bfloat16).requires_grad_()
        weight = (torch.randn(rows, cols, device=device, dtype=torch.bfloat16) / cols**0.5).requires_grad_()
        dy = torch.randn(tokens, rows, device=device, dtype=torch.bfloat16)
        total += timed(lambda: torch.autograd.grad(Linear.apply(x, weight, way), (x, weight), dy), device)
    return total


def of_way(plain, way):
    model = copy.deepcopy(plain)
    for module in model.model.modules():
        if type(module) is nn.Linear:
            module.__class__, module.way = Layer, way
    return model


def gradients(model, ids):
    model(input_ids=ids, labels=ids).loss.backward()
    grads = {n: p.grad.double() for n, p in model.model.named_parameters() if p.dim() == 2 and "embed" not in n}
    model.zero_grad()
    return grads


def row(way, plain, exact, ids, other, device, args):
    found = {"way": way, "times": times_of(way, device, args.tokens)}
    grads = gradients(of_way(plain, way), ids)
    far = sum((grads[n] - g).square().sum() for n, g in exact.items()) ** 0.5
    found["gradients"] = (far / sum(g.square().sum() for g in exact.values()) ** 0.5).item()
    model = of_way(plain, way).float()
    patch(model, swiglu=False)  # whose products are its own
    found["trained"] = statistics.mean(trained(model, model.parameters(), 1e-4, other, device, args.steps)[-50:])
    print(found, flush=True)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-steps", type=int, default=1000, help="of training the base (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=300, help="of training on the other text (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=8192, help="of the times (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("out/eight-bit-full.json"), help="default: %(default)s")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    plain, ids, other = subject(device, args.base_steps)
    exact = gradients(copy.deepcopy(plain).double(), ids)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    report = {"machine": machine(device, sources=Path(__file__).parent), "rows": []}
    for way in WAYS:
        report["rows"].append(row(way, plain, exact, ids, other, device, args))
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
