"""The tables of docs/cards.md and of the gain of each family: whole models, out of every result that has some.

A new result appears by itself: that of a card which has no section yet makes one.
"""

import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from liger_kernel.measure.shapes import SHAPES
from provenance import Provenance, provenance, read, results
from tables import OURS, cases, label, time
from tabulate import tabulate

#: The beginning of a file's name (the longest that fits): how the models of its rows are trained. measure.py gives
#: files these names.
METHODS = {
    "e2e": "all weights, checkpointed",
    "e2e-budget": "all weights, checkpointed",
    "e2e-small": "all weights",
    "e2e-sinks": "all weights",
    "e2e-packed": "all weights",
    "e2e-hybrids": "all weights",
    "e2e-masked": "all weights, masked tokens",
    "families": "all weights",
    "lora": "LoRA",
    "long": "LoRA",
    "expert-parallel": "all weights, checkpointed",
}
#: What the options of an arm of this library are called.
OPTIONS = {
    "compile": "torch.compile",
    "adamw": "",
    "passes": "captured model",
    "graph": "captured step",
    "plan": "planned memory",
    "host": "inputs on the host",
    "packed": "documents packed into a row",
    "padded": "padded rows",
    "ones": "mask of ones",
    "int8": "base in int8",
    "fp8": "base in fp8",
    "ep": "expert parallelism",
    "fsdp": "FSDP2",
}
RIVALS = {
    "triton": "liger (Triton)", "plain+compile": "torch.compile", "mamba": "mamba-ssm",
    "ep": "transformers' expert parallelism",
}  # fmt: skip
#: The arms of expert_parallel.py that are this library's.
OVER_RANKS = {"ours": "ours+ep", "fsdp": "plain", "fsdp+patch": "ours+fsdp"}


@dataclass(frozen=True)
class Run:
    """Tokens per second of a GPU and peak memory in GB, with so many sequences."""

    speed: float
    memory: float
    batch: int


@dataclass(frozen=True)
class Row:
    """A model with one way to train it: what plain transformers, the rivals and this library do. `plain` is None where
    it was not run, or, with `exceeded`, was out of memory."""

    model: str
    method: str
    length: int
    of: Provenance
    plain: Run | None
    exceeded: bool
    rivals: dict[str, Run]
    ours: Run

    @property
    def base(self) -> Run | None:
        """Plain transformers, with mamba-ssm where it is faster with it."""
        runs = filter(None, (self.plain, self.rivals.get(RIVALS["mamba"])))
        return max(runs, key=lambda run: run.speed, default=None)

    @property
    def family(self) -> str:
        name = self.model.split(",")[0]
        return SHAPES[name][1] if name in SHAPES else name


def _method(file: str) -> str | None:
    fits = [name for name in METHODS if file.startswith(f"{name}-")]
    return METHODS[max(fits, key=len)] if fits else None


def _measured(file, report) -> Iterator[tuple[tuple[str, str, int, int | None], str, Run | None]]:
    """((model, method, length, batch of all arms), arm, its run: None where it was out of memory)."""
    method = _method(file)
    if "rows" not in report:  # of train.py
        for family, runs in report.items():
            settings, arms = runs["settings"], {"plain": "plain", "triton": "triton", "ours": "liger"}
            kept = ", checkpointed" * settings["gradient_checkpointing"]
            for arm, side in arms.items():
                if side in runs:
                    found = Run(runs[side]["tokens_per_second"], runs[side]["peak_bytes"] / 1e9, settings["batch"])
                    yield (family, method + kept, settings["length"], settings["batch"]), arm, found
        return
    shared = method
    for row in report["rows"]:
        limit = f", at most {row['cap_gb']:.0f} GB" if row.get("cap_gb") else ""
        arm, method = row.get("arm", ""), shared + limit
        if "shape" in row:  # of lora.py
            batch, length = map(int, row["shape"].split("x"))
            batch = row["results"][0].get("batch", batch) if row.get("results") else batch
            speeds = [result["tokens_per_second"] for result in row.get("results", ())]  # none: out of memory
            found = Run(statistics.median(speeds), row["results"][0]["peak_gb"], batch) if speeds else None
            base = "QLoRA (nf4)" if row.get("nf4", report.get("nf4")) or "+nf4" in arm else shared
            arm = arm.replace("+nf4", "")
            kept = ", checkpointed" * (row["checkpointing"] == "on")
            key = row["model"], base + kept + limit, length, None if limit else batch
        elif "job" in row:  # of expert_parallel.py
            job, result = row["job"], row["result"]
            batch = job["tokens"] // job["length"]
            if "error" in result:
                continue
            found = Run(result["tokens_per_second"], result["peak_gb"], batch)
            routing = "" if job["routing"] == "random" else f", {job['routing']} routing"
            key = f"qwen3-30b-a3b, {job['layers']} layers{routing}", method, job["length"], batch
            arm = OVER_RANKS.get(job["arm"], job["arm"])
        else:
            result, graphs = row["result"], {"passes", "graph"} & {*row["arm"].split("+")}
            # A graph's memory is no part of the peak.
            memory = result and result["reserved_gb" if graphs else "peak_gb"]
            found = result and Run(result["tokens_per_second"], memory, result["batch"])
            # Shapes of one length are told apart by the batch, unless arms take what fits.
            fixed = file.startswith("e2e-small-")
            key = row["model"], method, row["length"], result["batch"] if result and fixed else None
        yield key, arm, found


def rows_of(file: str, report) -> list[Row]:
    """A row for each arm of this library."""
    of, found = provenance(file, report), {}
    for key, arm, run in _measured(file, report):
        found.setdefault(key, {})[arm] = run
    rows = []
    for (model, method, length, _), arms in found.items():
        rivals = {name: run for arm, name in RIVALS.items() if (run := arms.get(arm))}
        plain, exceeded = arms.get("plain"), "plain" in arms and arms["plain"] is None
        for arm, run in arms.items():
            side, *options = arm.split("+")
            if side != "ours" or run is None:
                continue
            names = [name for option in options if (name := OPTIONS.get(option, option))]
            rows.append(Row(model, ", ".join([method, *names]), length, of, plain, exceeded, rivals, run))
    return rows


def whole_models() -> list[Row]:
    """The rows of every result that has whole models."""
    return [row for file in results() if _method(file) for row in rows_of(file, read(file))]


def _speed(run: Run | None, row: Row, name: str = "") -> str:
    if run is None:
        return "out of memory" if row.exceeded and not name else ""
    words = f"{run.speed:,.0f}"
    if row.plain and run is not row.plain:
        words += f" ({run.speed / row.plain.speed:.2f}x)"
    if name:
        words = f"{name}: {words}"
    return words + (f", batch {run.batch}" if run.batch != row.ours.batch else "")


def _line(row: Row) -> list[str]:
    best = max(row.rivals, key=lambda name: row.rivals[name].speed, default=None)
    rival = row.rivals.get(best)
    memory = " / ".join(f"{run.memory:.1f}" if run else "-" for run in (row.plain, rival, row.ours))
    batch = f"{row.ours.batch} x {row.length:,}" + (f", {row.of.gpus} GPUs" if row.of.gpus > 1 else "")
    speeds = _speed(row.plain, row), _speed(rival, row, best or "rival"), _speed(row.ours, row)
    return [row.model, row.method, batch, *speeds, memory, row.of.link, row.of.date, row.of.commit]


def _models(rows: list[Row]) -> str:
    headers = ["model", "method", "batch", "plain, tokens/s", "best rival", "this library", "GB: plain / rival / ours",
               "result", "date", "commit"]  # fmt: skip
    return tabulate(map(_line, sorted(rows, key=lambda row: (row.model, row.method, row.length))), headers,
                    tablefmt="github", disable_numparse=True)  # fmt: skip


def _operators(file: str, report) -> list[str] | None:
    """How much faster operators are than plain torch and than their best rivals: geometric means, and the slowest."""
    plain, best = {}, {}
    for key, rivals in cases(report["rows"]).items() if "rows" in report else ():
        ours = rivals.pop(OURS, None)
        if ours and rivals:
            best[key] = min(time(row, beside=[ours]) / time(ours, beside=[row]) for row in rivals.values())
        if ours and "torch" in rivals:
            plain[key] = time(rivals["torch"], beside=[ours]) / time(ours, beside=[rivals["torch"]])
    if not best:
        return None
    of, slowest = provenance(file, report), min(best, key=best.get)
    mean = lambda values: f"{statistics.geometric_mean(values):.2f}x" if values else ""
    dtype = report["machine"]["dtype"].split()[0]
    return [of.link, dtype, str(len(best)), mean(plain.values()), mean(best.values()),
            f"{best[slowest]:.2f}x, {label(slowest)}", of.date, of.commit]  # fmt: skip


def cards() -> str:
    """The sections of docs/cards.md: a card each, those with most whole models first, CPUs last."""
    models, operators, found = {}, {}, {}
    for file in results():
        report = read(file)
        of = provenance(file, report)
        found.setdefault(of.card, []).append(of)
        if line := _operators(file, report):
            operators.setdefault(of.card, []).append(line)
    for row in whole_models():
        models.setdefault(row.of.card, []).append(row)
    parts = []
    for card in sorted(found, key=lambda card: (card == "cpu", -len(models.get(card, ())), card)):
        devices = ", ".join(dict.fromkeys(of.device for of in found[card]))
        parts.append(f"## {card.upper()}\n\nMeasured on: {devices}.")
        if card in models:
            parts += ["Whole models:", _models(models[card])]
        if card in operators:
            headers = ["result", "dtype", "cases", "faster than plain torch", "than the best rival",
                       "the slowest against its best rival", "date", "commit"]  # fmt: skip
            parts += ["Operators, forward and backward:",
                      tabulate(operators[card], headers, tablefmt="github", disable_numparse=True)]  # fmt: skip
        versions = [[of.link, str(of.gpus), of.date, of.commit, of.in_words] for of in found[card]]
        headers = ["result", "devices", "date", "commit", "versions"]
        parts += ["Results:", tabulate(versions, headers, tablefmt="github", disable_numparse=True)]
    return "\n\n".join(parts)


def _range(values: list[float], form: str) -> str:
    low, high = format(min(values), form), format(max(values), form)
    return low if low == high else f"{low} to {high}"


def gains() -> str:
    """What each family gains on each card by each method, over all models and lengths of one result."""
    groups: dict[tuple[str, str, str, str], list[Row]] = {}
    for row in whole_models():
        if row.base:
            groups.setdefault((row.family, row.of.card, row.method, row.of.file), []).append(row)
    lines = []
    for (family, card, method, _), rows in sorted(groups.items()):
        same = [row for row in rows if row.base.batch == row.ours.batch]
        lines.append([
            family, card.upper(), method, ", ".join(dict.fromkeys(row.model for row in rows)),
            _range([row.ours.speed / row.base.speed for row in rows], ".2f") + "x",
            _range([100 * row.ours.memory / row.base.memory for row in same], ".0f") + " %" if same else "",
            rows[0].of.link,
        ])  # fmt: skip
    headers = ["family", "card", "method", "models", "speed of plain", "memory of plain, same batch", "result"]
    return tabulate(lines, headers, tablefmt="github", disable_numparse=True)
