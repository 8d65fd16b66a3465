"""liger_kernel.patch and liger_kernel.report, and the line that a trainer's patch logs."""

import copy
import subprocess
import sys

import liger_kernel
import pytest
import torch
from conftest import assert_close, batch, make, run
from every_type import model_of
from liger_kernel.transformers import _apply_liger_kernel_to_instance
from liger_kernel.utils import warn_once
from torch import nn


def test_import_leaves_transformers_alone():
    code = "import sys, liger_kernel; assert 'transformers' not in sys.modules; from liger_kernel import patch, report"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("kind, made", [("llama", make), ("olmo", model_of)])
def test_any_type_is_patched(kind, made, caplog):
    """One with a row and one without: the same loss and gradients, the report, and the way back."""
    plain = made(kind)
    model = copy.deepcopy(plain)
    warn_once.cache_clear()
    assert liger_kernel.report(model) is None
    report = liger_kernel.patch(model)
    assert report.family == kind and liger_kernel.report(model) is report
    assert "kinds of parts" not in caplog.text  # the report says it
    assert {"fused_linear_cross_entropy", "swiglu"} <= {entry.switch for entry in report.replaced}
    (output, gradients), (expected, expected_gradients) = run(model, **batch()), run(plain, **batch())
    assert output.logits is None
    assert_close(output.loss, expected.loss)
    for name, gradient in expected_gradients.items():
        assert_close(gradients[name], gradient, 1e-4)
    report.undo()
    assert liger_kernel.report(model) is None
    assert [type(module) for module in model.modules()] == [type(module) for module in plain.modules()]


def test_switches():
    model = make("llama")
    report = liger_kernel.patch(model, rope=False, lora=False)
    assert "rope" not in {entry.switch for entry in report.replaced} and liger_kernel.report(model) is report
    with pytest.raises(TypeError, match="unknown option 'rop': did you mean rope"):
        liger_kernel.patch(make("llama"), rop=False)
    with pytest.raises(ValueError, match="a budget is"):
        liger_kernel.patch(make("llama"), memory_budget="much")
    planned = make("llama")
    liger_kernel.patch(planned, memory_budget="1GiB")
    assert planned._forward_pre_hooks


def test_a_model_of_peft_is_patched_inside():
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model = peft.get_peft_model(make("llama"), peft.LoraConfig(r=4, target_modules="all-linear"))
    expected = model(**batch()).loss
    report = liger_kernel.patch(model)
    assert "lora" in {entry.switch for entry in report.replaced} and liger_kernel.report(model) is report
    assert_close(model(**batch()).loss, expected)


def test_what_is_not_patched_is_an_error():
    with pytest.raises(TypeError, match="a Linear is no model of transformers.*apply_liger_kernel_by_structure"):
        liger_kernel.patch(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="'olmo' has no row"):
        liger_kernel.patch(model_of("olmo"), by_source=False)


@pytest.mark.parametrize("rank, lines", [(None, 1), ("0", 1), ("1", 0)])
def test_a_trainer_says_in_one_line_what_was_replaced(rank, lines, caplog, monkeypatch):
    """transformers calls this function: the first of several processes says it, once."""
    monkeypatch.delenv("RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    warn_once.cache_clear()
    model = make("llama")
    report = _apply_liger_kernel_to_instance(model=model)
    _apply_liger_kernel_to_instance(model=make("llama"))
    said = [record.getMessage() for record in caplog.records if "kinds of parts" in record.getMessage()]
    count = len(report.replaced)
    line = f"replaced {count} of {count} kinds of parts in a LlamaForCausalLM; print(liger_kernel.report(model)) lists"
    assert len(said) == lines and all(line in text for text in said)
    assert liger_kernel.report(model) is report
