"""Builds one wheel for several minor versions of torch and for every Python: `make wheel`.

    python cmake/wheels.py "2.11 2.13" ["80;90a" [aarch64]]

For each torch this builds the wheel that `pip install .` builds, and merges them: what depends on torch stands in a
folder of its version. The CUDA kernels include nothing of torch and are one library beside these. torch itself is not
installed: headers and libraries are taken out of its wheel. For a machine that is not this one, the compiler is that
of its file in cmake/toolchains, and there are no CUDA kernels. Everything stays under build/wheels, so that a build
that was stopped goes on where it was. The wheel is put into dist/.
"""

import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import provided

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "wheels"
#: How large a wheel may be, in bytes.
LIMITS = {"CPU": 18e6, "CUDA": 100e6}


def run(*command, **variables):
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    command = list(map(str, command))
    subprocess.run(command, cwd=ROOT, env={**os.environ, "PATH": path, **variables}, check=True)


def torch(minor, machine):
    """The folder of a torch's headers and of the libraries that are linked with."""
    folder = BUILD / f"torch-{minor}-{machine}" / "torch"
    if not folder.exists():
        folder.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=BUILD) as there:
            which = ("--no-deps", "--only-binary=:all:", f"--platform=manylinux_2_28_{machine}", f"torch=={minor}.*")
            run(sys.executable, "-m", "pip", "download", "--quiet", "--dest", there, *which)
            (file,) = Path(there).iterdir()
            with zipfile.ZipFile(file) as wheel:
                needed = re.compile(r"torch/(include/.*|lib/lib(torch|torch_cpu|c10)\.so)")
                wheel.extractall(there, filter(needed.fullmatch, wheel.namelist()))
            Path(there, "torch").rename(folder)
    return folder


def kernels(torch, architectures):
    """The CUDA kernels as a library. CMake wants some torch, which they do not see."""
    folder = BUILD / "kernels"
    options = ("-DLIGER_CUDA=ON", f"-DLIGER_CUDA_ARCHITECTURES={architectures}", "-DLIGER_MODELS=OFF")
    run("cmake", "-S", ROOT, "-B", folder, "-G", "Ninja", f"-DLIGER_TORCH_DIR={torch}", *options)
    run("cmake", "--build", folder, "--target", "liger_kernels")
    return folder / "libliger_kernels.so"


def wheel(torch, machine, library, architectures):
    """The wheel that `pip install .` would build for a torch on a machine."""
    folder = torch.parent
    for old in folder.glob("*.whl"):
        old.unlink()
    settings = [f"build-dir={folder / 'build'}", f"cmake.define.LIGER_KERNELS={library}"]
    if machine != platform.machine():
        settings.append(f"cmake.define.CMAKE_TOOLCHAIN_FILE={ROOT}/cmake/toolchains/{machine}-linux-gnu.cmake")
    options = [word for setting in settings for word in ("-C", setting)]
    pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-build-isolation", "--no-deps", "-w", folder)
    run(
        *(*pip, *options, ROOT),
        LIGER_TORCH_DIR=str(torch),
        LIGER_CUDA="ON" if library else "OFF",
        LIGER_CUDA_ARCHITECTURES=architectures,
        _PYTHON_HOST_PLATFORM=f"linux-{machine}",  # of the wheel's tag
    )
    (made,) = folder.glob("*.whl")
    with zipfile.ZipFile(made) as content:
        if not any(name.endswith("/liger-train") for name in content.namelist()):
            sys.exit("The wheel has no liger-train: what it needs could not be fetched (cmake/Sources.cmake).")
    return made


def requirement(minors):
    """The versions of torch that a wheel for these asks for."""
    numbers = sorted(tuple(map(int, minor.split("."))) for minor in minors)
    (major, first), (_, last) = numbers[0], numbers[-1]
    between = [f"!={major}.{n}.*" for n in range(first, last) if (major, n) not in numbers]
    return ",".join([f"torch>={major}.{first}", *between, f"<{major}.{last + 1}"])


def edit(file, pattern, text):
    """Replace what has to be there."""
    changed, count = re.subn(pattern, text, file.read_text(), flags=re.M)
    assert count == 1, (file, pattern)
    file.write_text(changed)


def merge(wheels, minors, library):
    """A folder with what all wheels hold, and with metadata that name all versions of torch."""
    tree = BUILD / "tree"
    shutil.rmtree(tree, ignore_errors=True)
    for file in wheels:
        with zipfile.ZipFile(file) as content:
            content.extractall(tree)
    for program in tree.glob("liger_kernel/lib/torch-*/liger-train"):
        program.chmod(0o755)  # which zipfile does not keep
    *others, metadata = tree.glob("*.dist-info")
    for folder in others:
        shutil.rmtree(folder)
    metadata = metadata.rename(tree / re.sub(r"\+pt\w+", "", metadata.name))
    edit(metadata / "METADATA", r"^(Version: .*)\+pt\w+$", r"\1")
    edit(metadata / "METADATA", r"^(Requires-Dist: )torch==.*", rf"\1{requirement(minors)}")
    edit(tree / "liger_kernel/_build.py", r"\+pt\w+", "")
    for folder in tree.glob("*.data"):
        shutil.rmtree(folder)
    for path, text in provided.files(metadata.name.removesuffix(".dist-info").partition("-")[2]).items():
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        (tree / path).write_text(text)
    if library:
        run("strip", library, "-o", tree / "liger_kernel/lib" / library.name)
    return tree


def pack(tree):
    """The wheel of a folder, tagged with the oldest Linux that has the symbols it needs."""
    # What is torch's own is found beside the package.
    excluded = ("--exclude=libtorch*.so", "--exclude=libc10*.so", "--exclude=libgomp*")
    with tempfile.TemporaryDirectory(dir=BUILD) as there:
        run(sys.executable, "-m", "wheel", "pack", tree, "-d", there)
        (file,) = Path(there).iterdir()
        run("auditwheel", "repair", "--only-plat", *excluded, "-w", ROOT / "dist", file)
    return max((ROOT / "dist").glob("*.whl"), key=os.path.getmtime)


def main(minors, architectures="", machine=platform.machine()):
    minors = minors.split()
    BUILD.mkdir(parents=True, exist_ok=True)
    nvcc = machine == platform.machine() and (os.environ.get("CUDACXX") or shutil.which("nvcc"))
    torches = [torch(minor, machine) for minor in minors]
    library = kernels(torches[0], architectures) if nvcc and architectures else ""
    file = pack(merge([wheel(torch, machine, library, architectures) for torch in torches], minors, library))
    with zipfile.ZipFile(file) as content:
        for item in content.infolist():
            if item.filename.endswith((".so", "/liger-train")):
                print(f"{item.compress_size / 1e6:6.1f} MB  {item.filename}")
    size, limit = file.stat().st_size, LIMITS["CUDA" if library else "CPU"]
    print(f"{size / 1e6:6.1f} MB  {file.relative_to(ROOT)}")
    if size > limit:
        sys.exit(f"more than {limit / 1e6:.0f} MB")


if __name__ == "__main__":
    main(*sys.argv[1:])
