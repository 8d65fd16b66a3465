"""This machine's wheel in dist/, in virtual environments with one version of torch each and no compiler on the path:
`make test-wheel`. Needs the package index and, for the C++ program, a compiler. The environments stay under
build/wheels.
"""

import os
import platform
import re
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
from pythons import pythons

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "wheels"
WHEEL = max((ROOT / "dist").glob(f"*_{platform.machine()}.whl"), key=os.path.getmtime)
MINORS = sorted(set(re.findall(r"lib/torch-([\d.]+)/libliger.so", "\n".join(zipfile.ZipFile(WHEEL).namelist()))))
BESIDE = re.findall(r"^(?:transformers|numpy|pytest)==.*", (ROOT / "requirements.txt").read_text(), re.M)

TRAIN = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from liger_kernel.transformers import apply_liger_kernel_to_llama

config = LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4)
ids = torch.arange(128).view(2, 64)

def losses(patched):
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    if patched:
        assert not apply_liger_kernel_to_llama(model).skipped
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.detach()

ours, plain = torch.stack([*losses(True)]), torch.stack([*losses(False)])
assert torch.allclose(ours, plain, rtol=1e-5) and ours[2] < ours[0], (ours, plain)
"""


class Environment:
    """A virtual environment, whose programs alone are on the path."""

    def __init__(self, folder, python=sys.executable):
        self.folder, self.python = folder, folder / "bin/python"
        if not self.python.exists():
            subprocess.run([python, "-m", "venv", folder], check=True)

    def run(self, *command, **variables):
        kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "LIGER_LIBRARY")}
        path = {"PATH": str(self.folder / "bin")}
        command = list(map(str, command))
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**kept, **path, **variables})
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def pip(self, *arguments):
        return self.run(self.python, "-m", "pip", "--disable-pip-version-check", *arguments)


@pytest.fixture(scope="module", params=MINORS)
def minor(request):
    return request.param


@pytest.fixture(scope="module")
def environment(minor):
    environment = Environment(BUILD / f"env-{minor}")
    environment.pip("install", f"torch=={minor}.*", *BESIDE)
    environment.pip("uninstall", "-y", "libliger")
    begin = time.time()
    environment.pip("install", WHEEL)
    environment.seconds = time.time() - begin
    return environment


def test_installs_in_seconds(environment):
    print(f"{environment.seconds:.1f} s")
    assert environment.seconds < 20
    assert "No broken requirements found" in environment.pip("check")


def test_takes_the_library_of_its_torch(environment, minor):
    report = environment.run(environment.python, "-m", "liger_kernel.env_report", "--device", "cpu")
    assert f"liger_kernel/lib/torch-{minor}/libliger.so" in report
    assert f"+pt{minor.replace('.', '')}" in report and "all operators agree with plain torch" in report


def test_a_patched_llama_trains(environment):
    environment.run(environment.python, "-c", TRAIN)


def test_liger_train_is_on_the_path(environment):
    assert "--data" in environment.run("liger-train", "--help")


def test_operators(environment):
    tests = ("-q", "-p", "no:cacheprovider", "--import-mode=importlib", "tests/test_ops.py")
    some = "exact and cpu and float32 and (rms_norm or rope or gated or cross_entropy)"
    passed = environment.run(environment.python, "-m", "pytest", *tests, "-k", some)
    assert int(re.search(r"(\d+) passed", passed)[1]) >= 5


def test_a_program_finds_it(environment, tmp_path):
    """find_package(liger) and the torch beside it, with the compiler and CMake of this machine."""
    prefix = environment.run(environment.python, "-c", "import liger_kernel; print(liger_kernel.cmake_prefix_path)")
    tools, path = Path(sys.executable).parent, {"PATH": os.environ["PATH"]}
    ninja = ("-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}")
    asked = (f"-DCMAKE_PREFIX_PATH={prefix.strip()}", "-DVERSION=1.0", "-DCOMPONENTS=models;tokenizer")
    environment.run(tools / "cmake", "-S", "tests/installed", "-B", tmp_path, *ninja, *asked, **path)
    environment.run(tools / "cmake", "--build", tmp_path, "--target", "uses", **path)
    environment.run(tmp_path / "uses")


PYTHONS = dict(pythons())


@pytest.mark.parametrize("n", PYTHONS, ids="3.{}".format)
def test_other_pythons(n, tmp_path):
    """The library is not linked with Python: what may differ is whether the sources are understood."""
    environment = Environment(tmp_path, PYTHONS[n])
    environment.pip("install", "--no-deps", WHEEL)
    (package,) = tmp_path.glob("lib/python3.*/site-packages/liger_kernel")
    environment.run(environment.python, "-m", "compileall", "-q", package)
    environment.run(environment.python, "-c", f"import liger_kernel, sys; assert sys.version_info[1] == {n}")
