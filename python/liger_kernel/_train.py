"""`liger-train` on the path: runs the program that was built for the torch that is installed."""

import importlib.util
import os
import re
import sys

from liger_kernel import cmake_prefix_path


def program():
    """(the program, the folder of torch's libraries); raises FileNotFoundError, which says why there is none."""
    torch = importlib.util.find_spec("torch")  # found, not imported, which takes longer than liger-train's start
    if not torch:
        raise FileNotFoundError("liger-train needs torch, which is not installed: run pip install torch")
    (folder,) = torch.submodule_search_locations
    with open(os.path.join(folder, "version.py"), encoding="utf-8") as file:
        minor = re.search(r"__version__ = ['\"](\d+\.\d+)", file.read())[1]
    libraries = os.path.join(cmake_prefix_path, "lib")
    name = "liger-train.exe" if os.name == "nt" else "liger-train"
    found = os.path.join(libraries, f"torch-{minor}", name)
    if os.path.exists(found):
        return found, os.path.join(folder, "lib")
    built = [there for there in os.listdir(libraries) if there.startswith("torch-")] if os.path.isdir(libraries) else []
    if f"torch-{minor}" in built or not built:
        raise FileNotFoundError(
            "this libliger was built without liger-train, because what it needs could not be fetched then. "
            "Install it again (pip install -v .), and look for lines that begin with 'liger:'."
        )
    versions = ", ".join(sorted(there.removeprefix("torch-") for there in built))
    raise FileNotFoundError(f"liger-train was built for torch {versions}, and torch {minor} is installed")


def main():
    """Become the program, with the arguments of this process."""
    try:
        path, libraries = program()
    except FileNotFoundError as error:
        sys.exit(f"liger-train: {error}")
    # It looks for torch beside this package; another folder of the same environment may hold it.
    variable = "DYLD_LIBRARY_PATH" if sys.platform == "darwin" else "LD_LIBRARY_PATH"
    os.environ[variable] = os.pathsep.join(filter(None, [os.environ.get(variable), libraries]))
    os.execv(path, [path, *sys.argv[1:]])
