"""Importing the package: what it loads, and what it says when it cannot."""

import ctypes
import importlib
import os
import pathlib
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from importlib import metadata

import liger_kernel
import pytest
import torch
from liger_kernel import _library, _train
from liger_kernel.operators import coverage
from packaging.version import Version

ROOT = pathlib.Path(__file__).resolve().parents[1]
#: Where the package is installed, not used from its sources where they stand, CMake has left this.
INSTALLED = os.path.exists(os.path.join(liger_kernel.cmake_prefix_path, "_build.py"))


def python(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **environment}
    )


def test_import_leaves_torch_alone():
    done = python("import sys, liger_kernel; assert 'torch' not in sys.modules; print(liger_kernel.__version__)")
    assert done.returncode == 0 and done.stdout.strip() == liger_kernel.__version__, done.stderr


def test_import_leaves_the_compiler_alone():
    """torch._dynamo takes seconds to import; the mark that its decorator leaves is on the function without it."""
    done = python("import sys, liger_kernel.transformers; assert 'torch._dynamo' not in sys.modules")
    assert done.returncode == 0, done.stderr
    marked = torch.compiler.assume_constant_result(lambda: None)
    assert vars(coverage._has_kernels) == vars(marked)


def test_version_says_what_it_was_built_for():
    """The package, its distribution and its library have one version, and the distribution asks for the torch that it
    was built for."""
    minor = torch.__version__.split(".")[:2]
    library = ctypes.CDLL(_library._path()).liger_version
    library.restype = ctypes.c_char_p
    assert re.fullmatch(rf"\d+\.\d+\.\d+\+pt{''.join(minor)}(cpu|cu\d+)", library().decode())
    assert Version(liger_kernel.__version__) >= Version("0.8.2")  # what packages that use this one ask for
    if INSTALLED:
        assert library().decode() == liger_kernel.__version__ == metadata.version("libliger")
        assert f"torch=={'.'.join(minor)}.*" in metadata.requires("libliger")
    else:
        assert library().decode().split("+")[0] == liger_kernel.__version__


def test_cmake_finds_an_installed_package(tmp_path):
    """find_package(liger) configures a program against the package's folder; the sources where they stand have nothing
    to find."""
    examples = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "examples")
    done = subprocess.run(
        [
            "cmake",
            "-S",
            examples,
            "-B",
            tmp_path,
            "-G",
            "Ninja",
            f"-DCMAKE_PREFIX_PATH={liger_kernel.cmake_prefix_path}",
            "-DCMAKE_DISABLE_FIND_PACKAGE_Python=ON",
        ],
        capture_output=True,
        text=True,
    )
    assert (done.returncode == 0) == INSTALLED, done.stderr


#: Another libliger is in the process before this package is imported.
SECOND = """
import sys, torch
torch.ops.load_library(sys.argv[1])
import liger_kernel
from liger_kernel.transformers.functional import liger_rms_norm
print(torch.allclose(liger_rms_norm(torch.full((1, 4), 3.0), torch.ones(4), 1e-6), torch.ones(1, 4)))
"""


def second(tmp_path, version=None):
    with open(_library._path(), "rb") as library:
        content = library.read()
    changed = re.sub(rb"\d\.\d\.\d(?=\+pt\d+c)", version, content) if version else content
    assert bool(version) == (changed != content) and len(changed) == len(content)
    (tmp_path / "another.so").write_bytes(changed)
    return subprocess.run([sys.executable, "-c", SECOND, str(tmp_path / "another.so")], capture_output=True, text=True)


def test_a_second_library_of_the_same_version_is_shared(tmp_path):
    done = second(tmp_path)
    assert done.returncode == 0 and done.stdout.strip() == "True", done.stderr


def test_a_second_library_of_another_version_is_named(tmp_path):
    done = second(tmp_path, b"0.9.9")
    last = done.stderr.strip().splitlines()[-1]
    assert (
        done.returncode == 1
        and last.startswith("ImportError")
        and str(tmp_path / "another.so") in last
        and _library._path() in last
        and "0.9.9" in last
    )


#: The package with the libraries of a folder.
LIBRARIES = """
import sys, liger_kernel
liger_kernel.cmake_prefix_path = sys.argv[1]
import liger_kernel.ops
print(liger_kernel._library._path())
"""


def with_libraries(folder, *minors):
    for minor in minors:
        (folder / "lib" / f"torch-{minor}").mkdir(parents=True)
        (folder / "lib" / f"torch-{minor}" / "libliger.so").symlink_to(_library._path())
    environment = {name: value for name, value in os.environ.items() if name != "LIGER_LIBRARY"}
    command = [sys.executable, "-c", LIBRARIES, str(folder)]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def test_the_library_of_the_installed_torch_is_taken(tmp_path):
    minor = ".".join(torch.__version__.split(".")[:2])
    done = with_libraries(tmp_path, "2.1", minor, "2.99")
    assert done.stdout.strip() == str(tmp_path / "lib" / f"torch-{minor}" / "libliger.so"), done.stderr


def test_no_library_for_the_installed_torch_is_one_sentence(tmp_path):
    done = with_libraries(tmp_path, "2.99", "2.1")
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1 and last.startswith("ImportError")
    assert f"was built for torch 2.1, 2.99, and torch {torch.__version__} is installed" in last and "rebuild it" in last


def test_wheels_for_several_versions_of_torch_become_one(tmp_path, monkeypatch):
    """What `make wheel` does with wheels that it has built."""
    monkeypatch.syspath_prepend(os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "cmake"))
    wheels = importlib.import_module("wheels")
    monkeypatch.setattr(wheels, "BUILD", tmp_path)
    for minor in ("2.11", "2.13"):
        version = f"1.0.0+pt{minor.replace('.', '')}cpu"
        with zipfile.ZipFile(tmp_path / f"{minor}.whl", "w") as wheel:
            wheel.writestr(f"liger_kernel/lib/torch-{minor}/libliger.so", minor)
            wheel.writestr(f"liger_kernel/lib/torch-{minor}/liger-train", minor)
            wheel.writestr("liger_kernel/_build.py", f'VERSION = "{version}"\n')
            metadata = f"Name: libliger\nVersion: {version}\nRequires-Dist: torch=={minor}.*\n"
            wheel.writestr(f"libliger-{version}.dist-info/METADATA", metadata)
    tree = wheels.merge([tmp_path / "2.11.whl", tmp_path / "2.13.whl"], ["2.11", "2.13"], "")
    assert {str(file.relative_to(tree)): file.read_text() for file in tree.rglob("*") if file.is_file()} == {
        "liger_kernel/lib/torch-2.11/libliger.so": "2.11",
        "liger_kernel/lib/torch-2.13/libliger.so": "2.13",
        "liger_kernel/lib/torch-2.11/liger-train": "2.11",
        "liger_kernel/lib/torch-2.13/liger-train": "2.13",
        "liger_kernel/_build.py": 'VERSION = "1.0.0"\n',
        "libliger-1.0.0.dist-info/METADATA": "Name: libliger\nVersion: 1.0.0\n"
        "Requires-Dist: torch>=2.11,!=2.12.*,<2.14\n",
        **wheels.provided.files("1.0.0"),
    }
    assert os.access(tree / "liger_kernel/lib/torch-2.13/liger-train", os.X_OK)


#: What tools ask for, here transformers; the environment has nothing else than the wheel.
ASKED = """
import importlib.metadata, sys
assert importlib.metadata.version("liger-kernel") == importlib.metadata.version("liger_kernel") == "9.9.9"
assert set(importlib.metadata.packages_distributions()["liger_kernel"]) == {"libliger", "liger-kernel"}
import liger_kernel
sys.path += sys.argv[1:]
from transformers.utils import is_liger_kernel_available
print(is_liger_kernel_available(), liger_kernel.__file__)
"""


def fake_wheel(folder, name, version):
    """A wheel of the module liger_kernel alone."""
    distribution = f"{name.replace('-', '_')}-{version}"
    path = folder / f"{distribution}-py3-none-any.whl"
    content = {
        "liger_kernel/__init__.py": "",
        f"{distribution}.dist-info/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{distribution}.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: py3-none-any\n",
    }
    with zipfile.ZipFile(path, "w") as wheel:
        for file, text in content.items():
            wheel.writestr(file, text)
        wheel.writestr(f"{distribution}.dist-info/RECORD", "".join(f"{file},,\n" for file in content))
    return path


def test_tools_that_ask_for_liger_kernel_find_it(tmp_path, monkeypatch):
    """With libliger alone; pip then refuses to install upstream's package over it, and removes all with libliger."""
    pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(ROOT / "cmake")
    wheel = fake_wheel(tmp_path, "libliger", "9.9.9")
    importlib.import_module("provided").add_to(wheel)
    fake_wheel(tmp_path, "liger-kernel", "0.8.5")
    home = tmp_path / "env"
    venv.create(home, with_pip=True)
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "LIGER_LIBRARY", "PIP_FIND_LINKS")}

    def pip(*arguments):
        line = [home / "bin/python", "-m", "pip", "--disable-pip-version-check", *map(str, arguments)]
        done = subprocess.run(line, capture_output=True, text=True, env=environment)
        return done.returncode, done.stdout + done.stderr

    offline = ("install", "--no-index", "--find-links", tmp_path)
    assert pip(*offline, "libliger")[0] == 0 and pip("check")[0] == 0
    base = sysconfig.get_path("purelib")
    line = [home / "bin/python", "-c", ASKED, base]
    done = subprocess.run(line, capture_output=True, text=True, env=environment)
    assert done.stdout.startswith(f"True {home}"), done.stderr
    assert "Requirement already satisfied" in pip(*offline, "liger-kernel>=0.8")[1]
    code, said = pip(*offline, "liger-kernel==0.8.5")
    assert code and "The package was installed by libliger" in said
    assert pip("uninstall", "-y", "libliger")[0] == 0
    (site,) = home.glob("lib/python3*/site-packages")
    assert not list(site.glob("*liger*"))


def test_the_package_index_leads_pip_to_the_files_of_releases(tmp_path):
    """Of a folder, by pip itself; of what the API says of releases, by the links."""
    make = runpy.run_path(str(ROOT / ".github/package_index.py"))
    dist, out = tmp_path / "dist", tmp_path / "out"
    dist.mkdir()
    (dist / "notes.md").touch()
    names = [f"libliger-1.0.0-{tag}py3-none-linux_x86_64.whl" for tag in ("", "0cpu-")]
    wheel = fake_wheel(dist, "libliger", "1.0.0")
    for name in names:
        (dist / name).write_bytes(wheel.read_bytes())
    wheel.unlink()
    make["write"](make["built"](dist), out)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--no-deps", "--quiet")
    system = ("--platform", "linux_x86_64", "--only-binary=:all:")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    for index, name in zip(("simple", "simple-cpu"), names):
        url, to = (out / index).as_uri(), tmp_path / index
        line = [*pip, *system, "--index-url", url, "--dest", str(to), "libliger"]
        done = subprocess.run(line, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        assert [file.name for file in to.iterdir()] == [name]
    digest = "a" * 64
    asset = lambda name: {"name": name, "browser_download_url": f"https://x/{name}", "digest": f"sha256:{digest}"}
    names = ("libliger-1.0.0.tar.gz", "libliger-1.0.0-0cpu-py3-none-manylinux_2_34_aarch64.whl")
    public = {"draft": False, "assets": [*map(asset, (*names, "notes.md"))]}
    found = make["indices"](make["released"]([public, {"draft": True, "assets": [asset("libliger-2.0.0.tar.gz")]}]))
    assert {index: tuple(f.name for f in files) for index, files in found.items()} == {
        "simple": names, "simple-cpu": names[1:],
    }  # fmt: skip
    assert f"https://x/{names[0]}#sha256={digest}" in make["link"](found["simple"][0])


def test_a_release_has_its_entry_in_the_changelog():
    notes = runpy.run_path(str(ROOT / ".github/release_notes.py"))["notes"]
    changelog = (ROOT / "CHANGELOG.md").read_text()
    old = "\n\n## 0.9 (2026-01-31)\nOld."
    dated = re.sub(r"^(## \S+) \(unreleased\)", rf"\1 (2027-01-31)\n\nNew.{old}", changelog, count=1, flags=re.M)
    version = re.search(r"^## (\S+)", changelog, re.M)[1]
    assert notes(f"v{version}", dated, version) == "New."
    for tag, text, reason in (
        ("v9", dated, "the tag is v9"),
        (f"v{version}", changelog, "'unreleased' where the date belongs"),
        (f"v{version}", "", "no entry"),
    ):
        with pytest.raises(ValueError, match=reason):
            notes(tag, text, version)


def test_a_missing_library_is_one_sentence():
    done = python("import liger_kernel.ops", LIGER_LIBRARY="/nowhere/libliger.so")
    assert done.returncode != 0 and "/nowhere/libliger.so is missing" in done.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize(
    "name, version, beside",
    [
        ("liger-kernel-nightly", "0.9", True),
        ("liger-kernel", "0.8.2", True),
        ("liger-kernel", "0.8.2", False),
        ("libliger", "0.9", True),
    ],
)
def test_another_distribution_is_named(tmp_path, name, version, beside):
    """Where it has written into this package's folder; one that is installed elsewhere is none of its business."""
    package, other = tmp_path / "package", tmp_path / "other"
    for folder in (package, other):
        folder.mkdir()
    (package / "liger_kernel").symlink_to(os.path.dirname(liger_kernel.__file__))
    info = (package if beside else other) / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "RECORD").write_text("liger_kernel/__init__.py,,\n")
    done = python("import liger_kernel", PYTHONPATH=os.pathsep.join(map(str, (package, other))))
    assert done.returncode == 0, done.stderr
    assert (f"{name} {version}" in done.stderr) == beside and ("pip uninstall" in done.stderr) == beside
    # The report says it among the rest, and goes on where the library cannot be loaded.
    code = "from liger_kernel import env_report; env_report.main(['--device', 'cpu'])"
    path = os.pathsep.join(map(str, (package, other)))
    done = python(code, PYTHONPATH=path, LIGER_LIBRARY="/nowhere", PYTHONWARNINGS="ignore")
    said = f"{name} {version} has installed its own liger_kernel"
    assert (said in done.stdout) == beside and "cannot be loaded" in done.stdout, done.stdout + done.stderr


def test_the_report_names_a_distribution_that_came_later(tmp_path):
    """It has overwritten the package itself, which can say nothing then."""
    package = tmp_path / "liger_kernel"
    shutil.copytree(os.path.dirname(liger_kernel.__file__), package, ignore=shutil.ignore_patterns("lib", "include"))
    (package / "__init__.py").write_text("")
    (tmp_path / "liger_kernel_nightly-0.9.dist-info").mkdir()
    (tmp_path / "liger_kernel_nightly-0.9.dist-info/RECORD").write_text("liger_kernel/__init__.py,,\n")
    done = python("from liger_kernel import env_report; env_report.main([])", PYTHONPATH=str(tmp_path))
    assert "liger-kernel-nightly 0.9 has installed its own liger_kernel in the folder of libliger;" in done.stdout
    assert "pip uninstall -y liger-kernel-nightly libliger" in done.stdout and "cannot be loaded" in done.stdout


def test_modules_need_no_import_of_their_own():
    code = "import sys, liger_kernel; assert 'torch' not in sys.modules; print(liger_kernel.routing.record.__name__)"
    done = python(code)
    assert done.returncode == 0 and done.stdout.strip() == "record", done.stderr


def test_import_takes_a_moment():
    """It reads the folder that it is in, and nothing of other packages: 50 ms at most, and a few where nothing else
    runs."""
    code = "import time; start = time.process_time(); import liger_kernel; print(time.process_time() - start)"
    assert min(float(python(code).stdout) for _ in range(3)) < 0.05


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


REFUSED = """
import torch
from liger_kernel import chunked_loss, ops, transformers
from liger_kernel.transformers import functional as LF

x, rows = torch.randn(3, 8), torch.zeros(3, dtype=torch.long)
for call in (
    lambda: LF.liger_rms_norm(x, torch.ones(7), 1e-6),
    lambda: LF.liger_rms_norm(x, torch.ones(8), 1e-6, casting_mode="other"),
    lambda: LF.liger_jsd(x, x, rows[:2]),
    lambda: transformers.LigerRMSNorm(8, init_fn="twos"),
    lambda: transformers.LigerCrossEntropyLoss(softcap=0),
    lambda: transformers.LigerFusedLinearJSD(temperature=0),
    lambda: chunked_loss.LigerFusedLinearKTOLoss()(x[None], torch.randn(5, 8), rows[None]),
    lambda: LF.liger_cross_entropy(x, rows, return_token_accuracy="yes"),
):
    try:
        call()
        print("accepted")
    except Exception as error:
        print(type(error).__name__)
"""


def test_arguments_are_checked_without_asserts_too():
    """`python -O` drops assert statements."""
    done = subprocess.run([sys.executable, "-O", "-c", REFUSED], capture_output=True, text=True)
    assert done.stdout.split() == ["AssertionError"] * 8, done.stderr


def test_liger_train_is_that_of_the_installed_torch(tmp_path, monkeypatch):
    minor = ".".join(torch.__version__.split(".")[:2])
    monkeypatch.setattr(_train, "cmake_prefix_path", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="built without liger-train"):
        _train.program()
    (tmp_path / "lib/torch-2.1").mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match=f"built for torch 2.1, and torch {minor} is installed"):
        _train.program()
    folder = tmp_path / f"lib/torch-{minor}"
    folder.mkdir()
    with pytest.raises(FileNotFoundError, match="built without liger-train"):
        _train.program()
    with pytest.raises(SystemExit, match="^liger-train: this libliger was built without"):
        _train.main()
    (folder / "liger-train").write_text('#!/bin/sh\necho "$LD_LIBRARY_PATH:" "$@"\n')
    (folder / "liger-train").chmod(0o755)
    code = f"import sys, liger_kernel; liger_kernel.cmake_prefix_path = {str(tmp_path)!r}\n"
    code += "from liger_kernel._train import main; main()"
    done = subprocess.run([sys.executable, "-c", code, "--help", "a b"], capture_output=True, text=True)
    assert done.stdout.endswith("torch/lib: --help a b\n"), done.stdout + done.stderr
