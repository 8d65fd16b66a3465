"""What is installed, what the library was built for and what it does here: `python -m liger_kernel.env_report`.

Prints the versions, the build, the devices and a test of each operator against plain torch. The exit status is 1 where
the library cannot be loaded or an operator fails, else 0.
"""

import argparse
import ctypes
import importlib.util
import os
import platform
import sys
from importlib import metadata

import liger_kernel
from liger_kernel._installed import others

PACKAGES = ("torch", "transformers", "trl", "peft", "accelerate", "kernels", "triton", "flash-attn")


def versions() -> list[tuple[str, str]]:
    """(package, version) of this package and of those that it works with."""
    python = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    version = getattr(liger_kernel, "__version__", "not known: another package has overwritten it")
    found = [("liger_kernel", version), ("Python", python)]
    for name in PACKAGES:
        try:
            found.append((name, metadata.version(name)))
        except metadata.PackageNotFoundError:
            found.append((name, "not installed"))
    return found


def library() -> list[tuple[str, str]]:
    """What is known of the library and of what it runs on; raises ImportError or OSError where it cannot be loaded."""
    from liger_kernel import _library

    file, version = _library._loaded()
    cpu, cuda = _built_for(file)
    return [("file", file), ("version", version), ("built for", f"CPU: {cpu}"), ("", f"CUDA: {cuda}"), *_devices()]


def _built_for(file):
    try:
        build = ctypes.CDLL(file, mode=os.RTLD_NOLOAD).liger_build
    except (OSError, AttributeError):
        return ("not known: the library is older than this package",) * 2
    build.restype = ctypes.c_char_p
    return build().decode().splitlines()


def _devices():
    import torch

    capability = torch.backends.cpu.get_cpu_capability()
    chosen = capability if capability in ("AVX2", "AVX512") else "DEFAULT"
    asked = os.environ.get("ATEN_CPU_CAPABILITY")
    reason = f", as ATEN_CPU_CAPABILITY={asked} says" if asked else ""
    yield "runs on", f"CPU: {chosen} kernels{reason}, {torch.get_num_threads()} threads"
    if not torch.cuda.is_available():
        yield "", f"CUDA: no device; torch was built for {torch.version.cuda or 'the CPU alone'}"
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        text = f"{properties.name}, compute capability {properties.major}.{properties.minor}"
        text += f", {properties.total_memory / 2**30:.0f} GiB"
        yield "", f"CUDA {index}: {text}; torch was built for {torch.version.cuda}"


def hub() -> str:
    """Whether `use_kernels=True` can run on this package, or why not."""
    if importlib.util.find_spec("transformers") is None:
        return "no transformers is installed"
    try:
        from transformers import PreTrainedModel

        from liger_kernel.transformers.patching.hub import obstacle
    except Exception as error:  # whatever a transformers raises that does not fit what is beside it
        return f"{type(error).__name__}: {error}"
    return obstacle(PreTrainedModel) or "runs on this library after liger_kernel.transformers.use_as_hub_kernels()"


def self_test(device: str) -> list[tuple[str, str]]:
    """(operator, "ok" or what is wrong) for each operator on a device."""
    from liger_kernel._self_test import CHECKS

    found = ((check, [text for dtype in check.dtypes if (text := _fault(check, device, dtype))]) for check in CHECKS)
    return [(check.operator, "; ".join(faults) or "ok") for check, faults in found]


def _fault(check, device, dtype):
    from liger_kernel._self_test import TOLERANCES, error_of

    try:
        error = error_of(check, device, dtype)
    except Exception as error:  # the report goes on with the other operators
        text = f"{type(error).__name__}: {error}"
    else:
        if error <= TOLERANCES[dtype]:
            return None
        text = f"off by {error:.2g} of the largest element, rounding explains {TOLERANCES[dtype]:.2g}"
    return f"FAILED in {str(dtype).removeprefix('torch.')}: {text}"


def _print(title, rows):
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    print(f"\n{title}")
    for row in rows:
        print("  " + "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths)), row[-1]]))


def main(arguments=None) -> int:
    """Print the report, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m liger_kernel.env_report", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--device",
        action="append",
        choices=("cpu", "cuda"),
        help="where to test the operators; by default on all there are",
    )
    options = parser.parse_args(arguments)
    _print("versions", versions())
    version = getattr(liger_kernel, "__version__", None)
    if wrong := [("WRONG", text) for text in others(liger_kernel.__path__, version)]:
        _print("packages in the same folder", wrong)
    try:
        _print("library", library())
    except (ImportError, OSError) as error:
        _print("library", [("cannot be loaded", str(error))])
        return 1
    _print("use_kernels=True", [("transformers", hub())])
    import torch

    failed = 0
    for device in options.device or ("cpu", "cuda")[: 1 + torch.cuda.is_available()]:
        rows = self_test(device)
        failed += sum(text != "ok" for _, text in rows)
        _print(f"operators on {device}, forward and backward against plain torch", rows)
    print(f"\n{failed} operators FAILED" if failed else "\nall operators agree with plain torch")
    return int(failed > 0)


def print_env_report() -> None:
    """Print the report, with the operators tested on all devices there are."""
    main([])


if __name__ == "__main__":
    sys.exit(main())
