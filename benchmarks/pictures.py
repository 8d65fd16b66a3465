"""The pictures of docs/ out of results."""

from pathlib import Path

from tables import ARMS, BOTH, OURS, SIDES, TRITON, by_length, time

DOCS = Path(__file__).resolve().parents[1] / "docs"


def axes(height):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, height), sharey=True)
    for ax in (left, right):
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(axis="x", alpha=0.3)
    return figure, left, right


COLORS = {OURS: "#1b7f5c", TRITON: "#d98e2b", "compile": "#7a8ba6", "plain": "#7a8ba6"}


def bars(ax, names, series, title):
    width = 0.8 / len(series)
    for i, (name, values) in enumerate(series.items()):
        at = [j + (i - (len(series) - 1) / 2) * width for j in range(len(names))]
        ax.barh(at, [v or 0 for v in values], width * 0.9, label=name, color=COLORS[name])
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(-0.7, len(names) - 0.3)
    ax.set_title(title, fontsize=11)


def save(figure, ax, file):
    ax.invert_yaxis()  # of both, which share it
    ax.legend(frameon=False, fontsize=9)
    figure.tight_layout()
    figure.savefig(DOCS / file, dpi=110)


def draw_operators(named_cases, file, names=None):
    """Time and memory of forward and backward in relation to ours, of all cases or of those with these names."""
    chosen = {}
    for key, rivals in named_cases.items():
        if ("compile" in rivals or TRITON in rivals) and (names is None or key[0] in names):
            chosen.setdefault(key[0], rivals)
    names = list(chosen)
    figure, left, right = axes(0.34 * len(names) + 1)
    extra = lambda row: row and row.get(f"peak {BOTH}")
    for ax, of, title in (
        (left, time, "time of forward and backward, ours = 1 (cut at 6)"),
        (right, extra, "peak memory beyond inputs, ours = 1"),
    ):
        ours = [of(chosen[name][OURS]) for name in names]
        relation = lambda rival: [
            (of(r) or 0) / o if (r := chosen[n].get(rival)) and o else None for n, o in zip(names, ours)
        ]
        bars(ax, names, {OURS: [1] * len(names), "compile": relation("compile"), TRITON: relation(TRITON)}, title)
        ax.set_xlim(0, 6)
    save(figure, right, file)


def draw_training(reports):
    names = list(reports)
    figure, left, right = axes(0.8 * len(names) + 1)
    of = lambda side, what, unit: [reports[n].get(side, {}).get(what, 0) / unit for n in names]
    for ax, what, unit, title in (
        (left, "tokens_per_second", 1000, "thousand tokens per second"),
        (right, "step_peak_bytes", 2**30, "memory of a step, GiB"),
    ):
        bars(ax, names, {name: of(side, what, unit) for side, name in SIDES.items()}, title)
    save(figure, right, "training.png")


def draw_lengths(report, model="llama-1b"):
    """Tokens per second and memory of a model over the length of the sequences."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lengths = by_length(report)[model]
    figure, both = pyplot.subplots(1, 2, figsize=(11, 3.6))
    for ax, what, unit, title in (
        (both[0], "tokens_per_second", 1000, f"{model}: thousand tokens per second"),
        (both[1], "peak_gb", 1, "peak memory, GB"),
    ):
        for arm, name in ARMS.items():
            there = [(n, arms[arm][what] / unit) for n, arms in sorted(lengths.items()) if arms.get(arm)]
            ax.plot(*zip(*there), marker="o", label=name, color=COLORS[name])
        ax.set_xscale("log", base=2)
        ax.set_xticks(sorted(lengths), [f"{n:,}" for n in sorted(lengths)])
        ax.set_ylim(0)
        ax.set_xlabel("tokens in a sequence")
        ax.set_title(title, fontsize=11)
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(alpha=0.3)
    both[1].legend(frameon=False, fontsize=9)
    figure.tight_layout()
    figure.savefig(DOCS / "lengths.png", dpi=110)
