"""What a measurement was made on."""

import datetime
import os
import platform
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

PACKAGES = ("torch", "transformers", "peft", "bitsandbytes", "triton")


def _output(*command):
    """What a program prints; None where there is no such program, or it fails."""
    try:
        return subprocess.check_output(command, text=True, stderr=subprocess.DEVNULL).strip()
    except (OSError, subprocess.CalledProcessError):
        return None


#: The files on which a measurement of this library depends, as patterns of git; pages and what writes them are not
#: among them, so that results can be committed between measurements.
MEASURED = (
    "liger", "python", "cmake", "CMakeLists.txt", ":(glob)benchmarks/*.py",
    *(f":!benchmarks/{name}.py"
      for name in ("cards", "history", "misses", "pictures", "plot", "provenance", "run_all", "runs", "scheduler",
                   "tables")),
)  # fmt: skip


def commit(folder: Path | str) -> str | None:
    """The last commit that changed what is measured (MEASURED) in the repository that has a folder's files, with a +
    where these files differ from it; LIGER_COMMIT where it is set; None outside a repository."""
    if given := os.environ.get("LIGER_COMMIT"):
        return given
    here = ("git", "-C", str(folder))
    if not _output(*here, "ls-files", "--", "."):
        return None
    git = ("git", "-C", _output(*here, "rev-parse", "--show-toplevel"))
    # In a repository of other files, which may have this package in it, it is the last commit of all.
    last = _output(*git, "log", "-1", "--format=%H", "--", *MEASURED) or _output(*git, "rev-parse", "HEAD")
    return last[:12] + "+" * bool(_output(*git, "status", "--porcelain", "--untracked-files=no", "--", *MEASURED))


def version_of(name: str, folder: Path | str | None = None) -> str | None:
    """The version of an installed distribution, or of one that was unpacked into a folder; None where there is none."""
    path = sys.path if folder is None else [str(folder)]
    return next((found.version for found in metadata.distributions(name=name, path=path)), None)


def processor() -> str:
    """The name of the CPU."""
    cpuinfo = Path("/proc/cpuinfo")
    name = re.search("model name\\s*: (.*)", cpuinfo.read_text()) if cpuinfo.exists() else None
    return name[1] if name else platform.processor()


def machine(
    device: str,
    gpus: int = 1,
    cap_gb: float | None = None,
    sources: Path | None = None,
    rival: Path | str | None = None,
) -> dict:
    """Device, driver, versions, also of the liger-kernel in a rival's folder, date, and the commit of a folder of
    sources; `device` is "cuda" or "cpu"."""
    import torch

    cuda = device == "cuda"
    driver = cuda and _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return {
        "device": torch.cuda.get_device_name() if cuda else processor(),
        "gpus": gpus,
        "cap_gb": cap_gb,
        "memory_bytes": torch.cuda.get_device_properties(0).total_memory if cuda else None,
        "driver": driver.splitlines()[0] if driver else None,
        "threads": torch.get_num_threads(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        **{name: version_of(name) for name in PACKAGES},
        "torch": torch.__version__,
        "liger-kernel": version_of("liger-kernel", rival) if rival else None,
        "commit": commit(sources or Path(__file__).parent),
        "date": datetime.date.today().isoformat(),
    }
