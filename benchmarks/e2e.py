"""Trains whole models on one GPU or several: plain transformers, liger with Triton, and this library, in turns.

    python benchmarks/e2e.py --models llama-8b --cap-gb 80                       FSDP2 over all GPUs of the machine
    python benchmarks/e2e.py --models llama-1b,gemma2-2b --lengths 2048,8192 --arms plain,ours --gpus 1

Weights and tokens are random; weights, gradients and AdamW's moments are bfloat16, layers are checkpointed. On several
GPUs FSDP2 shards each layer, and the embedding with the head. Each model and arm has its own processes, which take one
length of sequences after another, each with --batch sequences per GPU or, where those do not fit, half as many, and
so on, unless --no-shrink. Results are added to the file --out when a process ends: a run that was cut off goes on where
it was. Of an arm with the option plan they have what was measured of a layer at each level, and how many layers have
which.

An arm is plain transformers, fla (plain with the recurrences of FLA, which --fla names), mamba (plain with mamba-ssm's
scan and causal-conv1d, which --mamba-ssm names), liger with Triton or this library, with options: plain+compile,
ours+adamw+graph; what they are, liger_kernel/measure/arm.py says. One model on one machine is measured by
`python -m liger_kernel.measure`.
"""

import argparse
import json
import sys
from pathlib import Path

import torch
from liger_kernel.measure.arm import OPTIONS
from liger_kernel.measure.launch import run_arm
from liger_kernel.measure.machine import machine, version_of
from liger_kernel.measure.report import table
from liger_kernel.measure.shapes import SHAPES
from provenance import save
from runs import RIVALS_OF_ARMS

ARMS = ("plain", "triton", "ours")
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768)


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--models", default="llama-8b", help=f"of {', '.join(SHAPES)} (default: %(default)s)")
    add("--arms", default=",".join(ARMS), help="default: %(default)s")
    add("--no-checkpointing", action="store_true", help="layers keep what backward needs")
    add("--lengths", default=",".join(map(str, LENGTHS)), help="tokens in a sequence (default: %(default)s)")
    add("--batch", type=int, default=8, help="sequences per GPU (default: %(default)s)")
    add("--no-shrink", action="store_true", help="a batch that does not fit is out of memory")
    add("--gpus", type=int, default=torch.cuda.device_count() or 1, help="default: all")
    add("--cap-gb", type=float, help="memory that a process may take of a GPU")
    add("--budget", default="70GiB", help="of memory, for the option plan (default: %(default)s)")
    add("--profile", action="store_true", help="also where the time of a step goes, by the name of each kernel")
    add("--triton-liger", metavar="DIR", default="", help="a folder that holds liger_kernel with Triton")
    add("--fla", metavar="DIR", default="", help="a folder that holds fla-core and einops")
    add("--mamba-ssm", metavar="DIR", default="", help="a folder that holds mamba_ssm and causal_conv1d")
    add("--again", action="store_true", help="measure also what --out has")
    add("--out", type=Path, default=Path("out/e2e.json"), help="default: %(default)s")
    args = parser.parse_args()
    args.failed = False
    args.models, args.arms = args.models.split(","), args.arms.split(",")
    sides = [arm.split("+")[0] for arm in args.arms]
    options = [option for arm in args.arms for option in arm.split("+")[1:]]
    for given, known in ((args.models, SHAPES), (sides, {*ARMS, *RIVALS_OF_ARMS}), (options, OPTIONS)):
        if unknown := set(given).difference(known):
            parser.error(f"there is no {', '.join(sorted(unknown))}")
    args.lengths = sorted(int(n) for n in args.lengths.split(","))
    args.rivals = {}
    for side, (option, package) in RIVALS_OF_ARMS.items():
        args.rivals[side] = getattr(args, option.replace("-", "_"))
        if side in sides and not Path(args.rivals[side], package).is_dir():
            parser.error(f"--arms {side}: --{option} names the folder that holds {package}")
    args.device = "cuda" if torch.cuda.is_available() else "cpu"
    return args


def lengths_of(args, model, arm, lengths):
    """Yields (length, its result) of one model and arm: None where not even one sequence a GPU fits."""
    batch, rival = args.batch, args.rivals.get(arm.split("+")[0])
    while lengths and batch:
        job = {
            "model": model, "layers": None, "arm": arm, "batch": batch, "lengths": lengths,
            "shrink": not args.no_shrink,
            "warm_up": 3 if {"compile", "graph", "passes"} & set(arm.split("+")) else 2, "steps": None, "lora": 0,
            "quantise": None, "checkpointing": not args.no_checkpointing, "dtype": "bfloat16", "budget": args.budget,
            "cap_gb": args.cap_gb, "profile": args.profile, "device": args.device,
        }  # fmt: skip
        failed, small = None, False
        for line in run_arm(job, rival, args.gpus):
            if "result" in line:
                lengths = [n for n in lengths if n != line["length"]]
                yield line["length"], line["result"]
            failed, small = line.get("error", failed), small or "out_of_memory" in line
        if failed and not small:
            print(f"{model}, {arm}: failed at length {lengths[0]}: {failed}", flush=True)
            args.failed = True
            return
        if not args.no_shrink:
            batch //= 2  # of several ranks, all end where one is out of memory
        elif small:
            yield lengths[0], None
            lengths = lengths[1:]
    for length in lengths:
        yield length, None


def in_words(key, result):
    if not result:
        return [*map(str, key), "", "out of memory", "", ""]
    speed, peak = f"{result['tokens_per_second']:,.0f}", f"{result.get('peak_gb', 0):.1f} GB"
    return [*map(str, key), str(result["batch"]), speed, peak, f"{result.get('warm_up_seconds', 0):.0f} s"]


def main():
    args = arguments()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    report = json.loads(args.out.read_text()) if args.out.exists() else {"rows": []}
    report["machine"] = machine(args.device, args.gpus, args.cap_gb, Path(__file__).parent, args.triton_liger)
    for name, folder in (("fla-core", args.fla), ("mamba-ssm", args.mamba_ssm), ("causal-conv1d", args.mamba_ssm)):
        report["machine"][name] = version_of(name, folder) if folder else None
    rows = {(row["model"], row["length"], row["arm"]): row["result"] for row in report["rows"]}
    for model in args.models:
        for arm in args.arms:
            left = [n for n in args.lengths if args.again or (model, n, arm) not in rows]
            for length, result in lengths_of(args, model, arm, left):
                rows[model, length, arm] = result
                report["rows"] = [
                    {"model": m, "length": n, "arm": a, "result": found} for (m, n, a), found in sorted(rows.items())
                ]
                save(args.out, report)
    headers = ["model", "length", "arm", "batch", "tokens/s per GPU", "peak memory", "warm-up"]
    print(table(headers, [in_words(key, result) for key, result in sorted(rows.items())]))
    for key, result in sorted(rows.items()):
        if result and "profile" in result:
            parts = ", ".join(f"{part} {ms:.0f}" for part, ms in result["profile"]["ms"].items())
            print(f"{' '.join(map(str, key))}: {result['profile']['step']:.0f} ms: {parts}")
    sys.exit(args.failed)


if __name__ == "__main__":
    main()
