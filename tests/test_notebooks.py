"""The notebooks run as they stand; what they assert is what they claim. `python tests/test_notebooks.py` stores what
they print, on this machine."""

import contextlib
import io
import json
import pathlib

import pytest

NOTEBOOKS = sorted((pathlib.Path(__file__).resolve().parents[1] / "examples" / "notebooks").glob("*.ipynb"))


def run(path, notebook):
    """Each cell of code, and what it prints."""
    names = {"__name__": "__main__"}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            with contextlib.redirect_stdout(io.StringIO()) as said:
                exec(compile("".join(cell["source"]), str(path), "exec"), names)
            yield cell, said.getvalue()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook(path, monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.setattr("transformers.trainer.is_liger_kernel_available", lambda: True, raising=False)
    monkeypatch.setattr("transformers.integrations.liger.is_liger_kernel_available", lambda: True, raising=False)
    for cell, said in run(path, json.loads(path.read_text())):
        assert bool(said) == bool(cell["outputs"]), "the stored output is of other code: python tests/test_notebooks.py"


def test_there_are_nine():
    assert [path.stem for path in NOTEBOOKS] == [
        "distillation", "dpo", "experts", "grpo", "hybrids", "long_context", "lora", "patch_and_measure", "quantised",
    ]  # fmt: skip


if __name__ == "__main__":
    import transformers.integrations.liger
    import transformers.trainer

    for module in (transformers.trainer, transformers.integrations.liger):
        module.is_liger_kernel_available = lambda: True
    for path in NOTEBOOKS:
        notebook = json.loads(path.read_text())
        for count, (cell, said) in enumerate(run(path, notebook), 1):
            lines = said.splitlines(keepends=True)
            cell["execution_count"] = count
            cell["outputs"] = [{"name": "stdout", "output_type": "stream", "text": lines}] if lines else []
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")
        print(path.stem)
