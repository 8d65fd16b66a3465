"""The numbers of the pages are those of benchmarks/results: the tables are what benchmarks/plot.py writes, every table
of measured numbers has a result that says where and when it was measured, and so have speeds and memory in prose."""

import json
import pathlib
import re
import statistics
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
sys.path.insert(0, str(ROOT / "benchmarks"))

pytest.importorskip("tabulate")
import cards  # noqa: E402
import misses  # noqa: E402
import plot  # noqa: E402
import provenance  # noqa: E402
import tables  # noqa: E402


def test_the_tables_are_those_of_the_results():
    for page, text in plot.filled().items():
        assert (DOCS / page).read_text() == text, f"{page}: run benchmarks/plot.py"


@pytest.mark.parametrize("file", provenance.results())
def test_results_say_where_and_when(file):
    of = provenance.provenance(file)
    assert re.match(r"\d{4}-\d\d-\d\d", of.date) and of.card and of.versions["torch"]
    for commit in of.commit.split(", "):
        assert re.fullmatch(r"\([0-9a-f]{7}\)|[0-9a-f]{7}\+?", commit)
    assert (file in provenance.RECORDED) == of.commit.startswith("("), "recorded.json is for results without a commit"


MACHINE = {"device": "NVIDIA H100 80GB HBM3", "torch": "2.13.0", "commit": "0123456789ab", "date": "2026-01-02"}


@pytest.mark.parametrize("key", [*MACHINE])
def test_a_result_that_lacks_something_is_refused(key):
    full = {"machine": MACHINE, "rows": []}
    assert provenance.provenance("new-h100.json", full).commit == "0123456"
    with pytest.raises(ValueError, match="new-h100.json has no"):
        provenance.provenance("new-h100.json", {**full, "machine": {**MACHINE, key: None}})


@pytest.mark.parametrize("row", ({"arm": "triton"}, {"rival": "liger (Triton)"}))
def test_a_result_of_a_rival_names_its_version(row):
    with pytest.raises(ValueError, match="no version of liger-kernel"):
        provenance.provenance("new-h100.json", {"machine": MACHINE, "rows": [row]})
    named = {"machine": {**MACHINE, "liger-kernel": "0.8.5"}, "rows": [row]}
    assert provenance.provenance("new-h100.json", named).in_words.endswith(", liger-kernel 0.8.5")


@pytest.mark.parametrize(
    ("device", "card"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA L40S", "l40s"),
        ("AMD EPYC", "cpu"),
        ("Intel(R) Xeon(R) Processor @ 2.10GHz", "cpu"),
    ],
)
def test_names_of_cards(device, card):
    assert provenance.card_of(device) == card


#: What only a measurement gives: milliseconds and memory, tokens per second with memory, pairs of times, ratios.
MEASURED = re.compile(r"\b\d+(\.\d+)? (GB|GiB|MiB|kB|ms)\b|\d,\d{3}, \d|\d\.\d+x|\d\.\d+ / \d")
#: Tables that another program writes, with card, date and version in their page, and that a program prints.
OTHERS = {"errors-cpu.md", "errors-cuda.md"}
#: Tables by arithmetic from one of the results of their page, or from sizes.
DERIVED = {("memory.md", "Long sequences"), ("memory.md", "Less memory for layers")}


def tables_of(text):
    """(heading, the lines of a table) of a page, without what is between marks and in code."""
    text = re.sub(r"```.*?```|<!-- (\w+) -->\n.*?<!-- end -->", "", text, flags=re.S)
    heading, lines = "", []
    for line in [*text.splitlines(), ""]:
        if line.startswith("|"):
            lines.append(line)
        elif lines:
            yield heading, "\n".join(lines)
            lines = []
        if line.startswith("#"):
            heading = line.lstrip("# ")


def test_tables_of_numbers_have_a_result():
    """A table with measured numbers is made by plot.py."""
    found = {
        (page.name, heading)
        for page in DOCS.glob("*.md")
        if page.name not in OTHERS
        for heading, lines in tables_of(page.read_text())
        if MEASURED.search(lines)
    }
    assert found <= DERIVED
    marked = re.compile(r"<!-- (\w+) -->\n(?:(?!<!--).)*<!-- end -->", re.S)
    marks = {(page.name, name) for page in DOCS.glob("*.md") for name in marked.findall(page.read_text())}
    made = {(table.page, table.name) for table in plot.TABLES}
    assert marks == made | {
        ("cards.md", "cards"), ("families.md", "gains"), ("performance.md", "misses"), ("performance.md", "tables")
    }  # fmt: skip


def test_what_misses_its_goal(monkeypatch):
    """Values are those of the result; a case whose values all meet its goal, at two digits, is left out."""
    row = {"case": "softmax", "options": {}, "eager forward": 1.0}
    rows = [
        {**row, "shape": [8, columns], "rival": rival, "eager forward+backward": ms, "rate forward+backward": rate}
        for columns, rival, ms, rate in ((64, "ours", 1.0, 0.5), (64, "torch", 1.5, 0.3), (65, "ours", 2.0, 0.896))
    ]
    monkeypatch.setattr(misses, "read", lambda file: {"machine": MACHINE, "rows": rows})
    monkeypatch.setattr(misses, "provenance", lambda file: provenance.provenance(file, {"machine": MACHINE}))

    def table(values, goal, least=False):
        case = misses.Case("softmax", "{card}.json", values, "{} of it", goal, "because", least)
        return cells(misses.missed(lambda pattern: "h100.json", (case,)))

    line = ["softmax", "0.50 to 0.90 of it", "0.90", "because", "H100", "[h100](../benchmarks/results/h100.json)"]
    assert table(misses.of_limit("softmax"), 0.9, True) == [line]
    assert table(misses.of_limit("softmax", misses.odd), 0.9, True) == []
    assert table(misses.of_gemms("softmax"), 1.5)[0][1] == "1.12 to 2.00 of it"
    assert table(misses.of_rival("softmax", "torch"), 0.6)[0][1] == "0.67 of it"
    assert table(misses.of_rival("softmax", "torch", rate=True), 2.0, True)[0][1] == "1.50 of it"
    assert table(misses.of_rival("softmax", "torch", rate=True), 1.5, True) == []
    with pytest.raises(AssertionError, match="h100.json has no such case"):
        table(misses.of_limit("rms_norm"), 0.9, True)


def test_a_table_that_nobody_measured_is_found():
    text = "# A\n\n| model | speed |\n|---|---|\n| llama | 12,345, 6.7 GB |\n"
    ((heading, lines),) = tables_of(text)
    assert heading == "A" and MEASURED.search(lines)


def test_every_table_is_in_the_list():
    lines = plot.measured().splitlines()
    assert sum(line.startswith("| [") for line in lines) == len(plot.TABLES)
    for table in plot.TABLES:
        of = provenance.provenance(table.file)
        (line,) = (line for line in lines if re.search(rf"\| {table.name} +\|.*{re.escape(table.file)}", line))
        assert of.date in line and of.commit in line and of.card.upper() in line


def read(file):
    return json.loads((ROOT / "benchmarks/results" / file).read_text())


def test_cards_have_the_numbers_of_the_results():
    """Llama-3-8B's LoRA and the longest sequence, read from the files in another way; every row names its file."""
    page = (DOCS / "cards.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| ") and "../benchmarks/results/" in line]
    assert len(rows) > 60
    assert all((DOCS / re.search(r"\]\((\S+json)\)", row)[1]).is_file() for row in rows)
    speeds = {
        row["arm"]: statistics.median(result["tokens_per_second"] for result in row["results"])
        for row in read("lora-h100.json")["rows"]
        if (row["model"], row["shape"], row.get("nf4")) == ("llama-8b", "4x2048", False)
    }
    (row,) = (row for row in rows if re.match(r"\| llama-8b +\| LoRA, checkpointed +\| 4 x 2,048 .*\[lora-h100\]", row))
    for arm in ("plain", "triton", "ours"):
        assert f"{speeds[arm]:,.0f}" in row
    assert f"({speeds['ours'] / speeds['plain']:.2f}x)" in row
    sections = re.findall(r"^## (\w+)$", page, re.M)
    assert {"H100", "H200"} < {*sections} and sections[-1] == "CPU"


def test_a_new_card_gets_a_section(monkeypatch):
    """A result of another card is in the page, with plain out of memory and a smaller batch named."""
    result = lambda speed, batch: {"tokens_per_second": speed, "peak_gb": 20.0, "reserved_gb": 21.0, "batch": batch}
    rows = [
        {"model": "llama-1b", "length": 2048, "arm": "plain", "result": result(1000.0, 2)},
        {"model": "llama-1b", "length": 2048, "arm": "ours", "result": result(1500.0, 8)},
        {"model": "llama-1b", "length": 4096, "arm": "plain", "result": None},
        {"model": "llama-1b", "length": 4096, "arm": "ours", "result": result(1400.0, 8)},
    ]
    report = {"machine": {**MACHINE, "device": "NVIDIA GeForce RTX 4090"}, "rows": rows}
    monkeypatch.setattr(cards, "results", lambda: ["e2e-rtx4090.json"])
    monkeypatch.setattr(cards, "read", lambda file: report)
    monkeypatch.setattr(cards, "provenance", lambda file, report: provenance.provenance(file, report))
    text = re.sub(" +", " ", cards.cards())
    assert text.startswith("## RTX4090") and "## H100" not in text
    assert "| llama-1b | all weights, checkpointed | 8 x 2,048 | 1,000, batch 2 | | 1,500 (1.50x) |" in text
    assert "| 8 x 4,096 | out of memory | | 1,400 |" in text and "2026-01-02 | 0123456" in text
    assert "| llama | RTX4090 | all weights, checkpointed | llama-1b | 1.50x | |" in re.sub(" +", " ", cards.gains())


def test_a_gain_is_over_the_faster_plain_model(monkeypatch):
    """Plain transformers with mamba-ssm counts as plain, in the gains of families and in the table of hybrids."""
    result = lambda speed, batch: {"tokens_per_second": speed, "peak_gb": 20.0 * batch, "batch": batch}
    rows = [
        {"model": "nemotron-h-2b", "length": 2048, "arm": arm, "result": result(speed, batch)}
        for arm, speed, batch in (("plain", 100.0, 2), ("mamba", 1000.0, 4), ("ours", 1250.0, 4))
    ]
    report = {"machine": MACHINE, "rows": rows}
    monkeypatch.setattr(cards, "results", lambda: ["e2e-hybrids-h200.json"])
    monkeypatch.setattr(cards, "read", lambda file: report)
    monkeypatch.setattr(cards, "provenance", lambda file, report: provenance.provenance(file, report))
    assert "| nemotron-h-2b | 1.25x | 100 % |" in re.sub(" +", " ", cards.gains())
    table = re.sub(" +", " ", tables.forms(report))
    assert "| | 1,000, 80.0 GB | 1,250, 80.0 GB (1.25x) |" in table and "| 100, 40.0 GB | | |" in table


def test_nf4_is_compared_with_plain_in_nf4(monkeypatch):
    """Not with plain in bfloat16, in a result that has both, and what a process may take is named."""
    run = lambda speed, batch: [{"tokens_per_second": speed, "peak_gb": 13.0, "batch": batch}]
    shared = {"model": "llama-8b", "shape": "4x2048", "checkpointing": "on", "cap_gb": 24}
    rows = [
        {**shared, "arm": "plain", "results": run(1000.0, 1)},
        {**shared, "arm": "plain+nf4", "results": run(2000.0, 2)},
        {**shared, "arm": "ours+nf4", "results": run(3000.0, 4)},
        {**shared, "arm": "ours+int8", "results": run(4000.0, 4)},
    ]
    report = {"machine": MACHINE, "rows": rows}
    text = re.sub(" +", " ", cards._models(cards.rows_of("lora-fits-h100.json", report)))
    assert "| QLoRA (nf4), checkpointed, at most 24 GB | 4 x 2,048 | 2,000, batch 2 | | 3,000 (1.50x) |" in text
    method = "LoRA, checkpointed, at most 24 GB, base in int8"
    assert f"| {method} | 4 x 2,048 | 1,000, batch 1 | | 4,000 (4.00x) |" in text


def values(report, keys):
    """Every value of these keys, however deep."""
    if isinstance(report, dict):
        for key, value in report.items():
            if key in keys and isinstance(value, float | int):
                yield value
            yield from values(value, keys)
    elif isinstance(report, list):
        for each in report:
            yield from values(each, keys)


def prose(text):
    text = re.sub(r"^\|.*$", "", re.sub(r"```.*?```", "", text, flags=re.S), flags=re.M)
    return re.split(r"(?<=[.])\s", re.sub(r"\s+", " ", text))


def claims(text):
    """Speeds in sentences that speak of tokens per second, and memory with one decimal, in a page's prose."""
    for sentence in prose(text):
        if re.search("tokens per second|tokens/s", sentence):
            yield from re.findall(r"(?<!x )\b\d{1,3}(?:,\d{3})+\b(?! tokens(?! per second|/s))(?! x )", sentence)
        yield from re.findall(r"\b\d+\.\d+ Gi?B\b", sentence)


def test_speeds_and_memory_in_prose_are_measured():
    """It covers tokens per second and memory with a decimal, on the pages of measurements and in README; not times in
    ms, ratios, percentages and sizes that are chosen, such as budgets."""
    reports = [read(file) for file in provenance.results()]
    known = {f"{value:,.0f}" for value in values(reports, {"tokens_per_second"})}
    for report in reports:  # the median of several runs
        for row in report.get("rows", ()):
            if "results" in row:
                known.add(f"{statistics.median(r['tokens_per_second'] for r in row['results']):,.0f}")
    known |= {f"{value:.1f} GB" for value in values(reports, {"peak_gb", "reserved_gb"})}
    known |= {f"{value / 2**30:.1f} GiB" for value in values(reports, {"step_peak_bytes", "peak_bytes"})}
    pages = [ROOT / "README.md", *(DOCS / f"{name}.md" for name in
             ("performance", "training", "memory", "lora", "graphs", "hybrids", "exactness", "cards"))]  # fmt: skip
    found = {(page.name, claim) for page in pages for claim in claims(page.read_text())}
    assert len(found) >= 10
    assert sorted(claim for claim in found if claim[1] not in known) == []


def test_a_claim_without_a_measurement_is_found():
    assert list(claims("It trains at 99,999 tokens per second\nin 12.5 GB with 2,048 tokens.")) == ["99,999", "12.5 GB"]


def cells(text):
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()[2:]]


def test_what_fits_on_smaller_cards():
    """Of rows of lora.py, which name a shape, and of e2e.py; the batch is that which fitted."""
    run = lambda batch, peak: {"batch": batch, "tokens_per_second": 5000.0, "peak_gb": peak}
    shared = {"model": "llama-8b", "shape": "4x2048", "checkpointing": "on"}
    rows = [
        {**shared, "arm": "ours", "cap_gb": 16, "out_of_memory": True},
        {**shared, "arm": "ours", "cap_gb": 24, "results": [run(1, 20.04)]},
        {**shared, "arm": "ours+nf4", "cap_gb": 16, "results": [run(4, 12.5)]},
    ]
    of_lora = cells(tables.what_fits({"rank": 16, "rows": rows}))
    assert of_lora == [
        ["llama-8b, 2,048", "ours", "out of memory", "1 in 20.0 GB, 5,000"],
        ["llama-8b, 2,048", "ours, nf4", "4 in 12.5 GB, 5,000", ""],
    ]  # fmt: skip
    rows = [{"model": "llama-1b", "length": 2048, "arm": "plain", "cap_gb": 16, "result": result}
            for result in (run(2, 15.0),)]  # fmt: skip
    assert cells(tables.what_fits({"rows": rows})) == [["llama-1b, 2,048", "plain", "2 in 15.0 GB, 5,000"]]


def test_no_replacement_is_slower_than_what_it_replaces():
    """Times in turns repeat to some 2 %."""
    rows = plot.read(plot.newest("replacements-{card}.json"))["rows"]
    assert not [row["part"] for row in rows if row["ratio"] > 1.02]


def test_steps_of_trl():
    shared = {"method": "dpo", "model": "llama-8b", "lora": 16, "batch": 4, "prompt": 512, "completion": 512}
    found = {"plain": {"seconds": 2.0, "peak_gb": 40.0}, "triton": None, "ours": {"seconds": 1.0, "peak_gb": 30.0}}
    found["ours+256MiB"] = {"seconds": 1.25, "peak_gb": 28.0}
    ((*_, shape, plain, triton, ours, fewer),) = cells(
        tables.trl_steps({"rows": [{**shared, "arm": arm, "result": result} for arm, result in found.items()]})
    )
    assert shape == "4 pairs of 512 + 512" and plain == "2.00, 40.0 GB"
    assert triton == "out of memory" and ours == "1.00 (2.00x), 30.0 GB" and fewer == "1.25 (1.60x), 28.0 GB"


def test_levels_of_a_plan():
    costs = [{"all": {"bytes": 2e6, "seconds": 0.0399}, "input": {"bytes": 0, "seconds": 0.05}}]
    result = {"batch": 4, "levels": {"all": 32}, "costs": costs}
    rows = [{"model": "llama-8b", "length": 2048, "result": result}, {"model": "llama-8b", "length": 1, "result": None}]
    found = cells(tables.levels({"rows": rows}))
    assert [line[2:] for line in found] == [["`all`", "2", "39.9", "32"], ["`input`", "0", "50.0", "0"]]


def test_a_table_shows_the_card_that_was_measured_last(monkeypatch):
    """A whole result before one that lacks parts, and one with what the table needs before others; results of several
    GPUs are others."""
    reports = {}

    def add(file, device, date, **more):
        reports[file] = {"machine": {**MACHINE, "device": device, "date": date}, "rows": [], **more}

    monkeypatch.setattr(plot, "results", lambda: [*reports])
    monkeypatch.setattr(plot, "read", reports.get)
    monkeypatch.setattr(plot, "provenance", lambda file: provenance.provenance(file, reports[file]))
    add("e2e-h100.json", "NVIDIA H100 80GB HBM3", "2026-01-02")
    add("e2e-h200x2.json", "NVIDIA H200", "2026-09-09")
    add("e2e-small-h200.json", "NVIDIA H200", "2026-09-09")
    add("e2e-cpu-avx2.json", "AMD EPYC", "2026-09-09")
    assert plot.newest("e2e-{card}.json") == "e2e-h100.json" and plot.newest("e2e-{card}x2.json") == "e2e-h200x2.json"
    add("e2e-h200.json", "NVIDIA H200", "2026-01-01")
    assert plot.newest("e2e-{card}.json") == "e2e-h100.json"
    add("e2e-h200.json", "NVIDIA H200", "2026-01-03")
    assert plot.newest("e2e-{card}.json") == "e2e-h200.json"
    assert plot.newest("e2e-{card}.json", lambda report: "80GB" in report["machine"]["device"]) == "e2e-h100.json"
    add("e2e-rtx4090.json", "NVIDIA GeForce RTX 4090", "2026-01-04", missing=["--models llama-1b"])
    assert plot.newest("e2e-{card}.json") == "e2e-h200.json"
    del reports["e2e-rtx4090.json"]["missing"]
    assert plot.newest("e2e-{card}.json") == "e2e-rtx4090.json"
    assert plot.newest("cpu-avx512.json") == "cpu-avx512.json"
    table = plot.Table("a.md", "a", "e2e-{card}.json", lambda report: "| a |")
    assert table.lines.startswith("NVIDIA GeForce RTX 4090, 2026-01-04: torch 2.13.0.\n\n| a |")
