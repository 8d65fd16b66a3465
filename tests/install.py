"""Every documented way to install, each from a virtual environment with nothing in it: `make test-install`. Needs the
package index.

The CUDA kernels are left out, unless LIGER_CUDA=ON: what is tested is how the package is found, named and loaded.
"""

import os
import re
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TORCH = re.search(r"^torch==(\d+\.\d+)\.\d+", (ROOT / "requirements.txt").read_text(), re.M)

USE = """
import importlib.metadata, sys
import torch, liger_kernel
from liger_kernel.transformers.functional import liger_rms_norm
x = torch.randn(3, 8)
assert torch.allclose(liger_rms_norm(x, torch.ones(8), 1e-6), torch.rms_norm(x, (8,), None, 1e-6), atol=1e-6)
assert liger_kernel.__version__ == importlib.metadata.version("libliger")
assert liger_kernel.__version__ == importlib.metadata.version("liger-kernel")  # what tools ask for
print(liger_kernel.__version__, liger_kernel.__file__, liger_kernel.cmake_prefix_path, sep="\\n")
"""


class Environment:
    """A virtual environment and a copy of the sources."""

    def __init__(self, folder):
        self.folder, self.sources = folder / "env", folder / "sources"
        listed = subprocess.run(
            ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout
        for name in filter(None, listed.split("\0")):
            if (ROOT / name).exists():
                (self.sources / name).parent.mkdir(parents=True, exist_ok=True)
                (self.sources / name).write_bytes((ROOT / name).read_bytes())
        venv.create(self.folder, with_pip=True)

    def run(self, *command, **variables):
        # Not the folder of make's own virtual environment, which has all tools.
        path = os.pathsep.join([str(self.folder / "bin"), "/usr/local/bin", "/usr/bin", "/bin"])
        kept = {
            name: value
            for name, value in os.environ.items()
            if name not in ("PYTHONPATH", "LIGER_LIBRARY", "VIRTUAL_ENV")
        }
        return subprocess.run(
            list(map(str, command)),
            cwd=self.sources,
            capture_output=True,
            text=True,
            env={"LIGER_CUDA": "OFF", **kept, "PATH": path, **variables},
        )

    def pip(self, *arguments, **variables):
        return self.run(self.folder / "bin/python", "-m", "pip", "--disable-pip-version-check", *arguments, **variables)

    def installed(self, *arguments, **variables):
        done = self.pip("install", *arguments, **variables)
        assert done.returncode == 0, done.stdout + done.stderr

    def refused(self, words, *arguments, **variables):
        done = self.pip("install", *arguments, **variables)
        said = " ".join((done.stdout + done.stderr).split())
        assert done.returncode != 0 and words in said and "Traceback" not in said, said

    def used(self):
        """What the package says about itself, and that it works, seen from elsewhere."""
        done = subprocess.run(
            [str(self.folder / "bin/python"), "-c", USE],
            cwd=self.folder,
            capture_output=True,
            text=True,
            env={name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "LIGER_LIBRARY")},
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.split("\n")[:3]

    def torch(self):
        return [line for line in self.pip("freeze").stdout.splitlines() if line.startswith("torch==")]

    def remove(self):
        assert self.pip("uninstall", "-y", "libliger").returncode == 0


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    return Environment(tmp_path_factory.mktemp("bare"))


@pytest.fixture(scope="module")
def with_torch(tmp_path_factory):
    environment = Environment(tmp_path_factory.mktemp("with_torch"))
    environment.installed(TORCH[0])
    return environment


def test_without_torch_it_says_what_to_type(bare):
    bare.refused("Run `pip install torch` first", ".")
    bare.refused("Run `pip install torch` first", "-e", ".")


def test_without_isolation_and_tools_it_says_what_to_type(bare):
    bare.refused("Run `pip install scikit-build-core cmake ninja` first", "--no-build-isolation", ".")


@pytest.mark.parametrize("how", ([], ["-e"]), ids=("package", "editable"))
def test_without_a_compiler_it_says_what_to_install(bare, how):
    bare.refused("install g++ (Debian, Ubuntu: apt install g++", *how, ".", PATH=str(bare.folder / "bin"))
    bare.refused("CXX names no-such-compiler", *how, ".", CXX="no-such-compiler")


def test_torch_that_is_too_old_is_named(bare, tmp_path):
    header = tmp_path / "include/torch/headeronly/version.h"
    header.parent.mkdir(parents=True)
    header.write_text("#define TORCH_VERSION_MAJOR 2\n#define TORCH_VERSION_MINOR 10\n#define TORCH_VERSION_PATCH 1\n")
    bare.refused("needs torch >= 2.11, found 2.10.1", ".", LIGER_TORCH_DIR=str(tmp_path))


def test_isolated(with_torch):
    """The documented way: built for the torch that is installed, which stays what it was."""
    before = with_torch.torch()
    with_torch.installed(".")
    version, file, prefix = with_torch.used()
    assert re.fullmatch(r"\d+\.\d+\.\d+\+pt" + TORCH[1].replace(".", "") + r"(cpu|cu\d+)", version)
    assert file.startswith(str(with_torch.folder)) and prefix == os.path.dirname(file)
    assert with_torch.torch() == before
    assert with_torch.pip("check").returncode == 0
    done = with_torch.run("liger-train", "--help")
    assert done.returncode == 0 and "--data" in done.stdout, done.stdout + done.stderr
    # Metadata that another torch does not meet.
    assert re.search(
        rf"^Requires-Dist: torch=={re.escape(TORCH[1])}\.\*$",
        (Path(prefix).parent / f"libliger-{version}.dist-info/METADATA").read_text(),
        re.M,
    )


def test_installed_package_reports_on_itself(with_torch):
    """After test_isolated: with torch and nothing else beside it."""
    done = with_torch.run(with_torch.folder / "bin/python", "-m", "liger_kernel.env_report", "--device", "cpu")
    version, _, prefix = with_torch.used()
    assert done.returncode == 0, done.stdout + done.stderr
    for line in (
        f"liger_kernel  {version}",
        f"file       {prefix}/lib/torch-{TORCH[1]}/libliger.so",
        "built for  CPU: DEFAULT",
        "no transformers is installed",
    ):
        assert line in done.stdout
    assert "not known" not in done.stdout and "all operators agree with plain torch" in done.stdout


def test_installed_package_serves_cmake(with_torch, tmp_path):
    """After test_isolated: a project elsewhere is configured and built with no Python to be found."""
    tools = Path(sys.executable).parent  # CMake and ninja alone are this environment's
    _, _, prefix = with_torch.used()
    flags = [
        f"-DCMAKE_PREFIX_PATH={prefix}",
        "-DCMAKE_DISABLE_FIND_PACKAGE_Python=ON",
        "-G",
        "Ninja",
        f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}",
        "--no-warn-unused-cli",
    ]
    for command in (
        [tools / "cmake", "-S", "examples", "-B", tmp_path, *flags],
        [tools / "cmake", "--build", tmp_path],
        [tmp_path / "train"],
    ):
        done = with_torch.run(*command)
        assert done.returncode == 0, done.stdout + done.stderr


def test_editable(with_torch):
    """The sources serve where they stand: a change is seen without another build."""
    with_torch.remove()
    with_torch.installed("-e", ".")
    _, file, prefix = with_torch.used()
    assert file == str(with_torch.sources / "python/liger_kernel/__init__.py") and prefix.startswith(
        str(with_torch.folder)
    )
    loader = with_torch.sources / "python/liger_kernel/_library.py"
    loader.write_text(loader.read_text() + '\nprint("changed")\n')
    assert with_torch.used()[0] == "changed"
    with_torch.remove()


def objects(environment):
    """When each object of the build was compiled."""
    return {file: file.stat().st_mtime_ns for file in environment.sources.glob("build/wheel/**/*.o")}


def test_editable_again_compiles_what_has_changed(with_torch):
    """pip's isolated environment has another name each time."""
    with_torch.installed("-e", ".")
    before = objects(with_torch)
    with_torch.installed("-e", ".")
    assert before and objects(with_torch) == before
    source = with_torch.sources / "liger/core/version.cpp"
    source.write_text(source.read_text() + "\n")
    with_torch.installed("-e", ".")
    changed = [file.name for file, time in objects(with_torch).items() if before[file] != time]
    assert changed == ["version.cpp.o"]
    with_torch.remove()


def test_uv_builds_for_the_environment_that_it_installs_into(with_torch, tmp_path):
    """Where it is active, and where it is the .venv beside."""
    uv = Environment(tmp_path)
    uv.installed("uv")
    program = uv.folder / "bin/uv"
    before = with_torch.torch()
    (with_torch.sources / ".venv").symlink_to(with_torch.folder)
    for variables in ({"VIRTUAL_ENV": str(with_torch.folder)}, {}):
        done = with_torch.run(program, "pip", "install", ".", PATH="/usr/bin:/bin", **variables)
        assert done.returncode == 0, done.stderr
        assert f"+pt{TORCH[1].replace('.', '')}" in with_torch.used()[0] and with_torch.torch() == before
        with_torch.remove()
    # One that was chosen by hand is not guessed.
    done = with_torch.run(program, "pip", "install", "--python", uv.folder / "bin/python", ".", PATH="/usr/bin:/bin")
    assert done.returncode and "--no-build-isolation" in done.stderr


def test_nightly_in_the_same_folder_is_named(with_torch):
    """The package that came last has overwritten files of the other."""
    with_torch.installed("--no-deps", "liger-kernel-nightly")
    with_torch.installed("--no-deps", ".")
    done = with_torch.run(with_torch.folder / "bin/python", "-c", "import liger_kernel")
    assert "liger-kernel-nightly" in done.stderr and "pip uninstall -y liger-kernel-nightly" in done.stderr
    assert with_torch.pip("uninstall", "-y", "liger-kernel-nightly", "libliger").returncode == 0


def test_readmes_commands_run_as_written(tmp_path):
    """One block after another, from nothing; torch in the version that is tested here."""
    environment = Environment(tmp_path)
    constraint = tmp_path / "constraint.txt"
    constraint.write_text(TORCH[0])
    found = re.findall(r"^```(sh|python)\n(.*?)^```$", (ROOT / "README.md").read_text(), re.S | re.M)
    assert [language for language, _ in found] == ["sh", "python"]
    for language, block in found:
        shell = ("bash", "-ec", block) if language == "sh" else (environment.folder / "bin/python", "-c", block)
        done = environment.run(*shell, PIP_CONSTRAINT=str(constraint))
        assert done.returncode == 0, done.stdout + done.stderr
        expected = "| patched" if language == "sh" else "LigerRMSNorm"
        assert expected in done.stdout, done.stdout + done.stderr


EXTRAS = {
    "transformers": ["-c", "from liger_kernel.transformers import apply_liger_kernel_to_llama as f; print(f())"],
    "measure": ["-m", "liger_kernel.measure", "--device", "cpu", "--lora", "4", "--length", "64", "--steps", "3"],
    "examples": ["examples/train.py", "--config", "tiny", "--device", "cpu", "--steps", "6", "--length", "64"],
    "test": ["-m", "pytest", "-q", "tests/test_modules.py", "tests/test_setup.py"],
}


@pytest.mark.parametrize("extra", EXTRAS)
def test_an_extra_is_complete(tmp_path, extra):
    """Each by itself, in an environment that has torch alone."""
    environment = Environment(tmp_path)
    environment.installed(TORCH[0])
    environment.installed(f".[{extra}]")
    done = environment.run(environment.folder / "bin/python", *EXTRAS[extra])
    assert done.returncode == 0, done.stdout + done.stderr
    if extra == "examples":
        assert (environment.sources / "out/train.png").exists() and (environment.sources / "out/train.json").exists()


def test_cpp_without_python_and_with_an_old_cmake(with_torch, tmp_path):
    """Debian 12's: what the documented commands need where no CUDA kernels are built."""
    tools = Environment(tmp_path)
    tools.installed("cmake==3.25.2", "ninja")
    code = "import torch; print(*torch.__path__)"
    torch = with_torch.run(with_torch.folder / "bin/python", "-c", code).stdout.strip()
    flags = ["-G", "Ninja", f"-DLIGER_TORCH_DIR={torch}", "-DCMAKE_DISABLE_FIND_PACKAGE_Python=ON"]
    for command in (
        ["cmake", "-S", ".", "-B", tmp_path / "build", *flags, "-DLIGER_CUDA=OFF"],
        ["cmake", "--build", tmp_path / "build", "--target", "liger_train"],
        [tmp_path / "build/liger-train", "--help"],
    ):
        done = tools.run(*command)
        assert done.returncode == 0, done.stdout + done.stderr
    compiler = tmp_path / "nvcc"
    compiler.write_text("#!/bin/sh\necho Cuda compilation tools, release 13.0, V13.0.88\n")
    compiler.chmod(0o755)
    done = tools.run("cmake", "-S", ".", "-B", tmp_path / "cuda", *flags, "-DLIGER_CUDA=ON", CUDACXX=str(compiler))
    assert done.returncode and "CUDA kernels need CMake 3.30 or newer" in done.stderr, done.stderr


def test_without_isolation(with_torch):
    with_torch.installed("scikit-build-core", "cmake", "ninja")
    with_torch.installed("--no-build-isolation", ".")
    with_torch.used()


def test_source_distribution_is_for_any_torch(with_torch, tmp_path):
    """After test_without_isolation, which has brought the tools."""
    hook = (
        "import sys; sys.path.insert(0, 'cmake'); import liger_backend; "
        f"print(liger_backend.build_sdist({str(tmp_path)!r}))"
    )
    done = with_torch.run(with_torch.folder / "bin/python", "-c", hook)
    assert done.returncode == 0, done.stderr
    (archive,) = tmp_path.iterdir()
    assert re.fullmatch(r"libliger-\d+\.\d+\.\d+\.tar\.gz", archive.name)
    done = with_torch.pip("install", "--dry-run", "--no-deps", "--force-reinstall", archive)
    assert done.returncode == 0 and re.search(r"Would install libliger-\d+\.\d+\.\d+\+pt\d+c", done.stdout), (
        done.stdout + done.stderr
    )
