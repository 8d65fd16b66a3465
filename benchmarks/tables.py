"""The tables of docs/ out of results: each function takes a result of benchmarks/results and gives Markdown."""

import json
import re
import statistics
from pathlib import Path

from tabulate import tabulate

ROOT = Path(__file__).resolve().parents[1]
FORWARD, BOTH = "forward", "forward+backward"
OURS, EAGER, TRITON = "ours", "torch", "liger (Triton)"
# Of each operator the first shape is shown, and of these one more: other widths, vocabularies and budgets that models
# have.
MORE = {
    ("cross_entropy", (8192, 128256)),
    ("fused_linear_cross_entropy", (16384, 2048, 248320)),
    ("linear_log_prob", (8192, 4096, 151936)),
    ("fused_experts", (16384, 2048, 768)),
}
#: What most models are trained with: the first rows of the tables, and those of the picture.
FIRST = (
    "rms_norm", "fused_add_rms_norm", "layer_norm", "rope", "gated", "cross_entropy", "fused_linear_cross_entropy",
    "fused_experts", "linear_log_prob", "linear_dpo", "linear_grpo", "linear_kto", "linear_distillation",
)  # fmt: skip
#: The cases of research operators, which have tables and a picture at the end.
RESEARCH = {
    name
    for path in (ROOT / "tests" / "research" / "cases").glob("*.py")
    for name in re.findall(r'^        name="(\w+)"', path.read_text(), re.M)
}
#: What a picture calls a run of train.py.
SIDES = {"plain": "plain", "triton": "liger (Triton)", "liger": "ours"}
#: And one of e2e.py.
ARMS = {"plain": "plain", "triton": "liger (Triton)", "ours": "ours"}


def cases(rows):
    """(case, shape, options) -> {rival: its row} of those that are timed, not called alone."""
    found = {}
    for row in rows:
        if f"eager {BOTH}" in row:
            name, options = row["case"], row["options"]
            if name == "fused_mlp":  # as gated_mlp was called where it keeps its input alone
                name, options = "gated_mlp", {**options, "recompute": True}
            key = name, tuple(row["shape"]), json.dumps(options)
            found.setdefault(key, {})[row["rival"]] = row
    return found


def named(rows):
    """The cases of the tables: of each operator the first, and MORE."""
    seen, chosen = set(), {}
    for key, rivals in cases(rows).items():
        name, shape, options = key
        if "bfloat16" in options or "recompute" in options and name != "gated_mlp" or OURS not in rivals:
            continue
        if name not in seen or (name, shape) in MORE:
            chosen[key] = rivals
        seen.add(name)
    return chosen


def parted(chosen):
    """(cases, those of research operators), each beginning with FIRST."""
    order = {name: place for place, name in enumerate(FIRST)}
    ordered = sorted(chosen, key=lambda key: order.get(key[0], len(order)))
    parts = [key for key in ordered if key[0] not in RESEARCH], [key for key in ordered if key[0] in RESEARCH]
    return [{key: chosen[key] for key in part} for part in parts]


def time(row, mode=BOTH, beside=()):
    """A call in a CUDA graph where it and those `beside` it can be captured; otherwise a call as it is. Compaction of
    ignored tokens and some rivals cannot be."""
    captured = all(f"gpu {mode}" in each for each in (row, *beside)) and row["options"].get("ignored", 0) == 0
    return row.get(f"gpu {mode}" if captured else f"eager {mode}")


def best_rival(rivals):
    return min((row for name, row in rivals.items() if name != OURS), key=time)


#: Options that no table names: the others tell the rows of a case apart.
UNNAMED = {
    "unlabelled", "weight_hard_loss", "weight_soft_loss", "transposed", "biases", "limit", "alpha", "up_offset",
}  # fmt: skip


def label(key):
    name, shape, options = key
    usual = ("ignored", 0.0), ("hot", 0.0)
    options = {k: v for k, v in json.loads(options).items() if k not in UNNAMED and (k, v) not in usual}
    if "max_bytes" in options:
        options["max_bytes"] = f"{options['max_bytes'] >> 20} MiB"
    values = ", ".join(str(v) if isinstance(v, str) else f"{k} {v}" for k, v in options.items())
    return f"{name} {'x'.join(map(str, shape))}" + (f" ({values})" if values else "")


def pair(row, digits, beside=()):
    times = (time(row, mode, beside) for mode in (FORWARD, BOTH))
    return " / ".join("-" if t is None else f"{t:.{digits}f}" for t in times)


def table(chosen, memory):
    lines = []
    for key, rivals in chosen.items():
        ours, best = rivals[OURS], best_rival(rivals)
        digits = 3 if time(ours) < 1 else 2 if time(ours) < 10 else 1
        line = [
            label(key),
            pair(ours, digits, [best]),
            f"{best['rival']}: {pair(best, digits, [ours])}",
            f"{time(best, beside=[ours]) / time(ours, beside=[best]):.2f}x",
        ]
        if memory:
            extra = [row[f"extra {BOTH}"] for row in (ours, best)]
            line.append(" / ".join(f"{mib:,.0f}" for mib in extra))
            line.append(format(ours[f"rate {BOTH}"], ".2f") if f"rate {BOTH}" in ours else "")
        lines.append(line)
    headers = [
        "case",
        "ours, ms",
        "best rival, ms",
        "faster",
        *(["MiB, ours / rival", "of the limit"] if memory else []),
    ]
    return tabulate(lines, headers, tablefmt="github", disable_numparse=True)


def alone(report):
    """Operators that had no rival in the run."""
    lines = []
    for key, rows in cases(report["rows"]).items():
        ours = rows[OURS]
        forward, both = (f"{time(ours, mode):.{3 if time(ours) < 1 else 2}f}" for mode in (FORWARD, BOTH))
        rates = [f"{ours[f'rate {mode}']:.2f}" for mode in (FORWARD, BOTH) if f"rate {mode}" in ours]
        lines.append([label(key), forward, both, f"{ours[f'extra {BOTH}']:,.0f}", " / ".join(rates)])
    headers = ["case", "forward, ms", "forward and backward, ms", "MiB", "of the limit"]
    return tabulate(lines, headers, tablefmt="github", disable_numparse=True)


def families(reports):
    lines = []
    for family, report in reports.items():
        plain, others = report["plain"], [report.get(side) for side in ("triton", "liger")]
        speeds = [
            r and f"{r['tokens_per_second']:,.0f} ({r['tokens_per_second'] / plain['tokens_per_second']:.2f}x)"
            for r in others
        ]
        memory = [r and f"{r['step_peak_bytes'] / 2**30:.1f} GiB" for r in (plain, *others)]
        lines.append(
            [family, f"{plain['parameters'] / 1e6:,.0f} M", f"{plain['tokens_per_second']:,.0f}", *speeds, *memory]
        )
    headers = [
        "family",
        "parameters",
        "plain, tokens/s",
        "liger (Triton)",
        "ours",
        "plain, memory",
        "liger (Triton)",
        "ours",
    ]
    return tabulate(lines, headers, tablefmt="github", disable_numparse=True)


def one_family(report):
    """Speed and memory of a Llama, in sentences."""
    runs = {side: report["llama"][side] for side in SIDES if side in report["llama"]}
    speed = {side: f"{run['tokens_per_second']:,.0f}" for side, run in runs.items()}
    memory = {side: f"{run['step_peak_bytes'] / 2**30:.1f} GiB" for side, run in runs.items()}
    rival = f", with liger's Triton kernels at {speed['triton']}" if "triton" in runs else ""
    return (
        f"A Llama with 1B parameters trains at {speed['liger']} tokens per second; plain at {speed['plain']}{rival}.\n"
        f"A step takes {memory['liger']} beyond the model's state; plain {memory['plain']}."
    )


def by_length(report):
    """model -> length -> arm -> the result of a run of e2e.py, None where it was out of memory."""
    found = {}
    for row in report["rows"]:
        found.setdefault(row["model"], {}).setdefault(row["length"], {})[row["arm"]] = row["result"]
    return found


def end_to_end(report, names=ARMS):
    lines = []
    for model, lengths in by_length(report).items():
        for length, arms in sorted(lengths.items()):
            line = [model, f"{length:,}"]
            for arm in names:
                result, plain = arms.get(arm), arms.get("plain")
                if not result:
                    line.append("out of memory" if arm in arms else None)
                    continue
                speed = f"{result['tokens_per_second']:,.0f}"
                if arm != "plain" and plain:
                    speed += f" ({result['tokens_per_second'] / plain['tokens_per_second']:.2f}x)"
                line.append(f"{speed}, {result['batch']}, {result['peak_gb']:.1f} GB")
            lines.append(line)
    headers = ["model", "length", *(f"{name}: tokens/s, batch, memory" for name in names.values())]
    return tabulate(lines, headers, tablefmt="github", disable_numparse=True)


def with_graphs(report):
    """A report whose captured arms have the memory that torch has reserved: a graph's is no part of the peak."""
    for row in report["rows"]:
        if {"passes", "graph"} & {*row["arm"].split("+")}:
            row["result"]["peak_gb"] = row["result"]["reserved_gb"]
    return report


def measured(names, rows):
    """The names of those arms that one of the rows has."""
    return {arm: name for arm, name in names.items() if any(arm in arms for arms in rows.values())}


def in_turns(report, first, **names):
    """A table with a row for each model and shape and a column for each arm of `names` that was measured, against the
    arm `first`."""
    shapes = {}
    for row in report["rows"]:
        if row["result"] is None:  # out of memory
            continue
        shape = row["model"], f"{row['result']['batch']} x {row['length']:,}"
        shapes.setdefault(shape, {})[row["arm"]] = row["result"]
    names = measured(names, shapes)
    lines = []
    for shape, arms in shapes.items():
        line = [*shape]
        for arm in names:
            if not (result := arms.get(arm)):
                line.append(None)
                continue
            ratio = ""
            if arm != first and first in arms:
                ratio = f" ({result['tokens_per_second'] / arms[first]['tokens_per_second']:.2f}x)"
            line.append(f"{result['tokens_per_second']:,.0f}{ratio}, {result['peak_gb']:.1f} GB")
        lines.append(line)
    return tabulate(lines, ["model", "batch", *names.values()], tablefmt="github", disable_numparse=True)


def forms(report):
    """Batches of whole, packed and padded rows: the plain model, where it was measured also with FLA or mamba-ssm, and
    ours. Ratios of ours are to the fastest of the plain ones."""
    names = {
        "": "whole rows", "+packed": "documents packed into one row", "+padded": "rows padded on the right",
        "+compile": "whole rows, torch.compile", "+compile+ones": "whole rows and a mask of ones, torch.compile",
    }  # fmt: skip
    rows = {}
    for row in report["rows"]:
        side, *form = row["arm"].partition("+")
        shape = row["model"], f"{row['result']['batch']} x {row['length']:,}", names["".join(form)]
        rows.setdefault(shape, {})[side] = row["result"]
    plain = {"plain": "plain", "fla": "plain with FLA", "mamba": "plain with mamba-ssm"}
    sides = measured({**plain, "ours": "ours"}, rows)
    lines = []
    for shape, arms in rows.items():
        words = {side: f"{found['tokens_per_second']:,.0f}, {found['peak_gb']:.1f} GB" for side, found in arms.items()}
        speeds = {side: found["tokens_per_second"] for side, found in arms.items()}
        for side in speeds.keys() - {"plain"}:
            others = plain if side == "ours" else ("plain",)
            if base := max((speeds[other] for other in others if other in speeds), default=None):
                words[side] += f" ({speeds[side] / base:.2f}x)"
        lines.append([*shape, *map(words.get, sides)])
    return tabulate(lines, ["model", "batch", "form", *sides.values()], tablefmt="github", disable_numparse=True)


def of_lora(report):
    """The rows of lora.py as those of e2e.py."""
    rows = []
    for row in report["rows"]:
        batch, length = map(int, row["shape"].split("x"))
        batch = row["results"][0].get("batch", batch) if row.get("results") else batch
        kept = "" if row["checkpointing"] == "on" else ", not checkpointed"
        shared = {"model": row["model"] + kept, "arm": row["arm"], "length": length, "result": None}
        rows.append(shared)
        if "results" not in row:  # out of memory
            continue
        rate = statistics.median(result["tokens_per_second"] for result in row["results"])
        peak = row["results"][0]["peak_gb"]
        shared["result"] = {"batch": batch, "tokens_per_second": rate, "peak_gb": peak}
    return {"rows": rows}


def eight_bit(report):
    """The table of eight_bit.py."""
    head = ["base", "product", "loss", "gradients", "farthest adapter", "trained"]
    lines = [
        [row["base"], f"{row['product']:.2%}", f"{row['loss']:+.5f}", f"{row['gradients']:.1%}", f"{row['worst']:.1%}",
         f"{row['trained']:.4f}"]
        for row in report["rows"]
    ]  # fmt: skip
    return tabulate(lines, head, tablefmt="github", disable_numparse=True)


def step_parts(report):
    """Where the time of a step of ours goes, in ms and as a part of the step. Communication overlaps with the rest."""
    results = [
        (model, length, arms["ours"]["profile"])
        for model, lengths in by_length(report).items()
        for length, arms in sorted(lengths.items())
        if arms.get("ours") and "profile" in arms["ours"]
    ]
    known = dict.fromkeys(name for *_, profile in results for name in profile["ms"])
    names = [name for name in known if any(profile["ms"].get(name, 0) >= 0.5 for *_, profile in results)]
    lines = [
        [model, f"{n:,}", *(f"{p['ms'].get(name, 0):,.0f} ({p['ms'].get(name, 0) / p['step']:.0%})" for name in names)]
        for model, n, p in results
    ]
    return tabulate(lines, ["model", "length", *names], tablefmt="github", disable_numparse=True)


def replacements(report):
    """What patches put in the place of others' code, beside that code."""
    rows = [
        {
            "part": row["part"],
            "original, ms": f"{row['original_ms']:.3g}",
            "ours, ms": f"{row['ours_ms']:.3g}",
            "of the original": f"{row['ratio']:.2f}",
            "MiB, original / ours": f"{row['original_mib']:,.0f} / {row['ours_mib']:,.0f}",
        }
        for row in report["rows"]
    ]
    return tabulate(rows, headers="keys", tablefmt="github", disable_numparse=True)


def by_base(report):
    """LoRA on weights in bfloat16 and in eight bits."""
    return in_turns(of_lora(report), "ours", **{"ours": "bfloat16", "ours+int8": "int8", "ours+fp8": "fp8"})


def lora(report):
    """The table of lora.py: a row for each model, base and shape, with and without checkpointing."""
    names = {"plain": "plain", "triton": "liger (Triton)", "peft": "ours, `lora=False`", "ours": "ours",
             "frozen": "ours, no adapters"}  # fmt: skip
    for row in report["rows"]:
        row["model"] += ", nf4" * bool(row.get("nf4", report.get("nf4")))
    return in_turns(of_lora(report), "plain", **names)


def over_ranks(report):
    """Experts over GPUs: a row for each arm."""
    names = {"fsdp": "FSDP2", "fsdp+patch": "FSDP2, patched", "ep": "transformers' expert parallelism",
             "ep+patch": "transformers' expert parallelism, patched", "ours": '`"liger"`, patched'}  # fmt: skip
    head = ["layers", "tokens per GPU", "routing", "", "tokens/s per GPU", "model TF/s per GPU", "peak memory",
            "communication that nothing hides"]  # fmt: skip
    lines = []
    for row in report["rows"]:
        job, found = row["job"], row["result"]
        if "error" in found:
            continue
        alone = found["profile"]["ms"]["communication alone"] / found["profile"]["step"]
        layers = f"{job['layers']}{'' if job['no_checkpointing'] else ', checkpointed'}"
        lines.append(
            [layers, f"{job['tokens']:,}", job["routing"], names[job["arm"]], f"{found['tokens_per_second']:,.0f}",
             f"{found['model_tflops']:.0f}", f"{found['peak_gb']:.1f} GB", f"{alone:.0%} of the step"]
        )  # fmt: skip
    return tabulate(lines, head, tablefmt="github", disable_numparse=True)


def invariant(report):
    """Rows of documents that differ from those of the document alone, without batch_invariant and with it."""
    lines = ["| model | rows compared | differ without | differ with | step |", "|---|---|---|---|---|"]
    for row in report["rows"]:
        name = row["model"].removeprefix("tiny:") + (", tiny" if ":" in row["model"] else ", 4 layers")
        step = f"{min(row['seconds on']) / min(row['seconds off']):.2f}x" if "seconds on" in row else ""
        lines.append(f"| {name} | {row['pairs']:,} | {row['off']:,} | {row['on']:,} | {step} |")
    return "\n".join(lines)


def what_fits(report):
    """The sequences of a step that fit into the memory of smaller cards, the peak and tokens/s: a row for each model
    and arm, a column for each card; of rows of e2e.py and of lora.py."""
    names = {"plain": "plain", "triton": "liger (Triton)", "ours": "ours", "ours+int8": "ours, int8",
             "plain+nf4": "plain, nf4", "triton+nf4": "liger (Triton), nf4", "ours+nf4": "ours, nf4"}  # fmt: skip
    caps, cells = sorted({row["cap_gb"] for row in report["rows"]}), {}
    for row, raw in zip(of_lora(report)["rows"] if "rank" in report else report["rows"], report["rows"]):
        found = row["result"]
        words = "out of memory"
        if found:
            words = f"{found['batch']} in {found['peak_gb']:.1f} GB, {found['tokens_per_second']:,.0f}"
        cells.setdefault((f"{row['model']}, {row['length']:,}", row["arm"]), {})[raw["cap_gb"]] = words
    order = sorted(cells, key=lambda of: (of[0], [*names].index(of[1])))
    lines = [[model, names[arm], *map(cells[model, arm].get, caps)] for model, arm in order]
    headers = ["model, tokens in a sequence", "", *(f"{cap:.0f} GB" for cap in caps)]
    return tabulate(lines, headers, tablefmt="github", disable_numparse=True)


def levels(report):
    """What a plan of memory measured of a layer at each level."""
    lines = []
    for row in report["rows"]:
        for costs in (row["result"] or {}).get("costs", ()):
            for level, cost in costs.items():
                count = row["result"]["levels"].get(level, 0)
                shape = f"{row['result']['batch']} x {row['length']:,}"
                line = [f"{cost['bytes'] / 1e6:,.0f}", f"{cost['seconds'] * 1e3:.1f}", str(count)]
                lines.append([row["model"], shape, f"`{level}`", *line])
    headers = ["model", "batch", "level", "MB of a layer", "ms of a layer", "layers in the plan"]
    return tabulate(lines, headers, tablefmt="github", disable_numparse=True)


def trl_steps(report):
    """Steps of TRL's trainers: a row for each method, a column for each arm."""
    lines, names = {}, {"plain": "TRL", "triton": "with liger (Triton)", "ours": "ours",
                    "ours+256MiB": "ours, 256 MiB of logits"}  # fmt: skip
    for row in report["rows"]:
        method = row["method"].upper() + (f", LoRA of rank {row['lora']}" if row["lora"] else "")
        pairs = "pairs" if row["method"] == "dpo" else "completions"
        shape = f"{row['batch']} {pairs} of {row['prompt']} + {row['completion']}"
        lines.setdefault((method, row["model"], shape), {})[row["arm"]] = row["result"]
    table = []
    for shape, arms in lines.items():
        line, plain = [*shape], arms.get("plain")
        for arm in names:
            if not (found := arms.get(arm)):
                line.append("out of memory" if arm in arms else None)
                continue
            ratio = f" ({plain['seconds'] / found['seconds']:.2f}x)" if plain and arm != "plain" else ""
            line.append(f"{found['seconds']:.2f}{ratio}, {found['peak_gb']:.1f} GB")
        table.append(line)
    headers = ["method", "model", "a step", *(f"{name}: s, memory" for name in names.values())]
    return tabulate(table, headers, tablefmt="github", disable_numparse=True)


def in_cpp(report):
    """The same training in Python, patched, and in C++."""
    settings, sides = report["settings"], (report["python"], report["cpp"])
    what = f"{settings['steps']} steps of {settings['batch']} x {settings['length']:,} tokens, {settings['dtype']}"
    parameters = f"Llama with {report['python']['parameters'] / 1e6:,.0f} M parameters"
    forms = {
        "tokens per second": lambda run: f"{run['tokens_per_second']:,.0f}",
        "peak memory": lambda run: f"{run['peak_bytes'] / 2**30:.2f} GiB",
        "from start to the first step": lambda run: f"{run['startup_seconds']:.1f} s",
    }
    lines = [[name, *map(form, sides)] for name, form in forms.items()]
    differ = f"{report['difference']:.1e}; allowed is {report['limit']:.1e}"
    lines.append([f"losses of the first {settings['noise_steps']} steps differ by", differ, ""])
    return tabulate(lines, [f"{parameters}, {what}", "Python", "C++"], tablefmt="github", disable_numparse=True)
