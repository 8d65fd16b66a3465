"""Whether the rows of a product keep their bits with another number of rows, and what it costs that they do.

    python benchmarks/gemm_bits.py --out out/gemm-bits.json

Each product x wᵀ is made of --rows rows of x, and of the first rows alone, by each way:

    default     as torch makes it
    no split    by cuBLASLt without split-K (GPUs)
    blocks n    in products of n rows each, the last one padded

For each, how many of the first rows differ, how many of 2048 rows that have moved to another place, and the time.
docs/decisions/0014-batch-invariance.md has what follows from it.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from liger_kernel.measure.machine import machine
from torch.backends import cuda

#: rows of the weight, its columns
SHAPES = {
    "8b q, o": (4096, 4096), "8b k, v": (1024, 4096), "8b gate, up": (12288, 4096), "8b down": (4096, 12288),
    "LoRA A": (16, 4096), "LoRA B": (4096, 16), "30b-a3b q": (4096, 2048), "30b-a3b k, v": (512, 2048),
    "30b-a3b o": (2048, 4096), "router": (128, 2048), "expert gate, up": (768, 2048), "expert down": (2048, 768),
    "head, 8192 classes": (8192, 2048), "0.6b q": (2048, 1024),
}  # fmt: skip
PARTS = (1, 7, 128, 2048, 4095)
TIMED = (128, 2048)


def whole(x, w):
    return x @ w.t()


def in_blocks(rows):
    def product(x, w):
        y = x.new_empty(len(x), len(w))
        for first in range(0, len(x), rows):
            part = x[first : first + rows]
            if len(part) == rows:
                torch.mm(part, w.t(), out=y[first : first + rows])
            else:
                padded = x.new_zeros(rows, x.shape[1])
                padded[: len(part)] = part
                y[first:] = (padded @ w.t())[: len(part)]
        return y

    return product


class WithoutSplit:
    """cuBLASLt, whose sums are neither split nor rounded on the way."""

    def __enter__(self):
        self.before = cuda.matmul.allow_bf16_reduced_precision_reduction, cuda.preferred_blas_library()
        cuda.matmul.allow_bf16_reduced_precision_reduction = False, False
        cuda.preferred_blas_library("cublaslt")

    def __exit__(self, *_):
        cuda.matmul.allow_bf16_reduced_precision_reduction, library = self.before
        cuda.preferred_blas_library(library)


def seconds(call, device, repeats):
    times = []
    for _ in range(repeats + 2):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return min(times)


def row(name, way, product, x, w, repeats):
    full = product(x, w)
    parts = [n for n in PARTS if n < len(x)]
    differ = {n: int((product(x[:n], w) != full[:n]).any(1).sum()) for n in parts}
    place = slice(len(x) // 16, len(x) // 16 + min(2048, len(x) // 2))
    moved = int((product(x[place].clone(), w) != full[place]).any(1).sum())
    timed = [*(n for n in TIMED if n < len(x)), len(x)]
    times = {n: seconds(lambda n=n: product(x[:n], w), x.device.type, repeats) for n in timed}
    found = {
        "product": name, "shape": list(w.shape), "dtype": str(x.dtype).removeprefix("torch."), "way": way,
        "rows": len(x), "differ": differ, "moved": moved, "seconds": times,
    }  # fmt: skip
    print(name, found["dtype"], way, differ, moved, {n: f"{t * 1e6:.0f} us" for n, t in times.items()}, flush=True)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--products", default=",".join(SHAPES).replace(", ", "/"), help="default: all")
    parser.add_argument("--rows", type=int, default=16384, help="default: %(default)s")
    parser.add_argument("--blocks", default="512,1024,2048", help="default: %(default)s")
    parser.add_argument("--dtypes", default="bfloat16,float32", help="default: %(default)s")
    parser.add_argument("--repeats", type=int, default=20, help="of a measurement (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("out/gemm-bits.json"), help="default: %(default)s")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    names = [name.replace("/", ", ") for name in args.products.split(",")]
    if unknown := set(names) - SHAPES.keys():
        parser.error(f"there is no {', '.join(sorted(unknown))}")
    blocks = [int(n) for n in args.blocks.split(",")]
    report = {"machine": machine(device, sources=Path(__file__).parent), "rows": []}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    for dtype in args.dtypes.split(","):
        for name in names:
            torch.manual_seed(0)
            classes, depth = SHAPES[name]
            x = torch.randn(args.rows, depth, device=device).to(getattr(torch, dtype))
            w = (torch.randn(classes, depth, device=device) / depth**0.5).to(x.dtype)
            report["rows"].append(row(name, "default", whole, x, w, args.repeats))
            if device == "cuda":
                with WithoutSplit():
                    report["rows"].append(row(name, "no split", whole, x, w, args.repeats))
            report["rows"] += [row(name, f"blocks {n}", in_blocks(n), x, w, args.repeats) for n in blocks]
            args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
