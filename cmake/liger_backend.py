"""What pip asks to build this package: scikit-build-core, for the torch of the environment that the package is
installed into.

A build for another torch cannot be loaded, so that pip's isolated build environment gets none of its own: this finds
the one outside, or stops and says what to type. It is also scikit-build-core's provider of the version and the
dependencies, which name that torch.
"""

import functools
import json
import os
import pathlib
import re
import site
import subprocess
import sys

import presupposed
import provided

ROOT = pathlib.Path(__file__).resolve().parent.parent
TOOLS = (
    "libliger: a build without isolation uses the tools that are there. "
    "Run `pip install scikit-build-core cmake ninja` first, or leave out --no-build-isolation."
)

try:
    import scikit_build_core
    import scikit_build_core.build as _build
    from packaging.specifiers import SpecifierSet
    from scikit_build_core.cmake import CMake
    from scikit_build_core.errors import CMakeNotFoundError
except ImportError:
    sys.exit(TOOLS)


def _environment_of_uv():
    """The environment that uv installs into, in a list: uv builds in one of its own and says nothing of the other."""
    caller = pathlib.Path("/proc", str(os.getppid()))
    try:
        words = (caller / "cmdline").read_text().split("\0")
        variables = dict(line.split("=", 1) for line in (caller / "environ").read_text().split("\0") if "=" in line)
        folder = (caller / "cwd").resolve()
    except (OSError, UnicodeDecodeError):  # not on Linux
        words, folder = [], ROOT
        here = pathlib.Path(sys.prefix)  # what VIRTUAL_ENV names here
        active = [pathlib.Path(path).parent for path in os.environ.get("PATH", "").split(os.pathsep)]
        variables = {"VIRTUAL_ENV": next((str(p) for p in active if p != here and (p / "pyvenv.cfg").is_file()), "")}
    if any(re.match(r"(-p|--python|--system|--target|--prefix)(=|$)", word) for word in words):
        return []  # one that was chosen by hand
    named = [variables.get("VIRTUAL_ENV"), os.environ.get("CONDA_PREFIX")]
    found = [*map(pathlib.Path, filter(None, named)), *(parent / ".venv" for parent in (folder, *folder.parents))]
    return [environment.resolve() for environment in found if environment.is_dir()][:1]  # in the order of uv


@functools.cache
def _torch():
    """The folder of the torch that the package will run with."""
    if named := os.environ.get("LIGER_TORCH_DIR"):
        return named
    # Isolation takes the environment's own folders off sys.path; they are still those of sys.prefix.
    folders = sys.path + site.getsitepackages()
    if sys.prefix == sys.base_prefix:
        folders.append(site.getusersitepackages())
    if "UV" in os.environ:
        for environment in _environment_of_uv():
            folders += [*environment.glob("lib/python3.*/site-packages"), *environment.glob("Lib/site-packages")]
    for folder in filter(None, folders):
        torch = pathlib.Path(folder, "torch")
        if (torch / "include").is_dir() and (torch / "version.py").is_file():
            return str(torch)
    sys.exit(
        f"libliger is built for the torch that is installed, and {sys.prefix} has none. "
        "Run `pip install torch` first; where a tool builds elsewhere (python -m build, uv with --python), "
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


def _presupposed(settings):
    """Ends with one sentence, before anything is fetched or built, where there is no compiler or no torch."""
    if not any(name.endswith(("CMAKE_TOOLCHAIN_FILE", "CMAKE_CXX_COMPILER")) for name in settings or {}):
        if lacks := presupposed.missing():
            sys.exit(lacks)
    _torch()


def _keep_objects(settings):
    """Lets a build in another isolated environment go on where the last one ended.

    scikit-build-core removes the build's configuration, and with it all objects, where its own folder is not that of
    the last time. No object depends on that folder, nor on any other of the environment.
    """
    file = ROOT / settings.get("build-dir", "build/wheel") / ".skbuild-info.json"
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return  # the first build, or one that was interrupted, which begins anew
    found["skbuild_path"] = os.path.dirname(scikit_build_core.__file__)
    file.write_text(json.dumps(found), encoding="utf-8")


def _wheel(hook):
    """A hook of scikit-build-core's that knows which torch, and whether to build for CUDA, and what the wheel will be
    called."""

    def run(directory, config_settings=None, *rest):
        global _settings
        _presupposed(config_settings)
        _settings = {
            "cmake.define.LIGER_CUDA": os.environ.get("LIGER_CUDA", "ON"),
            **(config_settings or {}),
            "cmake.define.LIGER_TORCH_DIR": _torch(),
        }
        _settings["cmake.define.LIGER_WHEEL_VERSION"] = _versions(_settings["cmake.define.LIGER_CUDA"])[0]
        if hook in (_build.build_wheel, _build.build_editable):  # seen with -v, and by uv
            _keep_objects(_settings)
            print(f"libliger: building for the torch in {_torch()}, which takes minutes", flush=True)
            name = hook(directory, _settings, *rest)
            provided.add_to(pathlib.Path(directory, name))
            return name
        return hook(directory, _settings, *rest)

    return run


prepare_metadata_for_build_wheel = _wheel(_build.prepare_metadata_for_build_wheel)
prepare_metadata_for_build_editable = _wheel(_build.prepare_metadata_for_build_editable)
build_wheel = _wheel(_build.build_wheel)
build_editable = _wheel(_build.build_editable)
build_sdist = _build.build_sdist
get_requires_for_build_sdist = _build.get_requires_for_build_sdist


def get_requires_for_build_wheel(config_settings=None):
    _presupposed(config_settings)
    return _build.get_requires_for_build_wheel(config_settings)


get_requires_for_build_editable = get_requires_for_build_wheel
