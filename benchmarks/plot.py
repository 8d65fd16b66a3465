"""Writes the tables and pictures of docs/ out of benchmarks/results/*.json, which bench.py, e2e.py, lora.py and other
programs wrote.

    python benchmarks/plot.py            after a run, as bench.py --out benchmarks/results/h200.json
    python benchmarks/plot.py --check    exit status 1 where a page has another table than the results

TABLES says which table is made of which result: of a GPU, that of the card which was measured last. `make measure` runs
the benchmarks, then this.
"""

import argparse
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import cards
import misses
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
    in_cpp,
    in_turns,
    invariant,
    levels,
    lora,
    named,
    of_lora,
    one_family,
    over_ranks,
    parted,
    replacements,
    step_parts,
    table,
    trl_steps,
    what_fits,
    with_graphs,
)
from tabulate import tabulate

sys.path.append(str(Path(__file__).parents[1] / "examples"))

from train import in_markdown  # noqa: E402

DOCS = Path(__file__).resolve().parents[1] / "docs"


def newest(pattern: str, fits: Callable[[dict], bool] = lambda report: True) -> str:
    """The file of the card that was measured last, of those that fit a pattern with {card}: whole ones before those
    that lack parts, and those with what a table needs before others."""
    if "{card}" not in pattern:
        return pattern
    found = []
    for file in results():
        of = provenance(file)
        if of.card != "cpu" and pattern.format(card=of.card) == file:
            report = read(file)
            found.append((fits(report), "missing" not in report, of.date[-10:], of.card, file))
    return max(found)[-1]


@dataclass(frozen=True)
class Table:
    """A table of a page, between `<!-- name -->` and `<!-- end -->`, and the result that it is made of: {card} is that
    which was measured last, of those with a result that `fits`."""

    page: str
    name: str
    pattern: str
    make: Callable[[dict], str]
    fits: Callable[[dict], bool] = lambda report: True

    @property
    def file(self) -> str:
        return newest(self.pattern, self.fits)

    @property
    def lines(self) -> str:
        """The table, below what it was measured on."""
        of = provenance(self.file)
        device = f"{of.gpus} x {of.device}" if of.gpus > 1 else of.device
        return f"{device}, {of.date}: {of.in_words}.\n\n{self.make(read(self.file))}"


def with_triton(report: dict) -> bool:
    return any(row["arm"] == "triton" for row in report["rows"])


def with_rivals(report: dict) -> bool:
    return any(len(rivals) > 1 for rivals in cases(report["rows"]).values())


def in_every_base(report: dict) -> bool:
    """Whether each model was measured with every base."""
    arms: dict[tuple, set] = {}
    for row in report["rows"]:
        arms.setdefault((row["model"], row["checkpointing"]), set()).add(row["arm"])
    return len({frozenset(each) for each in arms.values()}) == 1


def of_models(report: dict) -> str:
    return table(parted(named(report["rows"]))[0], True)


def of_research(report: dict) -> str:
    return table(parted(named(report["rows"]))[1], True)


def of_newer_research(report: dict) -> str:
    return table(parted(cases(report["rows"]))[1], True)


def of_all(report: dict) -> str:
    return table({key: rivals for key, rivals in cases(report["rows"]).items() if len(rivals) > 1}, True)


THREE = {"plain": "plain", "triton": "liger (Triton)", "ours": "ours"}
PLANNED = {"plain": "plain", "ours": "ours, every layer checkpointed", "ours+plan": "ours, planned"}
SMALL = {
    "plain": "plain", "plain+compile": "torch.compile", "ours": "ours", "ours+compile": "ours, torch.compile",
    "ours+adamw+passes": "ours, captured model", "ours+adamw+graph": "ours, captured step",
}  # fmt: skip
MASKED = {arm: name for arm, name in SMALL.items() if arm != "ours+adamw+passes"}
TABLES = (
    Table("performance.md", "operators", "{card}.json", of_models),
    Table("performance.md", "quack", "quack-{card}.json", of_all),
    Table("performance.md", "cpu", "cpu-avx512.json", lambda r: table(parted(named(r["rows"]))[0], False)),
    Table("performance.md", "newer", "experts-{card}.json", lambda r: table(parted(cases(r["rows"]))[0], True)),
    Table("performance.md", "topk", "topk-{card}.json", of_all),
    Table("performance.md", "few_classes", "topk-tools-{card}.json", of_all),
    Table("performance.md", "qk", "qk-{card}.json", of_all),
    Table("performance.md", "products", "eight-bit-products-{card}.json", of_all),
    Table("performance.md", "mixers", "mixers-{card}.json", alone),
    Table("performance.md", "mixers_rival", "mixers-{card}.json", of_all, with_rivals),
    Table("performance.md", "replacements", "replacements-{card}.json", replacements),
    Table("performance.md", "operators_research", "{card}.json", of_research),
    Table("performance.md", "newer_research", "experts-{card}.json", of_newer_research),
    Table("performance.md", "cpu_research", "cpu-avx512.json", lambda r: table(parted(named(r["rows"]))[1], False)),
    Table("performance.md", "training", "families-{card}.json", one_family),
    Table("training.md", "families", "families-{card}.json", families),
    Table("training.md", "cpu_families", "families-cpu-avx2.json", in_markdown),
    Table("training.md", "e2e", "e2e-{card}.json", end_to_end),
    Table("training.md", "parts", "e2e-{card}.json", step_parts),
    Table("training.md", "two", "e2e-{card}x2.json", end_to_end),
    Table("training.md", "two_parts", "e2e-{card}x2.json", step_parts),
    Table("training.md", "experts", "e2e-moe-{card}.json",
          lambda r: in_turns(r, "plain", **THREE, mamba="plain with mamba-ssm"), with_triton),
    Table("training.md", "forms", "e2e-packed-{card}.json", forms),
    Table("training.md", "hybrids", "e2e-hybrids-{card}.json", forms),
    Table("training.md", "masked", "e2e-masked-{card}.json", lambda r: in_turns(r, "plain", **MASKED)),
    Table("training.md", "sinks", "e2e-sinks-{card}.json", lambda r: in_turns(r, "plain", plain="plain", ours="ours")),
    Table("training.md", "lora", "lora-{card}.json", lora),
    Table("training.md", "lora_plan", "lora-plan-{card}.json",
          lambda r: in_turns(of_lora(r), "plain", **THREE, **{"ours+plan": "ours, planned"})),
    Table("training.md", "trl", "trl-{card}.json", trl_steps),
    Table("training.md", "bases", "lora-base-{card}.json", by_base, in_every_base),
    Table("cpp.md", "cpp", "cpp-{card}.json", in_cpp),
    Table("cpp.md", "cpp_cpu", "cpp-cpu-avx512.json", in_cpp),
    Table("exactness.md", "eight_bit", "eight-bit-{card}.json", eight_bit),
    Table("distributed.md", "over_ranks", "expert-parallel-{card}x2.json", over_ranks),
    Table("batch-invariance.md", "invariant", "batch-invariance-{card}.json", invariant),
    Table("memory.md", "budget", "e2e-budget-{card}.json", lambda r: in_turns(r, "ours", **PLANNED)),
    Table("memory.md", "budget_two", "e2e-plan-{card}x2.json", lambda r: in_turns(r, "ours", **PLANNED)),
    Table("memory.md", "levels", "e2e-plan-{card}x2.json", levels),
    Table(
        "memory.md", "long", "long-{card}.json",
        lambda r: in_turns(of_lora(r), "plain", **THREE, **{"ours+host": "ours, inputs on the host"}),
    ),
    Table("memory.md", "lora_fits", "lora-fits-{card}.json", what_fits),
    Table("memory.md", "weights_fit", "e2e-fits-{card}.json", what_fits),
    Table("graphs.md", "small", "e2e-small-{card}.json", lambda r: in_turns(with_graphs(r), "plain", **SMALL)),
)  # fmt: skip


def anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def measured() -> str:
    """Of each table: its page, card, date, commit and result."""
    lines = []
    for each in TABLES:
        of, text = provenance(each.file), (DOCS / each.page).read_text().split(f"<!-- {each.name} -->")[0]
        heading = re.findall(r"^#+ (.*)", text, re.M)[-1]
        link = f"[{heading}]({each.page if each.page != 'performance.md' else ''}#{anchor(heading)})"
        lines.append([link, each.name, of.card.upper(), of.date, of.commit, of.link])
    headers = ["section", "table", "card", "date", "commit", "result"]
    return tabulate(lines, headers, tablefmt="github", disable_numparse=True)


def filled() -> dict[str, str]:
    """Page -> its text with every table as the results have it."""
    made = {(each.page, each.name): each.lines for each in TABLES}
    made |= {("cards.md", "cards"): cards.cards(), ("families.md", "gains"): cards.gains()}
    made["performance.md", "misses"] = misses.missed(newest)
    made["performance.md", "tables"] = measured()
    pages = {page: (DOCS / page).read_text() for page, _ in made}
    for (page, name), lines in made.items():
        marked = rf"(<!-- {name} -->\n).*?(<!-- end -->)"
        pages[page], count = re.subn(marked, lambda m: f"{m[1]}{lines}\n{m[2]}", pages[page], flags=re.S)
        assert count == 1, f"{page} has no place for {name}"
    return pages


def draw() -> None:
    models, research = parted(named(read(newest("{card}.json"))["rows"]))
    newer_research = parted(cases(read(newest("experts-{card}.json"))["rows"]))[1]
    pictures.draw_operators(models, "operators.png", FIRST)
    pictures.draw_operators({**research, **newer_research}, "research.png")
    pictures.draw_training(read(newest("families-{card}.json")))
    pictures.draw_lengths(read(newest("e2e-{card}.json")))


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
