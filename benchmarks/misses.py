"""The table of what misses its goal: what was measured comes from the results, why it misses is said here. A case that
meets its goal on the card which was measured last is left out.
"""

import json
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from provenance import provenance, read
from tables import BOTH, FORWARD, OURS, cases, of_lora, time
from tabulate import tabulate

Values = Callable[[Any], Iterable[float]]


def timed(report, names: str, fits: Callable = lambda shape, options: True):
    """The rivals of each case of some operators whose shape and options fit."""
    for (name, shape, options), rivals in cases(report["rows"]).items():
        if name in names.split(",") and fits(shape, json.loads(options)) and OURS in rivals:
            yield rivals


def of_gemms(names: str, fits=lambda shape, options: True) -> Values:
    """Time over that of the bare GEMMs."""
    return lambda report: [1 / rivals[OURS][f"rate {BOTH}"] for rivals in timed(report, names, fits)]


def of_limit(names: str, fits=lambda shape, options: True, modes=(BOTH,)) -> Values:
    """The limit's time over the operator's."""
    rates = [f"rate {mode}" for mode in modes]
    return lambda report: [r[OURS][rate] for r in timed(report, names, fits) for rate in rates if rate in r[OURS]]


def of_rival(names: str, rival: str, fits=lambda shape, options: True, rate=False) -> Values:
    """Time over a rival's, where it was run; `rate`: the rival's over ours."""

    def ratios(report):
        for rivals in timed(report, names, fits):
            if rival in rivals:
                ours, theirs = (time(rivals[a], beside=[rivals[b]]) for a, b in ((OURS, rival), (rival, OURS)))
                yield theirs / ours if rate else ours / theirs

    return ratios


def of_arms(first: str, second: str, model: str) -> Values:
    """Tokens per second of an arm of lora.py over those of another, checkpointed, at the first shape."""

    def ratios(report):
        arms = {}
        for row in of_lora(report)["rows"]:
            if row["model"] == model and row["result"]:
                arms.setdefault(row["arm"], row["result"]["tokens_per_second"])
        return [arms[first] / arms[second]]

    return ratios


def peak(arm: str, model: str) -> Values:
    """GB of an arm of lora.py."""
    return lambda report: [
        row["result"]["peak_gb"] for row in of_lora(report)["rows"] if (row["model"], row["arm"]) == (model, arm)
    ]


def of_families(report) -> Iterable[float]:
    """Tokens per second of train.py over those of liger with Triton."""
    runs = [each for each in report.values() if "triton" in each]
    return [each["liger"]["tokens_per_second"] / each["triton"]["tokens_per_second"] for each in runs]


@dataclass(frozen=True)
class Case:
    """A case with a goal.

    Args:
        name: what the table calls it.
        pattern: of the result; {card} is the card that was measured last.
        values: what the result has of it.
        form: in which the values are written.
        goal: the largest value, or the smallest where `least`, that all values are to have.
        why: they miss it.
    """

    name: str
    pattern: str
    values: Values
    form: str
    goal: float
    why: str
    least: bool = False


GEMMS, LIMIT, COPY = "{} of its GEMMs' time", "{} of its GEMMs' rate", "{} of a copy"
TORCH = "{} of the speed of plain torch"
EITHER = FORWARD, BOTH
odd = lambda shape, options: shape[-1] % 2 == 1
even = lambda shape, options: not odd(shape, options)
CASES = (
    Case("linear_log_prob that computes its logits again", "{card}.json",
         of_gemms("linear_log_prob", lambda shape, options: "max_bytes" in options), GEMMS, 1.36,
         "four GEMMs in place of three are 1.33; the gradient of hidden is added to a float sum nine times"),
    Case("linear_distillation, linear_jsd", "{card}.json", of_gemms("linear_distillation,linear_jsd"), GEMMS, 1.09,
         "two or three exponentials and a logarithm per class in two passes: arithmetic, not memory"),
    Case("fused_linear_cross_entropy", "{card}.json", of_limit("fused_linear_cross_entropy"), LIMIT, 0.94,
         "of several chunks, the pass over the logits takes 5 % of the time, rounding the float gradient of the weight "
         "1 to 2", True),
    Case("fused_experts, 512 experts, or 256 tokens per expert, nothing computed again", "experts-{card}.json",
         of_limit("fused_experts", lambda shape, options: options.get("recompute") is False
                  and shape[0] * options["k"] / options["experts"] < 400), LIMIT, 0.60,
         "the weights of all experts are read twice and their gradients written, 9.7 GB of 512 experts: the GEMMs of "
         "rows are at 0.80 to 0.86 of the L2 cache's rate and 0.70 of the memory's; gathering tokens' rows, the "
         "activation's backward and the weighted sum take nearly 0.4 of 2.7 ms", True),
    Case("gated_delta_rule 1x8192x16x2x128x128", "mixers-{card}.json",
         lambda report: [time(rivals[OURS]) for rivals in timed(
             report, "gated_delta_rule", lambda shape, options: shape == (1, 8192, 16, 2, 128, 128) and not options)],
         "{} ms", 0.90,
         "one document is a chain of chunks, each of which waits for the one before; half of its time goes to "
         "conversions of sums to pairs of bfloat16 terms, which keep results as exact as float products"),
    Case("mamba2_scan", "mixers-{card}.json", of_rival("mamba2_scan", "mamba-ssm"), "{} of mamba-ssm's time", 0.70,
         "of a step's 2 ms, the gradients of chunks take 0.7 to 0.9: a block works on the heads of a group one after "
         "the other, in phases that wait for each other; states and their gradients are kept as two bfloat16 terms for "
         "each chunk of 64 tokens"),
    Case("causal_conv1d", "mixers-{card}.json", of_limit("causal_conv1d", modes=EITHER), COPY, 0.90,
         "not analysed further", True),
    Case("channel_gates", "mixers-{card}.json", of_limit("channel_gates", modes=EITHER), COPY, 0.90,
         "an exponential and a quotient per element: arithmetic and memory take as long", True),
    Case("delta_gates", "mixers-{card}.json", of_rival("delta_gates", "compile", rate=True),
         "{} of torch.compile's speed", 1.0,
         "some 20 µs: the sums of parameters' gradients need their own launch", True),
    Case("all weights, 1B, 8 x 2,048", "families-{card}.json", of_families, "{} of the speed of liger-kernel", 1.25,
         "a step is mostly matrix products and attention, which both leave to cuBLAS and flash attention "
         "([by length](training.md#by-length))", True),
    Case("LoRA, Llama 8B, 4 x 2,048, checkpointed", "lora-{card}.json", of_arms("ours", "frozen", "llama-8b"),
         "{} of the speed without adapters", 0.92, "of 640 ms, the thin GEMMs of adapters take 31, and casts 4", True),
    Case("LoRA on int8, Llama 8B, 4 x 2,048, checkpointed", "lora-base-{card}.json", peak("ours+int8", "llama-8b"),
         "{} GB", 13.0, "[where they are](decisions/0013-eight-bit-base.md)"),
    Case("attention_residuals", "experts-{card}.json", of_limit("attention_residuals"), COPY, 0.90,
         "its backward reads the blocks twice, and reduces each block's row for itself", True),
    Case("mhc_coefficients", "experts-{card}.json", of_limit("mhc_coefficients"), COPY, 0.90,
         "48 multiply-adds in float per element of x, for products with phi that the reference has in float as well",
         True),
    Case("gated_mlp (recompute)", "{card}.json", of_rival("gated_mlp", "checkpoint", rate=True),
         "{} of the speed of checkpointing", 1.10, "without an adapter its bare GEMMs take 15.7 of 15.9 ms", True),
    Case("layer_norm", "{card}.json", of_limit("layer_norm", even), COPY, 0.90,
         "forward: the bias is read from L1 after the row's statistics, because the registers are full; backward: two "
         "sums per row and two per column, at 0.64 of the instruction issue rate", True),
    Case("rms_norm, fused_add_rms_norm of 16384 and 65536 columns", "{card}.json",
         of_limit("rms_norm,fused_add_rms_norm", lambda shape, options: shape[-1] in (16384, 65536)), COPY, 0.90,
         "two blocks per multiprocessor overlap little; four blocks wait for one another's sums", True),
    Case("norms of odd widths", "{card}.json", of_limit("rms_norm,fused_add_rms_norm,layer_norm", odd), COPY, 0.70,
         "the weight is aligned differently from the row and is read element by element; a row touches one pack more "
         "than the threads share evenly", True),
    Case("CPU, 256 columns: preference and policy losses, linear_jsd", "cpu-avx512.json",
         of_gemms("linear_dpo,linear_orpo,linear_kto,linear_grpo,linear_jsd"), GEMMS, 1.2,
         "the passes over the logits; not analysed further"),
    Case("CPU: layer_norm, group_norm", "cpu-avx512.json", of_rival("layer_norm,group_norm", "torch", rate=True), TORCH,
         2.0, "eager runs at the memory's rate there", True),
)  # fmt: skip


def missed(newest: Callable[[str], str], rows: Iterable[Case] = CASES) -> str:
    """The table; `newest` is the file of a pattern."""
    lines = []
    for case in rows:
        file = newest(case.pattern)
        values = [round(value, 2) for value in case.values(read(file))]
        assert values, f"{case.name}: {file} has no such case"
        beyond = operator.lt if case.least else operator.gt
        if not any(beyond(value, case.goal) for value in values):
            continue
        low, high = f"{min(values):.2f}", f"{max(values):.2f}"
        measured = case.form.format(low if low == high else f"{low} to {high}")
        of = provenance(file)
        lines.append([case.name, measured, f"{case.goal:.2f}", case.why, of.card.upper(), of.link])
    headers = ["case", "measured", "goal", "reason", "card", "result"]
    return tabulate(lines, headers, tablefmt="github", disable_numparse=True)
