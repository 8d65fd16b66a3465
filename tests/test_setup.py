"""The set-up from nothing: what is fetched, and what is named before anything is built."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ROOT / "cmake/Sources.cmake"


class Mirror:
    """Folders in place of Debian's mirrors, each with an archive of the source `json`, and what CMake makes of them."""

    def __init__(self, folder):
        self.folder, self.mirrors = folder, []

    def add(self, content):
        """A mirror whose archive has this content; returns its checksum."""
        mirror = self.folder / f"mirror-{len(self.mirrors)}"
        archive = mirror / "pool/main/j/json_1.tar.gz"
        archive.parent.mkdir(parents=True)
        file = self.folder / "json.hpp"
        file.write_text(content)
        with tarfile.open(archive, "w:gz") as made:
            made.add(file, "json-1/include/json.hpp")
            made.add(file, "json-1/tests/large.hpp")
        self.mirrors.append(f"file://{mirror}")
        return hashlib.sha256(archive.read_bytes()).hexdigest()

    def fetch(self, checksum, *options):
        """(where CMake says the source is, what it said)"""
        script = self.folder / "fetch.cmake"
        script.write_text(
            f'include("{SOURCES}")\nset(liger_json_source 1 {checksum} j/json_1.tar.gz */include)\n'
            'liger_sources(json)\nmessage("json is in <${liger_json}>")\n'
        )
        given = (f"-DLIGER_MIRRORS={';'.join(self.mirrors)}", f"-DLIGER_SOURCES_DIR={self.folder}/sources", *options)
        done = subprocess.run(["cmake", *given, "-P", script], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return re.search("json is in <(.*)>", done.stderr)[1], " ".join((done.stdout + done.stderr).split())


@pytest.fixture()
def mirror(tmp_path):
    return Mirror(tmp_path)


def test_a_source_is_fetched_once_and_one_line_says_so(mirror):
    checksum = mirror.add("right")
    folder, said = mirror.fetch(checksum)
    assert said.count("fetching the sources of json-1 from file://") == 1
    assert Path(folder, "include/json.hpp").read_text() == "right" and not Path(folder, "tests").exists()
    mirror.mirrors = ["file:///nowhere"]
    again, said = mirror.fetch(checksum)
    assert again == folder and "fetching" not in said


def test_a_source_with_another_checksum_is_taken_from_the_next_mirror(mirror):
    mirror.add("wrong")
    folder, said = mirror.fetch(mirror.add("right"))
    assert Path(folder, "include/json.hpp").read_text() == "right" and "could not" not in said


def test_what_cannot_be_fetched_is_named_and_leaves_nothing(mirror):
    found = mirror.add("wrong")
    folder, said = mirror.fetch("0" * 64)
    assert folder == "" and f"json-1 could not be fetched (the checksum is {found}" in said
    mirror.mirrors = ["file:///nowhere"]
    folder, said = mirror.fetch("0" * 64)
    assert folder == "" and "json-1 could not be fetched (" in said and "LIGER_MIRRORS" in said
    assert [file.name for file in (mirror.folder / "sources").iterdir()] == ["cmake.lock"]


def test_nothing_is_fetched_where_that_is_off(mirror):
    folder, said = mirror.fetch(mirror.add("right"), "-DLIGER_FETCH=OFF")
    assert folder == "" and "fetching" not in said


def presupposed(*what, **environment):
    command = [sys.executable, ROOT / "cmake/presupposed.py", *what]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})
    return done.returncode, done.stderr.strip()


def test_what_has_to_be_there_is_named_with_its_package(tmp_path):
    without = {name: value for name, value in os.environ.items() if name != "CXX"}
    assert presupposed("venv") == (0, "")
    for path, variables in ((str(tmp_path), {"CXX": ""}), (without["PATH"], {"CXX": "no-such-compiler -m64"})):
        code, said = presupposed(PATH=path, **variables)
        assert code == 1 and "\n" not in said and "apt install g++" in said and "dnf install gcc-c++" in said
    # Debian's Python without python3-venv: a module that is not there, before any other is looked for.
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['ensurepip'] = None")
    code, said = presupposed("venv", PYTHONPATH=str(tmp_path))
    assert code == 1 and "\n" not in said and "apt install python3-venv" in said


def test_make_names_what_is_missing_before_it_fetches(tmp_path):
    """With programs of its own alone on the path: everything that make runs up to there, and no compiler."""
    for program in ("make", "bash", "sh", "find", "env", "rm", "mkdir", sys.executable):
        (tmp_path / os.path.basename(program)).symlink_to(shutil.which(program))
    environment = {"PATH": str(tmp_path), "HOME": str(tmp_path)}
    venv = tmp_path / "venv"
    python = os.path.basename(sys.executable)
    command = ["make", f"VENV={venv}", f"PYTHON={python}", f"{venv}/bin/python"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode and "apt install g++" in done.stderr and not venv.exists()
    command[2] = "PYTHON=no-such-python"
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode and "install python3 and python3-venv" in done.stderr and not venv.exists()


def test_the_first_screen_of_readme_names_all_the_set_up():
    first = (ROOT / "README.md").read_text().split("\n## ")[0]
    assert "make train" in first and "make test" in first
