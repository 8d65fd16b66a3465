"""Runs every benchmark whose results the pages show, on this machine, and fills the tables: `make measure`.

    python benchmarks/run_all.py --triton-liger DIR --trl DIR     everything that this machine can run, for hours
    python benchmarks/run_all.py --only lora,e2e-moe              some of it
    python benchmarks/run_all.py --deadline 480 --work DIR        what can be done in 8 minutes; again, and it goes on
    python benchmarks/run_all.py --collect h200 --work DIR        results of the parts in a folder from another machine
    python benchmarks/run_all.py --list                           what there is, and what is done at this commit
    python benchmarks/run_all.py --tiny                           on a CPU, with tiny models: whether all of it works

Each benchmark has a file of benchmarks/results, named after the card. It is made of parts: commands with a limit of
time, which run beside each other in the order of RUNS, each on its own GPUs, as soon as these are free. A part has a
folder in --work, with its log. Parts that are done stay there, so that the same command goes on where it was cut off,
also on another machine to which the folder is brought. What is done at the present commit is skipped: the last one that
changed what is measured. A tree with changes has no commit to compare, and is measured again.

With --deadline, nothing begins that would not end before, and what still runs then is ended. How long a part takes is
known from the last time, at whatever commit; until then it is its limit. Scripts that keep each row as it comes begin
all the same, and go on the next time.

A measurement that goes on from one machine to the next may keep its parts in the repository (--work benchmarks/parts),
until the result is whole.

Without --triton-liger, --trl, --verl, --veomni, --mamba-ssm, --quack or --fla (folders of unpacked wheels, or of
sources) these rivals are left out, and what needs them is skipped.
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
from pathlib import Path

import torch
from liger_kernel.measure.machine import commit
from provenance import RESULTS, ROOT, card_of, provenance
from runs import APART, BENCH, GO_ON, LORA, OTHERS, RIVALS, RIVALS_OF_ARMS, RUNS, Run
from scheduler import ENDING, Machine, Part, call, read

FOLDER = Path(__file__).parent
MINUTES = 60


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
        elif words[-1:] == ["--arms"]:
            lacking = tuple(side for side, (name, _) in RIVALS_OF_ARMS.items() if not args.rivals[name])
            words.append(",".join(arm for arm in word.split(",") if not arm.startswith(lacking)))
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
    if "cpp" in first:  # of train_cpp.py
        return first
    if "rows" not in first:  # of train.py
        return {report["settings"]["family"]: report for report in reports}
    of_parts = lambda name: {report["machine"].get(name) for report in reports}
    differ = [name for name in ("cap_gb", "date", "commit") if len(of_parts(name)) > 1]
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
    if missing and "rows" in report:  # a family that is missing has no entry
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
