"""The examples of the pages run, their links lead somewhere, and the site has every page."""

import contextlib
import io
import json
import pathlib
import re
import shutil
import sys
import types

import pytest
import torch

ROOT = pathlib.Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
sys.path.insert(0, str(DOCS / "site"))

import reference  # noqa: E402

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
    pages += re.sub(r"\| *([\d.]+) / ([\d.]+) / ([\d.]+) *\|", r"\1 GB \2 GB \3 GB", (DOCS / "cards.md").read_text())
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


RECORD = json.loads((ROOT / "tests/api.json").read_text())


def test_questions_have_short_answers():
    """Two to four sentences and a link each; what they say of switches and functions exists."""
    parts = re.split(r"^### (.*\?.*)\n", (DOCS / "faq.md").read_text(), flags=re.M)[1:]
    answers = {question: re.split(r"^## ", text, flags=re.M)[0] for question, text in zip(parts[::2], parts[1::2])}
    assert len(answers) >= 20
    for question, text in answers.items():
        words = re.sub(r"\[[^\]]*\]\([^)]*\)[,.\s]*", "", re.sub(r"`[^`]*`", "code", text)).split()
        ends = sum(word.endswith((".", "?")) for word in words)
        assert 2 <= ends <= 4 and re.search(r"\]\(\w[\w-]*\.md", text), question
    named = set(re.findall(r"`(?:liger_kernel\.)?(\w+)\(?[^`]*`", "".join(answers.values())))
    public = {name.split(".")[0] for of in RECORD.values() for name in of}
    assert {"patch", "report", "quantise", "capture_model", "capture_step", "set_memory_budget"} <= named & public


GENERATED = {"index.md", "python.md", "changelog.md", "contributing.md", *reference.PAGES}


def test_the_site_has_every_page():
    listed = set(re.findall(r"[\w/.-]+\.md", (ROOT / "mkdocs.yml").read_text().split("nav:")[1]))
    written = {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}
    assert listed == written | GENERATED


def test_every_public_name_has_an_anchor():
    """Once in the reference. A name that is new in the record has one, too."""
    pages = reference.pages(RECORD | {"liger_kernel.fresh": {"Thing": "(x)", "Thing.forward": "(self, x)"}})
    anchors = [anchor for text in pages.values() for anchor in re.findall(r'<h\d id="([^"]+)">', text)]
    names = {f"{module}.{name}" for module, of in RECORD.items() for name in of}
    assert names and set(anchors) == names | {"liger_kernel.fresh.Thing", "liger_kernel.fresh.Thing.forward"}
    assert len(anchors) == len(set(anchors))
    # An entry is HTML: nothing in it is Markdown that begins or ends a block.
    assert not any(
        "```" in text or "<pre>" in body
        for text in pages.values()
        for body in re.findall("<pre><code>(.*?)</code></pre>", text, re.S)
    )


def test_the_reference_has_docstrings():
    """The docstrings of what users call are found, also where a module hands a name on or imports it late."""
    for module, name in (
        ("liger_kernel", "patch"),
        ("liger_kernel", "quantise"),
        ("liger_kernel.optim", "LigerAdamW"),
        ("liger_kernel.graphs", "capture_step"),
        ("liger_kernel.memory", "plan"),
        ("liger_kernel.chunked_loss", "LigerFusedLinearDPOLoss"),
        ("liger_kernel.trl", "patch"),
        ("liger_kernel.transformers.auto_model", "AutoLigerKernelForCausalLM"),
    ):
        assert reference.docstring(module, name), f"{module}.{name}"
    assert [module for module in reference.MODULES if not reference.source(module)] == []


@pytest.mark.parametrize("installed", [True, False], ids=["doxygen", "without"])
def test_the_reference_of_cpp_is_linked(monkeypatch, installed):
    """From the navigation and from cpp.md, where Doxygen is installed; mkdocs itself is not needed here."""
    for name in ("mkdocs", "mkdocs.structure", "mkdocs.structure.files", "mkdocs.structure.nav"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules["mkdocs.structure.files"].File = object
    sys.modules["mkdocs.structure.nav"].Link = lambda title, url: types.SimpleNamespace(title=title, url=url)
    monkeypatch.delitem(sys.modules, "pages", raising=False)
    import pages

    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/doxygen" if installed else None)
    sections = [types.SimpleNamespace(title=title, children=[]) for title in ("Start", "Reference")]
    links = pages.on_nav(types.SimpleNamespace(items=sections), None, None).items[1].children
    assert [link.url for link in links] == ["cpp-reference/html/index.html"] * installed
    page = types.SimpleNamespace(file=types.SimpleNamespace(src_uri="cpp.md"), url="cpp/")
    text = pages.on_page_markdown((DOCS / "cpp.md").read_text(), page, types.SimpleNamespace(repo_url=""), None)
    assert ('<a href="../cpp-reference/html/index.html">C++ reference</a>' in text) == installed
    assert "site/Doxyfile" not in text


def test_the_site_has_tabs_and_suggests():
    settings = (ROOT / "mkdocs.yml").read_text().split("nav:")[0]
    assert {"navigation.tabs", "search.suggest"} <= set(re.findall(r"[\w.]+", settings))
    assert "\n  - search\n" in settings
