"""The examples of the pages run, their links lead somewhere, and the site has every page."""

import contextlib
import io
import pathlib
import re

import pytest
import torch

ROOT = pathlib.Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = [*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *(ROOT / ".github").rglob("*.md")]


def blocks(page, language="python"):
    fences = re.findall(r"^```(\w*)\n(.*?)^```$", (DOCS / page).read_text(), re.S | re.M)
    return [code for of, code in fences if of == language]


def test_losses():
    """One after another in one namespace; each loss moves the weight."""
    found = blocks("losses.md")
    assert len(found) >= 7
    names = {}
    for i, block in enumerate(found):
        exec(block, names)
        if i == 0:
            continue
        weight, hidden = names["weight"], names["hidden"]
        assert names["loss"].isfinite() and names["loss"] != 0, block
        assert weight.grad.isfinite().all() and weight.grad.any() and hidden.grad.any(), block
        weight.grad = hidden.grad = None
    assert torch.is_tensor(names["kl"]) and names["kl"] > 0


def test_getting_started():
    """The commands in Python run, and print the report that the page shows."""
    pytest.importorskip("transformers")
    names, printed = {}, io.StringIO()
    with contextlib.redirect_stdout(printed):
        for block in blocks("getting-started.md"):
            exec(block, names)
    assert printed.getvalue() == blocks("getting-started.md", "")[0]
    assert "rope" not in {entry.switch for entry in names["report"].replaced}


def test_routing():
    """The examples of router replay run, and the routers get gradients."""
    pytest.importorskip("transformers")
    names = {}
    for block in blocks("routing.md"):
        exec(block, names)
    assert names["model"].model.layers[1].mlp.gate.weight.grad.any()


README = (ROOT / "README.md").read_text()


def test_readme_fits_on_a_screen_or_two():
    assert len(README.split()) <= 500 and README.count("![") == 1


def test_readmes_numbers_are_those_of_the_measurements():
    """Each speed, memory and length of its table is in a page that benchmarks/plot.py writes, or in that of a run."""
    pages = "".join((DOCS / page).read_text() for page in ("training.md", "memory.md"))
    (table,) = re.findall(r"^\| model \|.*?\n\n", README, re.S | re.M)
    numbers = re.findall(r"\d+,\d{3}|\d+\.\d+ GB|\d+\.\d+x|\d+k", table)
    assert len(numbers) >= 25 and not [number for number in numbers if number not in pages]


def test_readmes_python_runs():
    pytest.importorskip("transformers")
    names, printed = {}, io.StringIO()
    with contextlib.redirect_stdout(printed):
        for block in blocks("../README.md"):
            exec(block, names)
    assert "LlamaForCausalLM (1 module)" in printed.getvalue() and "kept:" not in printed.getvalue()


def anchors(page):
    """What GitHub and the site make of a page's headings."""
    headings = re.findall(r"^#+ (.*)", re.sub(r"```.*?```", "", page.read_text(), flags=re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"\w+:", target):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked), target


def test_the_site_has_every_page():
    listed = set(re.findall(r"[\w/.-]+\.md", (ROOT / "mkdocs.yml").read_text().split("nav:")[1]))
    written = {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}
    assert listed == written | {"index.md", "python.md", "changelog.md", "contributing.md"}
