"""What a measurement found, as a table, and as the lines that use it."""

#: The arms: how arm.py calls them; and what gives them: lines of Python, and the settings of a Trainer.
ARMS = {
    "plain": ("plain", "", ""),
    "patched": ("ours", "from liger_kernel import patch\n\nprint(patch(model))", ""),
    "planned": (
        "ours+plan",
        'from liger_kernel import patch\n\nprint(patch(model, memory_budget="BUDGET"))',
        'liger_kernel_config={"memory_budget": "BUDGET"}',
    ),
    "captured": (
        "ours+graph",
        "from liger_kernel import graphs, patch\n\nprint(patch(model))\n"
        "step = graphs.capture_step(model, optimizer, batch)  # step(batch) takes a step and returns its loss",
        'liger_kernel_config={"cuda_graphs": True}',
    ),
    "liger-kernel": ("triton", "", ""),
    "torch.compile": ("plain+compile", "", ""),
}

UNEVEN = 1.5  # times as long as the fastest step, which a step does not take by itself


def size(count: float) -> str:
    """Bytes in words."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


def table(headers: list[str], rows: list[list[str]]) -> str:
    """Rows of text in Markdown: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(headers, *rows)]
    line = lambda cells: f"| {' | '.join([cells[0].ljust(widths[0]), *map(str.rjust, cells[1:], widths[1:])])} |"
    rule = f"|{'-' * (widths[0] + 2)}|{'|'.join('-' * (width + 1) + ':' for width in widths[1:])}|"
    return "\n".join([line(headers), rule, *map(line, rows)])


def compared(rows: list[dict]) -> None:
    """Adds to each row its ratio to plain, and by how much the loss of the last step that both have differs."""
    plain = rows[0]["result"] if rows and rows[0]["arm"] == "plain" else None
    for row in rows:
        if not plain or not (result := row["result"]):
            continue
        row["ratio"] = result["tokens_per_second"] / plain["tokens_per_second"]
        last = min(len(result["losses"]), len(plain["losses"])) - 1
        row["loss"], row["loss_difference"] = result["losses"][last], result["losses"][last] - plain["losses"][last]


def in_words(row: dict) -> list[str]:
    """The cells of a row."""
    result = row["result"]
    if not result:
        return [row["arm"], "out of memory" if row["out_of_memory"] else "failed", "", "", "", ""]
    cells = [row["arm"], f"{result['tokens_per_second']:,.0f}", "", size(result["peak_gb"] * 1e9), "", ""]
    if "ratio" in row:
        difference = row["loss_difference"]
        cells[2], cells[4] = f"{row['ratio']:.2f}x", f"{row['loss']:.5f}"
        cells[5] = f"{difference:+.1e}" if difference else "0"
    return cells


def of_arms(rows: list[dict]) -> str:
    """The table of all arms; below it why one has no numbers, or is not what it is called."""
    headers = ["", "tokens/s", "to plain", "peak memory", "last loss", "differs by"]
    lines = [table(headers, [in_words(row) for row in rows])]
    for row in rows:
        result = row["result"] or {}
        if note := row["error"] or result.get("note"):
            lines.append(f"{row['arm']}: {note}")
        fastest, slowest = min(result.get("times", [1])), max(result.get("times", [1]))
        if slowest > UNEVEN * fastest:
            lines.append(f"{row['arm']}: steps took {fastest:.3g} to {slowest:.3g} s: does other work run here?")
    return "\n".join(lines)


def of_largest(found: dict[str, dict], length: int) -> str:
    """The table of what fits; below it what has not been run."""
    counted = lambda one: f"{one['size']:,}" + "*" * (one["how"] == "extrapolated")
    rows = [[name, counted(one["length"]), counted(one["batch"])] for name, one in found.items()]
    lines = [table(["", "longest sequence", f"largest batch of {length:,}"], rows)]
    if any("*" in cell for row in rows for cell in row):
        lines.append("* extrapolated from the peaks of two shorter steps; it would take too long. The others ran.")
    return "\n".join(lines)


def to_paste(rows: list[dict], budget: str) -> str:
    """The lines that use the fastest of this library's arms; empty where none ran."""
    ours = [row for row in rows if row["result"] and ARMS[row["arm"]][1]]
    if not ours:
        return ""
    best = max(ours, key=lambda row: row["result"]["tokens_per_second"])
    _, lines, setting = (text.replace("BUDGET", budget) for text in ARMS[best["arm"]])
    setting = f", {setting}" if setting else ""
    return (
        f"The fastest is {best['arm']}:\n\n{lines}\n\n"
        f"With transformers' Trainer, and what is built on it:\n\nTrainingArguments(use_liger_kernel=True{setting})"
    )
