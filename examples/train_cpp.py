"""Train a fresh Llama with liger-train, the C++ trainer, and with Python's patched transformers, and compare.

Both have the same weights, text, seed and order of data: `make train-cpp`. What "the same loss" means, comparison.py
says; the options are those of train.py.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import comparison
import numpy
import torch
import train

ROOT = Path(__file__).resolve().parent.parent
FASTER = 3  # that C++ is to come to its first step, in times


def binary():
    """LIGER_TRAIN, or what was built with the package, or by `make VENV=`."""
    import liger_kernel._train

    if named := os.environ.get("LIGER_TRAIN"):
        return named
    try:
        return liger_kernel._train.program()[0]
    except FileNotFoundError as error:
        beside = ROOT / "build/system/liger-train"
        return beside if beside.exists() else sys.exit(str(error))


def write_inputs(args, folder):
    """The model that train.py's run begins with, and the rows of tokens that it reads."""
    from safetensors.torch import save_file
    from transformers import set_seed

    save_file({"input_ids": torch.from_numpy(numpy.load(args.tokens))}, folder / "rows.safetensors")
    if args.model:
        return args.model
    set_seed(args.seed)
    with torch.device(args.device):  # whose generator draws Python's
        model = train.fresh_model(args, getattr(torch, args.dtype))
    model.save_pretrained(folder / "model")
    return folder / "model"


def run_cpp(args, model, folder):
    """liger-train with the defaults of transformers' Trainer that train.py leaves as they are."""
    out = folder / "out"
    options = {"data": folder / "rows.safetensors", "out": out, "device": args.device, "dtype": args.dtype,
               "length": args.length, "batch": args.batch, "steps": args.steps, "lr": args.lr, "schedule": "constant",
               "seed": args.seed}  # fmt: skip
    command = [binary(), model, *(f"--{name}={value}" for name, value in options.items())]
    command += ["--no-master-weights", "--no-deterministic"]
    if args.gradient_checkpointing:
        command.append("--gradient-checkpointing")
    begin = time.time()
    process = subprocess.Popen(command)
    log = out / "log.jsonl"
    while process.poll() is None and not (log.exists() and log.read_text().count("\n") > 1):  # the first: of the data
        time.sleep(0.002)
    first = time.time()
    if code := process.wait():
        sys.exit(f"liger-train failed with code {code}: see above.")
    lines = [json.loads(line) for line in log.read_text().splitlines()[1:]]
    seconds = [line["seconds"] for line in lines]
    return {
        "losses": [line["loss"] for line in lines],
        "startup_seconds": first - begin - seconds[0],
        "tokens_per_second": args.batch * args.length / comparison.typical(seconds),
        "peak_bytes": max(line["peak_bytes"] for line in lines),
    }


def run_python(args, side, steps):
    begin = time.time()
    result = comparison.run_apart(train.__file__, args, side, steps)
    return result | {"startup_seconds": result["first_step_at"] - begin}


def main():
    args = train.arguments()
    if args.family != "llama":
        sys.exit("--family: liger-train knows Llama and its relatives; give --model a checkpoint of theirs")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        args.tokens = os.path.join(name, "tokens.npy")
        print(train.write_tokens(args, args.tokens), flush=True)
        cpp = run_cpp(args, write_inputs(SimpleNamespace(**vars(args)), folder), folder)
        python = run_python(args, "liger", args.steps)
        plain, noise = (run_python(args, side, args.noise_steps) for side in ("plain", "noise"))
    eps, tokens = torch.finfo(getattr(torch, args.dtype)).eps, args.batch * args.length
    # How far rounding carries a curve is what plain differs from itself after a change of a last bit.
    stray = comparison.compare(plain["losses"], plain["losses"], noise["losses"], eps, tokens)
    differences = [abs(a - b) for a, b in zip(python["losses"], cpp["losses"], strict=True)]
    difference = max(differences[: args.noise_steps])
    settings = {name: getattr(args, name) for name in ("config", "batch", "length", "steps", "noise_steps", "dtype")}
    report = {"python": python, "cpp": cpp, "difference": difference, "settings": settings,
              "machine": comparison.machine(args.device, sources=ROOT),
              "difference_of_all_steps": max(differences), "limit": stray["limit"]}  # fmt: skip

    from tabulate import tabulate

    rows = [
        ("tokens per second", "tokens_per_second", "{:,.0f}".format, comparison.speed),
        ("peak memory of everything", "peak_bytes", comparison.size, comparison.less),
        ("start to first step", "startup_seconds", "{:.2f} s".format, comparison.less),
        ("final loss", "losses", lambda v: f"{v[-1]:.6f}", lambda p, q: f"{q[-1] - p[-1]:+.1e}"),
    ]
    table = [[what, form(python[key]), form(cpp[key]), by(python[key], cpp[key])] for what, key, form, by in rows]
    headers = ["", "Python, patched", "C++", "difference"]
    print(f"\n{tabulate(table, headers, disable_numparse=True, colalign=('left', 'right', 'right', 'right'))}\n")
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "train-cpp.json").write_text(json.dumps(report, indent=1) + "\n")
    same = difference <= stray["limit"]
    print(
        f"The losses are {'' if same else 'NOT '}the same: over the first {args.noise_steps} steps they differ by up "
        f"to {difference:.1e}; allowed is {stray['limit']:.1e}. written: {args.out / 'train-cpp.json'}"
    )
    missed = [what for what, misses in {
        "slower": cpp["tokens_per_second"] < python["tokens_per_second"],
        "larger": cpp["peak_bytes"] > python["peak_bytes"],
        f"not {FASTER} times as fast to its first step": FASTER * cpp["startup_seconds"] > python["startup_seconds"],
    }.items() if misses]  # fmt: skip
    if missed:
        print(f"C++ was {' and '.join(missed)}.")
    sys.exit(not same)


if __name__ == "__main__":
    main()
