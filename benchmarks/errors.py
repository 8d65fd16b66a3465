"""Writes docs/errors-DEVICE.md: how far results and gradients are from float64, ours and eager torch's, over the cases
of tests/cases. With --out, the rows go to a file, too.

python benchmarks/errors.py              on the GPU if there is one
python benchmarks/errors.py --device cpu
"""

import argparse
import json
import os
import sys
from datetime import date
from pathlib import Path

import torch
from tabulate import tabulate

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(ROOT, "tests"))

from cases import all_cases, rounded  # noqa: E402
from liger_kernel.measure.machine import machine  # noqa: E402
from test_ops import run, same  # noqa: E402

DTYPES = ("float32", "bfloat16", "float16")
COLUMNS = ("case", "dtype", "result", "values", "ours", "eager", "ratio", "largest")
MANY = 1000  # values, of which a ratio says something


def rows(device):
    """For each case, dtype and result: RMS errors in units of the dtype's rounding of the values' RMS, ours over
    eager's, and that of the largest."""
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
                if not c.is_floating_point():
                    continue  # such as a router's choices
                unit = torch.finfo(dtype).eps * c.square().mean().sqrt().item()
                e, t = ((x.double() - c).abs() for x in (a, b))
                rms = [x.square().mean().sqrt().item() for x in (e, t)]
                n = len(ours) - gradients
                name = f"result {i}" if i < n and n > 1 else "result" if i < n else f"gradient {i - n}"
                yield (
                    case.name,
                    str(dtype)[6:],
                    name,
                    c.numel(),
                    *(x / unit if unit else 0 for x in rms),
                    *(x / y if y else float(x > 0) for x, y in (rms, (e.max().item(), t.max().item()))),
                )


def summary(found):
    """One line per operator: for each dtype, the result or gradient with the largest ratio, of those with many values
    if there are any."""
    worst = {}
    for operator, dtype, name, values, ours, eager, ratio, largest in found:
        better = worst.setdefault(operator, {}).get(dtype)
        mine = (values >= MANY, ratio)
        if better is None or mine > better[0]:
            worst[operator][dtype] = mine, f"{ours:.2f} / {eager:.2f} ({name})"
    return [[operator, *(of[d][1] if d in of else "" for d in DTYPES)] for operator, of in worst.items()]


def write(where, found, path):
    most = {
        d: max((row[6], row[0], row[2]) for row in found if row[1] == d and row[3] >= MANY)
        for d in DTYPES
        if any(row[1] == d and row[3] >= MANY for row in found)
    }
    over = "; ".join(f"{d} {ratio:.2f} ({operator}, {name})" for d, (ratio, operator, name) in most.items())
    text = (
        f"# Errors on {where}\n\n"
        "RMS errors of results and gradients against float64: this library / eager torch, in units of the dtype's "
        "rounding unit times\nthe RMS of the values. For each operator and dtype, the table shows the result or "
        "gradient with the largest ratio to eager's,\n"
        f"among those with at least {MANY} values if there are any: with fewer values, a ratio is luck. The largest "
        f"ratios of all are:\n{over}.\n\n"
        "`tests/test_ops.py` requires every ratio to be at most 1.1, and at most 2 for the largest single error; a "
        "quarter of a unit and a\nwhole unit are free ([the rule](decisions/0006-exactness-rule.md)). Written by "
        f"`benchmarks/errors.py`\non {date.today()} with torch {torch.__version__}.\n\n"
    )
    with open(path, "w") as f:
        f.write(text + tabulate(summary(found), ["operator", *DTYPES], tablefmt="github", disable_numparse=True) + "\n")


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--page", help="default: docs/errors-DEVICE.md")
    p.add_argument("--out", type=Path, help="write the rows as JSON, too")
    args = p.parse_args()
    path = args.page or os.path.join(ROOT, "docs", f"errors-{args.device}.md")
    found = list(rows(args.device))
    write(torch.cuda.get_device_name(0) if args.device == "cuda" else "a CPU", found, path)
    if args.out:
        listed = [dict(zip(COLUMNS, row)) for row in found]
        args.out.write_text(json.dumps({"machine": machine(args.device, sources=Path(ROOT)), "rows": listed}, indent=1))
    print(path)


if __name__ == "__main__":
    main()
