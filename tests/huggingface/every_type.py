"""Every model type of the installed transformers with a language-model head, tiny, plain and patched by source.

    python tests/huggingface/every_type.py [--write] [TYPE ...]

prints for each type that has no row, or for those that are named, what is replaced, and how far loss and gradients are
from those of the plain model; with --write it writes their rows of the table in docs/families.md. The configurations
are the defaults, with their sizes made small.
"""

import argparse
import collections
import copy
import pathlib
import re
import sys
import textwrap
import typing
import warnings

import torch
import transformers
from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN, _apply_liger_kernel_to_instance
from liger_kernel.transformers.patching.apply import TABLES, UNKNOWN
from shrink import VOCABULARY, shrunk
from transformers.models.auto import modeling_auto

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "families.md"
BEGIN, END = "<!-- made by tests/huggingface/every_type.py -->", "<!-- end -->"
MAPPINGS = tuple(
    f"MODEL_FOR_{task}_MAPPING_NAMES" for task in ("MASKED_LM", "CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM")
)
# Sums in float32 in another order: see conftest.py. Twice as many layers as there, and one number for a whole gradient.
LOSS_TOLERANCE, GRADIENT_TOLERANCE = 2.0**-18, 2.0**-12


def types() -> dict[str, str]:
    """Model type -> the class of its language model."""
    found: dict[str, str] = {}
    for name in MAPPINGS:
        for kind, cls in getattr(modeling_auto, name, {}).items():
            found.setdefault(kind, cls if isinstance(cls, str) else cls[0])
    return dict(sorted(found.items()))


def without_row() -> dict[str, str]:
    return {kind: cls for kind, cls in types().items() if kind not in MODEL_TYPE_TO_APPLY_LIGER_FN}


def model_of(kind):
    """A tiny random model of a type; whatever its constructor raises where the sizes do not fit."""
    torch.manual_seed(0)
    model = getattr(transformers, types()[kind])(shrunk(kind))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 and parameter.is_floating_point():
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model.float().train()


def inputs():
    """Token ids, and other ones as labels: a masked language model may know its own tokens without training, and the
    difference of two large logits is no measure."""
    generator = torch.Generator().manual_seed(1)
    ids, labels = (torch.randint(4, VOCABULARY - 8, (2, 12), generator=generator) for _ in range(2))
    labels[0, :3] = -100
    return {"input_ids": ids, "labels": labels}


def step(model):
    """(loss, gradients by name) of one step, with the same random numbers each time."""
    model.zero_grad()
    torch.manual_seed(1)
    output = model(**inputs())
    loss = output.loss if hasattr(output, "loss") else output[0]
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), gradients, getattr(output, "logits", None)


class Result(typing.NamedTuple):
    report: typing.Any
    loss: float  # the largest relative differences of loss and gradients
    gradient: float
    fused: bool


def compare(kind) -> Result:
    """One step of a plain and of a patched model of a type."""
    plain = model_of(kind)
    model = copy.deepcopy(plain)
    loss, gradients, _ = step(plain)
    report = _apply_liger_kernel_to_instance(model)
    ours, our_gradients, logits = step(model)
    assert gradients.keys() == our_gradients.keys()
    norms = {name: g.norm() for name, g in gradients.items()}
    # A gradient of rounding errors, as that of a key's bias, is no measure: of one parameter to a usual one's.
    floor = 1e-3 * torch.stack([n / g.numel() ** 0.5 for n, g in zip(norms.values(), gradients.values())]).median()
    worst = max(
        ((our_gradients[name] - g).norm() / (norms[name] + floor * g.numel() ** 0.5)).item()
        for name, g in gradients.items()
    )
    return Result(report, ((ours - loss).abs() / loss.abs()).item(), worst, logits is None)


COLUMNS = {
    "RMSNorm": ("rms_norm",), "LayerNorm": ("layer_norm",),
    "MLP, experts": ("swiglu", "geglu", "relu_squared", "xielu"), "rope": ("rope",),
    "loss": ("fused_linear_cross_entropy",),
}  # fmt: skip
SHORT = {UNKNOWN: "unknown source", TABLES: "unknown tables"}


def line(kind, report) -> str:
    """The row of a type in the table of docs/families.md."""
    done = {entry.switch for entry in report.replaced}
    kept = collections.defaultdict(list)
    for skip in report.skipped:
        kept[SHORT.get(skip.reason, skip.reason)].append(f"`{skip.name}`")
    why = "; ".join(f"{', '.join(dict.fromkeys(names))}: {reason}" for reason, names in kept.items())
    cells = ["yes" if done & set(switches) else "" for switches in COLUMNS.values()]
    return f"| {kind} | {' | '.join(cells)} | {why} |"


def documented() -> dict[str, str]:
    """Type -> its row in the table of docs/families.md."""
    text = PAGE.read_text().split(BEGIN)[1].split(END)[0]
    return {row.split("|")[1].strip(): row for row in text.splitlines() if re.match(r"\| (?!type)[a-z]", row)}


def documented_version() -> str:
    return re.search(r"transformers ([\d.]+), \d+ types", PAGE.read_text()).group(1)


def write(results):
    """Put the rows of these types into the page, beside those that it has of other types without a row."""
    before, rest = PAGE.read_text().split(BEGIN)
    after = rest.split(END, 1)[1]
    there, made = documented(), {kind: line(kind, result.report) for kind, result in results.items()}
    lines = {kind: row for kind in without_row() if (row := made.get(kind, there.get(kind)))}
    others = [kind for kind in without_row() if kind not in lines]
    rows = [f"| type | {' | '.join(COLUMNS)} | kept |", "|" + "---|" * (len(COLUMNS) + 2), *lines.values()]
    head = f"transformers {transformers.__version__}, {len(lines)} types:"
    tail = textwrap.fill(
        f"{len(others)} more types were not tried, because their small models could not be made or take more than "
        f"text: {', '.join(others)}.", 120, break_on_hyphens=False,
    )  # fmt: skip
    PAGE.write_text("\n".join([before + BEGIN, "", head, "", *rows, "", tail, "", END + after]))


def main():
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the table of docs/families.md")
    parser.add_argument("types", nargs="*")
    arguments = parser.parse_args()
    results, failed, wrong = {}, [], 0
    for kind in arguments.types or without_row():
        try:
            result = results[kind] = compare(kind)
        except Exception as error:  # a constructor that wants other sizes, a forward that wants other inputs
            failed.append(kind)
            print(f"{kind}: not run: {type(error).__name__}: {str(error).partition(chr(10))[0][:110]}", flush=True)
            continue
        bad = result.loss > LOSS_TOLERANCE or result.gradient > GRADIENT_TOLERANCE
        wrong += bad
        print(f"{kind}: {'WRONG: ' * bad}loss {result.loss:.0e}, gradient {result.gradient:.0e}, "
              f"{'no ' * result.fused}logits. {result.report.line()}", flush=True)  # fmt: skip
    print(f"{len(results)} run, {wrong} wrong, {len(failed)} not run")
    if arguments.write:
        write(results)
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
