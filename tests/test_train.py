"""examples/train.py and align.py: small comparisons from end to end, and their parts."""

import ast
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy
import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))
import align  # noqa: E402
import comparison  # noqa: E402
import text  # noqa: E402
import train  # noqa: E402

EPS = 2.0**-23


@pytest.fixture(scope="module")
def prose(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "prose.txt"
    path.write_text("\n".join(f"{n} times {m} makes {n * m}." for n in range(60) for m in range(60)))
    return path


def run(folder, *arguments, script="train.py", batch=2):
    command = [sys.executable, EXAMPLES / script, "--config", "tiny", "--device", "cpu", "--steps", "6"]
    command += ["--batch", batch, "--length", "64", "--out", folder / "out", *arguments]
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    return subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True)


def check_report(report):
    for name in ("plain", "liger"):
        assert len(report[name]["losses"]) == 6 and all(map(math.isfinite, report[name]["losses"]))
        assert report[name]["tokens_per_second"] > 0
        assert 0 < report[name]["step_peak_bytes"] < report[name]["peak_bytes"]
    assert report["plain"]["state_bytes"] == report["liger"]["state_bytes"]
    assert report["comparison"]["same"] and report["comparison"]["steps"] == len(report["noise"]["losses"]) == 6
    assert report["machine"]["device"] and report["settings"]["dtype"] == "float32"


def test_compares_plain_and_liger(tmp_path, prose):
    done = run(tmp_path, "--text", prose)
    assert done.returncode == 0, done.stdout + done.stderr
    check_report(json.loads((tmp_path / "out/train.json").read_text()))
    assert (tmp_path / "out/train.png").read_bytes().startswith(b"\x89PNG")
    for words in ("tokens per second", "peak memory of a step", "Training loss is the same"):
        assert words in done.stdout
    assert len(list((tmp_path / "cache/liger_kernel").glob("bpe-1024-*.json"))) == 1


def imported(files):
    """The packages that files import, of those that are neither Python's nor this project's."""
    names = set()
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names.add(node.module)
    ours = {"liger_kernel", *(file.stem for file in files)}
    return {name.split(".")[0] for name in names} - ours - set(sys.stdlib_module_names)


def test_the_extra_of_the_examples_has_all_that_they_import():
    text = (EXAMPLES.parent / "pyproject.toml").read_text()
    extra = set(re.findall(r'"([a-z]+)[>=]', re.search(r"^examples = \[(.*?)^\]", text, re.M | re.S)[1]))
    files = [*EXAMPLES.glob("*.py")]
    assert imported(files) <= {"torch", *extra}
    assert set(comparison.NEEDED) == {"torch", *extra}


#: An example in a process in which a package is not to be found.
WITHOUT = """
import importlib.util, runpy, sys
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "tabulate" else find(name, *rest)
sys.argv = sys.argv[1:]
sys.path.insert(0, sys.argv[0].rpartition("/")[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("example", ("train.py", "align.py", "train_cpp.py"))
def test_an_example_names_missing_packages_before_it_trains(example):
    command = [sys.executable, "-c", WITHOUT, str(EXAMPLES / example), "--help"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("This needs tabulate: run `pip install tabulate`"), done.stderr


def test_results_are_written_before_they_are_drawn(tmp_path, monkeypatch):
    def fail(*_):
        raise ModuleNotFoundError("No module named 'matplotlib'")

    for name in ("table", "draw"):
        with monkeypatch.context() as patch:
            patch.setattr(comparison, "table", str)
            patch.setattr(comparison, name, fail)
            with pytest.raises(ModuleNotFoundError):
                comparison.finish(type("", (), {"out": tmp_path / name}), "train", {}, {"measured": 1})
        assert "measured" in (tmp_path / name / "train.json").read_text()


@pytest.mark.full()
def test_trains_families_and_a_rival(tmp_path, prose):
    """The rival is a stand-in for liger with Triton, which has no more than a function for one of them."""
    package = tmp_path / "rival/liger_kernel/transformers"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").write_text("def apply_liger_kernel_to_mixtral():\n    print('the rival patches')\n")
    done = run(tmp_path, "--text", prose, "--family", "mixtral,gemma3", "--triton-liger", tmp_path / "rival")
    assert done.returncode == 0, done.stdout + done.stderr
    reports = json.loads((tmp_path / "out/families.json").read_text())
    assert list(reports) == ["mixtral", "gemma3"]
    for report in reports.values():
        check_report(report)
    # The rival's run is plain: the function does nothing.
    assert reports["mixtral"]["triton"]["losses"] == reports["mixtral"]["plain"]["losses"]
    assert "triton" not in reports["gemma3"] and "It is left out" in done.stdout
    assert done.stdout.count("the rival patches") == 1
    assert re.search(r"\| mixtral +\|.*x\).*x\).*%\).*%\)", done.stdout) and re.search(r"\| gemma3 +\|", done.stdout)


@pytest.mark.full()
def test_trains_adapters(tmp_path, prose):
    done = run(tmp_path, "--text", prose, "--lora", 4, "--gradient-checkpointing")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "out/train.json").read_text())
    check_report(report)
    of_model = report["plain"]["parameters"] * 4
    assert of_model < report["plain"]["state_bytes"] < 1.5 * of_model  # gradients and states of adapters only


@pytest.mark.parametrize("losses", ["grpo", "grpo,dpo"])
@pytest.mark.full()
def test_aligns_plain_and_liger(tmp_path, prose, losses):
    done = run(tmp_path, "--text", prose, "--loss", losses, script="align.py", batch=4)
    assert done.returncode == 0, done.stdout + done.stderr
    reports = json.loads((tmp_path / "out/align.json").read_text())
    assert list(reports) == losses.split(",")
    for name, report in reports.items():
        check_report(report)
        assert report["settings"]["loss"] == name and len(set(report["plain"]["losses"])) == 6
        assert f"{name.upper()} loss is the same" in done.stdout
    assert (tmp_path / "out/align.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", sorted(align.LOSSES))
def test_each_loss_on_both_sides(name):
    """Ours and plain agree on a batch that has everything; the gradient is not 0."""
    import torch
    from liger_kernel import chunked_loss

    torch.manual_seed(0)
    loss, rows, tokens, classes = align.LOSSES[name], 4, 6, 30
    ids, labels, rewards = align.completions(
        torch.randint(classes, (rows // loss.group, tokens + 1)).numpy(), loss.group, 0
    )
    leaves = [torch.randn(rows, tokens, 8, requires_grad=True), (torch.randn(classes, 8) / 2).requires_grad_()]
    b = align.Batch(
        hidden=leaves[0],
        weight=leaves[1],
        labels=torch.from_numpy(labels),
        ref_hidden=torch.randn(rows, tokens, 8),
        ref_weight=torch.randn(classes, 8),
        advantages=torch.tensor([1.0, -0.5, 0.2, -0.7]),
        liked=torch.tensor([True, True, False, False]),
    )
    b.old = (b.logp() + torch.randn(rows, tokens) / 4).detach()
    values, gradients = zip(
        *((value, torch.autograd.grad(value, leaves)) for value in (loss.plain(b), loss.ours(chunked_loss, b)))
    )
    torch.testing.assert_close(values[1], values[0], rtol=1e-5, atol=1e-5)
    for ours, plain in zip(gradients[1], gradients[0]):
        assert plain.abs().max() > 1e-4
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5)


def test_completions_are_worse_the_more_is_replaced():
    blocks = (numpy.arange(8 * 400) % 701).reshape(8, 400)
    ids, labels, rewards = align.completions(blocks, 4, seed=3)
    assert (
        ids.shape == (32, 400) and labels.shape == (32, 399) and (rewards[:8] == 1).all() and (ids[:8] == blocks).all()
    )
    counted = labels != align.IGNORE
    assert (labels[counted] == ids[:, 1:][counted]).all() and not counted[:, :99].any() and counted[:, 99:200].all()
    assert len(set(counted.sum(1))) > 16  # lengths of their own
    original = numpy.tile(blocks, (4, 1))
    assert ((ids != original)[:, :100].sum() == 0) and ((ids == original)[:, 1:] | counted).all()
    means = rewards.reshape(4, 8).mean(1)
    assert abs(means - [1, 0.75, 0.5, 0.25]).max() < 0.05


def said(monkeypatch, capsys, example, *arguments):
    """What an example says at its end, which is an error."""
    monkeypatch.setattr(sys, "argv", [example.__name__, "--config", "tiny", "--device", "cpu", *arguments])
    with pytest.raises(SystemExit) as end:
        example.main()
    assert end.value.code
    return capsys.readouterr().err + str(end.value.code)


@pytest.mark.parametrize(
    "arguments, advice",
    [
        (("--steps", "3"), "at least"),
        (("--text", "absent.txt"), "no file absent.txt"),
        (("--family", "llama,gpt17"), "no family gpt17"),
        (("--family", "mixtral", "--model", "."), "leave out --model"),
        (("--triton-liger", "absent"), "no package liger_kernel in absent"),
    ],
)
def test_says_what_is_wrong(tmp_path, monkeypatch, capsys, arguments, advice):
    assert advice in said(monkeypatch, capsys, train, "--out", str(tmp_path), *arguments)


@pytest.mark.parametrize(
    "arguments, advice", [(("--loss", "dpo,ppo"), "no loss ppo"), (("--batch", "6"), "multiple of 4")]
)
def test_align_says_what_is_wrong(tmp_path, monkeypatch, capsys, arguments, advice):
    assert advice in said(monkeypatch, capsys, align, "--out", str(tmp_path), *arguments)


@pytest.mark.parametrize("example, loss", [(train, None), (align, "dpo,orpo")])
def test_ends_with_an_error_when_the_losses_differ(tmp_path, monkeypatch, prose, example, loss):
    curves = {"plain": [7.0, 6.0], "liger": [7.0, 6.1], "noise": [7.0, 6.000001]}
    numbers = {"tokens_per_second": 1, "step_seconds": 1, "peak_bytes": 3, "step_peak_bytes": 2, "state_bytes": 1}

    def made_up(script, args, side, steps):
        differs = getattr(args, "loss", None) in (None, "orpo")
        return {**numbers, "losses": curves[side] if differs or side != "liger" else curves["plain"]}

    monkeypatch.setattr(comparison, "run_apart", made_up)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    arguments = [
        example.__name__,
        "--device",
        "cpu",
        "--config",
        "tiny",
        "--text",
        str(prose),
        "--length",
        "64",
        "--out",
        str(tmp_path),
    ]
    monkeypatch.setattr(sys, "argv", [*arguments, *(("--loss", loss) if loss else ())])
    with pytest.raises(SystemExit) as end:
        example.main()
    assert end.value.code
    curves["liger"] = curves["plain"]
    with pytest.raises(SystemExit) as end:
        example.main()
    assert not end.value.code


def test_the_limit_is_ten_times_the_noise():
    plain = [8.0, 7.0, 6.0]
    noise = [8.0, 7.0 + 1e-3, 6.0]
    assert comparison.compare(plain, [8.0, 7.0, 6.0 + 9e-3], noise, EPS, 100)["same"]
    assert not comparison.compare(plain, [8.0, 7.0, 6.0 + 11e-3], noise, EPS, 100)["same"]
    assert not comparison.compare(plain, [8.0, 7.0, math.nan], noise, EPS, 100)["same"]
    # A loss may be negative, and its size is what counts.
    negative = [-8.0, -7.0]
    assert comparison.compare(negative, negative, negative, EPS, 100)["floor"] == 8.0 * EPS
    # Neither side has more digits than the float sums of which the loss is a difference.
    assert comparison.compare(plain, plain, plain, EPS, 100, sums=300.0)["floor"] == 300.0 * EPS
    assert comparison.compare(plain, plain, plain, 2.0**-7, 64, sums=300.0)["floor"] == 8.0 * 2.0**-7 / 8
    # Only steps that the noise is known for are judged; the rest is reported.
    later = comparison.compare(plain, [8.0, 7.0, 9.0], noise[:2], EPS, 100)
    assert later["same"] and later["steps"] == 2 and later["difference_of_all_steps"] == 3.0


def test_a_cap_that_rounds_away(monkeypatch):
    """Capped in float, logits of a Gemma 2 in bfloat16 have the mean and the gradient of the cap; plain's do not. A
    model in float32 and one without a cap are left as they are."""
    import torch
    import transformers

    small = dict(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    make = lambda **own: transformers.Gemma2ForCausalLM(
        transformers.Gemma2Config(**small, num_key_value_heads=1, head_dim=16, initializer_range=0.3, **own)
    )
    torch.manual_seed(0)
    model, ids = make(final_logit_softcapping=30.0).to(torch.bfloat16), torch.arange(40)[None]
    plain = model(input_ids=ids).logits
    uncapped = model.lm_head(model.model(input_ids=ids).last_hidden_state).float()
    exact = 30 * torch.tanh(uncapped.double() / 30)
    assert comparison.cap_of(model) == 30
    comparison.cap_in_float(model)
    logits = model(input_ids=ids).logits
    assert logits.dtype == torch.float32 and (logits - exact).abs().max() <= 8 * 2**-24 * exact.abs().max()
    assert (plain - exact).abs().max() > 2**-10 * exact.abs().max()
    y = uncapped.bfloat16().requires_grad_()
    dz = torch.randn_like(exact)
    (dy,) = torch.autograd.grad(comparison._Cap.apply(y, 30.0), y, dz.float())
    expected = dz * (1 - (exact / 30) ** 2)
    assert (dy - expected).abs().max() <= 2**-8 * expected.abs().max()
    for other in (make(final_logit_softcapping=30.0), make(final_logit_softcapping=None).to(torch.bfloat16)):
        assert comparison.cap_of(other) is None
        comparison.cap_in_float(other)
        assert not other.lm_head._forward_hooks


def test_a_model_that_caps_its_logits_is_compared_with_one_that_caps_in_float(tmp_path, prose):
    done = run(tmp_path, "--text", prose, "--family", "gemma2", "--dtype", "bfloat16")
    assert "Plain's logits are capped in float for this" in done.stdout, done.stdout + done.stderr
    report = json.loads((tmp_path / "out/train.json").read_text())
    assert report["plain"]["cap"] == 30 and len(report["capped"]["losses"]) == 6
    steps = zip(report["capped"]["losses"], report["liger"]["losses"])
    assert report["comparison"]["difference"] == max(abs(a - b) for a, b in steps)


def test_no_noise_leaves_the_rounding_of_the_loss():
    plain = [8.0, 7.0]
    assert comparison.compare(plain, [8.0, 7.0 + 5 * 8 * EPS], plain, EPS, 100)["same"]
    assert not comparison.compare(plain, [8.0, 7.0 + 15 * 8 * EPS], plain, EPS, 100)["same"]
    # In bfloat16 every token is rounded, and the mean over them evens it out.
    assert comparison.compare(plain, plain, plain, 2.0**-7, 64)["floor"] == 8.0 * 2.0**-7 / 8


PEAKS = """
import comparison, torch
memory, peaks = comparison.Memory("cpu"), []
torch.ones(1 << 24)
for _ in range(3):
    memory.start()
    torch.ones(1 << 24).add(1)  # two of 64 MiB at once
    torch.ones(1 << 20)
    peaks.append(memory.step(parameters=0, gradients=1 << 20, optimiser=0))
print(min(peaks))
"""


def test_the_peak_of_a_step_is_what_it_allocates():
    """In a process of its own, for threads of other tests allocate, too; what this one does beside, or the first time,
    only adds to a peak."""
    path = os.pathsep.join([str(EXAMPLES), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", PEAKS], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    # Each of the two takes up to one large page and its header's page more. Linux counts resident pages per core and
    # adds them up in batches (percpu_counter_batch).
    cores, page = os.cpu_count(), 4096
    late = cores * max(32, 2 * cores) * page
    assert abs(int(done.stdout.split()[-1]) - (127 << 20)) <= 2 * ((2 << 20) + page) + late


def test_reads_text_and_json_lines(tmp_path):
    messages = [{"role": "user", "content": "hi"}, {"role": "bot", "content": "ho"}]
    lines = [{"text": "one\u2028line"}, {"messages": messages}]
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n\n".join(json.dumps(line, ensure_ascii=False) for line in lines), "utf-8")
    assert text.documents(rows) == ["one\u2028line", "user: hi\nbot: ho"]

    class Chat:
        chat_template = "any"

        def apply_chat_template(self, messages, tokenize):
            return f"<{len(messages)}>"

    assert text.documents(rows, Chat())[1] == "<2>"
    plain = tmp_path / "plain.txt"
    plain.write_text("as it is\n")
    assert text.documents(plain) == ["as it is\n"]
    rows.write_text('{"text": "good"}\n{"body": "bad"}')
    with pytest.raises(SystemExit, match="rows.jsonl, line 2"):
        text.documents(rows)
    plain.write_text(" \n")
    with pytest.raises(SystemExit, match="holds no text"):
        text.documents(plain)


def test_the_standard_library_is_a_large_text_in_a_fixed_order():
    texts = text.documents()
    assert sum(map(len, texts)) > 3e6 and texts == text.documents()


def test_keeps_the_trained_tokeniser(tmp_path, prose):
    texts = text.documents(prose)
    first = text.bpe(texts, 300, tmp_path)
    (cached,) = tmp_path.iterdir()
    written = cached.stat().st_mtime_ns
    again = text.bpe(texts, 300, tmp_path)
    assert cached.stat().st_mtime_ns == written and first.get_vocab() == again.get_vocab() and len(again) <= 300
    text.bpe(texts, 310, tmp_path), text.bpe(["other text"], 300, tmp_path)
    assert len(list(tmp_path.iterdir())) == 3
    assert again.decode(again("12 times 3 – ünï")["input_ids"]) == "12 times 3 – ünï"


def test_blocks_hold_the_texts_in_turn(tmp_path):
    texts = ["aaa", "bb", "c"]
    tokenizer = text.bpe(texts, 257, tmp_path)
    rows = text.blocks(texts, tokenizer, 3, 4, seed=1)
    assert rows.shape == (3, 4) and (rows == text.blocks(texts, tokenizer, 3, 4, seed=1)).all()
    said = tokenizer.decode(rows.flatten()).split(text.END)
    assert sorted(said[:3]) == ["aaa", "bb", "c"] and "aaa".startswith(said[3][:1])


@pytest.mark.full()
def test_whole_models_by_length(tmp_path):
    """FSDP2 over two processes; what was measured is not measured again."""
    script = EXAMPLES.parent / "benchmarks/e2e.py"
    command = [sys.executable, script, "--models", "tiny", "--arms", "plain,ours", "--gpus", "2", "--batch", "2"]
    command += ["--out", tmp_path / "e2e.json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    reports = []
    for _ in range(2):
        done = subprocess.run([*command, "--lengths", "32,64"], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        reports.append(json.loads((tmp_path / "e2e.json").read_text()))
    assert reports[0] == reports[1] and reports[0]["machine"]["gpus"] == 2
    results = {(row["length"], row["arm"]): row["result"] for row in reports[0]["rows"]}
    assert len(results) == 4
    for length in (32, 64):
        plain, ours = (results[length, arm] for arm in ("plain", "ours"))
        assert plain["batch"] == ours["batch"] == 2 and min(plain["tokens_per_second"], ours["tokens_per_second"]) > 0
        # Losses near log(512), of bfloat16's logits: a mean of 62 tokens and more errs by less than one rounding.
        assert numpy.allclose(plain["losses"][:3], ours["losses"][:3], rtol=2**-8)


@pytest.mark.skipif("LIGER_TRAIN" not in os.environ, reason="LIGER_TRAIN names no liger-train: tests/run.sh builds it")
@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-3), ("bfloat16", 0.5)])
@pytest.mark.full()  # tests/cpp/compare_training.py compares more of it
def test_the_trainer_in_cpp_has_the_losses_of_python(tmp_path, prose, dtype, bound):
    done = run(tmp_path, "--text", prose, "--dtype", dtype, script="train_cpp.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "The losses are the same" in done.stdout and "start to first step" in done.stdout
    report = json.loads((tmp_path / "out/train-cpp.json").read_text())
    assert len(report["python"]["losses"]) == len(report["cpp"]["losses"]) == 6
    assert report["difference"] <= report["limit"] < bound
    for side in ("python", "cpp"):
        assert all(report[side][key] > 0 for key in ("tokens_per_second", "peak_bytes", "startup_seconds"))
