"""The notebooks run as they stand; what they assert is what they claim."""

import json
import pathlib

import pytest

NOTEBOOKS = sorted((pathlib.Path(__file__).resolve().parents[1] / "examples" / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook(path, monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.setattr("transformers.trainer.is_liger_kernel_available", lambda: True, raising=False)
    monkeypatch.setattr("transformers.integrations.liger.is_liger_kernel_available", lambda: True, raising=False)
    cells = json.loads(path.read_text())["cells"]
    assert not any(cell.get("outputs") for cell in cells), "outputs are not kept"
    names = {"__name__": "__main__"}
    for cell in cells:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), str(path), "exec"), names)


def test_there_are_five():
    assert [path.stem for path in NOTEBOOKS] == ["distillation", "dpo", "hybrids", "lora", "patch_and_measure"]
