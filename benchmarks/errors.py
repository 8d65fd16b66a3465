"""Writes docs/errors-DEVICE.md: how far results and gradients are from float64, ours and eager torch's, over the cases of tests/cases.

    python benchmarks/errors.py              on the GPU if there is one
    python benchmarks/errors.py --device cpu
"""

import argparse
import os
import sys
from datetime import date

import torch
from tabulate import tabulate

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(ROOT, "tests"))

from cases import all_cases, rounded  # noqa: E402
from test_ops import run, same  # noqa: E402

HEADER = ("operator", "dtype", "result", "values", "ours", "eager", "ratio", "ratio of the largest")


def rows(device):
    """For each case, dtype and result: RMS errors in units of the dtype's rounding of the values' RMS, ours over eager's, and that of the largest."""
    for case in all_cases().values():
        if not case.differentiable:
            continue  # integers
        shape = max((s for s in case.shapes if torch.Size(s).numel() <= 150000), key=lambda s: torch.Size(s).numel())
        for dtype in case.dtypes:
            inputs, options = case.inputs(shape, case.options[0], dtype, device), case.options[0]
            exact, upstream = run(case.reference, rounded(inputs), options)
            eager = run(case.reference, [same(t) for t in inputs], options, upstream)[0]
            ours = run(case.op, inputs, options, upstream)[0]
            gradients = sum(t is not None and t.requires_grad for t in inputs)
            for i, (a, b, c) in enumerate(zip(ours, eager, exact)):
                unit = torch.finfo(dtype).eps * c.square().mean().sqrt().item()
                e, t = ((x.double() - c).abs() for x in (a, b))
                rms = [x.square().mean().sqrt().item() for x in (e, t)]
                n = len(ours) - gradients
                name = f"result {i}" if i < n and n > 1 else "result" if i < n else f"gradient {i - n}"
                yield case.name, str(dtype)[6:], name, c.numel(), *(x / unit if unit else 0 for x in rms), *(x / y if y else float(x > 0) for x, y in (rms, (e.max().item(), t.max().item())))


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    device = p.parse_args().device
    machine = torch.cuda.get_device_name(0) if device == "cuda" else "CPU"
    path = os.path.join(ROOT, "docs", f"errors-{device}.md")
    with open(path, "w") as f:
        f.write(f"# Errors on {machine}\n\nWritten by `benchmarks/errors.py` on {date.today()}, torch {torch.__version__}. RMS errors against float64, in units of the dtype's rounding of the\n"
                "values' RMS; the ratios are ours over eager torch's. Of fewer than 1000 values a ratio is luck. `tests/test_ops.py` holds every\nratio to its bound: 1.1 for the RMS and 2 for the largest, "
                "where a quarter and a whole unit are free.\n\n")
        f.write(tabulate(rows(device), HEADER, tablefmt="github", floatfmt=".2f") + "\n")
    print(path)


if __name__ == "__main__":
    main()
