"""`make measure`: every table has a benchmark that makes its result, what is done is not done again, and what takes too
long ends."""

import json
import os
import pathlib
import re
import subprocess
import sys
import time

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

pytest.importorskip("tabulate")
import cards  # noqa: E402
import plot  # noqa: E402
import run_all  # noqa: E402


def run(work, *arguments, commit="0123456789ab"):
    environment = {**os.environ, "LIGER_COMMIT": commit, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(ROOT / "benchmarks/run_all.py"), "--tiny", "--work", str(work), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_dry_run(tmp_path):
    """Results are named after the card, and say what they were measured on. The second time nothing is measured; at
    another commit everything is."""
    first = run(tmp_path, "--only", "operators,errors")
    assert re.search(r"^operators: \d+ s$", first, re.M) and re.search(r"^errors: \d+ s$", first, re.M)
    folder = tmp_path / "tiny/0123456789ab"
    (operators,) = folder.glob("cpu-*.json")
    (errors,) = folder.glob("errors-cpu-*.json")
    for path in (operators, errors):
        report = json.loads(path.read_text())
        assert report["machine"]["commit"] == "0123456789ab" and report["machine"]["torch"] and report["rows"]
    assert {row["case"] for row in json.loads(errors.read_text())["rows"]} == {"rms_norm"}
    assert "RMS errors" in (folder / "errors-0/errors.md").read_text()
    second = run(tmp_path, "--only", "operators,errors")
    assert second.count("it is done at this commit") == 2 and "$" not in second
    assert "it has no dry run" in run(tmp_path, "--only", "eight-bit")
    assert "done at this commit" not in run(tmp_path, "--only", "operators", "--list", commit="fedcba987654")


def test_what_was_cut_off_goes_on(tmp_path):
    """A part that is done is not measured again, and its numbers stay."""
    run(tmp_path, "--only", "operators")
    folder = tmp_path / "tiny/0123456789ab"
    (result,) = folder.glob("cpu-*.json")
    before = json.loads(result.read_text())
    result.unlink()
    assert "$" not in run(tmp_path, "--only", "operators") and json.loads(result.read_text()) == before
    assert "$" in run(tmp_path, "--only", "operators", "--again")


@pytest.mark.full()
def test_every_dry_run(tmp_path):
    printed = run(tmp_path)
    for name, each in run_all.RUNS.items():
        if each.tiny:
            assert re.search(rf"^{name}: \d+ s$", printed, re.M), name


def test_a_limit_of_time():
    began = time.monotonic()
    failed = run_all.call([sys.executable, "-c", "import time; time.sleep(60)"], 0.5, {})
    assert failed.startswith("not done") and time.monotonic() - began < 30
    assert run_all.call([sys.executable, "-c", "raise SystemExit(3)"], 60, {}) == "ended with status 3"
    assert run_all.call([sys.executable, "-c", ""], 60, {}) is None


def pattern(file):
    return re.escape(file).replace(r"\{card\}", r"(?:h\d+|cpu-\w+)")


def test_every_table_has_a_benchmark():
    files = [*(each.file for each in run_all.RUNS.values()), *run_all.ONCE]
    for table in plot.TABLES:
        assert any(re.fullmatch(pattern(file), table.file) for file in files), table.file
    assert len({each.file for each in run_all.RUNS.values()}) == len(run_all.RUNS)


def test_files_of_whole_models_have_a_method():
    """The page of cards knows how the models of each file are trained."""
    for name, each in run_all.RUNS.items():
        if each.script in (run_all.E2E, run_all.LORA, "examples/train.py"):
            method = cards._method(each.file.format(card="h100"))
            assert method, name
            unchecked = all("--no-checkpointing" in part for part in each.parts)
            if each.script == run_all.E2E:
                assert ("checkpointed" in method) != unchecked, name


def test_every_operator_is_in_a_run():
    sys.path.insert(0, str(ROOT / "tests"))
    from cases import all_cases
    from loss_cases import LOSSES

    timed = {name for name, case in (all_cases() | LOSSES).items() if case.bench}
    groups = run_all.EXPERTS, run_all.FEW_CLASSES, run_all.MIXERS, run_all.QK
    listed = {name for group in groups for name in group.split(",")}
    assert listed | {*run_all.others("cuda").split(",")} == timed and run_all.APART <= timed
    assert {*run_all.others("cpu").split(",")} == timed


def test_rivals_that_are_not_there_are_left_out(monkeypatch):
    for name in run_all.RIVALS:
        monkeypatch.delenv(f"{name.upper().replace('-', '_')}_DIR", raising=False)
    without, with_it = (run_all.arguments(list(each)) for each in ((), ("--triton-liger", "/some/where")))
    line = "--arms plain,triton,ours {triton-liger}"
    assert run_all.words_of(line, without, ROOT) == ["--arms", "plain,ours"]
    assert run_all.words_of(line, with_it, ROOT) == ["--arms", "plain,triton,ours", "--triton-liger", "/some/where"]
    without.device, without.gpus = "cuda", 1
    assert run_all.obstacle(run_all.RUNS["topk"], without) == "it needs --trl"
    assert run_all.obstacle(run_all.RUNS["e2e-x2"], without) == "it needs 2 GPUs"
    assert run_all.obstacle(run_all.RUNS["lora"], without) is None
    without.device = "cpu"
    assert run_all.obstacle(run_all.RUNS["lora"], without) == "it needs a GPU"


def test_parts_of_a_result_are_put_together():
    """Rows keep what their part says of all: whether weights are in nf4."""
    parts = [{"machine": {}, "nf4": nf4, "rows": [{"arm": "ours"}]} for nf4 in (False, True)]
    assert [row["nf4"] for row in run_all.merged(parts)["rows"]] == [False, True]
    assert run_all.merged([{"llama": {"plain": {}}}]) == {"llama": {"plain": {}}}


def test_an_unknown_name_is_refused(capsys):
    with pytest.raises(SystemExit):
        run_all.arguments(["--only", "lora,nothing"])
    assert "there is no nothing" in capsys.readouterr().err
