"""The versions of docs/hub.md, each in an environment of its own: what is documented runs, or is refused in the words
of the page. `make test-hub`."""

import copy
import importlib.metadata
import pathlib
import re

import pytest
import torch
import transformers
from conftest import assert_same_step, batch, make
from liger_kernel import env_report
from liger_kernel.transformers import use_as_hub_kernels

PAGE = (pathlib.Path(__file__).parents[2] / "docs" / "hub.md").read_text()
ON_KERNELS, SWITCHES, CLASSIC = re.findall(r"```python\n(.*?)```", PAGE, re.S)
INSTEAD = "apply_liger_kernel_to_<family>() and use_liger_kernel=True need no `kernels`"
# (transformers, kernels) -> what use_as_hub_kernels() raises.
TESTED = {
    ("5.22.2", "0.17.2"): None,
    (
        "5.23.0",
        "0.17.2",
    ): "use_as_hub_kernels: transformers 5.23.0 works with kernels>=0.18.2,<0.19.0, and kernels 0.17.2 is "
    f"installed. Run `pip install 'kernels>=0.18.2,<0.19.0'`; {INSTEAD}",
    ("4.57.6", None): f"use_as_hub_kernels needs transformers>=5.18, and transformers 4.57.6 is installed; {INSTEAD}",
}


def installed(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


REFUSAL = TESTED[transformers.__version__, installed("kernels")]


@pytest.fixture
def folder(tmp_path):
    make("llama").save_pretrained(tmp_path)
    return tmp_path


def run(block, folder, names):
    """Run an example of the page with the model in `folder`, and return that model and an untouched one."""
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder).train()
    names["AutoModelForCausalLM"] = transformers.AutoModelForCausalLM
    assert "meta-llama/Llama-3.2-1B" in block
    exec(block.replace("meta-llama/Llama-3.2-1B", str(folder)), names)
    return names["model"].train(), reference


def test_the_example_with_use_kernels(folder, capsys):
    names = {}
    if REFUSAL:
        with pytest.raises(ImportError) as error:
            run(ON_KERNELS, folder, names)
        assert str(error.value) == REFUSAL
        assert "model" not in names and "replaced by" not in capsys.readouterr().out
        return
    model, reference = run(ON_KERNELS, folder, names)
    table = re.search(r"```\n(liger_kernel: .*?)```", PAGE, re.S)[1]
    assert capsys.readouterr().out == table
    try:
        assert assert_same_step(model, reference, **batch()).logits is None
        exec(SWITCHES, names)
        assert_same_step(model, reference, **batch())
        assert model(**batch()).logits is not None and str(names["handle"]).endswith("since use_as_hub_kernels()")
    finally:
        names["handle"].undo()


def test_the_example_without_kernels(folder, capsys):
    model, reference = run(CLASSIC, folder, {})
    printed = capsys.readouterr().out
    assert all(f" {switch} " in printed for switch in ("rope", "rms_norm", "swiglu", "fused_linear_cross_entropy"))
    assert "kept" not in printed
    assert assert_same_step(model, reference, **batch()).logits is None


def test_a_refusal_changes_nothing(folder):
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder).train()
    kept = dict(vars(transformers.PreTrainedModel))
    if REFUSAL:
        with pytest.raises(ImportError):
            use_as_hub_kernels()
    else:
        use_as_hub_kernels().undo()
    assert dict(vars(transformers.PreTrainedModel)) == kept
    model = copy.deepcopy(reference)
    assert torch.equal(model(**batch()).logits, reference(**batch()).logits)


def test_the_report_of_the_environment_says_the_same(capsys):
    assert env_report.hub() == (REFUSAL or "runs on this library after liger_kernel.transformers.use_as_hub_kernels()")
    assert env_report.main(["--device", "cpu"]) == 0
    assert f"  {env_report.hub()}\n" in capsys.readouterr().out


def test_the_page_shows_what_is_tested():
    """A row for each pair, with the beginning of its message."""
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.splitlines() if line.startswith("| ")
    ]
    said = {cells[0]: cells[1:] for cells in rows if cells[0] != "transformers"}
    assert len(said) == len(TESTED)
    for (version, kernels), message in TESTED.items():
        beside, text = said[version]
        assert beside.split(",")[0] == (kernels or "none")
        assert message.startswith(text.strip("`").removesuffix("...")) if message else text == "works"
