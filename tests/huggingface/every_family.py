"""Every family's small model, patched: what is replaced, and what is kept, and the table of docs/families.md.

    python tests/huggingface/every_family.py [--write] [FAMILY ...]

prints the rows; with --write it writes them into the page.
"""

import argparse
import collections
import pathlib
import re
import sys
import warnings

import torch
import transformers
from liger_kernel.transformers import monkey_patch
from liger_kernel.transformers.families import FAMILIES

sys.path.append(str(pathlib.Path(__file__).parents[2] / "examples"))

from tiny import TINY_MODELS, can_be_made, model_of  # noqa: E402

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "families.md"
BEGIN, END = "<!-- made by tests/huggingface/every_family.py -->", "<!-- end -->"
#: Switches of what is not the replacement of one module or function.
WHOLE = ("layers", "qk_norm", "masks", "attention", "mixers")
LOSSES = {"fused_linear_cross_entropy": "in the head", "cross_entropy": "of logits"}


def families() -> list[str]:
    return [name for name in FAMILIES if TINY_MODELS.get(name) and can_be_made(name)]


def report_of(family):
    """Of the first model of a family that its row names, patched with its defaults, and restored."""
    apply = getattr(monkey_patch, f"apply_liger_kernel_to_{family}")
    report = apply(model=model_of(family, next(iter(TINY_MODELS[family]))))
    report.undo()
    return report


def row(family: str) -> str:
    """The row of a family in the table of docs/families.md."""
    report = report_of(family)
    done = dict.fromkeys(entry.switch for entry in report.replaced)
    parts = dict.fromkeys(f"`{entry.name}`" for entry in report.replaced if entry.switch not in (*WHOLE, *LOSSES))
    steps = dict.fromkeys(f"`{entry.by}`" for entry in report.replaced if entry.switch in WHOLE[:2])
    others = [switch for switch in WHOLE[2:] if switch in done]
    kept = collections.defaultdict(list)
    for skip in report.skipped:
        kept[skip.reason].append(f"`{skip.name}`" if re.fullmatch(r"\w+", skip.name) else skip.name)
    why = "; ".join(f"{', '.join(dict.fromkeys(names))}: {reason}" for reason, names in kept.items())
    off = [f"`{name}`" for name, on in FAMILIES[family].switches.items() if not on and name not in done | LOSSES]
    why = "; ".join(filter(None, [why, f"{', '.join(off)}: off unless asked for" if off else ""]))
    loss = next((words for switch, words in LOSSES.items() if switch in done), "")
    return f"| {family} | {', '.join(parts)} | {', '.join([*steps, *others])} | {loss} | {why.replace('|', '/')} |"


def section() -> str:
    return PAGE.read_text().split(BEGIN)[1].split(END)[0]


def documented() -> dict[str, str]:
    """Family -> its row in the page."""
    return {
        line.split("|")[1].strip(): line for line in section().splitlines() if re.match(r"\| (?!family)[a-z]", line)
    }


def documented_version() -> str | None:
    found = re.search(r"transformers ([\d.]+), \d+ families", section())
    return found and found[1]


def write(rows: dict[str, str]):
    before, rest = PAGE.read_text().split(BEGIN)
    after = rest.split(END, 1)[1]
    there = documented() | rows
    lines = [there[name] for name in FAMILIES if name in there]
    head = f"transformers {transformers.__version__}, {len(lines)} families:"
    header = ["| family | replaced | several steps at once | loss | kept |", "|---|---|---|---|---|"]
    PAGE.write_text("\n".join([before + BEGIN, "", head, "", *header, *lines, "", END + after]))


def main():
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the table of docs/families.md")
    parser.add_argument("families", nargs="*")
    args = parser.parse_args()
    rows = {}
    for family in args.families or families():
        rows[family] = row(family)
        print(rows[family], flush=True)
    if args.write:
        write(rows)


if __name__ == "__main__":
    main()
