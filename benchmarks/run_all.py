"""Runs every benchmark whose results the pages show, on this machine, and fills the tables: `make measure`.

    python benchmarks/run_all.py --triton-liger DIR --trl DIR     everything that this machine can run, for hours
    python benchmarks/run_all.py --only lora,e2e-moe              some of it
    python benchmarks/run_all.py --list                           what there is, and what is done at this commit
    python benchmarks/run_all.py --tiny                           on a CPU, with tiny models: whether all of it works

Each benchmark has a file of benchmarks/results, named after the card, and a limit of time. It is skipped where its file
has been measured at the present commit; a tree with changes has no commit to compare, and is measured again. Parts that
are done stay in --work, so that the same command goes on where it was cut off. Without --triton-liger, --trl, --verl or
--veomni (folders of unpacked wheels) these rivals are left out, and what needs them is skipped.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from liger_kernel.measure.machine import commit
from provenance import RESULTS, ROOT, card_of, provenance

FOLDER = Path(__file__).parent
MINUTES = 60
RIVALS = ("triton-liger", "trl", "verl", "veomni")
#: Operators that have a file of their own; operators.json has the others.
EXPERTS = (
    "fused_experts,gated_rms_norm,xielu,attention_residuals,causal_softmax,gated_packed,mhc_pre,mhc_coefficients,"
    "mhc_post_res,neighborhood_attention,route,expert_load"
)
FEW_CLASSES = "class_logits,linear_multi_head,linear_topk_divergence"
MIXERS = "causal_conv1d,gated_delta_rule,channel_delta_rule,delta_gates"
QK = "qk_norm_rope"
APART = {QK, *EXPERTS.split(","), *FEW_CLASSES.split(","), *MIXERS.split(",")} - {"fused_experts"}
OTHERS = "{others}"  # the operators that are not in APART; on a CPU all


@dataclass(frozen=True)
class Run:
    """A result, and the commands that make it: arguments of a script, each of which writes a part.

    Args:
        file: in benchmarks/results; {card} is filled in.
        script: in the repository.
        parts: the arguments; {name} stands for a rival's option, which is left out where the rival is.
        minutes: for each part.
        tiny: the arguments of a dry run on a CPU; none: there is no dry run.
        where: "gpu", "cpu" or both.
        gpus: how many it needs.
        needs: rivals without which there is nothing to measure.
        writes: the file that the script writes into the folder that it is given; empty: it is given a file.
        environment: variables.
    """

    file: str
    script: str
    parts: tuple[str, ...]
    minutes: int
    tiny: str = ""
    where: tuple[str, ...] = ("gpu",)
    gpus: int = 1
    needs: tuple[str, ...] = ()
    writes: str = ""
    environment: tuple[tuple[str, str], ...] = ()


BENCH, E2E, LORA = (f"benchmarks/{name}.py" for name in ("bench", "e2e", "lora"))
TINY_BENCH = "--device cpu --rivals torch --seconds 0.001 --op"
TINY_E2E = "--models tiny --arms plain,ours --lengths 32 --batch 2 --gpus 1"
TINY_LORA = "--models tiny --shapes 2x32 --checkpointing on --rounds 1 --arms plain,ours"
LONG = "--models llama-8b --checkpointing on --rounds 1"
SEGMENTS = (("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"),)
#: In the order in which they run: what most pages show first.
RUNS = {
    "lora": Run("lora-{card}.json", LORA, (
        "--models llama-1b --shapes 4x2048,1x8192 --arms plain,triton,peft,ours,frozen {triton-liger}",
        "--models llama-1b --shapes 8x512 --checkpointing off --arms plain,triton,ours,frozen {triton-liger}",
        "--models llama-8b,qwen3-4b --checkpointing on --arms plain,triton,peft,ours,frozen {triton-liger}",
        "--models qwen3-moe-4b --checkpointing on --arms plain,peft,ours",
        "--models llama-8b --checkpointing on --arms peft,ours --nf4",
    ), 40, TINY_LORA),
    "lora-base": Run("lora-base-{card}.json", LORA, (
        "--models llama-8b,llama-1b --arms ours,ours+int8,ours+fp8",
    ), 30, TINY_LORA + ",ours+int8"),
    "long": Run("long-{card}.json", LORA, (
        f"{LONG} --shapes 1x16384,1x32768 --arms plain,triton,ours {{triton-liger}}",
        f"{LONG} --shapes 1x131072 --arms ours,ours+host",
        f"{LONG} --shapes 1x262144 --arms ours+host",
    ), 30, TINY_LORA, environment=SEGMENTS),
    "families": Run("families-{card}.json", "examples/train.py", (
        "--family measured --steps 20 --noise-steps 8 {triton-liger}",
    ), 120, "--family llama,qwen3 --device cpu --batch 1 --length 32 --steps 9 --noise-steps 9", ("gpu", "cpu"),
        writes="families.json"),
    "e2e": Run("e2e-{card}.json", E2E, (
        "--models llama-1b --gpus 1 --cap-gb 80 --profile --arms plain,triton,ours {triton-liger}",
        "--models gemma2-2b,llama-3b,qwen3-1.7b --lengths 2048,8192 --gpus 1 --cap-gb 80 --profile "
        "--arms plain,triton,ours {triton-liger}",
    ), 90, TINY_E2E),
    "e2e-x2": Run("e2e-{card}x2.json", E2E, (
        "--models llama-8b --lengths 2048 --gpus 2 --cap-gb 80 --profile --arms plain,triton,ours {triton-liger}",
    ), 20, gpus=2),
    "e2e-moe": Run("e2e-moe-{card}.json", E2E, (
        "--models qwen3-moe-4b --lengths 2048 --gpus 1 --arms plain,triton,ours {triton-liger}",
        "--models mixtral-3b --lengths 2048 --gpus 1 --arms plain,ours",
    ), 30, TINY_E2E),
    "e2e-sinks": Run("e2e-sinks-{card}.json", E2E, (
        "--models gpt-oss-4b --lengths 2048 --batch 4 --gpus 1 --no-checkpointing --arms plain,ours",
        "--models gpt-oss-4b --lengths 8192 --batch 1 --gpus 1 --no-checkpointing --arms plain,ours",
    ), 20, TINY_E2E),
    "e2e-packed": Run("e2e-packed-{card}.json", E2E, (
        "--models qwen3.5-2b --lengths 1024 --gpus 1 --no-checkpointing --arms ours,ours+packed,plain",
        "--models llama-1b --lengths 2048 --gpus 1 --no-checkpointing "
        "--arms ours,ours+packed,ours+padded,plain,plain+packed,plain+padded",
    ), 20, TINY_E2E + " --no-checkpointing"),
    "e2e-small": Run("e2e-small-{card}.json", E2E, tuple(
        f"--models llama-1b --batch {batch} --lengths {length} --gpus 1 --no-checkpointing "
        "--arms plain,plain+compile,ours,ours+compile,ours+adamw+passes,ours+adamw+graph"
        for batch, length in ((1, 512), (4, 512), (8, 2048))
    ), 20, TINY_E2E + " --no-checkpointing"),
    "e2e-budget": Run("e2e-budget-{card}.json", E2E, (
        "--models llama-1b,llama-3b --lengths 2048 --gpus 1 --cap-gb 80 --budget 70GiB --arms ours,ours+plan",
        "--models llama-1b --lengths 8192 --gpus 1 --cap-gb 80 --budget 62GiB --arms ours,ours+plan",
    ), 20, TINY_E2E),
    "operators": Run("{card}.json", BENCH, (f"--op {OTHERS} {{triton-liger}}",), 240,
        f"{TINY_BENCH} rms_norm --shape 4,16", ("gpu", "cpu")),
    "experts": Run("experts-{card}.json", BENCH, (f"--op {EXPERTS} {{triton-liger}}",), 120,
        f"{TINY_BENCH} xielu --shape 4,16"),
    "topk": Run("topk-{card}.json", BENCH, ("--op linear_topk_divergence --rivals trl {trl}",), 30, needs=("trl",)),
    "topk-tools": Run("topk-tools-{card}.json", BENCH, (f"--op {FEW_CLASSES} {{verl}} {{veomni}}",), 40,
        f"{TINY_BENCH} class_logits --shape 33,16,101"),
    "qk": Run("qk-{card}.json", BENCH, (f"--op {QK}",), 30, f"{TINY_BENCH} {QK} --shape 1,2,3,64"),
    "mixers": Run("mixers-{card}.json", BENCH, (f"--op {MIXERS}",), 30, f"{TINY_BENCH} causal_conv1d --shape 2,8,21"),
    "replacements": Run("replacements-{card}.json", "benchmarks/replacements.py", ("{trl}",), 20, needs=("trl",)),
    "eight-bit": Run("eight-bit-{card}.json", "benchmarks/eight_bit.py", (
        "--bases bfloat16,int8,fp8 --base-steps 1000",
    ), 40),
    "eight-bit-products": Run("eight-bit-products-{card}.json", BENCH, ("--op scaled_matmul",), 10,
        f"{TINY_BENCH} scaled_matmul --shape 33,64,48"),
    "eight-bit-full": Run("eight-bit-full-{card}.json", "benchmarks/eight_bit_full.py", ("",), 60),
    "errors": Run("errors-{card}.json", "benchmarks/errors.py", ("",), 30,
        "--device cpu --cases rms_norm --page {folder}/errors.md", ("gpu", "cpu")),
    "expert-parallel": Run("expert-parallel-{card}x2.json", "benchmarks/expert_parallel.py", (
        "--gpus 2 --layers 8 --tokens 16384 --routing balanced --arms ours,fsdp+patch,ep",
    ), 30, gpus=2),
    "batch-invariance": Run("batch-invariance-{card}.json", "benchmarks/batch_invariance.py", (
        "--models tiny:llama,tiny:qwen3,tiny:qwen3_moe,tiny:gemma2,llama-1b --layers 4",
    ), 30, "--models tiny:llama --documents 4 --longest 24 --tokens 0"),
    "gemm-bits": Run("gemm-bits-{card}.json", "benchmarks/gemm_bits.py", ("",), 30),
}  # fmt: skip
#: Results that one run has made, and why they are not made again.
ONCE = {"norms-{card}.json": "it compares with a library of an older commit"}


def card(device: str) -> str:
    """Of a CPU the instruction set of its kernels."""
    if device == "cuda":
        return card_of(torch.cuda.get_device_name())
    return f"cpu-{torch.backends.cpu.get_cpu_capability().lower()}"


def others(device: str) -> str:
    """The operators that bench.py times and that no other run has; on a CPU, which has no other runs, all."""
    sys.path.insert(0, str(ROOT / "tests"))
    from cases import all_cases
    from loss_cases import LOSSES

    return ",".join(
        name for name, case in (all_cases() | LOSSES).items() if case.bench and (device == "cpu" or name not in APART)
    )


def file_of(run: Run, args) -> str:
    return run.file.format(card=args.card)


def obstacle(run: Run, args) -> str | None:
    """Why a run cannot be made here; None where it can."""
    if not (ROOT / run.script).is_file():
        return f"there is no {run.script}"
    if args.tiny:
        return None if run.tiny else "it has no dry run"
    if ("gpu" if args.device == "cuda" else "cpu") not in run.where:
        return "it needs a GPU" if args.device == "cpu" else "it is for CPUs"
    if args.device == "cuda" and run.gpus > args.gpus:
        return f"it needs {run.gpus} GPUs"
    lacking = [f"--{name}" for name in run.needs if not args.rivals[name]]
    return f"it needs {' and '.join(lacking)}" if lacking else None


def done(run: Run, args) -> bool:
    """Whether the result is of the present commit."""
    path = args.results / file_of(run, args)
    if not path.exists() or args.again or not args.clean:
        return False
    report = json.loads(path.read_text())
    try:
        return provenance(path.name, report).commit == args.commit[:7]
    except ValueError:
        return False


def words_of(arguments: str, args, folder: Path) -> list[str]:
    """The arguments of a part, with the rivals that there are; of arms those that have theirs."""
    words = []
    for word in arguments.split():
        name = word.strip("{}")
        if word == OTHERS:
            words.append(others(args.device))
        elif word.startswith("{") and name in RIVALS:
            words += [f"--{name}", args.rivals[name]] if args.rivals[name] else []
        elif words[-1:] == ["--arms"] and not args.rivals["triton-liger"]:
            words.append(",".join(arm for arm in word.split(",") if not arm.startswith("triton")))
        else:
            words.append(word.replace("{folder}", str(folder)))
    if "--cap-gb" in words and args.device == "cuda":
        at, total = words.index("--cap-gb"), torch.cuda.get_device_properties(0).total_memory / 1e9
        if float(words[at + 1]) > total:  # a smaller card
            del words[at : at + 2]
    return words


def call(command: list[str], seconds: float, variables: dict[str, str]) -> str | None:
    """Runs a command, with all processes that it starts; why it failed, or None."""
    process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, **variables}, start_new_session=True)
    try:
        code = process.wait(seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return f"not done after {seconds / MINUTES:.0f} minutes"
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return f"ended with status {code}" if code else None


def merged(reports: list[dict]) -> dict:
    """The parts of a result as one: its rows, one after another."""
    first = reports[0]
    if "rows" not in first:
        return first
    for report in reports:
        if "nf4" in report:  # which a part has for all of its rows
            for row in report["rows"]:
                row["nf4"] = report["nf4"]
    return {**first, "rows": [row for report in reports for row in report["rows"]]}


def parts_of(run: Run, name: str, args) -> Iterator[tuple[list[str], Path]]:
    """(command, the file that it writes) of each part."""
    for i, arguments in enumerate([run.tiny] if args.tiny else run.parts):
        folder = args.work / f"{name}-{i}"
        out = folder if run.writes else folder / "result.json"
        words = words_of(arguments, args, folder)
        yield [sys.executable, str(ROOT / run.script), *words, "--out", str(out)], folder / (run.writes or out.name)


def measure(run: Run, name: str, args) -> str | None:
    """Makes a result; why it failed, or None."""
    reports = []
    for command, path in parts_of(run, name, args):
        path.parent.mkdir(parents=True, exist_ok=True)
        finished = path.with_suffix(".done")
        if args.again or not args.clean:
            finished.unlink(missing_ok=True), path.unlink(missing_ok=True)
        if not finished.exists():
            print(f"\n$ {' '.join(command)}", flush=True)
            if failed := call(command, run.minutes * MINUTES, dict(run.environment)):
                return failed
            finished.touch()
        reports.append(json.loads(path.read_text()))
    report = merged(reports)
    try:
        provenance(file_of(run, args), report)
    except ValueError as error:
        return str(error)
    args.results.mkdir(parents=True, exist_ok=True)
    (args.results / file_of(run, args)).write_text(json.dumps(report, indent=1) + "\n")
    return None


def arguments(argv=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--only", metavar="NAME,NAME", help=f"of {', '.join(RUNS)}")
    add("--list", action="store_true", help="measure nothing")
    add("--again", action="store_true", help="also what is done at this commit")
    add("--tiny", action="store_true", help="a dry run, whose results stay in --work")
    add("--no-tables", action="store_true", help="leave the pages as they are")
    add("--work", type=Path, default=ROOT / "out" / "measure", help="default: %(default)s")
    for name in RIVALS:
        add(f"--{name}", metavar="DIR", default=os.environ.get(f"{name.upper().replace('-', '_')}_DIR"))
    args = parser.parse_args(argv)
    args.only = args.only.split(",") if args.only else [*RUNS]
    if unknown := set(args.only) - RUNS.keys():
        parser.error(f"there is no {', '.join(sorted(unknown))}; there is {', '.join(RUNS)}")
    args.device = "cuda" if torch.cuda.is_available() and not args.tiny else "cpu"
    args.rivals = {name: getattr(args, name.replace("-", "_")) for name in RIVALS}
    args.card, args.gpus, args.commit = card(args.device), torch.cuda.device_count(), commit(ROOT)
    args.clean = bool(args.commit) and not args.commit.endswith("+")
    args.work = args.work.resolve() / ("tiny" if args.tiny else args.card) / (args.commit or "no-commit")
    args.results = args.work if args.tiny else RESULTS
    return args


def main(argv=None) -> int:
    args = arguments(argv)
    failures = {}
    for name, run in RUNS.items():
        if name not in args.only:
            continue
        why = obstacle(run, args) or ("it is done at this commit" if done(run, args) else None)
        if args.list or why:
            print(f"{name} ({file_of(run, args)}): {'skipped: ' + why if why else 'to be measured'}", flush=True)
            continue
        began = time.monotonic()
        failed = measure(run, name, args)
        if failed:
            failures[name] = failed
        print(f"{name}: {failed or f'{time.monotonic() - began:.0f} s'}", flush=True)
    if not (args.list or args.tiny or args.no_tables):
        failed = call([sys.executable, str(FOLDER / "plot.py")], 10 * MINUTES, {})
        failures |= {"tables": failed} if failed else {}
    for name, failed in failures.items():
        print(f"{name} failed: {failed}")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
