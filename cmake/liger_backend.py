"""What pip asks to build this package: scikit-build-core, for the torch of the environment that the package is
installed into.

A build for another torch cannot be loaded, so that pip's isolated build environment gets none of its own: this finds
the one outside, or stops and says what to type. It is also scikit-build-core's provider of the version and the
dependencies, which name that torch.
"""

import functools
import importlib.util
import os
import pathlib
import re
import site
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
TOOLS = (
    "liger-kernel: a build without isolation uses the tools that are there. "
    "Run `pip install scikit-build-core cmake ninja` first, or leave out --no-build-isolation."
)

try:
    import scikit_build_core.build as _build
    from packaging.specifiers import SpecifierSet
    from scikit_build_core.cmake import CMake
    from scikit_build_core.errors import CMakeNotFoundError
except ImportError:
    sys.exit(TOOLS)


def _torch():
    """The folder of the torch that the package will run with."""
    if named := os.environ.get("LIGER_TORCH_DIR"):
        return named
    # Isolation takes the environment's own folders off sys.path; they are still those of sys.prefix.
    folders = sys.path + site.getsitepackages()
    if sys.prefix == sys.base_prefix:
        folders.append(site.getusersitepackages())
    for folder in filter(None, folders):
        torch = pathlib.Path(folder, "torch")
        if (torch / "include").is_dir() and (torch / "version.py").is_file():
            return str(torch)
    sys.exit(
        f"liger-kernel is built for the torch that is installed, and {sys.prefix} has none. "
        "Run `pip install torch` first; with a tool that builds elsewhere (uv, build), "
        "also give it --no-build-isolation, or set LIGER_TORCH_DIR to torch's folder."
    )


@functools.cache
def _versions(cuda):
    """The version of the wheel and that of torch, by the rule that CMake has."""
    try:
        cmake = CMake.default_search(version=SpecifierSet(">=3.30"), env=os.environ)
    except CMakeNotFoundError:
        sys.exit(TOOLS)
    command = [
        os.fspath(cmake),
        f"-DLIGER_TORCH_DIR={_torch()}",
        f"-DLIGER_CUDA={cuda}",
        "-P",
        str(ROOT / "cmake" / "Version.cmake"),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    return done.stdout.split()


_settings = None  # of the wheel that is being built; None: a source distribution, which is for any torch


def dynamic_metadata(field, settings):
    if _settings is None:
        version = re.search(r'^__version__ = "(.*)"', (ROOT / "python/liger_kernel/__init__.py").read_text(), re.M)[1]
        torch = ">=2.11"
    else:
        version, torch = _versions(_settings["cmake.define.LIGER_CUDA"])
        torch = "==" + ".".join(torch.split(".")[:2]) + ".*"
    return {"version": version, "dependencies": [f"torch{torch}", "packaging"]}[field]


def _wheel(hook):
    """A hook of scikit-build-core's that knows which torch, and whether to build for CUDA, and what the wheel will be
    called."""

    def run(directory, config_settings=None, *rest):
        global _settings
        _settings = {
            "cmake.define.LIGER_CUDA": os.environ.get("LIGER_CUDA", "ON"),
            **(config_settings or {}),
            "cmake.define.LIGER_TORCH_DIR": _torch(),
        }
        if json := importlib.util.find_spec("nlohmann_json"):
            _settings.setdefault(
                "cmake.define.LIGER_JSON_DIR", os.path.join(json.submodule_search_locations[0], "include")
            )
        _settings["cmake.define.LIGER_WHEEL_VERSION"] = _versions(_settings["cmake.define.LIGER_CUDA"])[0]
        return hook(directory, _settings, *rest)

    return run


prepare_metadata_for_build_wheel = _wheel(_build.prepare_metadata_for_build_wheel)
prepare_metadata_for_build_editable = _wheel(_build.prepare_metadata_for_build_editable)
build_wheel = _wheel(_build.build_wheel)
build_editable = _wheel(_build.build_editable)
build_sdist = _build.build_sdist
get_requires_for_build_sdist = _build.get_requires_for_build_sdist


def get_requires_for_build_wheel(config_settings=None):
    _torch()  # before more is fetched
    return _build.get_requires_for_build_wheel(config_settings)


get_requires_for_build_editable = get_requires_for_build_wheel
