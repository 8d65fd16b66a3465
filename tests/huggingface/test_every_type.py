"""Model types without a row, patched by source: they train as they did, and docs/families.md tells what is replaced."""

import copy

import every_type
import pytest
import transformers
from every_type import GRADIENT_TOLERANCE, LOSS_TOLERANCE, compare, documented, documented_version, line, without_row
from liger_kernel.transformers.monkey_patch import _apply_liger_kernel_to_instance
from liger_kernel.utils import warn_once
from packaging.version import parse

# In every run: one of each way to lay out a rotary embedding, to name an MLP, and to hold another model; attention that
# normalises the encoder's keys after its rotation (T5Gemma 2); a masked language model; and norms that hold their width
# as a number (I-BERT).
SOME = (
    "aria axk1 bart cohere2_moe gpt2 helium ibert lfm2_vl minicpm3 modernbert nanochat olmo phi4_multimodal "
    "qwen2_5_omni_thinker t5gemma2".split()
)
SAME = transformers.__version__ == documented_version()
KINDS = [
    pytest.param(kind, marks=() if kind in SOME else pytest.mark.full())
    for kind in documented()
    if kind in without_row() and (SAME or kind in SOME)
]


@pytest.mark.skipif(parse(transformers.__version__) < parse("5.19"), reason="the configurations have other fields")
@pytest.mark.parametrize("kind", KINDS)
def test_a_type_without_a_row(kind):
    result = compare(kind)
    assert result.loss <= LOSS_TOLERANCE and result.gradient <= GRADIENT_TOLERANCE, result
    assert result.report.replaced
    if SAME:
        assert line(kind, result.report) == documented()[kind], "python tests/huggingface/every_type.py --write"
    assert result.fused == any(entry.switch == "fused_linear_cross_entropy" for entry in result.report.replaced)


#: Of these the default configuration, made small, trains no plain model; test_families.py makes them by hand.
BY_HAND = set(
    "glm4v glm4v_moe hunyuan_v1_dense hunyuan_v1_moe llama4 ministral nemotron qwen2_5_vl qwen2_vl qwen3_5 qwen3_5_moe"
    .split()
)  # fmt: skip
#: One rounding of its embedding changes its gradients by as much as the tolerance.
UNSTABLE = {"gemma4"}
WITH_ROW = every_type.types().keys() - without_row().keys() - BY_HAND - UNSTABLE


@pytest.mark.skipif(not SAME, reason="the configurations have other fields")
@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=() if k == "deepseek_v4" else pytest.mark.full()) for k in sorted(WITH_ROW)]
)
def test_a_type_with_a_row(kind):
    """By its default configuration, which may have more than the tiny ones of other tests: DeepSeek-V4's attention adds
    compressed keys to keys and mask."""
    result = compare(kind)
    assert result.loss <= LOSS_TOLERANCE and result.gradient <= GRADIENT_TOLERANCE, result


@pytest.mark.skipif(not SAME, reason="the page is of another version of transformers")
def test_every_type_is_in_the_page():
    text = every_type.PAGE.read_text().split(every_type.BEGIN)[1].split(every_type.END)[0]
    tried, others = documented(), text.rpartition("more than text: ")[2].replace("\n", " ").rstrip(" .").split(", ")
    assert {*tried, *others} == {*without_row()} and not {*tried} & {*others}
    assert f"{len(tried)} types" in text and f"{len(others)} more types" in text
    assert all("yes" in row for row in tried.values())


def test_switches_of_a_type_without_a_row(caplog):
    plain = every_type.model_of("olmo")
    for switches, expected in (
        ({}, {"layer_norm", "swiglu", "rope", "fused_linear_cross_entropy"}),
        ({"rope": False, "swiglu": False, "geglu": False}, {"layer_norm", "fused_linear_cross_entropy"}),
        (
            {"fused_linear_cross_entropy": False, "cross_entropy": True, "geglu": True},
            {"layer_norm", "swiglu", "rope", "cross_entropy"},
        ),
    ):
        model = copy.deepcopy(plain)
        warn_once.cache_clear()
        caplog.clear()
        report = _apply_liger_kernel_to_instance(model=model, **switches)
        # The tables of some versions of transformers were not compared.
        kept = {skip.switch for skip in report.skipped if skip.reason == every_type.TABLES}
        expected |= {"layers", "masks"}
        assert {entry.switch for entry in report.replaced} | kept == expected
        assert len(kept) == len(report.skipped) and kept <= {"rope"}
        (message,) = [r.getMessage() for r in caplog.records if r.name.startswith("liger_kernel.utils")]
        assert "'olmo'" in message and all(switch in message for switch in expected - kept)
        report.undo()
        assert [type(module) for module in model.modules()] == [type(module) for module in plain.modules()]
    assert _apply_liger_kernel_to_instance(model=model, by_source=False) is None
    assert "no Liger kernels for a OlmoForCausalLM of type 'olmo'" in caplog.text
    assert [type(module) for module in model.modules()] == [type(module) for module in plain.modules()]


def test_tables_that_are_laid_out_otherwise_keep_the_rotary_embedding(monkeypatch):
    """The function is known, and what makes its tables is not."""
    from transformers.models.dots1 import modeling_dots1
    from transformers.models.helium import modeling_helium

    class OtherRotaryEmbedding(modeling_dots1.Dots1RotaryEmbedding):
        def forward(self, x, position_ids):
            cos, sin = super().forward(x, position_ids)
            return cos.flip(-1), sin

    for home, kind, kept in ((modeling_dots1, "dots1", True), (modeling_helium, "helium", False)):
        monkeypatch.setattr(home, "OtherRotaryEmbedding", OtherRotaryEmbedding, raising=False)
        report = _apply_liger_kernel_to_instance(every_type.model_of(kind))
        assert ("rope" not in {entry.switch for entry in report.replaced}) == kept
        # The router's source in transformers 4.57 is another.
        reasons = [skip.reason for skip in report.skipped if skip.name != "Dots1TopkRouter"]
        assert reasons == ([every_type.TABLES] if kept else [])
