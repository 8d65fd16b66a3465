"""Importing the package: what it loads, and what it says when it cannot."""

import os
import subprocess
import sys
from importlib import metadata

import liger_kernel
import pytest


def python(code, **environment):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **environment})


def test_import_leaves_torch_alone():
    done = python("import sys, liger_kernel; assert 'torch' not in sys.modules; print(liger_kernel.__version__)")
    assert done.returncode == 0 and done.stdout.strip() == liger_kernel.__version__, done.stderr


def test_version_is_that_of_the_distribution():
    try:
        installed = metadata.version("liger-kernel")
    except metadata.PackageNotFoundError:
        installed = "1.0.0+cpp"  # the sources where they stand
    assert installed == liger_kernel.__version__ == "1.0.0+cpp"


def test_cmake_finds_an_installed_package(tmp_path):
    """find_package(liger) configures a program against the package's folder; the sources where they stand have nothing to find."""
    installed = os.path.exists(os.path.join(liger_kernel.cmake_prefix_path, "_build.py"))
    examples = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "examples")
    done = subprocess.run(
        ["cmake", "-S", examples, "-B", tmp_path, "-G", "Ninja", f"-DCMAKE_PREFIX_PATH={liger_kernel.cmake_prefix_path}", f"-DPython_EXECUTABLE={sys.executable}"],
        capture_output=True, text=True)
    assert (done.returncode == 0) == installed, done.stderr


MISMATCH = """
import sys, types
build = types.ModuleType("liger_kernel._build")
build.TORCH_VERSION = "2.1.0"
sys.modules["liger_kernel._build"] = build
import liger_kernel.ops
"""


def test_another_torch_is_one_sentence():
    done = python(MISMATCH)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode != 0 and "was built for torch 2.1.0" in last and "rebuild it" in last


def test_a_missing_library_is_one_sentence():
    done = python("import liger_kernel.ops", LIGER_LIBRARY="/nowhere/libliger.so")
    assert done.returncode != 0 and "/nowhere/libliger.so is missing" in done.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize("name,version", [("liger-kernel-nightly", "0.9"), ("liger_kernel", "0.8.2")])
def test_another_distribution_is_named(tmp_path, name, version):
    info = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "RECORD").write_text("liger_kernel/__init__.py,,\n")
    done = python("import liger_kernel", PYTHONPATH=os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(tmp_path)])))
    assert f"{name} {version}" in done.stderr and "pip uninstall" in done.stderr


def test_kernels_run_from_several_threads():
    """Each operator keeps what it knows per call: calls from other threads do not meet."""
    import threading

    import torch
    from liger_kernel.transformers.functional import liger_cross_entropy

    x, y = torch.randn(64, 500), torch.randint(0, 500, (64,))
    expected, got = liger_cross_entropy(x, y), []
    threads = [threading.Thread(target=lambda: got.append(liger_cross_entropy(x, y))) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(got) == 4 and all(torch.equal(g, expected) for g in got)
