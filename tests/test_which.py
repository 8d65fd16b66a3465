"""What `make check` runs for a changed file (tests/which.py)."""

import pytest
import which


def words(*changed, diff=""):
    return " ".join(which.plan(changed, lambda path: diff)).replace("tests/huggingface/", "").split()


@pytest.mark.parametrize(
    "path, chosen",
    {
        # an operator's family, its cases and the tests that call it; the families that borrow from it
        "liger/ops/norm/norm_cpu.cpp": ["liger", "tests/test_ops.py", "tests/test_modules.py"],
        "liger/ops/preference/policy_op.cpp": ["loss_cases", "tests/test_policy.py"],
        "liger/ops/optimizer/adamw.h": ["liger", "tests/test_optim.py"],
        "liger/core/cpu/row.h": ["liger", "tests/test_ops.py"],
        "liger/models/tokenizer.cpp": ["all", "'^(compare_tokenizers?|models)$'", "tests/test_train_tokenizers.py"],
        "liger/train/trainer.cpp": ["all", "'^(compare_trainings?|models)$'", "tests/test_train_manners.py"],
        "liger/nn/norm.h": ["all", "'^(experts|liger|liger_emulated|models)$'"],
        # by the names that a file defines, or that those have which import it
        "python/liger_kernel/operators/norm.py": ["tests/test_modules.py", "test_families.py"],
        "python/liger_kernel/chunked_loss/dpo_loss.py": ["tests/test_preference.py"],
        "python/liger_kernel/research/sparsemax.py": ["tests/research/test_sparsemax.py"],
        "python/liger_kernel/transformers/lora.py": ["test_lora.py", "test_families.py", "gemma2,llama,mixtral"],
        "python/liger_kernel/optim.py": ["tests/test_optim.py"],
        "tests/cases/rope.py": ["rope", "tests/test_ops.py"],
        "tests/test_arguments.py": ["tests/test_arguments.py"],
        "tests/huggingface/test_rows.py": ["test_rows.py"],
        "tests/ranks.py": ["tests/test_dtensor.py"],
        "tests/api.json": ["tests/test_api.py"],
        "examples/train.py": ["tests/test_train.py"],
        "docs/lora.md": ["tests/test_docs.py", "tests/test_measurements.py"],
        "benchmarks/results/lora-h100.json": ["tests/test_measurements.py"],
        "benchmarks/run_all.py": ["tests/test_run_all.py"],
    }.items(),
)
def test_a_changed_file(path, chosen):
    assert set(chosen) <= set(words(path))


def test_cases_of_the_families_that_borrow():
    chosen = words("liger/ops/loss/cross_entropy_cpu.cpp")
    assert {"cross_entropy", "linear_log_prob"} <= set(chosen[chosen.index("--cases") + 1].split(","))
    assert "--cases" not in words("liger/ops/rope/rope_op.cpp", "liger/core/torch/op.h")


def test_cuda_kernels_are_emulated():
    for path in ("liger/ops/rope/rope_cuda.cu", "liger/core/cuda/reduce.cuh", "liger/core/cuda/launch.h"):
        assert "LIGER_EMULATED_DEVICE=sm_90" in words(path)
    assert "LIGER_EMULATED_DEVICE=sm_90" not in words("liger/ops/rope/rope_cpu.cpp")


def test_families_of_changed_rows_and_sources():
    row = '-    _known("qwen2_moe", "Qwen2MoeForCausalLM", router=True),\n     _known("glm", "GlmForCausalLM"),'
    assert "qwen2_moe" in words("python/liger_kernel/transformers/families.py", diff=row)
    source = '+++ b/sources.json\n+  "46eec397bcb207f8": "FalconH1RMSNorm and 1 more, 5.5.0 to 5.24.0",'
    assert "falcon_h1" in words("python/liger_kernel/transformers/sources.json", diff=source)
    assert "gemma2,llama,mixtral" in words("python/liger_kernel/transformers/families.py")


def test_nothing_for_files_that_no_test_reads():
    assert not any("pytest" in word for word in words(".gitignore"))


def test_files_that_are_gone():
    assert words("tests/test_gone.py", "python/liger_kernel/gone.py", "liger/ops/rope/gone_cpu.cpp")
