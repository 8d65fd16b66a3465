"""Writes the tables and pictures of docs/ out of benchmarks/results/*.json, which bench.py, e2e.py, lora.py and other
programs wrote.

    python benchmarks/plot.py            after a run, as bench.py --out benchmarks/results/h200.json
    python benchmarks/plot.py --check    exit status 1 where a page has another table than the results

TABLES says which table is made of which result. `make measure` runs the benchmarks, then this.
"""

import argparse
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import cards
import pictures
from provenance import provenance, read, results
from tables import (
    FIRST,
    alone,
    by_base,
    cases,
    eight_bit,
    end_to_end,
    families,
    forms,
    in_turns,
    invariant,
    lora,
    named,
    norms,
    of_lora,
    over_ranks,
    parted,
    replacements,
    step_parts,
    table,
    with_graphs,
)
from tabulate import tabulate

DOCS = Path(__file__).resolve().parents[1] / "docs"


@dataclass(frozen=True)
class Table:
    """A table of a page, between `<!-- name -->` and `<!-- end -->`, and the result that it is made of."""

    page: str
    name: str
    file: str
    make: Callable[[dict], str]


def of_models(report: dict) -> str:
    return table(parted(named(report["rows"]))[0], True)


def of_research(report: dict) -> str:
    return table(parted(named(report["rows"]))[1], True)


def of_all(report: dict) -> str:
    return table(cases(report["rows"]), True)


THREE = {"plain": "plain", "triton": "liger (Triton)", "ours": "ours"}
PLANNED = {"plain": "plain", "ours": "ours, every layer checkpointed", "ours+plan": "ours, planned"}
SMALL = {
    "plain": "plain", "plain+compile": "torch.compile", "ours": "ours", "ours+compile": "ours, torch.compile",
    "ours+adamw+passes": "ours, captured model", "ours+adamw+graph": "ours, captured step",
}  # fmt: skip
TABLES = (
    Table("performance.md", "h200", "h200.json", of_models),
    Table("performance.md", "norms", "norms-h200.json", norms),
    Table("performance.md", "cpu", "cpu-avx512.json", lambda r: table(parted(named(r["rows"]))[0], False)),
    Table("performance.md", "newer", "experts-h100.json", lambda r: table(parted(cases(r["rows"]))[0], True)),
    Table("performance.md", "topk", "topk-h100.json", of_all),
    Table("performance.md", "few_classes", "topk-tools-h100.json", of_all),
    Table("performance.md", "qk", "qk-h200.json", of_all),
    Table("performance.md", "mixers", "mixers-h200.json", alone),
    Table("performance.md", "mixers_rival", "mixers-h100.json", of_all),
    Table("performance.md", "replacements", "replacements-h100.json", replacements),
    Table("performance.md", "h200_research", "h200.json", of_research),
    Table("performance.md", "newer_research", "experts-h100.json", lambda r: table(parted(cases(r["rows"]))[1], True)),
    Table("performance.md", "cpu_research", "cpu-avx512.json", lambda r: table(parted(named(r["rows"]))[1], False)),
    Table("training.md", "families", "families-h200.json", families),
    Table("training.md", "e2e", "e2e-h200.json", end_to_end),
    Table("training.md", "parts", "e2e-h200.json", step_parts),
    Table("training.md", "two", "e2e-h100x2.json", end_to_end),
    Table("training.md", "two_parts", "e2e-h100x2.json", step_parts),
    Table("training.md", "experts", "e2e-moe-h100.json", lambda r: in_turns(r, "plain", **THREE)),
    Table("training.md", "forms", "e2e-packed-h200.json", forms),
    Table("training.md", "sinks", "e2e-sinks-h100.json", lambda r: in_turns(r, "plain", plain="plain", ours="ours")),
    Table("training.md", "lora", "lora-h100.json", lora),
    Table("training.md", "bases", "lora-base-h100.json", by_base),
    Table("exactness.md", "eight_bit", "eight-bit-h200.json", eight_bit),
    Table("distributed.md", "over_ranks", "expert-parallel-h200x2.json", over_ranks),
    Table("batch-invariance.md", "invariant", "batch-invariance-h200.json", invariant),
    Table("memory.md", "budget", "e2e-budget-h100.json", lambda r: in_turns(r, "ours", **PLANNED)),
    Table(
        "memory.md", "long", "long-h100.json",
        lambda r: in_turns(of_lora(r), "plain", **THREE, **{"ours+host": "ours, inputs on the host"}),
    ),
    Table("graphs.md", "small", "e2e-small-h100.json", lambda r: in_turns(with_graphs(r), "plain", **SMALL)),
)  # fmt: skip
#: Tables of numbers whose results are not kept as files: (page, heading).
TYPED = (
    ("cpp.md", "Compared with Python"),
    ("families.md", "Measured on a CPU"),
    ("training.md", "On a CPU"),
    ("training.md", "With torch.compile"),
    ("performance.md", "What misses its goal, and why"),
)


def anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def measured() -> str:
    """Of each table: its page, card, date, commit and result; then the tables without one."""
    lines = []
    for each in TABLES:
        of, text = provenance(each.file), (DOCS / each.page).read_text().split(f"<!-- {each.name} -->")[0]
        heading = re.findall(r"^#+ (.*)", text, re.M)[-1]
        link = f"[{heading}]({each.page if each.page != 'performance.md' else ''}#{anchor(heading)})"
        lines.append([link, each.name, of.card.upper(), of.date, of.commit, of.link])
    headers = ["section", "table", "card", "date", "commit", "result"]
    links = [f"[{heading}]({page if page != 'performance.md' else ''}#{anchor(heading)})" for page, heading in TYPED]
    return (
        tabulate(lines, headers, tablefmt="github", disable_numparse=True)
        + "\n\nThe results of these tables were not kept: "
        + ", ".join(links)
        + "."
    )


def filled() -> dict[str, str]:
    """Page -> its text with every table as the results have it."""
    made = {(each.page, each.name): each.make(read(each.file)) for each in TABLES}
    made |= {("cards.md", "cards"): cards.cards(), ("families.md", "gains"): cards.gains()}
    made["performance.md", "tables"] = measured()
    pages = {page: (DOCS / page).read_text() for page, _ in made}
    for (page, name), lines in made.items():
        marked = rf"(<!-- {name} -->\n).*?(<!-- end -->)"
        pages[page], count = re.subn(marked, lambda m: f"{m[1]}{lines}\n{m[2]}", pages[page], flags=re.S)
        assert count == 1, f"{page} has no place for {name}"
    return pages


def draw() -> None:
    h200, h200_research = parted(named(read("h200.json")["rows"]))
    newer_research = parted(cases(read("experts-h100.json")["rows"]))[1]
    pictures.draw_operators(h200, "operators.png", FIRST)
    pictures.draw_operators({**h200_research, **newer_research}, "research.png")
    pictures.draw_training(read("families-h200.json"))
    pictures.draw_lengths(read("e2e-h200.json"))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument("--no-pictures", action="store_true", help="tables only")
    args = parser.parse_args()
    for file in results():
        provenance(file)  # raises where a result lacks what a table must say
    pages = filled()
    stale = [page for page, text in pages.items() if text != (DOCS / page).read_text()]
    if args.check:
        sys.exit(f"{', '.join(stale)}: run benchmarks/plot.py" if stale else 0)
    for page in stale:
        (DOCS / page).write_text(pages[page])
    if not args.no_pictures:
        draw()
    print(f"written: {', '.join(stale) or 'nothing'}")


if __name__ == "__main__":
    main()
