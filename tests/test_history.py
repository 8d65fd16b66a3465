"""Benchmarks' rows say what was measured, when and where, and benchmarks/history.py shows them over the commits."""

import json
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
BENCH = ("--op", "rms_norm", "--shape", "4,16", "--device", "cpu", "--rivals", "torch", "--seconds", "0.01")


def script(folder, name, *arguments):
    command = [sys.executable, str(folder / "benchmarks" / name), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_rows_have_commit_date_and_machine(tmp_path):
    script(ROOT, "bench.py", *BENCH, "--out", str(tmp_path / "run.json"))
    rows = json.loads((tmp_path / "run.json").read_text())["rows"]
    assert {row["rival"] for row in rows} == {"ours", "torch"}
    for row in rows:
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", row["date"]) and row["machine"]
        assert row["commit"] is None or re.fullmatch(r"[0-9a-f]{12}\+?", row["commit"])


def test_history(tmp_path):
    """Two commits that change one row, one that keeps it, and a row that is not committed yet."""
    if not shutil.which("git"):
        pytest.skip("no git")
    results = tmp_path / "benchmarks" / "results"
    results.mkdir(parents=True)
    shutil.copy(ROOT / "benchmarks" / "history.py", tmp_path / "benchmarks")
    git = lambda *command: subprocess.run(
        ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", tmp_path, *command], check=True, capture_output=True
    )

    def write(ms, name="a.json", **stamp):
        row = {"case": "norm", "shape": [4, 8], "options": {}, "rival": "ours", "eager forward": ms, **stamp}
        run = {"machine": {"device": "old machine"}, "rows": [row, row | {"rival": "torch", "eager forward": 9.0}]}
        (results / name).write_text(json.dumps(run))

    git("init", "-q")
    for i, ms in enumerate((1.0, 2.0, 2.0)):
        write(ms)
        (tmp_path / f"{i}").touch()
        git("add", "-A")
        git("commit", "-q", "-m", "A run")
    write(3.0, "b.json", commit="123456789abc", date="2026-01-02", machine="new machine")
    lines = [line.split("|")[1:-1] for line in script(tmp_path, "history.py", "norm").splitlines()[2:]]
    rows = [[cell.strip() for cell in line] for line in lines]
    assert [row[7] for row in rows] == ["1.000", "2.000", "3.000"]
    assert [row[2] for row in rows] == ["old machine", "old machine", "new machine"]
    assert rows[0][1].startswith("(") and rows[2][:2] == ["2026-01-02", "123456789abc"]
    assert len(script(tmp_path, "history.py", "another").splitlines()) == 2  # no row
