"""Trains LoRA adapters of PEFT on one GPU: plain, liger with Triton, and this library, in turns.

    python benchmarks/lora.py --models llama-1b,llama-8b --shapes 4x2048 --arms plain,peft,ours,frozen
    python benchmarks/lora.py --models llama-1b --checkpointing off --profile

The base model is in bfloat16, with random weights; adapters of rank 16 on all linear layers of the blocks, and on
experts, are in float32, under autocast to bfloat16, as in transformers' Trainer. Each arm has a process of its own, and
the arms run in turns, --rounds times; the median of the rounds is shown.

    plain   transformers and PEFT
    triton  liger_kernel with Triton, which --triton-liger names
    peft    this library with lora=False: PEFT's own layers
    ours    this library
    frozen  this library and no adapters: the gradient passes through the frozen layers to the embeddings

"ours+host" has layers keep their input on the host, and "ours+plan" what fits into --budget (liger_kernel.memory); all
options, liger_kernel/measure/arm.py says. A step that takes longer than 20 s is measured once.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path

import torch
from liger_kernel.measure.launch import run_arm
from liger_kernel.measure.machine import machine
from liger_kernel.measure.report import table
from liger_kernel.measure.shapes import SHAPES
from provenance import save


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--models", default="llama-1b", help=f"of {', '.join(SHAPES)} (default: %(default)s)")
    add("--arms", default="plain,peft,ours,frozen", help="default: %(default)s")
    add("--shapes", default="4x2048", help="sequences x tokens, separated by commas (default: %(default)s)")
    add("--checkpointing", default="on,off", help="default: %(default)s")
    add("--rank", type=int, default=16)
    add("--budget", default="70GiB", help="of memory, for the option plan (default: %(default)s)")
    add("--cap-gb", type=float, help="memory that a process may take of the GPU, as of a smaller one")
    add("--shrink", action="store_true", help="take half the sequences where they do not fit, and so on")
    add("--nf4", action="store_true", help="weights of the layers in 4 bits, by bitsandbytes (QLoRA)")
    add("--rounds", type=int, default=2, help="default: %(default)s")
    add("--profile", action="store_true", help="also where the time of a step goes, and its launches")
    add("--triton-liger", metavar="DIR", default="", help="a folder that holds liger_kernel with Triton")
    add("--go-on", action="store_true", help="keep the results that --out has, and measure the others")
    add("--out", type=Path, default=Path("out/lora.json"), help="default: %(default)s")
    return parser.parse_args()


def result_of(args, model, shape, checkpointing, arm, device):
    """The result of one process; None where it was out of memory. Raises RuntimeError where it failed."""
    batch, length = map(int, shape.split("x"))
    job = {
        "model": model, "layers": None, "arm": arm, "batch": batch, "lengths": [length], "warm_up": 3, "steps": None,
        "shrink": args.shrink, "lora": args.rank, "quantise": "nf4" if args.nf4 else None,
        "checkpointing": checkpointing == "on", "dtype": "bfloat16", "budget": args.budget, "cap_gb": args.cap_gb,
        "profile": args.profile, "device": device,
    }  # fmt: skip
    rival = args.triton_liger if arm.startswith("triton") else None
    last = (run_arm(job, rival, quiet=True) or [{"error": "no result"}])[-1]
    if "error" in last:
        raise RuntimeError(last["error"])
    return last.get("result")


def main():
    args = arguments()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    args.out.parent.mkdir(parents=True, exist_ok=True)
    report = json.loads(args.out.read_text()) if args.go_on and args.out.exists() else {"rows": []}
    on = machine(device, 1, args.cap_gb, Path(__file__).parent, args.triton_liger)
    report |= {"machine": on, "rank": args.rank, "nf4": args.nf4}
    cases = [
        (model, shape, checkpointing)
        for model in args.models.split(",")
        for shape in args.shapes.split(",")
        for checkpointing in args.checkpointing.split(",")
    ]
    names = "model", "shape", "checkpointing", "arm"
    rows = {tuple(row[name] for name in names): row for row in report["rows"]}
    failed = set()
    for case in cases:
        keys = [(*case, arm) for arm in args.arms.split(",")]
        for turn in range(args.rounds):
            for key in keys:
                row = rows.setdefault(key, {**dict(zip(names, key)), "results": []})
                if key in failed or "results" not in row or len(row["results"]) > turn:
                    continue
                try:
                    result = result_of(args, *key, device)
                except RuntimeError as error:
                    print(*key, f"failed: {error}", flush=True)
                    failed.add(key)
                    continue
                if result:
                    row["results"].append(result)
                elif not row["results"]:
                    print(*key, "out of memory", flush=True)
                    row["out_of_memory"] = not row.pop("results")
                report["rows"] = [row for row in rows.values() if row.get("results", True)]
                save(args.out, report)
        for key in keys:
            if found := rows[key].get("results"):
                if "profile" in found[0]:
                    print(*key, json.dumps(found[0]["profile"]), flush=True)
    lines = []
    for key, row in rows.items():
        if found := row.get("results"):
            rate = statistics.median(result["tokens_per_second"] for result in found)
            lines.append([*key, str(found[0]["batch"]), f"{rate:,.0f}", f"{found[0]['peak_gb']:.1f} GB"])
        elif "out_of_memory" in row:
            lines.append([*key, "", "out of memory", ""])
    print(table([*names, "batch", "tokens/s", "peak memory"], lines))
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
