"""Every public name of liger-kernel 0.8.5 is importable from where it was, or docs/differences.md says why not."""

import importlib
import json
import pathlib
import re

import pytest
import transformers
from reference_names import RECORD, names_of

DIFFERENCES = (pathlib.Path(__file__).parents[1] / "docs" / "differences.md").read_text()
#: (modules, names, words of docs/differences.md that give the reason)
LEFT_OUT = (
    (r"liger_kernel\.ops\.(cute(?!\.ops)|cutedsl|cutile)(\..*)?", ".*", "Implementations by CuTe, CuTe DSL and cuTile"),
    (r"liger_kernel\.ops\.cute\.ops\.moe", "tvm_ffi", "Implementations by CuTe, CuTe DSL and cuTile"),
    (r"liger_kernel\.ops\.configure", "FusedLinearCrossEntropyConfig", "`FusedLinearCrossEntropyConfig`"),
    (r"liger_kernel\.ops\.fused_moe_kernels", ".*", "`liger_kernel.ops.fused_moe_kernels`"),
    (r"liger_kernel\.testing", ".*", "`liger_kernel.testing`"),
    (r"liger_kernel\.backends\.(capability|dispatch|registry)", ".*", "The registry of implementations"),
    (
        r"liger_kernel\.(backends|functional|transformers\..*|ops\..*)",
        "Capability|OpImpl|BackendNotAvailableError|LigerBackendFallbackWarning|NoBackendAvailableError|all_backends"
        "|resolve_(backend|impl)|register_(impl|op)|dispatch|declare_op_locations",
        "The registry of implementations",
    ),
    (
        r"liger_kernel\.ops(\..*)?",
        "ensure_contiguous|calculate_settings|compare_version|is_hip|infer_device(_arch)?|is_npu_available"
        "|get_npu_core_count|set_large_grf_mode|torch_to_triton_dtype|device_context|amp_custom_(bwd|fwd)"
        "|element_mul_kernel|liger_cross_entropy_kernel|get_autotune_config|get_num_warps|get_bucket_m|gemm_swiglu"
        "|swiglu_backward_d(GU|I)|TensorDescriptor|[A-Z][A-Z0-9_]+",
        "What modules of kernels import and define for themselves",
    ),
    (
        r"liger_kernel\.ops(\..*)?",
        "fused_(ce_tvd|linear_kl_div)_(forward|backward)|fused_neighborhood_attention_forward",
        "`fused_ce_tvd_*`, `fused_linear_kl_div_*`",
    ),
    (r"liger_kernel\.triton\.monkey_patch", "LigerTritonFileCacheManager", "Triton kernels"),
    (r"liger_kernel\.transformers\..*", "logger", "Loggers"),
)
#: Outputs of models that some versions of transformers have.
OUTPUTS = r"Liger(Glm4vMoe|Qwen\w+|MuseGlimmer|Gemma4|InternVL|Llava|PaliGemma)CausalLMOutputWithPast"


def reason(module, name):
    return next((words for m, n, words in LEFT_OUT if re.fullmatch(m, module) and re.fullmatch(n, name)), None)


def is_there(module, name):
    try:
        return hasattr(importlib.import_module(module), name)
    except ModuleNotFoundError:
        return False
    except ImportError as error:  # of what needs a package that is not installed
        return "TRL" in str(error)


@pytest.mark.parametrize("module", json.loads(RECORD.read_text()))
def test_names(module):
    for name in json.loads(RECORD.read_text())[module]:
        if re.fullmatch(OUTPUTS, name) and not is_there(module, name):
            base = name.removeprefix("Liger")
            assert not any(hasattr(m, base) for m in vars(transformers.models).values()), (module, name)
        elif reason(module, name) is None:
            assert is_there(module, name), f"{module}.{name} is neither there nor in docs/differences.md"


def test_reasons_are_given():
    assert all(words in DIFFERENCES for *_, words in LEFT_OUT)


def test_what_a_module_binds():
    source = "from liger_kernel.x import a as b\nimport torch\ntry:\n    C = 1\nexcept E:\n    d: int = 2\n_e = f = 3\n"
    source += "@triton.jit\ndef g(): pass\nclass H: pass\nfrom torch import i\n"
    assert names_of(source) == {"b": False, "C": False, "d": False, "f": False, "g": True, "H": False}
