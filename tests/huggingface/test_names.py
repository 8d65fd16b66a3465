"""The names of the package, and what it says of models, types and names that it has nothing for."""

import importlib
import pathlib
import re
import subprocess
import sys

import liger_kernel.ops
import liger_kernel.transformers
import pytest
from liger_kernel.transformers import monkey_patch
from liger_kernel.utils import warn_once
from tiny import model_of
from torch import nn


@pytest.fixture
def warnings_of(caplog):
    """What a call warns of, for the first time, beside the line that says what was replaced."""
    warn_once.cache_clear()

    def warnings_of(call):
        caplog.clear()
        call()
        return [
            record.getMessage()
            for record in caplog.records
            if record.levelname == "WARNING"
            and record.name.startswith("liger_kernel")
            and "kinds of parts" not in record.getMessage()
        ]

    return warnings_of


def test_a_type_without_a_row_is_named_once(warnings_of):
    for call, name in (
        (lambda: monkey_patch._apply_liger_kernel("gpt17", rope=True), "'gpt17'"),
        (lambda: monkey_patch._apply_liger_kernel(""), "''"),
        (lambda: monkey_patch._apply_liger_kernel_to_instance(model=nn.Linear(1, 1)), "a Linear of type None"),
    ):
        (message,) = warnings_of(call)
        assert name in message and "docs/families.md" in message and len(message) < 300
        assert warnings_of(call) == []


def test_a_switch_without_effect_is_named_once(warnings_of):
    apply = monkey_patch._apply_liger_kernel_to_instance
    llama, mllama = model_of("llama", "LlamaForCausalLM"), model_of("mllama", "MllamaForCausalLM")
    for model, switches, expected in (
        (llama, {}, None),
        (llama, {"rope": None, "layer_norm": False}, None),
        (llama, {"layer_norm": True}, "layer_norm=True has no effect on llama: the family has no such switch"),
        (mllama, {}, None),  # a default that finds nothing is no news
        (mllama, {"layer_norm": False}, None),
        (mllama, {"layer_norm": True}, "layer_norm=True has no effect on mllama: LayerNorm: the model has none"),
        (mllama, {"rope": True, "rms_norm": True}, None),
    ):
        messages = warnings_of(lambda: apply(model, **switches).undo())
        assert messages == ([expected] if expected else [])
        assert warnings_of(lambda: apply(model, **switches).undo()) == []


@pytest.mark.parametrize(
    "given, words",
    [
        ({"rms_nrom": True}, "unknown option 'rms_nrom': did you mean rms_norm"),
        ({"memory_budgett": 1}, "unknown option 'memory_budgett': did you mean memory_budget"),
        ({"liger_fused_linear": False}, "unknown option 'liger_fused_linear'"),
        ({"xyz": True}, "unknown option 'xyz': known are rope, .*memory_budget"),
    ],
)
def test_an_unknown_option_is_an_error(given, words):
    model = model_of("llama", "LlamaForCausalLM")
    kinds = [type(module) for module in model.modules()]
    for apply in (
        lambda: monkey_patch._apply_liger_kernel_to_instance(model, **given),
        lambda: monkey_patch._apply_liger_kernel("llama", **given),
        lambda: monkey_patch._apply_liger_kernel_to_instance(model, memory_budget="1GiB", **given),
    ):
        with pytest.raises(TypeError, match=words):
            apply()
    assert [type(module) for module in model.modules()] == kinds and not model._forward_pre_hooks


def test_the_nearest_family_is_named(warnings_of):
    for name in ("lama", "llama"[::-1] + "x"):
        with pytest.raises(AttributeError) as error:
            getattr(monkey_patch, f"apply_liger_kernel_to_{name}")
        assert ("did you mean llama" in str(error.value)) == (name == "lama") and len(str(error.value)) < 400


@pytest.mark.parametrize("module", ["liger_kernel.transformers", "liger_kernel.transformers.monkey_patch"])
def test_a_patch_without_a_row_is_an_error_that_says_why(module, warnings_of):
    module = importlib.import_module(module)
    why = "no Liger kernels for the family 'gpt17'.*docs/families.md"
    with pytest.raises(AttributeError, match=f"apply_liger_kernel_to_gpt17.*{why}"):
        module.apply_liger_kernel_to_gpt17
    assert not hasattr(module, "apply_liger_kernel_to_gpt17")
    warn_once.cache_clear()

    def import_it():
        with pytest.raises(ImportError, match="apply_liger_kernel_to_gpt17"):
            exec(f"from {module.__name__} import apply_liger_kernel_to_gpt17")

    (message,) = warnings_of(import_it)  # Python's own ImportError leaves the reason out
    assert re.search(why, message)


@pytest.mark.parametrize(
    "switches, replaced", [({}, True), ({"layer_norm": False}, True), ({"by_source": False}, False)]
)
def test_auto_model_of_a_type_without_a_row(switches, replaced, warnings_of):
    from transformers import GPT2Config

    config = GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=16)
    models = []
    (message,) = warnings_of(
        lambda: models.append(liger_kernel.transformers.AutoLigerKernelForCausalLM.from_config(config, **switches))
    )
    assert models[0].config.model_type == "gpt2" and "'gpt2'" in message
    assert ("patched by source" in message) == hasattr(type(models[0]).forward, "liger_original") == replaced
    norms = isinstance(models[0].transformer.ln_f, liger_kernel.transformers.LigerLayerNorm)
    assert norms == (replaced and not switches)


def test_names_of_the_docs():
    """Every Python name in the table of operators in docs/operators.md can be imported as a reader would try."""
    from liger_kernel import chunked_loss
    from liger_kernel.transformers import experimental, functional

    page = (pathlib.Path(__file__).parents[2] / "docs" / "operators.md").read_text()
    names = set(re.findall(r"`((?:Liger|liger_|apply_liger|apply_tiled)\w+)`", page)) - {"liger_kernel"}
    assert len(names) > 20 and "LigerGroupNorm" in names
    places = liger_kernel.transformers, experimental, functional, liger_kernel.ops, chunked_loss
    assert not [name for name in names if not any(hasattr(place, name) for place in places)]


def test_names_of_the_package():
    with pytest.raises(AttributeError, match="nothing_of_this_name"):
        liger_kernel.transformers.nothing_of_this_name
    for name in liger_kernel.transformers.__all__:
        assert getattr(liger_kernel.transformers, name) is not None
    from liger_kernel.transformers.model import output_classes
    from liger_kernel.transformers.trainer_integration import _apply_liger_kernel

    assert _apply_liger_kernel is monkey_patch._apply_liger_kernel
    fields = output_classes.LigerMoeCausalLMOutputWithPast.__dataclass_fields__
    assert {"token_accuracy", "predicted_tokens", "aux_loss"} <= fields.keys()
    with pytest.raises(AttributeError):
        output_classes.LigerSomethingElse


def _python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


def test_import_leaves_transformers_alone():
    done = _python("import sys, liger_kernel.transformers; assert 'transformers' not in sys.modules")
    assert done.returncode == 0, done.stderr


def test_without_transformers():
    done = _python(
        "import sys; sys.modules['transformers'] = None\n"
        "import liger_kernel.transformers as t\n"
        "assert not t.is_transformers_available()\n"
        "assert not hasattr(t, 'unknown')\n"
        "t.apply_liger_kernel_to_llama"
    )
    assert "ImportError: apply_liger_kernel_to_llama needs the transformers library" in done.stderr


def test_an_old_transformers_is_refused():
    done = _python(
        "import transformers; transformers.__version__ = '4.40.0'\nimport liger_kernel.transformers.monkey_patch"
    )
    assert "ImportError" in done.stderr and "4.40.0 is installed" in done.stderr
