"""Runs this package inside other people's tools, each in a virtual environment of its own: `make downstream`.

    python tests/downstream/run.py [--only NAME ...] [--wheel FILE] [--environments FOLDER] [pytest's arguments ...]

An environment gets torch, what requirements/NAME.txt lists, and last this package, as a wheel that is built once from
the sources. What the tests record goes into docs/downstream.md, between the marks that bear a tool's name.
"""

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(HERE.parent))
from pythons import pythons  # noqa: E402

PAGE = ROOT / "docs" / "downstream.md"
TORCH = re.search(r"^torch==\S+", (ROOT / "requirements.txt").read_text(), re.M)[0]
TESTING = re.search(r"^pytest==\S+", (ROOT / "requirements.txt").read_text(), re.M)[0]


@dataclass(frozen=True)
class Tool:
    """What is tested with a tool, and what an installation of it needs besides a list of requirements."""

    tests: tuple[str, ...]
    names: tuple[str, ...]  # distributions whose versions are told
    alone: tuple[str, ...] = ()  # installed without what they require
    unwanted: tuple[str, ...] = ()  # distributions that are taken out again
    modules: dict[str, str] = field(default_factory=dict)  # written in their place: name -> source
    minor: int = 0  # the first version of Python 3 that the tool takes


TOOLS = {
    "trl-1.16": Tool(
        tuple(
            f"downstream/test_{name}.py"
            for name in ("trl", "trl_divergence", "trl_distillation", "trainers", "recipes")
        ),
        ("trl", "transformers", "peft", "accelerate"),
    ),
    "trl-1.12": Tool(("downstream/test_classes.py",), ("trl", "transformers")),
    "use-kernels": Tool(("downstream/test_trainers.py",), ("trl", "transformers", "kernels")),
    "llamafactory": Tool(
        ("downstream/test_llamafactory.py",),
        ("llamafactory", "transformers", "trl", "peft"),
        # Wheels for a CUDA build of torch, where torch is one for the CPU; torchaudio is imported, but for sound alone.
        unwanted=("torchvision", "torchaudio"),
        modules={"torchaudio": ""},
    ),
    "ms-swift": Tool(("downstream/test_swift.py",), ("ms-swift", "transformers", "trl", "peft")),
    "axolotl": Tool(("downstream/test_axolotl.py",), ("axolotl", "transformers", "trl", "peft"), minor=12),
    # It asks for an older torch.
    "oumi": Tool(("downstream/test_oumi.py",), ("oumi", "transformers", "trl", "peft"), alone=("oumi==0.9",)),
    "deepspeed": Tool(("huggingface/zero.py",), ("deepspeed", "transformers")),
    # Whole tools on GPUs: tested are their calls of this package.
    "verl": Tool(("downstream/test_verl.py",), ("verl", "transformers"), alone=("verl==0.9.1",)),
    "veomni": Tool(("downstream/test_veomni.py",), ("veomni", "transformers"), alone=("veomni==0.1.12",)),
    "automodel": Tool(
        ("downstream/test_automodel.py",), ("nemo-automodel", "transformers"), alone=("nemo-automodel==0.7.0",)
    ),
    "megatron": Tool(("downstream/test_megatron.py",), ("megatron-core",), minor=12),
    "lightning": Tool(("downstream/test_lightning.py",), ("lightning", "transformers")),
    "sentence-transformers": Tool(
        ("downstream/test_sentence_transformers.py",), ("sentence-transformers", "transformers")
    ),
    "quantised": Tool(("downstream/test_quantised.py",), ("bitsandbytes", "gptqmodel", "peft", "transformers")),
}


def call(*command, **options):
    return subprocess.run(list(map(str, command)), check=True, **options)


def wheel():
    """This package, built for the torch that `make` installs."""
    folder = ROOT / "build" / "wheels"
    python = Path(sys.prefix) / "bin"
    environment = os.environ | {"PATH": f"{python}{os.pathsep}{os.environ['PATH']}"}
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    call(*pip, "wheel", "--quiet", "--no-build-isolation", "--no-deps", "--wheel-dir", folder, ROOT, env=environment)
    return max(folder.glob("libliger-*.whl"), key=lambda file: file.stat().st_mtime)


def interpreter(minor):
    """The Python of `make`, or where that is too old for a tool, the next one of this machine."""
    for n, python in [(sys.version_info.minor, sys.executable), *pythons()]:
        if n >= minor:
            return python
    raise LookupError(f"it needs Python 3.{minor}, which is neither on the path nor among pyenv's")


def environment(name, folder, package):
    """The Python of a tool's environment, which is made where it is not there yet as it should be."""
    tool, requirements = TOOLS[name], HERE / "requirements" / f"{name}.txt"
    home = folder / name
    python, marks = home / "bin" / "python", home / "made.json"
    wanted = {
        "tool": hashlib.sha256((repr(tool) + TORCH + TESTING + requirements.read_text()).encode()).hexdigest(),
        "package": hashlib.sha256(package.read_bytes()).hexdigest(),
    }
    made = json.loads(marks.read_text()) if marks.exists() else {}
    pip = (python, "-m", "pip", "--disable-pip-version-check")
    if made.get("tool") != wanted["tool"]:
        call(interpreter(tool.minor), "-m", "venv", "--clear", home)
        call(*pip, "install", "--quiet", TORCH)
        call(*pip, "install", "--quiet", TORCH, TESTING, "-r", requirements)
        if tool.alone:
            call(*pip, "install", "--quiet", "--no-deps", *tool.alone)
        if tool.unwanted:
            call(*pip, "uninstall", "--quiet", "--yes", *tool.unwanted)
        where = "import sysconfig; print(sysconfig.get_path('purelib'))"
        site = Path(call(python, "-c", where, capture_output=True, text=True).stdout.strip())
        for module, source in tool.modules.items():
            (site / f"{module}.py").write_text(source)
    if made != wanted:
        # Last: a tool may have brought a liger-kernel, which has the same module.
        subprocess.run([*pip, "uninstall", "--quiet", "--yes", "liger-kernel"], stderr=subprocess.DEVNULL)
        call(*pip, "install", "--quiet", "--no-deps", "--force-reinstall", package)
        marks.write_text(json.dumps(wanted))
    return python


def rows(found):
    """A tool's table."""
    lines = ["| set-up | result | s |", "| --- | --- | ---: |"]
    lines += [f"| {row['setup']} | {row['result']} | {row['seconds']:.0f} |" for row in found["rows"]]
    if found["others"]:
        passed = sum(outcome == "passed" for outcome in found["others"])
        others = "other tests" if found["rows"] else "tests"
        lines.append(f"| {len(found['others'])} {others} | {passed} passed | {found['seconds_of_others']:.0f} |")
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    return "\n".join([f"{versions}. {found['seconds']:.0f} s in all.", "", *lines])


def write_page(name, found):
    marks = f"<!-- {name} -->", f"<!-- end of {name} -->"
    before, rest = PAGE.read_text().split(marks[0])
    _, after = rest.split(marks[1])
    PAGE.write_text(f"{before}{marks[0]}\n{rows(found)}\n{marks[1]}{after}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=TOOLS, default=list(TOOLS), help="these tools; all by default")
    parser.add_argument("--wheel", type=Path, help="a wheel of this package, in place of one that is built here")
    parser.add_argument("--environments", type=Path, default=ROOT / "build" / "downstream", help="where they are made")
    options, arguments = parser.parse_known_args()
    package = options.wheel or wheel()
    failed = []
    for name in options.only:
        begin = time.time()
        try:
            python = environment(name, options.environments, package)
        except (LookupError, subprocess.CalledProcessError) as error:
            print(f"{name}: {error}", flush=True)
            failed.append(name)
            continue
        print(f"{name}: environment {time.time() - begin:.0f} s", flush=True)
        record = options.environments / f"{name}.json"
        record.unlink(missing_ok=True)
        variables = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "LIGER_LIBRARY")}
        variables |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        tests = [ROOT / "tests" / test for test in TOOLS[name].tests]
        recorded = ("-p", "recorded", f"--record={record}", f"--record-versions={','.join(TOOLS[name].names)}")
        command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *recorded, *tests, *arguments]
        variables["PYTHONPATH"] = str(HERE)
        if subprocess.run(list(map(str, command)), cwd=ROOT, env=variables).returncode:
            failed.append(name)
        elif not arguments:
            write_page(name, json.loads(record.read_text()))
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
