"""Measure the training of a model on this machine, plain and with this library.

    python -m liger_kernel.measure                                  a small Llama on a CPU, Llama-3.2-1B on a GPU
    python -m liger_kernel.measure llama-8b --lora 16               LoRA adapters
    python -m liger_kernel.measure ./my-model --batch 8 --json out.json

Each arm has a separate process, the same weights and the same random tokens:

    plain          transformers, and PEFT, as they are
    patched        liger_kernel.patch
    planned        patched, and layers keep what fits into --budget (liger_kernel.memory)
    captured       patched, and each step is a CUDA graph (liger_kernel.graphs); on a GPU
    liger-kernel   with --rivals: liger-kernel with Triton; on a GPU
    torch.compile  with --rivals: plain, compiled

Speed is tokens of a step over the median time of the steps after the warm-up. Peak memory is what torch's allocator has
given out on a GPU, and that of the process on a CPU. Then it finds the longest sequence and the largest batch that fit
on a GPU, with every layer checkpointed: plain, patched, and with the inputs of layers on the host.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import liger_kernel
from liger_kernel.measure.launch import SEGMENTS, run_arm
from liger_kernel.measure.machine import machine
from liger_kernel.measure.report import ARMS, compared, of_arms, of_largest, size, to_paste
from liger_kernel.measure.shapes import SHAPES, Unknown, config_of

RIVAL = "0.8.5"  # of liger-kernel
WARM_UP = 3  # steps
SETTING = " ".join(f"{name}={value}" for name, value in SEGMENTS.items())
LARGEST = {"plain": "plain", "patched": "ours", "patched, inputs on the host": "ours+host"}


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m liger_kernel.measure", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    which = (
        f"a folder, a config.json, a model in Hugging Face's cache, or a shape with random weights: {', '.join(SHAPES)}"
    )
    add("model", nargs="?", help=f"{which} (default: tiny on a CPU, llama-1b on a GPU)")
    add("--layers", type=int, metavar="N", help="the first N layers alone, with random weights")
    add("--lora", type=int, default=0, metavar="RANK", help="train adapters of PEFT of this rank on all linear layers")
    add(
        "--quantise",
        choices=("nf4", "int8", "fp8"),
        help="with --lora: frozen weights in 4 bits, by bitsandbytes, or in 8",
    )
    add("--batch", type=int, help="sequences in a step (default: 2 on a CPU, 4 on a GPU)")
    add("--length", type=int, help="tokens in a sequence (default: 512 on a CPU, 2048 on a GPU)")
    add("--steps", type=int, help="steps to measure (default: what plain takes in 5 seconds, from 3 to 20)")
    add("--checkpointing", choices=("auto", "on", "off"), default="auto", help="auto: where plain does not fit without")
    add("--budget", default="auto", help='of memory for "planned": GiB, or 90%% (default: 90 %% of what is free)')
    add("--cap", type=float, metavar="GIB", help="memory that a process may take of the GPU, as of a smaller one")
    add("--dtype", choices=("float32", "bfloat16"), help="of the weights (default: float32 on a CPU, else bfloat16)")
    add("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    add("--arms", help="default: plain,patched,planned, and on a GPU captured")
    add("--rivals", action="store_true", help=f"also liger-kernel {RIVAL}, and torch.compile")
    add("--liger", metavar="DIR", help="a folder with liger_kernel of liger-kernel (default: pip fetches it)")
    add("--no-largest", action="store_true", help="leave out what fits")
    add("--json", type=Path, metavar="FILE", help="write everything to this file")
    return parser


def arguments(argv=None) -> argparse.Namespace:
    """The options, filled in by the machine; ends with one sentence where something cannot be."""
    of = parser()
    args = of.parse_args(argv)
    if args.quantise and not args.lora:
        of.error("--quantise needs --lora: quantised weights are not trained")
    needed = ["torch", "transformers", *["peft"] * bool(args.lora), *["bitsandbytes"] * (args.quantise == "nf4")]
    if missing := [name for name in needed if not importlib.util.find_spec(name)]:
        of.exit(1, f"This needs {', '.join(missing)}: run `pip install {' '.join(missing)}`.\n")
    import torch

    gpu = torch.cuda.is_available()
    if args.device == "cuda" and not gpu:
        of.error("torch sees no CUDA device: take --device cpu, or install a torch with CUDA")
    args.device = args.device or ("cuda" if gpu else "cpu")
    cpu = args.device == "cpu"
    args.model = args.model or ("tiny" if cpu else "llama-1b")
    args.batch, args.length = args.batch or (2 if cpu else 4), args.length or (512 if cpu else 2048)
    args.dtype = args.dtype or ("float32" if cpu else "bfloat16")
    args.budget = f"{args.budget}GiB" if args.budget.replace(".", "", 1).isdigit() else args.budget
    if args.cap and args.budget == "auto":  # which does not know of the cap
        args.budget = f"{0.9 * args.cap:.1f}GiB"
    given = (args.arms or ("plain,patched,planned" if cpu else "plain,patched,planned,captured")).split(",")
    args.arms = given + ["liger-kernel"] * (args.rivals and not cpu) + ["torch.compile"] * args.rivals
    if unknown := set(args.arms) - ARMS.keys():
        of.error(f"there is no arm {', '.join(sorted(unknown))}: take some of {', '.join(ARMS)}")
    os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: nothing is fetched
    try:
        config_of(args.model, args.layers)
    except Unknown as error:
        of.error(str(error))
    return args


def rival_folder(args) -> str:
    """The folder that holds liger_kernel with Triton; raises OSError with a sentence where it cannot be had."""
    if args.liger:
        if not Path(args.liger, "liger_kernel").is_dir():
            raise OSError(f"there is no package liger_kernel in {args.liger}")
        return args.liger
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "liger_kernel", f"liger-kernel-{RIVAL}")
    if not cache.is_dir():
        cache.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache.parent) as folder:
            pip = (sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps")
            if subprocess.run([*pip, "--target", f"{folder}/it", f"liger-kernel=={RIVAL}"]).returncode:
                raise OSError(f"pip could not fetch liger-kernel {RIVAL}; --liger names a folder that has it")
            Path(folder, "it").rename(cache)
    return str(cache)


def job_of(args, arm: str, checkpointing: bool, steps: int | None = None, **others) -> dict:
    """The job of an arm of arm.py."""
    return {
        "model": args.model, "layers": args.layers, "arm": arm, "batch": args.batch, "lengths": [args.length],
        "warm_up": WARM_UP, "steps": steps, "shrink": False, "lora": args.lora, "quantise": args.quantise,
        "checkpointing": checkpointing, "dtype": args.dtype, "budget": args.budget,
        "cap_gb": args.cap and args.cap * 2**30 / 1e9, "profile": False, "device": args.device, **others,
    }  # fmt: skip


def run_row(name: str, job: dict, rival: str | None = None) -> dict:
    """The row of an arm: result, or out_of_memory, or error."""
    row = {"arm": name, "result": None, "out_of_memory": False, "error": None, "checkpointing": job["checkpointing"]}
    for line in run_arm({**job, "title": name}, rival, quiet=True):
        row |= {key: value for key, value in line.items() if key in ("result", "error")}
        row["out_of_memory"] |= "out_of_memory" in line
    if result := row["result"]:
        print(f"{name}: {result['tokens_per_second']:,.0f} tokens/s, {size(result['peak_gb'] * 1e9)}", flush=True)
    else:
        print(f"{name}: {'out of memory' if row['out_of_memory'] else row['error']}", flush=True)
    return row


def measure(args) -> tuple[list[dict], bool]:
    """The rows of the arms, and whether layers were checkpointed in them."""
    checkpointing, steps, rows = args.checkpointing == "on", args.steps, []
    for name in args.arms:
        arm, rival = ARMS[name][0], None
        if name == "captured" and checkpointing:
            print("captured: left out, because checkpointed layers cannot be captured", flush=True)
            continue
        if arm == "triton":
            try:
                rival = rival_folder(args)
            except OSError as error:
                print(f"{name}: {error}", flush=True)
                continue
        row = run_row(name, job_of(args, arm, checkpointing, steps), rival)
        if row["out_of_memory"] and name == "plain" and args.checkpointing == "auto" and not checkpointing:
            print("plain does not fit: every layer is checkpointed from here on", flush=True)
            checkpointing = True
            row = run_row(name, job_of(args, arm, checkpointing, steps))
        rows.append(row)
        if row["result"]:
            steps = steps or len(row["result"]["times"])
    compared(rows)
    return rows, checkpointing


def largest(args) -> dict[str, dict]:
    """{what: what `largest.search` found} for those that ran."""
    found = {}
    for name, arm in LARGEST.items():
        job = job_of(args, arm, True, largest={"length": args.length, "batch": args.batch})
        row = run_arm({**job, "title": name}, quiet=True)
        if row and "result" in row[-1]:
            found[name] = row[-1]["result"]
        else:
            print(f"what fits, {name}: {row[-1].get('error') or 'out of memory'}" if row else "", flush=True)
    return found


def main(argv=None) -> int:
    """Measures and prints; returns the exit status: 1 where no arm of this library ran."""
    args = arguments(argv)
    on = machine(args.device, int(args.device == "cuda"), cap_gb=args.cap and args.cap * 2**30 / 1e9)
    on["version"] = liger_kernel.__version__
    how = (
        f"LoRA of rank {args.lora}" + f", weights in {args.quantise}" * bool(args.quantise)
        if args.lora
        else "all weights"
    )
    what = (
        f"{args.model}{f', {args.layers} layers' if args.layers else ''}, {how}, {args.batch} x {args.length:,} tokens"
    )
    source = f" (random weights; {SHAPES[args.model][0]})" if args.model in SHAPES else ""
    print(
        f"{what}, {args.dtype}{source}\n{on['device']}, torch {on['torch']}, transformers {on['transformers']}",
        flush=True,
    )
    rows, checkpointing = measure(args)
    print(f"\n{what}{', every layer checkpointed but in planned' if checkpointing else ''}:\n{of_arms(rows)}\n")
    fits = {} if args.no_largest or args.device == "cpu" else largest(args)
    if fits:
        print(f"What fits, with every layer checkpointed and {SETTING}:\n{of_largest(fits, args.length)}\n")
    print(to_paste(rows, args.budget))
    if args.json:
        options = {name: value for name, value in vars(args).items() if name != "json"}
        found = {"machine": on, "settings": options, "checkpointing": checkpointing, "rows": rows, "largest": fits}
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    return int(not any(row["result"] and ARMS[row["arm"]][1] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
