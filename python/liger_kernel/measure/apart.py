"""Runs an arm, or a script, in a process that has `liger_kernel.measure`, whichever package is found as `liger_kernel`.

    python apart.py JOB              an arm: a job as JSON
    python apart.py SCRIPT ARGUMENT  a script that imports liger_kernel.measure

It is run as a file. Its own modules are registered under their names without an import of the package around them, so
that the arm of a rival, which has the same name, finds them too.
"""

import importlib.util
import os
import runpy
import sys
from pathlib import Path


def provide():
    """Registers this folder as liger_kernel.measure."""
    folder, name = Path(__file__).resolve().parent, "liger_kernel.measure"
    spec = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    sys.modules[name] = package = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)


if __name__ == "__main__":
    here = os.path.dirname(os.path.realpath(__file__))  # its modules would stand before others of their names
    sys.path[:] = [path for path in sys.path if os.path.realpath(path) != here]
    provide()
    if len(sys.argv) > 2:
        sys.argv = sys.argv[1:]
        sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
        runpy.run_path(sys.argv[0], run_name="__main__")
    else:
        from liger_kernel.measure.arm import main

        main(sys.argv[1])
