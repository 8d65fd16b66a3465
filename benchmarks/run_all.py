"""Runs every benchmark whose results the pages show, on this machine, and fills the tables: `make measure`.

    python benchmarks/run_all.py --triton-liger DIR --trl DIR     everything that this machine can run, for hours
    python benchmarks/run_all.py --only lora,e2e-moe              some of it
    python benchmarks/run_all.py --deadline 480 --work DIR        what can be done in 8 minutes; again, and it goes on
    python benchmarks/run_all.py --collect h200 --work DIR        results of the parts in a folder from another machine
    python benchmarks/run_all.py --list                           what there is, and what is done at this commit
    python benchmarks/run_all.py --tiny                           on a CPU, with tiny models: whether all of it works

Each benchmark has a file of benchmarks/results, named after the card. It is made of parts: commands with a limit of
time, which run beside each other in the order of RUNS, each on GPUs of its own, as soon as these are free. A part has a
folder in --work, with its log. Parts that are done stay there, so that the same command goes on where it was cut off,
also on another machine to which the folder is brought. What is done at the present commit is skipped: the last one that
changed what is measured. A tree with changes has no commit to compare, and is measured again.

With --deadline, nothing begins that would not end before, and what still runs then is ended. How long a part takes is
known from the last time, at whatever commit; until then it is its limit. Scripts that keep each row as it comes begin
all the same, and go on the next time.

Without --triton-liger, --trl, --verl, --veomni or --mamba-ssm (folders of unpacked wheels, or of sources) these rivals
are left out, and what needs them is skipped.
"""

import argparse
import json
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from liger_kernel.measure.machine import commit
from provenance import RESULTS, ROOT, card_of, provenance
from scheduler import ENDING, Machine, Part, call, read

FOLDER = Path(__file__).parent
MINUTES = 60
RIVALS = ("triton-liger", "trl", "verl", "veomni", "mamba-ssm")
#: Operators that have a file of their own; operators.json has the others.
EXPERTS = (
    "fused_experts,gated_rms_norm,xielu,attention_residuals,causal_softmax,gated_packed,mhc_pre,mhc_coefficients,"
    "mhc_post_res,neighborhood_attention,route,expert_load"
)
FEW_CLASSES = "class_logits,linear_multi_head,linear_topk_divergence"
MIXERS = "causal_conv1d,delta_gates,channel_gates"
RECURRENCES = "gated_delta_rule,channel_delta_rule"
QK = "qk_norm_rope"
APART = {QK, *",".join((EXPERTS, FEW_CLASSES, MIXERS, RECURRENCES)).split(",")} - {"fused_experts"}
OTHERS = "{others}"  # the operators that are not in APART; on a CPU all


@dataclass(frozen=True)
class Run:
    """A result, and the commands that make it: arguments of a script, each of which writes a part.

    Args:
        file: in benchmarks/results; {card} is filled in.
        script: in the repository.
        parts: the arguments; {name} stands for a rival's option, which is left out where the rival is. The operators of
            bench.py are parts of their own.
        minutes: the limit of each part.
        tiny: the arguments of a dry run on a CPU; none: there is no dry run.
        where: "gpu", "cpu" or both.
        gpus: how many each part needs.
        needs: rivals without which there is nothing to measure.
        writes: the file that the script writes into the folder that it is given; empty: it is given a file.
        page: the file in a part's folder that is a page, and that page.
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
    page: tuple[str, str] = ("", "")
    environment: tuple[tuple[str, str], ...] = ()


BENCH, E2E, LORA, RANKS, TRL = (
    f"benchmarks/{name}.py" for name in ("bench", "e2e", "lora", "expert_parallel", "trl_steps")
)
#: These keep each row as it comes, and go on from there.
GO_ON = {BENCH, E2E, LORA, RANKS, TRL}
TINY_BENCH = "--device cpu --rivals torch --seconds 0.001 --op"
TINY_E2E = "--models tiny --arms plain,ours --lengths 32 --batch 2 --gpus 1"
TINY_LORA = "--models tiny --shapes 2x32 --checkpointing on --rounds 1 --arms plain,ours"
LONG = "--models llama-8b --checkpointing on --rounds 1"
FULL = "--gpus 1 --cap-gb 80 --profile --arms plain,triton,ours {triton-liger}"
SEGMENTS = (("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"),)
CAPS = 16, 24, 40, 48  # GB, of smaller cards
MEASURED = "llama", "qwen3", "phi3", "gemma2", "gemma3_text", "qwen2_5_vl"
EXPERT_FAMILIES = "mixtral", "qwen3_moe"  # whose kernels liger's tuner still compares after minutes
#: In the order in which they run: what most pages show first.
RUNS = {
    "lora": Run("lora-{card}.json", LORA, (
        "--models llama-1b --checkpointing off --arms plain,triton,peft,ours,frozen {triton-liger}",
        "--models llama-8b --checkpointing on --rounds 1 --arms plain,triton,peft,ours,frozen {triton-liger}",
        "--models qwen3-4b --checkpointing on --rounds 1 --arms plain,triton,ours {triton-liger}",
        "--models qwen3-moe-4b --checkpointing on --rounds 1 --arms plain,peft,ours",
    ), 10, TINY_LORA),
    "lora-nf4": Run("lora-nf4-{card}.json", LORA, (
        "--models llama-8b --checkpointing on --rounds 1 --arms peft,ours --nf4",
    ), 10, TINY_LORA),
    "lora-base": Run("lora-base-{card}.json", LORA, tuple(
        f"--models {model} --checkpointing {kept} --arms ours,ours+int8,ours+fp8"
        for model, *every in (("llama-8b", "on", "off"), ("llama-1b", "on", "off"), ("qwen3-moe-4b", "on"))
        for kept in every
    ), 8, TINY_LORA + ",ours+int8"),
    "lora-plan": Run("lora-plan-{card}.json", LORA, tuple(
        f"--models {model} --checkpointing off --rounds 1 --budget 70GiB "
        "--arms plain,triton,ours,ours+plan {triton-liger}"
        for model in ("llama-8b", "qwen2.5-7b")
    ), 10, TINY_LORA + ",ours+plan", environment=SEGMENTS),
    "lora-fits": Run("lora-fits-{card}.json", LORA, tuple(
        f"--models llama-8b --checkpointing on --rounds 1 --shrink --cap-gb {cap} "
        "--arms plain,triton,ours,ours+int8,plain+nf4,ours+nf4 {triton-liger}"
        for cap in CAPS
    ), 10, TINY_LORA + " --shrink --cap-gb 16", environment=SEGMENTS),
    "long": Run("long-{card}.json", LORA, (
        *(f"{LONG} --shapes {shape} --arms plain,triton,ours {{triton-liger}}" for shape in ("1x16384", "1x32768")),
        *(f"{LONG} --shapes 1x131072 --arms {arm}" for arm in ("ours", "ours+host")),
        f"{LONG} --shapes 1x262144 --arms ours+host",
    ), 15, TINY_LORA, environment=SEGMENTS),
    "families": Run("families-{card}.json", "examples/train.py", tuple(
        f"--family {family} --steps 14 --noise-steps 6" + " {triton-liger}" * (family not in EXPERT_FAMILIES)
        for family in (*MEASURED, *EXPERT_FAMILIES)
    ), 8, "--family llama --device cpu --batch 1 --length 32 --steps 9 --noise-steps 9", ("gpu", "cpu"),
        writes="train.json"),
    "e2e": Run("e2e-{card}.json", E2E, (
        *(f"--models llama-1b --lengths {lengths} {FULL}" for lengths in ("512,1024,2048", "4096,8192", "16384,32768")),
        *(f"--models {model} --lengths 2048,8192 {FULL}" for model in ("gemma2-2b", "llama-3b", "qwen3-1.7b")),
    ), 10, TINY_E2E),
    "e2e-x2": Run("e2e-{card}x2.json", E2E, (
        "--models llama-8b --lengths 2048 --gpus 2 --cap-gb 80 --profile --arms plain,triton,ours {triton-liger}",
    ), 10, gpus=2),
    "e2e-x4": Run("e2e-{card}x4.json", E2E, tuple(
        f"--models llama-8b --lengths {length} --batch 4 --no-shrink --gpus 4 --cap-gb 80 --budget 70GiB --profile "
        "--arms plain,triton,ours,ours+plan {triton-liger}"
        for length in (2048, 4096, 8192, 16384)
    ), 10, TINY_E2E.replace("--gpus 1", "--gpus 2 --no-shrink"), gpus=4),
    "e2e-plan-x2": Run("e2e-plan-{card}x2.json", E2E, (
        "--models llama-8b --lengths 2048 --gpus 2 --cap-gb 80 --budget 58GiB --arms plain,ours,ours+plan",
    ), 10, TINY_E2E.replace("--gpus 1", "--gpus 2") + " --arms ours+plan", gpus=2),
    "e2e-fits": Run("e2e-fits-{card}.json", E2E, tuple(
        f"--models {model} --lengths 2048 --batch 4 --gpus 1 --cap-gb {cap} --arms plain,triton,ours {{triton-liger}}"
        for model, caps in (("llama-1b", CAPS[:2]), ("llama-3b", CAPS[2:])) for cap in caps
    ), 10, TINY_E2E + " --cap-gb 16", environment=SEGMENTS),
    "e2e-moe": Run("e2e-moe-{card}.json", E2E, (
        "--models qwen3-moe-4b --lengths 2048 --gpus 1 --arms plain,triton,ours {triton-liger}",
        "--models mixtral-3b --lengths 2048 --gpus 1 --arms plain,ours",
    ), 10, TINY_E2E),
    "e2e-sinks": Run("e2e-sinks-{card}.json", E2E, (
        "--models gpt-oss-4b --lengths 2048 --batch 4 --gpus 1 --no-checkpointing --arms plain,ours",
        "--models gpt-oss-4b --lengths 8192 --batch 1 --gpus 1 --no-checkpointing --arms plain,ours",
    ), 10, TINY_E2E),
    "e2e-packed": Run("e2e-packed-{card}.json", E2E, (
        "--models qwen3.5-2b --lengths 1024 --gpus 1 --no-checkpointing --arms ours,ours+packed,plain",
        "--models llama-1b --lengths 2048 --gpus 1 --no-checkpointing "
        "--arms ours,ours+packed,ours+padded,plain,plain+packed,plain+padded",
        "--models llama-1b --lengths 2048 --gpus 1 --no-checkpointing "
        "--arms ours+compile,ours+compile+ones,plain+compile,plain+compile+ones",
    ), 10, TINY_E2E + " --no-checkpointing"),
    "e2e-hybrids": Run("e2e-hybrids-{card}.json", E2E, tuple(
        f"--models {model} --batch 4 --lengths 2048 --gpus 1 --no-checkpointing --arms plain,ours,ours+packed"
        for model in ("nemotron-h-2b", "lfm2-1.2b")
    ), 10, TINY_E2E + " --no-checkpointing --arms plain,ours,ours+packed"),
    "e2e-small": Run("e2e-small-{card}.json", E2E, tuple(
        f"--models llama-1b --batch {batch} --lengths {length} --gpus 1 --no-checkpointing "
        "--arms plain,plain+compile,ours,ours+compile,ours+adamw+passes,ours+adamw+graph"
        for batch, length in ((1, 512), (4, 512), (8, 2048))
    ), 10, TINY_E2E + " --no-checkpointing"),
    "e2e-budget": Run("e2e-budget-{card}.json", E2E, (
        *(f"--models {model} --lengths 2048 --gpus 1 --cap-gb 80 --budget 70GiB --arms ours,ours+plan"
          for model in ("llama-1b", "llama-3b")),
        "--models llama-1b --lengths 8192 --gpus 1 --cap-gb 80 --budget 62GiB --arms ours,ours+plan",
    ), 10, TINY_E2E),
    "operators": Run("{card}.json", BENCH, (f"--op {OTHERS} {{triton-liger}}",), 10,
        f"{TINY_BENCH} rms_norm --shape 4,16", ("gpu", "cpu")),
    "experts": Run("experts-{card}.json", BENCH, (f"--op {EXPERTS} {{triton-liger}}",), 10,
        f"{TINY_BENCH} xielu --shape 4,16"),
    "topk": Run("topk-{card}.json", BENCH, ("--op linear_topk_divergence --rivals trl {trl}",), 10, needs=("trl",)),
    "topk-tools": Run("topk-tools-{card}.json", BENCH, (f"--op {FEW_CLASSES} {{verl}} {{veomni}}",), 10,
        f"{TINY_BENCH} class_logits --shape 33,16,101"),
    "qk": Run("qk-{card}.json", BENCH, (f"--op {QK}",), 10, f"{TINY_BENCH} {QK} --shape 1,2,3,64"),
    "mixers": Run("mixers-{card}.json", BENCH, (
        f"--op {MIXERS}",
        # torch.compile unrolls the loops over chunks, for minutes.
        f"--op {RECURRENCES} --rivals torch",
        "--op mamba2_scan --rivals torch,mamba-ssm {mamba-ssm}",
    ), 10, f"{TINY_BENCH} causal_conv1d --shape 2,8,21"),
    "replacements": Run("replacements-{card}.json", "benchmarks/replacements.py", ("{trl}",), 5, needs=("trl",)),
    "trl": Run("trl-{card}.json", TRL, tuple(
        f"{options} --arms plain,triton,ours,ours+256MiB {{triton-liger}} {{trl}}"
        for options in ("--method dpo --models llama-8b", "--method dpo --models llama-8b --lora 16",
                        "--method grpo --models llama-1b --batch 16 --completion 1024")
    ), 10, "--models tiny --batch 2 --prompt 8 --completion 8 --steps 2 --arms plain,ours,ours+256MiB {trl}",
        needs=("trl",)),
    "eight-bit": Run("eight-bit-{card}.json", "benchmarks/eight_bit.py", ("",), 8),
    "eight-bit-products": Run("eight-bit-products-{card}.json", BENCH, ("--op scaled_matmul",), 10,
        f"{TINY_BENCH} scaled_matmul --shape 33,64,48"),
    "eight-bit-full": Run("eight-bit-full-{card}.json", "benchmarks/eight_bit_full.py", ("",), 8),
    "errors": Run("errors-{card}.json", "benchmarks/errors.py", ("--page {folder}/errors.md",), 8,
        "--device cpu --cases rms_norm --page {folder}/errors.md", ("gpu", "cpu"),
        page=("errors.md", "docs/errors-{device}.md")),
    "expert-parallel": Run("expert-parallel-{card}x2.json", RANKS, (
        *(f"--gpus 2 --layers 8 --tokens 4096,16384 --routing {routing} --arms ours,fsdp+patch,ep"
          for routing in ("balanced", "random")),
        "--gpus 2 --layers 24 --tokens 16384 --routing random --arms ours,fsdp+patch",
        "--gpus 2 --layers 8 --tokens 16384 --routing random --no-checkpointing --arms ours,fsdp+patch",
    ), 10, gpus=2),
    "expert-parallel-x4": Run("expert-parallel-{card}x4.json", RANKS, tuple(
        f"--gpus 4 --layers 24 --tokens {tokens} --routing {routing} --arms fsdp,fsdp+patch,ep,ep+patch,ours"
        for routing in ("balanced", "random") for tokens in (4096, 16384)
    ), 10, "--tiny --gpus 2 --routing balanced --arms fsdp,ours", gpus=4),
    "batch-invariance": Run("batch-invariance-{card}.json", "benchmarks/batch_invariance.py", (
        "--models tiny:llama,tiny:qwen2,tiny:qwen3,tiny:mistral,tiny:gemma2,tiny:gemma3_text,tiny:phi3",
        "--models tiny:olmo2,tiny:mixtral,tiny:qwen3_moe,tiny:gpt_oss,tiny:qwen3_next,tiny:falcon_h1",
        "--models llama-1b,qwen3-1.7b,qwen3-moe-4b --layers 4",
    ), 8, "--models tiny:llama --documents 4 --longest 24 --tokens 0"),
    "gemm-bits": Run("gemm-bits-{card}.json", "benchmarks/gemm_bits.py", ("",), 5),
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
    if args.tiny and not run.tiny:
        return "it has no dry run"
    if not args.tiny and ("gpu" if args.device == "cuda" else "cpu") not in run.where:
        return "it needs a GPU" if args.device == "cpu" else "it is for CPUs"
    if args.device == "cuda" and run.gpus > args.gpus:
        return f"it needs {run.gpus} GPUs"
    lacking = [f"--{name}" for name in run.needs if not args.rivals[name]]
    return f"it needs {' and '.join(lacking)}" if lacking else None


def done(run: Run, args) -> bool:
    """Whether the result is of the present commit, and whole."""
    path = args.results / file_of(run, args)
    if args.again or not args.clean or not (report := read(path)) or "missing" in report:
        return False
    try:
        return provenance(path.name, report).commit == args.commit[:7]
    except ValueError:
        return False


def words_of(arguments: str, args, folder: Path) -> list[str]:
    """The arguments of a part, with the rivals that there are; of arms those that have theirs."""
    words = []
    for word in arguments.split():
        name = word.strip("{}")
        if word.startswith("{") and name in RIVALS:
            words += [f"--{name}", args.rivals[name]] if args.rivals[name] else []
        elif words[-1:] == ["--arms"] and not args.rivals["triton-liger"]:
            words.append(",".join(arm for arm in word.split(",") if not arm.startswith("triton")))
        else:
            words.append(word.replace("{folder}", str(folder)))
    if "--cap-gb" in words and args.device == "cuda" and torch.cuda.is_available():
        at, total = words.index("--cap-gb"), torch.cuda.get_device_properties(0).total_memory / 1e9
        if float(words[at + 1]) > total:  # a smaller card
            del words[at : at + 2]
    return words


def parts_of(run: Run, name: str, args) -> Iterator[Part]:
    """The parts of a run: of bench.py one for each operator."""
    every = [run.tiny] if args.tiny else run.parts
    if run.script == BENCH:
        every = [arguments.replace(OTHERS, others(args.device)) for arguments in every]
        every = [
            re.sub(r"--op \S+", f"--op {operator}", arguments)
            for arguments in every
            for operator in re.search(r"--op (\S+)", arguments)[1].split(",")
        ]
    for i, arguments in enumerate(every):
        folder = args.work / f"{name}-{i}"
        path = folder / (run.writes or "result.json")
        words = words_of(arguments, args, folder) + ["--go-on"] * (run.script in (BENCH, LORA))
        command = [sys.executable, str(ROOT / run.script), *words, "--out", str(folder if run.writes else path)]
        gpus = run.gpus if args.device == "cuda" else 1
        yield Part(name, arguments, folder, path, tuple(command), gpus, run.minutes * MINUTES, run.script in GO_ON,
                   run.environment)  # fmt: skip


def merged(reports: list[dict]) -> dict:
    """The parts of a result as one: its rows, one after another, or its families."""
    first = reports[0]
    if "rows" not in first:  # of train.py
        return {report["settings"]["family"]: report for report in reports}
    differ = [name for name in ("cap_gb", "date") if len({report["machine"].get(name) for report in reports}) > 1]
    for report in reports:  # what a part has for all of its rows
        for row in report["rows"]:
            row |= {"nf4": report["nf4"]} if "nf4" in report else {}
            row |= {name: report["machine"].get(name) for name in differ}
    machine = first["machine"] | dict.fromkeys(differ)
    return {**first, "machine": machine, "rows": [row for report in reports for row in report["rows"]]}


def gather(run: Run, name: str, args) -> str | None:
    """Puts the parts of a result together, if all are done or --partial takes what there is; why it failed, or
    None."""
    parts = [*parts_of(run, name, args)]
    missing = [part for part in parts if not part.done]
    if missing and not args.partial:
        failed = [f"{part.folder.name} {part.failed}" for part in missing if part.failed]
        return ", ".join(failed) or f"{len(missing)} of {len(parts)} parts are not done"
    reports = [report for part in parts if (report := read(part.path))]
    if not reports:
        return "no part is done"
    report = merged(reports)
    if missing:
        report["missing"] = [part.arguments for part in missing]
    try:
        provenance(file_of(run, args), report)
    except ValueError as error:
        return str(error)
    args.results.mkdir(parents=True, exist_ok=True)
    (args.results / file_of(run, args)).write_text(json.dumps(report, indent=1) + "\n")
    file, page = run.page
    if page and not missing and not args.tiny:
        shutil.copyfile(parts[0].folder / file, ROOT / page.format(device=args.device))
    return None


def arguments(argv=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--only", metavar="NAME,NAME", help=f"of {', '.join(RUNS)}")
    add("--list", action="store_true", help="measure nothing")
    add("--collect", metavar="CARD", help="measure nothing, and put together the parts of that card in --work")
    add("--partial", action="store_true", help="also results that lack parts")
    add("--again", action="store_true", help="also what is done at this commit")
    add("--retry", action="store_true", help="also parts that failed at this commit")
    add("--deadline", type=float, metavar="SECONDS", help="from now")
    add("--gpus", type=int, metavar="N", help="default: all; with --tiny: so many runs beside each other")
    add("--tiny", action="store_true", help="a dry run, whose results stay in --work")
    add("--no-tables", action="store_true", help="leave the pages as they are; so does --deadline")
    add("--work", type=Path, default=ROOT / "out" / "measure", help="default: %(default)s")
    for name in RIVALS:
        add(f"--{name}", metavar="DIR", default=os.environ.get(f"{name.upper().replace('-', '_')}_DIR"))
    args = parser.parse_args(argv)
    args.only = args.only.split(",") if args.only else [*RUNS]
    if unknown := set(args.only) - RUNS.keys():
        parser.error(f"there is no {', '.join(sorted(unknown))}; there is {', '.join(RUNS)}")
    args.until = args.deadline and time.monotonic() + args.deadline - ENDING
    args.device = "cuda" if torch.cuda.is_available() and not args.tiny else "cpu"
    folders = {name: getattr(args, name.replace("-", "_")) for name in RIVALS}
    args.rivals = {name: folder and os.path.abspath(folder) for name, folder in folders.items()}
    most = torch.cuda.device_count() if args.device == "cuda" else args.gpus or 1
    args.gpus = min(args.gpus or most, most)
    args.card, args.commit = args.collect or card(args.device), commit(ROOT)
    if args.collect:
        args.device = "cpu" if args.collect.startswith("cpu") else "cuda"
    args.clean = bool(args.commit) and not args.commit.endswith("+")
    args.work = args.work.resolve() / ("tiny" if args.tiny else args.card) / (args.commit or "no-commit")
    args.results = args.work if args.tiny else RESULTS
    return args


def measure(args) -> dict[str, str]:
    """Measures what is to be measured; why runs failed."""
    failures, left, every = {}, {}, {}
    for name, run in RUNS.items():
        if name not in args.only:
            continue
        why = obstacle(run, args) or ("it is done at this commit" if done(run, args) else None)
        parts = [] if why else [*parts_of(run, name, args)]
        if args.again or not args.clean:
            for part in () if args.list else parts:
                part.forget()
        todo = [part for part in parts if not part.done and (args.retry or not part.failed)]
        if args.list or why:
            what = f"skipped: {why}" if why else f"to be measured: {len(todo)} of {len(parts)} parts"
            print(f"{name} ({file_of(run, args)}): {what}", flush=True)
            continue
        left[name], every[name] = todo, parts
    if args.list:
        return {}

    def finish(name):
        if failed := gather(RUNS[name], name, args):
            failures[name] = failed
        seconds = sum(machine.known.seconds["took"].get(part.key, 0) for part in every[name])
        print(f"{name}: {failed or f'{seconds:.0f} s'}", flush=True)

    machine = Machine(args)
    for name in [name for name, todo in left.items() if not todo]:
        finish(name)
    for part in machine.run([part for todo in left.values() for part in todo]):
        left[part.name].remove(part)
        if not left[part.name]:
            finish(part.name)
    for name in [name for name, todo in left.items() if todo]:
        finish(name)
    return failures


def main(argv=None) -> int:
    args = arguments(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # and what runs is ended
    if args.collect:
        begun = lambda name: any(part.folder.exists() for part in parts_of(RUNS[name], name, args))
        found = {name: gather(RUNS[name], name, args) for name in args.only if begun(name)}
        for name, failed in found.items():
            print(f"{name}: {failed or file_of(RUNS[name], args)}")
        failures = {name: failed for name, failed in found.items() if failed}
    else:
        failures = measure(args)
    if not (args.list or args.tiny or args.no_tables or args.deadline):
        failed = call([sys.executable, str(FOLDER / "plot.py")], 10 * MINUTES, {})
        failures |= {"tables": failed} if failed else {}
    for name, failed in failures.items():
        print(f"{name} failed: {failed}")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
