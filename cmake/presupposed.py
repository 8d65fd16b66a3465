"""What has to be on a machine before anything is fetched or built; what else is needed comes by itself.

    python cmake/presupposed.py [venv]

Says in one sentence which package to install. Runs in any Python 3 and imports nothing that may be missing.
"""

import importlib.util
import os
import shlex
import shutil
import sys


def missing(what=(), environment=os.environ):
    """What to install first; None where all is there."""
    if sys.version_info < (3, 10):
        return "libliger needs Python 3.10 or newer, and this is {}.{}: name another by PYTHON=.".format(
            *sys.version_info
        )
    # Debian and Ubuntu have a Python without the modules that make an environment.
    if "venv" in what and not (importlib.util.find_spec("venv") and importlib.util.find_spec("ensurepip")):
        cure = "install python3-venv (Debian, Ubuntu: apt install python3-venv)."
        return "{} cannot make a virtual environment: {}".format(sys.executable, cure)
    named = environment.get("CXX")
    compilers = [shlex.split(named)[0]] if named else ["c++", "g++", "clang++", "CC", "icpx"]
    if os.name != "nt" and not any(shutil.which(name, path=environment.get("PATH")) for name in compilers):
        found = "CXX names {}, which is not there".format(named) if named else "there is none on the path"
        return (
            "libliger needs a C++ compiler, and {}: install g++ (Debian, Ubuntu: apt install g++; "
            "Fedora: dnf install gcc-c++; macOS: xcode-select --install).".format(found)
        )
    return None


if __name__ == "__main__":
    sys.exit(missing(sys.argv[1:]))
