"""`make measure`: every table has a benchmark that makes its result, what is done is not done again, and what takes too
long ends."""

import json
import os
import pathlib
import re
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

pytest.importorskip("tabulate")
import cards  # noqa: E402
import e2e  # noqa: E402
import lora  # noqa: E402
import plot  # noqa: E402
import run_all  # noqa: E402
import runs  # noqa: E402
import scheduler  # noqa: E402


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
    sys.path.insert(0, str(ROOT / "tests"))
    from cases import all_cases

    differentiable = {case.name for case in all_cases().values() if case.differentiable}
    assert {row["case"] for row in json.loads(errors.read_text())["rows"]} == differentiable
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
    for name, each in runs.RUNS.items():
        if each.tiny and not each.needs:
            assert re.search(rf"^{name}: \d+ s$", printed, re.M), name


#: Writes which GPUs it has, and when it ran; with a second argument, it first sleeps in a session of its own.
SCRIPT = """
import json, os, pathlib, subprocess, sys, time
began = time.time()
if "--child" in sys.argv:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    pathlib.Path(sys.argv[-1]).with_name("child").write_text(str(child.pid))
time.sleep(float(sys.argv[1]))
result = {"rows": [{"part": sys.argv[1]}], "machine": {}, "began": began, "ended": time.time(),
          "gpus": os.environ["CUDA_VISIBLE_DEVICES"], "threads": os.environ.get("OMP_NUM_THREADS")}
pathlib.Path(sys.argv[-1]).write_text(json.dumps(result))
"""


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """(arguments of a machine with four GPUs, what makes the parts of a run on it)."""
    monkeypatch.setattr(run_all.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(run_all.torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(run_all, "card", lambda device: "h200")
    monkeypatch.setattr(run_all, "ENDING", 0)
    monkeypatch.setattr(scheduler, "LEAST", 0)
    monkeypatch.setenv("LIGER_COMMIT", "0123456789ab")
    for name in ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    monkeypatch.setattr(run_all, "GO_ON", {str(script)})

    def parts(args, name, *seconds, **options):
        made = runs.Run(f"{name}.json", str(script), tuple(map(str, seconds)), 1, **options)
        monkeypatch.setitem(runs.RUNS, name, made)
        return [*run_all.parts_of(made, name, args)]

    return lambda *options: run_all.arguments(["--work", str(tmp_path / "work"), *options]), parts


def ran(parts):
    return [json.loads(part.path.read_text()) for part in parts]


def test_parts_run_beside_each_other(machine):
    """Each on a GPU of its own, with its share of the threads; the part that needs all waits, and what comes after it
    waits for it."""
    arguments, parts = machine
    args = arguments()
    one, all_, after = parts(args, "one", 1, 1, 1), parts(args, "all", 0, gpus=4), parts(args, "after", 0, 0)
    ended = [*scheduler.Machine(args).run([*one, *all_, *after])]
    assert {*ended} == {*one, *all_, *after} and all(part.done for part in ended)
    first, (whole,), last = ran(one), ran(all_), ran(after)
    assert {found["gpus"] for found in first} == {"0", "1", "2"} and whole["gpus"] == "0,1,2,3"
    assert max(found["began"] for found in first) < min(found["ended"] for found in first)
    assert max(found["ended"] for found in first) <= whole["began"]
    assert all(whole["ended"] <= found["began"] for found in last)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    assert {found["threads"] for found in first} == {str(max(1, cores // 4))}
    assert all((part.folder / "log").exists() for part in ended)


def test_gpus_that_are_left_to_a_process_are_taken(machine, monkeypatch):
    arguments, parts = machine
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7,8,9")
    args = arguments("--gpus", "2")
    both = parts(args, "both", 0, gpus=2)
    assert [*scheduler.Machine(args).run(both)] == both and ran(both)[0]["gpus"] == "5,7"
    assert run_all.obstacle(runs.Run("", "benchmarks/e2e.py", (), 1, gpus=4), args) == "it needs 4 GPUs"


def test_a_deadline(machine, monkeypatch):
    """What still runs is ended, and so is what it started; it is measured again the next time, for which there must be
    more time. What is done stays."""
    arguments, parts = machine
    args = arguments("--deadline", "2")
    made = parts(args, "some", "60 --child", 0)
    began = time.monotonic()
    assert {*scheduler.Machine(args).run(made)} == {*made} and time.monotonic() - began < 10
    assert [part.done for part in made] == [False, True] and made[0].failed is None
    child = int((made[0].folder / "child").read_text())
    status = pathlib.Path(f"/proc/{child}/stat")
    assert not status.exists() or status.read_text().split()[2] == "Z"
    known = scheduler.Known(args.work.parent / "seconds.json")
    assert known.expected(made[0]) >= 1.5 and known.seconds["took"].keys() == {made[1].key}
    assert [*scheduler.Machine(arguments("--deadline", "1")).run(made[:1])] == []


def test_nothing_begins_that_would_not_end(machine, monkeypatch):
    """By its limit, or once it has been done by the time that it took; a script that goes on begins in any case."""
    arguments, parts = machine
    monkeypatch.setattr(run_all, "GO_ON", set())
    made = parts(arguments(), "some", 0)
    assert [*scheduler.Machine(arguments("--deadline", "30")).run(made)] == [] and not made[0].folder.exists()
    assert [*scheduler.Machine(arguments()).run(made)] == made
    made[0].forget()
    assert [*scheduler.Machine(arguments("--deadline", "30")).run(made)] == made


def test_what_failed_is_said_and_not_tried_again(machine, monkeypatch, capsys):
    """Without --retry. With --partial the result has the other parts, and is not taken for done."""
    arguments, parts = machine
    args = arguments()
    parts(args, "some", 0, "nothing")
    monkeypatch.setattr(run_all, "RESULTS", args.work.parent)
    assert run_all.measure(arguments("--only", "some")) == {"some": "some-1 ended with status 1"}
    assert "could not convert string to float" in capsys.readouterr().out
    assert run_all.measure(arguments("--only", "some")) == {"some": "some-1 ended with status 1"}
    assert "$" not in capsys.readouterr().out
    run_all.measure(arguments("--only", "some", "--retry"))
    assert capsys.readouterr().out.count("$") == 1
    monkeypatch.setattr(run_all, "provenance", lambda *_: SimpleNamespace(commit="0123456"))
    args = arguments("--collect", "h200", "--partial")
    assert run_all.gather(runs.RUNS["some"], "some", args) is None
    assert scheduler.read(args.results / "some.json")["missing"] == ["nothing"]
    assert not run_all.done(runs.RUNS["some"], args)


def test_parts_of_another_machine_are_put_together(tmp_path, monkeypatch):
    """A folder that was brought here, from another place, to a machine without that card."""
    monkeypatch.setenv("LIGER_COMMIT", "0123456789ab")
    monkeypatch.setattr(run_all, "RESULTS", tmp_path / "results")
    (there := tmp_path / "h200/0123456789ab/gemm-bits-0").mkdir(parents=True)
    machine = {"device": "NVIDIA H200", "date": "2026-01-02", "torch": "2.11", "commit": "0123456789ab"}
    (there / "result.json").write_text(json.dumps({"machine": machine, "rows": [{"way": "default"}]}))
    line = ["--collect", "h200", "--work", str(tmp_path), "--no-tables"]
    assert run_all.main(line) == 1 and not (tmp_path / "results").exists()
    (there / "done").touch()
    assert run_all.main(line) == 0
    assert json.loads((tmp_path / "results/gemm-bits-h200.json").read_text())["rows"] == [{"way": "default"}]
    assert run_all.done(runs.RUNS["gemm-bits"], run_all.arguments(line))


def test_families_of_which_some_are_missing(tmp_path, monkeypatch):
    monkeypatch.setenv("LIGER_COMMIT", "0123456789ab")
    monkeypatch.setattr(run_all, "RESULTS", tmp_path / "results")
    (there := tmp_path / "h200/0123456789ab/families-2").mkdir(parents=True)
    machine = {"device": "NVIDIA H200", "date": "2026-01-02", "torch": "2.11", "commit": "0123456789ab"}
    report = {"machine": machine, "settings": {"family": "phi3"}}
    (there / "train.json").write_text(json.dumps(report))
    line = ["--collect", "h200", "--work", str(tmp_path), "--only", "families", "--partial", "--no-tables"]
    assert run_all.main(line) == 0
    assert json.loads((tmp_path / "results/families-h200.json").read_text()) == {"phi3": report}


def test_the_operators_of_bench_are_parts(monkeypatch):
    args = run_all.arguments([])
    args.device = "cuda"
    (run, *_) = [*run_all.parts_of(runs.RUNS["operators"], "operators", args)]
    assert re.match(r"--op \w+ \{", run.arguments)
    made = [part.arguments for part in run_all.parts_of(runs.RUNS["mixers"], "mixers", args)]
    assert made == [
        *(f"--op {name}" for name in runs.MIXERS.split(",")),
        *(f"--op {name} --rivals torch,FLA {{fla}}" for name in runs.RECURRENCES.split(",")),
        "--op mamba2_scan --rivals torch,mamba-ssm {mamba-ssm}",
    ]


def test_rows_whose_options_have_dtypes_are_kept(tmp_path):
    """`route` is timed on a CPU with chosen experts in uint8."""
    line = "--device cpu --op route --rivals torch --seconds 0.001 --go-on --out".split()
    command = [sys.executable, str(ROOT / "benchmarks/bench.py"), *line, str(tmp_path / "rows.json")]
    rows = []
    for _ in range(2):  # the second time nothing is measured
        subprocess.run(command, check=True, capture_output=True, timeout=600)
        rows.append(json.loads((tmp_path / "rows.json").read_text())["rows"])
    assert rows[0] == rows[1] and {row["options"].get("given") for row in rows[0]} == {None, "uint8"}


def test_rivals_that_nobody_would_choose_are_not_measured(capsys):
    from bench import in_the_race

    takes = {"ours": 0.3, "slow": 0.12, "slower": 0.01, "fast": 0.001}
    field = [SimpleNamespace(name=name, run=lambda mode, i, t=t: time.sleep(t)) for name, t in takes.items()]
    assert [c.name for c in in_the_race(field, "cpu")] == ["ours", "slower", "fast"]
    assert "slow left out:" in capsys.readouterr().err
    assert [c.name for c in in_the_race(field[:2], "cpu")] == ["ours", "slow"]


def test_a_dry_run_of_replacements(tmp_path):
    line = [sys.executable, str(ROOT / "benchmarks/replacements.py"), *"--device cpu --rounds 1 --out".split()]
    subprocess.run([*line, str(tmp_path / "rows.json")], check=True, capture_output=True, timeout=600)
    report = json.loads((tmp_path / "rows.json").read_text())
    assert "commit" in report["machine"] and {row["part"] for row in report["rows"]} >= {"LlamaMLP", "Gemma2RMSNorm"}
    assert all(row["ratio"] > 0 for row in report["rows"])


def test_a_limit_of_time():
    began = time.monotonic()
    failed = run_all.call([sys.executable, "-c", "import time; time.sleep(60)"], 0.5, {})
    assert failed.startswith("not done") and time.monotonic() - began < 30
    assert run_all.call([sys.executable, "-c", "raise SystemExit(3)"], 60, {}) == "ended with status 3"
    assert run_all.call([sys.executable, "-c", ""], 60, {}) is None


def pattern(file):
    return re.escape(file).replace(r"\{card\}", r"(?:h\d+|cpu-\w+)")


def test_every_table_has_a_benchmark():
    files = [each.file for each in runs.RUNS.values()]
    for table in plot.TABLES:
        assert any(re.fullmatch(pattern(file), table.file) for file in files), table.file
    assert len({each.file for each in runs.RUNS.values()}) == len(runs.RUNS)


def test_files_of_whole_models_have_a_method():
    """The page of cards knows how the models of each file are trained."""
    for name, each in runs.RUNS.items():
        if each.script in (runs.E2E, runs.LORA, "examples/train.py"):
            method = cards._method(each.file.format(card="h100"))
            assert method, name
            unchecked = all("--no-checkpointing" in part for part in each.parts)
            if each.script == runs.E2E:
                assert ("checkpointed" in method) != unchecked, name


def test_every_operator_is_in_a_run():
    sys.path.insert(0, str(ROOT / "tests"))
    from cases import all_cases
    from loss_cases import LOSSES

    timed = {name for name, case in (all_cases() | LOSSES).items() if case.bench}
    groups = runs.EXPERTS, runs.FEW_CLASSES, runs.MIXERS, runs.RECURRENCES, runs.QK
    listed = {name for group in groups for name in group.split(",")}
    assert listed | {*run_all.others("cuda").split(",")} == timed and runs.APART <= timed
    assert {*run_all.others("cpu").split(",")} == timed


def test_rivals_that_are_not_there_are_left_out(monkeypatch):
    for name in runs.RIVALS:
        monkeypatch.delenv(f"{name.upper().replace('-', '_')}_DIR", raising=False)
    without, with_it = (run_all.arguments(list(each)) for each in ((), ("--triton-liger", "/some/where")))
    line = "--arms plain,triton,fla,ours {triton-liger}"
    assert run_all.words_of(line, without, ROOT) == ["--arms", "plain,ours"]
    assert run_all.words_of(line, with_it, ROOT) == ["--arms", "plain,triton,ours", "--triton-liger", "/some/where"]
    without.device, without.gpus = "cuda", 1
    assert run_all.obstacle(runs.RUNS["topk"], without) == "it needs --trl"
    assert run_all.obstacle(runs.RUNS["e2e-x2"], without) == "it needs 2 GPUs"
    assert run_all.obstacle(runs.RUNS["lora"], without) is None
    without.device = "cpu"
    assert run_all.obstacle(runs.RUNS["lora"], without) == "it needs a GPU"


def test_parts_of_a_result_are_put_together():
    """Rows keep what their part says of all: whether weights are in nf4."""
    parts = [{"machine": {}, "nf4": nf4, "rows": [{"arm": "ours"}]} for nf4 in (False, True)]
    assert [row["nf4"] for row in run_all.merged(parts)["rows"]] == [False, True]
    families = [{"settings": {"family": name}} for name in ("llama", "mixtral")]
    assert run_all.merged(families) == dict(zip(("llama", "mixtral"), families))
    parts = [{"machine": {"cap_gb": cap, "date": "2026-01-02"}, "rows": [{}]} for cap in (24, None)]
    whole = run_all.merged(parts)
    assert whole["rows"] == [{"cap_gb": 24}, {"cap_gb": None}]
    assert whole["machine"] == {"cap_gb": None, "date": "2026-01-02"}
    parts = [{"machine": {"commit": name}, "rows": [{}]} for name in ("1234567", "89abcde")]
    assert [row["commit"] for row in run_all.merged(parts)["rows"]] == ["1234567", "89abcde"]


def test_an_unknown_name_is_refused(capsys):
    with pytest.raises(SystemExit):
        run_all.arguments(["--only", "lora,nothing"])
    assert "there is no nothing" in capsys.readouterr().err


def test_out_of_memory_is_a_result_of_e2e(monkeypatch):
    """With --no-shrink the same batch is tried at the other lengths; without it half of the batch, at all of them."""
    tried = []

    def run_arm(job, rival, gpus):
        tried.append((job["batch"], job["lengths"], job["shrink"]))
        lines = []
        for length in job["lengths"]:
            if length * job["batch"] > 64:
                return [*lines, {"out_of_memory": job["batch"]}, {"error": "another rank"}]
            lines.append({"length": length, "result": job["batch"]})
        return lines

    monkeypatch.setattr(e2e, "run_arm", run_arm)
    line = ["e2e.py", "--models", "tiny", "--arms", "ours", "--lengths", "16,32,64", "--batch", "2", "--gpus", "4"]
    monkeypatch.setattr(sys, "argv", [*line, "--no-shrink"])
    args = e2e.arguments()
    assert [*e2e.lengths_of(args, "tiny", "ours", args.lengths)] == [(16, 2), (32, 2), (64, None)]
    assert tried == [(2, [16, 32, 64], False)] and not args.failed
    monkeypatch.setattr(sys, "argv", line)
    args = e2e.arguments()
    assert [*e2e.lengths_of(args, "tiny", "ours", args.lengths)] == [(16, 2), (32, 2), (64, 1)]
    assert tried[1:] == [(2, [16, 32, 64], True), (1, [64], True)]


def test_lora_keeps_what_it_has(tmp_path, monkeypatch):
    """Each result as it comes, and that an arm was out of memory; what failed is tried again, and is in the status."""
    out, tried, found = tmp_path / "lora.json", [], {}

    def run_arm(job, rival, quiet):
        tried.append(job["arm"])
        return [found[job["arm"]]]

    def run():
        tried.clear()
        with pytest.raises(SystemExit) as status:
            lora.main()
        return status.value.code

    monkeypatch.setattr(lora, "run_arm", run_arm)
    line = "lora.py --models tiny --shapes 2x32 --checkpointing on --arms plain,peft,ours --go-on --out"
    monkeypatch.setattr(sys, "argv", [*line.split(), str(out)])
    result = {"result": {"batch": 2, "tokens_per_second": 1.0, "peak_gb": 1.0}}
    found.update(plain={"out_of_memory": 2}, peft={"error": "no peft"}, ours=result)
    assert run() and tried == ["plain", "peft", "ours", "ours"]
    rows = {row["arm"]: row for row in json.loads(out.read_text())["rows"]}
    assert rows.keys() == {"plain", "ours"} and len(rows["ours"]["results"]) == 2
    assert rows["plain"]["out_of_memory"] and "results" not in rows["plain"]
    found["peft"] = result
    assert not run() and tried == ["peft", "peft"]
