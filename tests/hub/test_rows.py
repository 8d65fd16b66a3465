"""Every class of every row of the table of families with use_kernels=True, against the untouched model. `make
test-hub`."""

import copy

import pytest
import torch
from liger_kernel.transformers import use_as_hub_kernels
from liger_kernel.transformers.patching.families import FAMILIES
from test_families import assert_same_step
from tiny import TINY_MODELS, model_of
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP

KINDS = [pytest.param(row, kind, id=kind) for row, kinds in TINY_MODELS.items() for kind in kinds]


@pytest.fixture
def installed():
    handle = use_as_hub_kernels()
    yield handle
    handle.undo()


@pytest.mark.parametrize("row, kind", KINDS)
def test_a_model_is_the_one_that_it_replaces(row, kind, installed, monkeypatch):
    # On a CPU, in inference alone, transformers would fetch these experts from the Hub.
    monkeypatch.delattr(GptOssMLP, "kernel_layer_name")
    reference = model_of(row, kind)
    model = copy.deepcopy(reference)
    model.set_use_kernels(True)
    inputs = TINY_MODELS[row][kind][1]()
    for training in (True, False, True):
        model.train(training), reference.train(training)
        torch.manual_seed(0)
        output = assert_same_step(model, reference, inputs)
        if FAMILIES[row].loss:
            assert (output.logits is None) == training
    (report,) = installed.reports
    # Mistral 3's images go through an MLP with erf's GELU.
    kept = [skip for skip in report.skipped if (row, skip.name) != ("mistral3", "PixtralMLP")]
    assert report.replaced and not kept
    assert any(entry.switch == "fused_linear_cross_entropy" for entry in report.replaced) == bool(FAMILIES[row].loss)
