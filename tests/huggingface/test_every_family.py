"""docs/families.md tells what is replaced in each family, and what is kept."""

import shutil

import every_family
import every_type
import pytest
import transformers
from every_family import documented, documented_version, families, row
from liger_kernel.transformers.families import FAMILIES

# In every run: a dense model, one with experts, one with sinks, one that holds another model, one with mixers.
SOME = {"llama", "granite", "mixtral", "gpt_oss", "paligemma", "qwen3_5", "phi4_multimodal"}
SAME = transformers.__version__ == documented_version()
NAMES = [pytest.param(name, marks=() if name in SOME else pytest.mark.full()) for name in families()]


@pytest.mark.skipif(not SAME, reason="the page is of another version of transformers")
@pytest.mark.parametrize("name", NAMES)
def test_the_row_of_a_family(name):
    assert row(name) == documented()[name], "python tests/huggingface/every_family.py --write"


@pytest.mark.skipif(not SAME, reason="the page is of another version of transformers")
def test_every_family_is_in_the_page():
    assert [*documented()] == [name for name in FAMILIES if name in families()]
    assert f"{len(documented())} families" in every_family.section()


@pytest.mark.skipif(not SAME, reason="the page is of another version of transformers")
@pytest.mark.parametrize("maker", [every_family, every_type], ids=["families", "types"])
def test_writing_changes_one_table(maker, tmp_path, monkeypatch):
    """The page has several generated tables: each program writes its own, and a page that is right stays as it is."""
    page = tmp_path / "families.md"
    shutil.copy(maker.PAGE, page)
    before = page.read_text()
    monkeypatch.setattr(maker, "PAGE", page)
    maker.write({})
    assert page.read_text() == before


def test_a_family_that_loses_a_part_is_noticed(monkeypatch):
    """The row of a patch that replaces no MLP is another, and says so."""
    from liger_kernel.transformers import monkey_patch

    whole, apply = row("llama"), monkey_patch.apply_liger_kernel_to_llama
    monkeypatch.setattr(monkey_patch, "apply_liger_kernel_to_llama", lambda model: apply(model=model, swiglu=False))
    assert "`LlamaMLP`" in whole and "`LlamaMLP`" not in row("llama")
