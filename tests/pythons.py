"""The interpreters of this machine, for what is tested with other versions of Python."""

import shutil
import subprocess
from pathlib import Path


def pythons():
    """(minor version, interpreter) of each supported Python that is on the path or among pyenv's."""
    for n in range(10, 15):
        found = [shutil.which(f"python3.{n}"), *Path.home().glob(f".pyenv/versions/3.{n}.*/bin/python3.{n}")]
        for python in filter(None, found):
            # pyenv puts names on the path for what it does not run
            if subprocess.run([python, "-c", ""], capture_output=True).returncode == 0:
                yield n, python
                break
