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
from pathlib import Path

import torch
from liger_kernel.measure.launch import run_arm
from liger_kernel.measure.machine import machine
from liger_kernel.measure.report import table
from liger_kernel.measure.shapes import SHAPES


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--models", default="llama-1b", help=f"of {', '.join(SHAPES)} (default: %(default)s)")
    add("--arms", default="plain,peft,ours,frozen", help="default: %(default)s")
    add("--shapes", default="4x2048", help="sequences x tokens, separated by commas (default: %(default)s)")
    add("--checkpointing", default="on,off", help="default: %(default)s")
    add("--rank", type=int, default=16)
    add("--budget", default="70GiB", help="of memory, for the option plan (default: %(default)s)")
    add("--nf4", action="store_true", help="weights of the layers in 4 bits, by bitsandbytes (QLoRA)")
    add("--rounds", type=int, default=2, help="default: %(default)s")
    add("--profile", action="store_true", help="also where the time of a step goes, and its launches")
    add("--triton-liger", metavar="DIR", default="", help="a folder that holds liger_kernel with Triton")
    add("--out", type=Path, default=Path("out/lora.json"), help="default: %(default)s")
    return parser.parse_args()


def result_of(args, model, shape, checkpointing, arm, device):
    """The result of one process; None where it fails."""
    batch, length = map(int, shape.split("x"))
    job = {
        "model": model, "layers": None, "arm": arm, "batch": batch, "lengths": [length], "warm_up": 3, "steps": None,
        "shrink": False, "lora": args.rank, "quantise": "nf4" if args.nf4 else None,
        "checkpointing": checkpointing == "on", "dtype": "bfloat16", "budget": args.budget, "cap_gb": None,
        "profile": args.profile, "device": device,
    }  # fmt: skip
    last = run_arm(job, args.triton_liger if arm.startswith("triton") else None, quiet=True)[-1]
    if "result" not in last:
        print(f"{model} {shape} {checkpointing} {arm}: {last.get('error') or 'out of memory'}", flush=True)
    return last.get("result")


def main():
    args = arguments()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    args.out.parent.mkdir(parents=True, exist_ok=True)
    report = {"machine": machine(device, sources=Path(__file__).parent), "rank": args.rank, "nf4": args.nf4, "rows": []}
    cases = [
        (model, shape, checkpointing)
        for model in args.models.split(",")
        for shape in args.shapes.split(",")
        for checkpointing in args.checkpointing.split(",")
    ]
    rows = []
    for case in cases:
        found = {arm: [] for arm in args.arms.split(",")}
        for _ in range(args.rounds):
            for arm, results in found.items():
                if result := result_of(args, *case, arm, device):
                    results.append(result)
        for arm, results in found.items():
            if not results:
                continue
            key = dict(zip(("model", "shape", "checkpointing", "arm"), (*case, arm)))
            report["rows"].append({**key, "results": results})
            rate = statistics.median(result["tokens_per_second"] for result in results)
            rows.append([*key.values(), f"{rate:,.0f}", f"{results[0]['peak_gb']:.1f} GB"])
            if "profile" in results[0]:
                print(*key.values(), json.dumps(results[0]["profile"]), flush=True)
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    print(table(["model", "shape", "checkpointing", "arm", "tokens/s", "peak memory"], rows))


if __name__ == "__main__":
    main()
