"""liger_kernel.measure: the command on a CPU, with arms that fail, and its parts."""

import collections
import importlib
import importlib.util
import json
import os
import subprocess
import sys
import time
import types
from unittest import mock

import pytest
import torch

transformers = pytest.importorskip("transformers")

from liger_kernel.measure import __main__ as command  # noqa: E402
from liger_kernel.measure import arm, build, largest, launch, report, shapes  # noqa: E402

CONFIG = {
    "model_type": "llama", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
SMALL = ["--device", "cpu", "--batch", "2", "--length", "32", "--steps", "2"]


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    file = tmp_path_factory.mktemp("model") / "config.json"
    file.write_text(json.dumps(CONFIG))
    return file


def run(*arguments, **environment):
    line = [sys.executable, "-m", "liger_kernel.measure", *map(str, arguments)]
    return subprocess.run(
        line, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1", **environment}
    )


def test_the_command_compares_plain_patched_and_planned(config, tmp_path):
    file = tmp_path / "out/measured.json"
    done = run(config, *SMALL, "--json", file, LIGER_COMMIT="abc")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(file.read_text())
    assert [row["arm"] for row in found["rows"]] == ["plain", "patched", "planned"]
    plain = found["rows"][0]["result"]
    for row in found["rows"]:
        result = row["result"]
        assert row["error"] is None and not row["out_of_memory"] and row["arm"] in done.stdout
        assert len(result["losses"]) == 5 and len(result["times"]) == 2 and result["peak_gb"] > 0
        assert result["tokens_per_second"] == pytest.approx(64 / result["seconds"])
        assert row["ratio"] == pytest.approx(result["tokens_per_second"] / plain["tokens_per_second"])
        # Means of 62 tokens' losses in float32, after steps that rounding has sent apart by as much.
        assert result["losses"] == pytest.approx(plain["losses"], rel=2**-17)
        assert row["loss_difference"] == result["losses"][-1] - plain["losses"][-1]
    assert plain["losses"][0] != plain["losses"][1]  # other tokens
    assert "predicted_gb" in found["rows"][2]["result"]
    machine = found["machine"]
    assert machine["commit"] == "abc" and machine["version"] and machine["date"] and machine["device"]
    assert machine["torch"] and machine["transformers"] and found["settings"]["batch"] == 2
    assert "| plain" in done.stdout and "from liger_kernel import patch" in done.stdout


def test_adapters_and_an_arm_that_needs_a_gpu(config, tmp_path):
    """The captured step runs without a graph, and the table says why."""
    pytest.importorskip("peft")
    file = tmp_path / "measured.json"
    done = run(config, *SMALL, "--lora", "4", "--arms", "plain,captured", "--json", file)
    assert done.returncode == 0, done.stdout + done.stderr
    plain, captured = json.loads(file.read_text())["rows"]
    assert "captured: " in done.stdout and captured["result"]["note"] in done.stdout
    assert captured["result"]["losses"] == pytest.approx(plain["result"]["losses"], rel=2**-17)


@pytest.mark.parametrize("fields", [
    {"model_type": "modernbert"}, {"model_type": "bert", "architectures": ["BertForMaskedLM"]},
], ids=("masked alone", "told by its checkpoint"))  # fmt: skip
def test_masked_language_models(fields, tmp_path):
    """About a third of the tokens have a label; the patched model computes the same loss of them."""
    file, out = tmp_path / "config.json", tmp_path / "measured.json"
    sizes = {name: value for name, value in CONFIG.items() if name != "num_key_value_heads"}
    tokens = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 0)
    dropout = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    file.write_text(json.dumps({**sizes, **tokens, **dropout, **fields}))
    done = run(file, *SMALL, "--arms", "plain,patched", "--json", out)
    assert done.returncode == 0, done.stdout + done.stderr
    plain, patched = (row["result"] for row in json.loads(out.read_text())["rows"])
    assert patched["losses"] == pytest.approx(plain["losses"], rel=2**-17)
    made = arm.Arm(job(file))
    labels = made.batch(256, 4, 0)["labels"]
    assert made.masked and 0.25 < (labels != -100).float().mean() < 0.35


def job(config, **others):
    return {
        "model": str(config), "layers": None, "arm": "plain", "batch": 1, "lengths": [16], "warm_up": 1, "steps": 1,
        "shrink": False, "lora": 0, "quantise": None, "checkpointing": False, "dtype": "float32", "budget": "auto",
        "cap_gb": None, "profile": False, "device": "cpu", **others,
    }  # fmt: skip


def test_a_first_step_that_tunes_kernels_does_not_cut_the_measurement(config, monkeypatch):
    """Kernels that are tuned for minutes in the first step leave fewest steps at least, which one slow step is not."""
    made = arm.Arm(job(config, steps=None, warm_up=2))
    wait = iter([0.5, *[0.001] * 9])
    monkeypatch.setattr(made, "step", lambda *_: time.sleep(next(wait)) or torch.zeros(()))
    monkeypatch.setattr(arm, "LONG", 0.4)
    monkeypatch.setattr(arm, "SECONDS", 0)
    times = made.measure(16, 1)["times"]
    assert len(times) == arm.FEWEST and max(times) < 0.4
    made = arm.Arm(job(config, steps=None, warm_up=2))
    monkeypatch.setattr(made, "step", lambda *_: time.sleep(0.5) or torch.zeros(()))
    assert len(made.measure(16, 1)["times"]) == 1


def test_an_arm_that_fails_is_a_row(config, monkeypatch, capsys):
    row = command.run_row("patched", job(config, budget="1KiB", arm="ours+plan"))
    assert row["result"] is None and "ValueError: memory.plan" in row["error"] and "few" in row["error"]
    plain = {"tokens_per_second": 1.0, "peak_gb": 1.0, "losses": [1.0], "note": None}
    rows = [{"arm": "plain", "result": plain, "out_of_memory": False, "error": None}, row]
    report.compared(rows)
    text = report.of_arms(rows)
    assert "failed" in text and row["error"] in text and report.to_paste(rows, "auto") == ""
    monkeypatch.setattr(launch, "run", lambda *arguments, **options: -9)
    row = command.run_row("plain", job(config))
    assert row["out_of_memory"] and "out of memory" in report.of_arms([row])
    monkeypatch.setattr(launch, "run", lambda *arguments, **options: 3)
    assert command.run_row("plain", job(config))["error"] == "the process ended with code 3"


def test_out_of_memory_is_told_from_other_errors(config, tmp_path, monkeypatch):
    def fail(*_):
        raise MemoryError

    monkeypatch.setattr(arm, "make_model", fail)
    results = tmp_path / "results"
    with pytest.raises(SystemExit):
        arm.main(json.dumps(job(config, results=str(results))))
    assert json.loads(results.read_text()) == {"out_of_memory": 1}


def test_plain_that_does_not_fit_is_checkpointed(config, monkeypatch, capsys):
    """And so are the arms after it."""
    jobs = []

    def run_arm(job, *_, **__):
        jobs.append((job["arm"], job["checkpointing"], job["steps"]))
        fits = job["checkpointing"]
        result = {"tokens_per_second": 1.0, "peak_gb": 1.0, "losses": [1.0], "times": [1.0] * 4, "note": None}
        return [{"result": result}] if fits else [{"out_of_memory": 1}]

    monkeypatch.setattr(command, "run_arm", run_arm)
    rows, checkpointing = command.measure(command.arguments([str(config), "--device", "cpu"]))
    assert checkpointing and [row["arm"] for row in rows] == ["plain", "patched", "planned"]
    assert jobs == [("plain", False, None), ("plain", True, None), ("ours", True, 4), ("ours+plan", True, 4)]


RIVAL = """
def patches(model=None):
    raise RuntimeError(f"the rival patches {'classes' if model is None else type(model).__name__}")


_apply_liger_kernel_to_instance, MODEL_TYPE_TO_APPLY_LIGER_FN = patches, {"llama": patches}
"""


def test_a_rival_of_the_same_name_has_a_process_of_its_own(config, tmp_path):
    """What is run there finds liger_kernel.measure, and else the rival's package."""
    package = tmp_path / "liger_kernel/transformers"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").write_text(RIVAL)
    (package / "monkey_patch.py").write_text(RIVAL)
    for lora, what in ((0, "classes"), (4, "LlamaForCausalLM")):
        row = command.run_row("liger-kernel", job(config, arm="triton", lora=lora), str(tmp_path))
        assert row["error"] == f"RuntimeError: the rival patches {what}"
    of = command.arguments([str(config), "--device", "cpu", "--liger", str(tmp_path)])
    assert command.rival_folder(of) == str(tmp_path)
    with pytest.raises(OSError, match="there is no package liger_kernel in"):
        command.rival_folder(command.arguments([str(config), "--device", "cpu", "--liger", str(package)]))


def test_mamba_ssm_is_found_without_its_compiled_kernels(tmp_path):
    """By transformers, too, which looks for the function in the package; side mamba needs both packages."""
    triton = tmp_path / "mamba_ssm/ops/triton"
    triton.mkdir(parents=True)
    (tmp_path / "mamba_ssm/__init__.py").write_text("raise ImportError('no compiled kernels')\n")
    (triton / "ssd_combined.py").write_text("def mamba_chunk_scan_combined(): return 7\n")
    path = "ops.triton.ssd_combined.mamba_chunk_scan_combined"
    with mock.patch.dict(sys.modules):
        assert build.import_mamba(tmp_path).mamba_chunk_scan_combined() == 7
        package = importlib.import_module("mamba_ssm")
        assert transformers.utils.import_utils.resolve_internal_import(package, path)() == 7
        with pytest.raises(ImportError, match="causal_conv1d"):
            build.make_model({"rival": str(tmp_path)}, "mamba", torch.device("cpu"))


def test_help_needs_no_torch():
    """In a process that has no torch."""
    code = "import sys; sys.modules['torch'] = None; from liger_kernel.measure.__main__ import main; main(sys.argv[1:])"
    done = subprocess.run([sys.executable, "-c", code, "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and "llama-8b --lora 16" in done.stdout, done.stderr


@pytest.mark.parametrize(
    "given, words",
    [
        (["--quantise", "nf4"], "--quantise needs --lora"),
        (["no/such-model"], "nor one of llama-1b, "),
        (["tiny", "--arms", "plain,fast"], "there is no arm fast"),
    ],
)
def test_what_cannot_be_is_one_sentence(given, words, capsys):
    with pytest.raises(SystemExit):
        command.arguments(["--device", "cpu", *given])
    assert words in capsys.readouterr().err


def test_a_missing_package_is_one_sentence(monkeypatch, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "bitsandbytes" else find(name))
    with pytest.raises(SystemExit) as ended:
        command.arguments(["tiny", "--device", "cpu", "--lora", "8", "--quantise", "nf4"])
    said = capsys.readouterr().err
    assert ended.value.code == 1 and said == "This needs bitsandbytes: run `pip install bitsandbytes`.\n"


def test_shapes_and_the_first_layers_of_them(config):
    for name, (_, kind, fields) in shapes.SHAPES.items():
        made, weights = shapes.config_of(name, 2)
        assert made.model_type == kind and made.num_hidden_layers == 2 and weights is None
        assert made.hidden_size == fields["hidden_size"] and made.vocab_size == fields["vocab_size"]
    assert shapes.config_of(str(config))[0].num_hidden_layers == 2
    made, _ = shapes.config_of(str(config), 1)
    assert made.num_hidden_layers == 1


@pytest.mark.parametrize(
    ("name", "layers", "parameters"),
    [  # parameters by hand, in millions: of layers of each kind, and of the vocabulary
        (
            "nemotron-h-2b",
            {"linear_attention": 9, "mlp": 9, "full_attention": 2},
            9 * 72.8 + 9 * 75.5 + 2 * 31.5 + 805.3,
        ),
        (
            "nemotron-3-5b",
            {"linear_attention": 3, "moe": 3, "full_attention": 1},
            3 * 38.7 + 3 * (128 * 9.98 + 20.3) + 23.4 + 704.6,
        ),
        ("lfm2-1.2b", {"conv": 10, "full_attention": 6}, 16 * 50.3 + 10 * 16.8 + 6 * 10.5 + 134.2),
    ],
)
def test_shapes_of_hybrids_have_their_layers(name, layers, parameters):
    made, _ = shapes.config_of(name)
    assert collections.Counter(made.layer_types) == layers
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(made)
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(parameters, rel=2e-3)


@pytest.mark.parametrize("gap", [0, 50])  # bytes of each step that the line does not know of
def test_the_largest_size_is_found_and_run(gap):
    ran = []

    def step(size):
        ran.append(size)
        peak = 1000 + 10 * size + gap * (size > 200)
        return (peak, 1e-3 * size) if peak <= 11_000 else None

    found = largest.find(step, 100, 200, 11_000, 8)
    assert found["size"] == ran[-1] and found["size"] % 8 == 0 and found["how"] == "ran"
    assert found["size"] == (1000 if gap == 0 else 936) and found["measured"] == [(100, 2000), (200, 3000)]


class Filled:
    """An arm on a GPU of so many bytes, whose steps take 1,000 bytes and 10 for each token."""

    def __init__(self, monkeypatch, total):
        self.device, self.job, self.total, self.steps = "cuda", {"cap_gb": None}, total, []
        self.optimizer = types.SimpleNamespace(state={})
        for name, value in {
            "mem_get_info": lambda device: (total - 600, total),
            "memory_reserved": lambda device: 600,
            "reset_peak_memory_stats": lambda: None,
            "max_memory_allocated": lambda: 1000 + 10 * self.steps[-1][0] * self.steps[-1][1],
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)

    def synchronize(self):
        pass

    forget = synchronize

    def step(self, length, batch, number):
        self.steps.append((batch, length))
        self.optimizer.state["made"] = True
        if 1000 + 10 * batch * length > self.total:
            raise torch.OutOfMemoryError("CUDA out of memory")


def test_the_search_fills_a_gpu(monkeypatch):
    arm = Filled(monkeypatch, total=1_000_000)
    found = largest.search(arm, length=2048, batch=4)
    room = int(largest.SHARE * 1_000_000)
    assert found["length"]["tokens"] == (room - 1000) // 10 // 64 * 64
    assert found["batch"]["size"] == (room - 1000) // 10 // 2048
    # Two steps of the first size, of which the first makes the optimiser's state; one of each other.
    longest = found["length"]["size"], found["batch"]["size"]
    assert arm.steps == [(1, 1024)] * 2 + [(1, 2048), (1, longest[0]), (1, 2048), (2, 2048), (longest[1], 2048)]
    small = Filled(monkeypatch, total=15_000)
    found = largest.search(small, length=2048, batch=4)
    assert (found["length"]["size"], found["batch"]["size"]) == (1344, 0)


def test_what_does_not_fit_or_takes_too_long_is_not_claimed():
    never = lambda size: None
    assert largest.find(never, 100, 200, 1e6, 8)["size"] == 0
    small = lambda size: (1000, 1.0) if size <= 70 else None
    assert largest.find(small, 400, 800, 1e6, 8)["size"] == 64 and largest.find(small, 64, 128, 1e6, 8)["size"] == 64
    assert largest.find(small, 70, 140, 1e6, 1, 10) | {"measured": []} == {
        "size": 70, "tokens": 700, "how": "ran", "measured": [],
    }  # fmt: skip
    slow = lambda size: (size * 10, size * 1.0)
    found = largest.find(slow, 8, 16, 10_000, 8)
    assert found["size"] == 1000 and found["how"] == "extrapolated"
    text = report.of_largest({"plain": {"length": found, "batch": found}}, 64)
    assert "1,000*" in text and "extrapolated" in text


def test_seconds_grow_with_the_square_of_attention():
    assert largest.seconds_of(40, (10, 2.0), (20, 6.0)) == pytest.approx(40 * 0.1 + 40**2 * 0.01)


def test_uneven_steps_are_told():
    result = {"tokens_per_second": 1.0, "peak_gb": 1.0, "losses": [1.0], "note": None, "times": [1.0, 1.2]}
    row = {"arm": "plain", "result": result, "out_of_memory": False, "error": None}
    assert "other work" not in report.of_arms([row])
    result["times"].append(1.6)
    assert "plain: steps took 1 to 1.6 s: does other work run here?" in report.of_arms([row])


def test_the_lines_to_paste_are_python():
    result = {"tokens_per_second": 1.0, "peak_gb": 1.0, "losses": [1.0], "note": None}
    for name, (_, lines, _) in report.ARMS.items():
        if lines:
            text = report.to_paste([{"arm": name, "result": result}], "70GiB")
            assert "TrainingArguments(use_liger_kernel=True" in text and "BUDGET" not in text
            for code in (lines, text[text.index("TrainingArguments") :]):
                compile(code, name, "exec")


def test_the_commit_is_the_last_that_changed_what_is_measured(tmp_path, monkeypatch):
    """Results, pages and tests do not count, changed files do."""
    from liger_kernel.measure.machine import commit

    monkeypatch.delenv("LIGER_COMMIT", raising=False)

    def git(*command):
        settings = "-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"
        return subprocess.check_output(("git", "-C", tmp_path, *settings, *command), text=True).strip()

    def add(name, text=""):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
        git("add", "."), git("commit", "-qm", name)
        return git("rev-parse", "HEAD")[:12]

    git("init", "-q")
    assert commit(tmp_path) is None
    first = add("README.md")
    assert commit(tmp_path) == first  # another project's repository
    for name in ("liger/norm.cu", "python/a/b.py", "cmake/c.cmake", "CMakeLists.txt", "benchmarks/bench.py"):
        last = add(name)
        assert commit(tmp_path) == last
    for name in ("benchmarks/results/h200.json", "benchmarks/tables.py", "docs/a.md", "tests/test_a.py", "README.md"):
        add(name, "more")
        assert commit(tmp_path) == last
    (tmp_path / "docs/a.md").write_text("changed")
    assert commit(tmp_path) == last
    (tmp_path / "liger/norm.cu").write_text("changed")
    assert commit(tmp_path) == last + "+"
    monkeypatch.setenv("LIGER_COMMIT", "abc")
    assert commit(tmp_path) == "abc"
