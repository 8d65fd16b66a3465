"""Builds the library for what this machine is not: `make test-platforms`.

    python tests/platforms/run.py [aarch64] [wheel] [windows] [rocm] [--jobs N]

aarch64 is cross-compiled and runs its C++ tests under qemu-user. The aarch64 wheel in dist/ (`make wheel
MACHINE=aarch64`) is used by a C++ program there, with each torch. For Windows (mingw) and ROCm (hipcc) objects are
compiled, which nothing runs. A part whose compiler is not there is left out, and says which Debian package has it.
Prints a line for each part; what the tools say is in build/platforms/*.log. docs/platforms.md says what follows from
it.
"""

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
OUT = ROOT / "build" / "platforms"
AARCH64 = OUT / "aarch64"
AARCH64_TOOLCHAIN = f"-DCMAKE_TOOLCHAIN_FILE={ROOT}/cmake/toolchains/aarch64-linux-gnu.cmake"
#: Of one core that the tests under qemu take for the machine's: what torch reads of an Arm processor (a Neoverse N1).
CPU = """processor\t: {core}
BogoMIPS\t: 243.75
Features\t: fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x3
CPU part\t: 0xd0c
CPU revision\t: 1

"""
MIDR = "0x00000000413fd0c1\n"


class Missing(Exception):
    """What a part needs and this machine lacks."""


class Part:
    def __init__(self, name, jobs):
        self.name, self.jobs, self.folder = name, jobs, OUT / name
        self.folder.mkdir(parents=True, exist_ok=True)
        self.log = OUT / f"{name}.log"
        self.log.write_text("")

    def run(self, *command, **environment):
        """Its output, which goes into the log too."""
        command = [str(word) for word in command]
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={**os.environ, **environment},
        )
        with self.log.open("a") as log:
            log.write(f"$ {' '.join(command)}\n{done.stdout}\n")
        if done.returncode:
            raise RuntimeError(f"{command[0]} {command[1]} ... failed with {done.returncode}: {self.log}")
        return done.stdout

    def need(self, tools, packages):
        """Programs, and Debian's packages that have them."""
        missing = [tool for tool in tools if not shutil.which(tool)]
        if missing:
            raise Missing(f"{', '.join(missing)} (apt-get install --no-install-recommends {' '.join(packages)})")

    def configure(self, source, build, *options):
        self.run("cmake", "-S", source, "-B", build, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release", *options)

    def build(self, build, *targets):
        return self.run("cmake", "--build", build, "-j", self.jobs, "--target", *targets)


def this_torch():
    return Path(importlib.util.find_spec("torch").submodule_search_locations[0])


def torch_version():
    major, minor, patch = (
        re.search(rf"^#define TORCH_VERSION_{part} (\d+)", text, re.M)[1]
        for text in [(this_torch() / "include/torch/headeronly/version.h").read_text()]
        for part in ("MAJOR", "MINOR", "PATCH")
    )
    return f"{major}.{minor}.{patch}"


def unpack(wheel, folder, wanted):
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if re.search(wanted, name):
                archive.extract(name, folder)


def aarch64_torch(part, version):
    """A folder torch/ of that version, of which libtorch.so needs no GPU's libraries."""
    folder = AARCH64 / f"torch-{version}"
    if (folder / "ready").exists():
        return folder / "torch"
    shutil.rmtree(folder, ignore_errors=True)
    wheels = folder / "wheels"
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    platforms = [f"--platform=manylinux_2_{minor}_aarch64" for minor in (28, 27, 25, 17)]
    download = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--python-version", python]
    download += [*platforms, "--platform=manylinux2014_aarch64", "--dest", wheels]
    part.run(*download, f"torch=={version}")
    wheel = next(wheels.glob("torch-*.whl"))
    unpack(
        wheel,
        folder,
        r"^torch/include/|^torch/lib/lib(c10\.|torch_cpu\.|arm_|gfortran|gomp|nvpl|openblas)|^torch\.libs/",
    )
    with zipfile.ZipFile(wheel) as archive:
        metadata = archive.read(next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))).decode()
    # Of a wheel with CUDA, libtorch_cpu.so needs two of CUDA's libraries, which look for no GPU until they are called.
    if cuda := re.search(r"^Requires-Dist: cuda-toolkit.*==(\d+\.\d+)", metadata, re.M):
        part.run(*download, *(f"nvidia-cuda-{name}=={cuda[1]}.*" for name in ("runtime", "cupti")))
        for wheel in wheels.glob("nvidia*.whl"):
            unpack(wheel, folder, r"/libcu(dart|pti)\.so")
    shutil.rmtree(wheels)
    # libtorch.so holds nothing; that of a wheel with CUDA asks for libtorch_cuda.so.
    lib = folder / "torch" / "lib"
    link = ["aarch64-linux-gnu-g++", "-shared", "-x", "c++", "/dev/null", "-o", lib / "libtorch.so"]
    part.run(*link, "-Wl,-soname,libtorch.so,--no-as-needed,--allow-shlib-undefined", f"-L{lib}", "-ltorch_cpu")
    (folder / "ready").touch()
    return folder / "torch"


def aarch64_root():
    """What programs under qemu take for /: the C library, and a processor of that kind in place of this machine's."""
    root = AARCH64 / "root"
    (root / "proc").mkdir(parents=True, exist_ok=True)
    if not (root / "lib").exists():
        (root / "lib").symlink_to("/usr/aarch64-linux-gnu/lib")
    cores = range(os.cpu_count())
    (root / "proc" / "cpuinfo").write_text("".join(CPU.format(core=core) for core in cores))
    for core in cores:
        registers = root / f"sys/devices/system/cpu/cpu{core}/regs/identification"
        registers.mkdir(parents=True, exist_ok=True)
        (registers / "midr_el1").write_text(MIDR)
    return root


def need_aarch64(part):
    tools = ["aarch64-linux-gnu-g++", "qemu-aarch64", "ninja"]
    part.need(tools, ["g++-aarch64-linux-gnu", "qemu-user", "ninja-build"])


def aarch64(part):
    need_aarch64(part)
    torch, build = aarch64_torch(part, torch_version()), part.folder / "liger"
    options = ["-DLIGER_CUDA=OFF", "-DLIGER_MODELS=OFF", "-DLIGER_TESTS=ON", f"-DLIGER_TORCH_DIR={torch}"]
    part.configure(ROOT, build, AARCH64_TOOLCHAIN, *options)
    part.build(build, "test_liger")
    code = subprocess.run(
        ["aarch64-linux-gnu-objdump", "-d", "--no-show-raw-insn", build / "libliger.so"], capture_output=True, text=True
    ).stdout
    vectors = len(re.findall(r"\sfmla\tv\d+\.4s", code))
    if vectors < 1000:
        raise RuntimeError(f"the library has {vectors} fused multiply-adds of NEON's vectors")
    test = ["qemu-aarch64", "-L", aarch64_root(), build / "tests" / "test_liger"]
    said = part.run(*test, OMP_NUM_THREADS="2")
    passed = re.search(r"\[  PASSED  \] (\d+) tests", said)[1]
    return f"{passed} C++ tests passed under qemu-user; {vectors} fused multiply-adds of NEON's vectors in the library"


def wheel(part):
    found = sorted(ROOT.glob("dist/*_aarch64.whl"), key=os.path.getmtime)
    if not found:
        raise Missing("wheel for aarch64 in dist/ (make wheel MACHINE=aarch64)")
    need_aarch64(part)
    package = part.folder / "site-packages"
    shutil.rmtree(package, ignore_errors=True)
    unpack(found[-1], package, "")
    minors = sorted(folder.name.removeprefix("torch-") for folder in package.glob("liger_kernel/lib/torch-*"))
    for minor in minors:
        build, asked = part.folder / minor, ("-DVERSION=1.0", "-DCOMPONENTS=models;tokenizer")
        where = (f"-Dliger_ROOT={package}/liger_kernel", f"-DLIGER_TORCH_DIR={aarch64_torch(part, f'{minor}.0')}")
        part.configure(ROOT / "tests" / "installed", build, AARCH64_TOOLCHAIN, *where, *asked)
        part.build(build, "uses")
        part.run("qemu-aarch64", "-L", aarch64_root(), build / "uses")
    return f"a C++ program runs under qemu-user on the libraries of {found[-1].name} for torch {', '.join(minors)}"


def windows(part):
    part.need(["x86_64-w64-mingw32-g++-posix", "ninja"], ["g++-mingw-w64-x86-64-posix", "ninja-build"])
    toolchain = f"-DCMAKE_TOOLCHAIN_FILE={ROOT}/cmake/toolchains/x86_64-w64-mingw32.cmake"
    build = part.folder / "liger"
    part.configure(
        ROOT, build, toolchain, "-DLIGER_CUDA=OFF", "-DLIGER_MODELS=OFF", f"-DLIGER_TORCH_DIR={this_torch()}"
    )
    part.build(build, "liger_ops", "liger_cpu_DEFAULT", "liger_cpu_AVX2", "liger_cpu_AVX512")
    files = [*ROOT.glob("liger/**/*_op.cpp"), *ROOT.glob("liger/core/torch/*.cpp")]
    kernels = [*ROOT.glob("liger/**/*_cpu.cpp")]
    return f"{len(files)} files of operators and {len(kernels)} of kernels, for 3 instruction sets, compile with mingw"


def rocm(part):
    part.need(["hipcc", "ninja"], ["hipcc", "libamdhip64-dev", "rocm-device-libs", "librocprim-dev", "ninja-build"])
    build, architectures = part.folder / "liger", ["gfx90a", "gfx1030"]
    options = ["-DLIGER_MODELS=OFF", "-DLIGER_ROCM=ON", f"-DLIGER_ROCM_ARCHITECTURES={';'.join(architectures)}"]
    part.configure(ROOT, build, *options, "-DLIGER_ROCM_FLAGS=-O1", f"-DLIGER_TORCH_DIR={this_torch()}")
    part.build(build, "liger")
    kernels = [*ROOT.glob("liger/**/*_cuda.cu")]
    return f"all {len(kernels)} files of kernels compile, and the library links, for {' and '.join(architectures)}"


PARTS = {"aarch64": aarch64, "wheel": wheel, "windows": windows, "rocm": rocm}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], help="which of them; all")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    given = parser.parse_args()
    failed = False
    for name in given.parts or PARTS:
        try:
            said = PARTS[name](Part(name, given.jobs))
        except Missing as e:
            said = f"left out, because this machine has no {e}"
        except Exception as e:
            said, failed = f"FAILED: {e}", True
        print(f"{name:10}{said}", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
