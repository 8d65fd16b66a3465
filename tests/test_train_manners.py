"""What liger-train says of a command line, data and disks that it cannot use, and how signals end it."""

import filecmp
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parent / "cpp"))
import training_runs  # noqa: E402

pytestmark = pytest.mark.skipif(
    "LIGER_TRAIN" not in os.environ, reason="LIGER_TRAIN names no liger-train: tests/run.sh builds it"
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    training_runs.checkpoint(folder)
    runs = training_runs.Runs(os.environ["LIGER_TRAIN"], folder, "cpu")
    training_runs.write(folder / "texts.jsonl", [{"text": text} for text in training_runs.TEXTS])
    training_runs.write(folder / "pairs.jsonl", training_runs.PAIRS)
    save_file({"input_ids": torch.randint(1, 300, (8, 16))}, folder / "rows.safetensors")
    return runs


@pytest.fixture
def train(runs, tmp_path):
    """Runs with data that is there, unless the options name other."""

    def run(*options, **more):
        options = list(map(str, options))
        if "--data" not in options:
            options += ["--data", str(runs.folder / "texts.jsonl")]
        command = [runs.binary, str(runs.folder)]
        defaults = {"--out": str(tmp_path / "out"), "--threads": "1", "--length": "32", "--batch": "2", "--steps": "2"}
        for name, value in defaults.items():
            if name not in options and not any(option.startswith(f"{name}=") for option in options):
                command += [name, value]
        return subprocess.run([*command, *options], capture_output=True, text=True, check=False, **more)

    return run


def sentence(done, *words, code=1):
    """The one line that a refused run says."""
    assert done.returncode == code and not done.stdout, done
    lines = done.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith("liger-train: "), done.stderr
    for word in words:
        assert word in lines[0], (word, lines[0])


@pytest.mark.parametrize(
    "options, words",
    [
        (["--lr", "abc"], "--lr: abc is no number of at least 0"),
        (["--lr", "-1"], "--lr: -1 is no number of at least 0"),
        (["--lr="], "--lr: "),
        (["--lr", "1", "--lr", "2"], "--lr"),
        (["--batch", "1.5"], "--batch: 1.5 is no whole number of at least 1"),
        (["--beta2", "1"], "--beta2: 1 is no number of at least 0 and below 1"),
        (["--device", "gpu"], "--device: gpu is none of cpu, cuda, cuda:0"),
        (["--device", "cuda:x"], "--device: cuda:x is none of"),
        (["--loss", "dpoo"], "--loss: dpoo is none of causal, dpo"),
        (["--lrr", "1"], "there is no option --lrr: --lr is the nearest"),
        (["--evalsteps=3"], "there is no option --evalsteps: --eval-steps is the nearest"),
        (["--qqqqqqqqq"], "there is no option --qqqqqqqqq ("),
        (["--steps"], "--steps"),
        (["--data", "nowhere.jsonl"], "--data: nowhere.jsonl: No such file or directory"),
        (["--data", "/tmp"], "--data: /tmp is a folder"),
        (["--adapter", "nowhere"], "--adapter: nowhere: No such file or directory"),
        (["--dpo-beta", "0.2"], "--dpo-beta requires --loss dpo"),
        (["--dpo-loss", "hinge"], "--dpo-loss requires --loss dpo"),
        (["--loss", "dpo", "--dpo-label-smoothing", "0.1"], "--dpo-label-smoothing requires --dpo-loss exo_pair or"),
        (["--loss", "dpo", "--dpo-loss", "exo_pair"], "--dpo-loss requires --dpo-label-smoothing for exo_pair"),
        (["--lora-alpha", "3"], "--lora-alpha requires --lora-rank"),
        (["--lora-rank", "0", "--lora-dropout", "0.1"], "--lora-dropout requires --lora-rank"),
        (["--eval-steps", "3"], "--eval-steps requires --eval"),
    ],
)
def test_one_sentence_for_a_wrong_option(train, options, words):
    sentence(train(*options), words, code=2)


def test_positionals_and_what_is_missing(runs):
    def said(*options):
        return subprocess.run([runs.binary, *map(str, options)], capture_output=True, text=True, check=False)

    sentence(said(), "model is required", code=2)
    sentence(said(runs.folder), "--data is required", code=2)
    sentence(said("nowhere", "--data", runs.folder / "texts.jsonl", "--out", "x"), "model: nowhere: No such", code=2)
    sentence(said(runs.folder / "texts.jsonl", "--out", "x"), "texts.jsonl is no folder", code=2)
    sentence(said(runs.folder, "more", "--out", "x", "--data", runs.folder / "texts.jsonl"), "what is more for", code=2)
    sentence(said(runs.folder, "--dataa", "x", "--out", "x"), "no option --dataa: --data is the nearest", code=2)


def help_text(runs):
    return subprocess.run([runs.binary, "--help"], capture_output=True, text=True, check=True).stdout


def test_every_number_has_its_range(runs, train):
    """Of each option with a number, by name: what is none, and what lies below and above."""
    numeric = re.findall(r"^  (--[\w-]+) (INT|FLOAT)", help_text(runs), re.MULTILINE)
    assert len(numeric) > 20
    for name, kind in numeric:
        more = ["x", "nan", "1e400", "", "0x", *(["1e3", "1.5"] if kind == "INT" else [])] if training_runs.ALL else []
        for value in ("-1", *more):
            sentence(train(f"{name}={value}"), name, code=2)


def test_help_and_version(runs):
    text = help_text(runs)
    groups = re.findall(r"^([A-Z][\w ,]+):$", text, re.MULTILINE)
    assert {"Model and data", "Loss", "Steps", "LoRA", "Evaluation, checkpoints and log"} < set(groups)
    examples = text.split("Examples:\n")[1].splitlines()
    assert len(examples) > 3 and all("liger-train " in line for line in examples)
    known = set(re.findall(r"--[\w-]+", text.split("Examples:\n")[0])) | {"--no-python", "--nproc-per-node"}
    assert set(re.findall(r"--[\w-]+", "".join(examples))) <= known
    version = subprocess.run([runs.binary, "--version"], capture_output=True, text=True, check=True).stdout
    assert re.fullmatch(r"liger-train \d+\.\d+\.\d+\S*\n", version)


def test_a_gpu_that_is_not_there(train):
    why = "there is no such GPU, but" if torch.cuda.is_available() else "there is no GPU that torch can use"
    sentence(train("--device", "cuda:99"), f"--device cuda:99: {why}")


@pytest.mark.parametrize(
    "name, content, words",
    [
        ("d.jsonl", b'{"text": "fine"}\n\n{"text": 1}\n', 'd.jsonl, line 3: "text" is no string'),
        ("d.jsonl", b'{"text": "fine"}\n{"text": "fine"\n', "d.jsonl, line 2: no JSON at its byte 16"),
        ("d.jsonl", b"plain text\n", "d.jsonl, line 1: no JSON at its byte 1"),
        ("d.jsonl", b"[1, 2]\n", "d.jsonl, line 1: no JSON object"),
        ("d.jsonl", b"[" * 300000, "d.jsonl, line 1: its brackets are too deep in each other"),
        ("d.jsonl", b'{"text": "\xff"}\n', "d.jsonl, line 1: no JSON at its byte"),
        ("d.jsonl", b'{"prompt": "x", "completion": null}\n', 'd.jsonl, line 1: "completion" is no string'),
        ("d.jsonl", b'{"completion": "x"}\n', 'd.jsonl, line 1: there is no "prompt"'),
        ("d.jsonl", b'{"input_ids": [1, 2.5]}\n', 'd.jsonl, line 1: "input_ids" is no list of whole numbers'),
        ("d.jsonl", b'{"input_ids": "x"}\n', 'd.jsonl, line 1: "input_ids" is no list of whole numbers'),
        ("d.jsonl", b'{"messages": [{"role": "user"}]}\n', 'd.jsonl, line 1: there is no "content"'),
        ("d.jsonl", b'{"messages": "x"}\n', 'd.jsonl, line 1: "messages" is no list'),
        ("d.jsonl", b'{"messages": ["x"]}\n', 'd.jsonl, line 1: there is no "role"'),
        ("d.jsonl", b"\x7fELF\x02\x01\x00\n", "d.jsonl, line 1: no JSON at its byte 1"),
        ("d.txt", b"some\x00thing", "d.txt: no text: byte 4 is 0"),
        ("d.txt", b"some \xff thing", "d.txt: liger::Tokenizer: text is no UTF-8 at byte 5"),
        ("d.safetensors", b"text", "d.safetensors: no safetensors file"),
    ],
)
def test_data_that_is_none(train, tmp_path, name, content, words):
    (tmp_path / name).write_bytes(content)
    sentence(train("--data", tmp_path / name), words)


@pytest.mark.parametrize("ending", ["json", "csv", "parquet", "npy", "bin", "gz", "CSV"])
def test_endings_of_other_data(train, tmp_path, ending):
    (tmp_path / f"d.{ending}").write_text("text")
    sentence(
        train("--data", tmp_path / f"d.{ending}"), "--data: ", f"d.{ending}: .{ending.lower()} is not read", code=2
    )
    sentence(train("--eval", tmp_path / f"d.{ending}"), "--eval: ", f"d.{ending}", code=2)


def test_what_has_no_effect_is_said(runs, train, tmp_path):
    (tmp_path / "d.PY").write_text("print(1)\n" * 100)
    shutil.copy(runs.folder / "texts.jsonl", tmp_path / "d.JSONL")
    for i, (options, words) in enumerate(
        [
            (["--epochs", 2], "--epochs has no effect: --steps is given"),
            (["--no-master-weights"], "--master-weights has no effect: the weights are float32"),
            (["--no-deterministic"], "--deterministic has no effect"),
            (["--cuda-graphs", "off"], "--cuda-graphs has no effect"),
            (["--shard-optimizer"], "--shard-optimizer has no effect: there is one process"),
            (["--warmup", 5], "--warmup has no effect: --steps is no larger, so that --lr is not reached"),
            (["--steps", 0, "--epochs", 0.1, "--warmup", 50], "--warmup 50 is not over after"),
            (["--data", runs.folder / "rows.safetensors"], "--length has no effect: the data are rows already"),
            (
                ["--data", runs.folder / "pairs.jsonl", "--loss", "dpo", "--packing", "join"],
                "--packing has no effect: a pair has its own rows",
            ),
            (["--data", tmp_path / "d.PY"], "d.PY is read as one document of text"),
            (["--length", 80], "longer than the model's max_position_embeddings, 64"),
        ]
    ):
        packed = ["--packing", "join"] if "--length" in options else []
        done = train(*options, *packed, "--out", tmp_path / f"said{i}")
        assert done.returncode == 0 and words in done.stderr, (words, done)
    quiet = train("--data", tmp_path / "d.JSONL", "--out", tmp_path / "quiet")
    assert quiet.returncode == 0 and " has no effect" not in quiet.stderr and "longer" not in quiet.stderr, quiet
    assert "document of text" not in quiet.stderr


def test_log(train, tmp_path):
    """A line for each of the steps that --log-steps names and the last, with the time left; checkpoints are named."""
    done = train("--steps", 8, "--log-steps", 3, "--save-steps", 4)
    lines = training_runs.log(tmp_path / "out")
    assert [line["step"] for line in lines] == [3, 6, 8]
    assert [line["seconds_left"] > 0 for line in lines] == [True, True, False]
    said = re.findall(r"^step (\d)/8  loss [\d.]+  lr \S+  \d+ tokens/s(  \d+s left)?$", done.stderr, re.MULTILINE)
    assert [step for step, _ in said] == ["3", "6", "8"] and [bool(left) for _, left in said] == [True, True, False]
    saved = re.findall(r"^saved (.*)$", done.stderr, re.MULTILINE)
    assert saved == [str(tmp_path / f"out/checkpoint-{step}") for step in (4, 8)]


def test_an_output_folder_that_cannot_be_written(runs, train, tmp_path):
    (tmp_path / "file").touch()
    sentence(train("--out", tmp_path / "file"), f"--out {tmp_path}/file: ", "Not a directory")
    sentence(train("--out", tmp_path / "file/out"), f"--out {tmp_path}/file/out: Not a directory")
    sentence(train("--out", "/proc/out"), "--out /proc/out: No such file or directory")
    if os.getuid() != 0:  # who may write everywhere
        (tmp_path / "closed").mkdir(mode=0o555)
        sentence(train("--out", tmp_path / "closed"), f"--out {tmp_path}/closed: Permission denied")


# A disk with so much space, which is full when that is written: what the system says of others is not changed.
FULL_DISK = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/statvfs.h>
#include <unistd.h>
int statvfs(const char* path, struct statvfs* info) {
  static int (*real)(const char*, struct statvfs*);
  if (!real) *(void**)&real = dlsym(RTLD_NEXT, "statvfs");
  const int result = real(path, info);
  if (getenv("FREE_BYTES")) info->f_frsize = 1, info->f_bavail = strtoull(getenv("FREE_BYTES"), NULL, 10);
  return result;
}
ssize_t write(int file, const void* bytes, size_t count) {
  static ssize_t (*real)(int, const void*, size_t);
  if (!real) *(void**)&real = dlsym(RTLD_NEXT, "write");
  char link[64], path[4096];
  snprintf(link, sizeof link, "/proc/self/fd/%d", file);
  const ssize_t length = readlink(link, path, sizeof path - 1);
  path[length > 0 ? length : 0] = 0;
  if (getenv("FULL") && strstr(path, getenv("FULL"))) return errno = ENOSPC, -1;
  return real(file, bytes, count);
}
"""


@pytest.fixture(scope="module")
def full_disk(tmp_path_factory):
    folder = tmp_path_factory.mktemp("disk")
    (folder / "disk.c").write_text(FULL_DISK)
    command = ["cc", "-shared", "-fPIC", folder / "disk.c", "-o", folder / "disk.so", "-ldl"]
    subprocess.run(command, check=True)
    return {**os.environ, "LD_PRELOAD": str(folder / "disk.so")}


@pytest.mark.parametrize("lora", [[], ["--lora-rank", 2]])
def test_free_space_is_compared_before_the_first_step(train, tmp_path, full_disk, lora):
    done = train(*lora)
    assert done.returncode == 0, done
    files = (tmp_path / "out/checkpoint-2").rglob("*.safetensors")
    needed = sum(tensor.numel() * tensor.element_size() for file in files for tensor in load_file(file).values())
    needed -= 4  # steps, of which the count is a number of the run
    finished = train(*lora, "--resume", env=full_disk | {"FREE_BYTES": "0"})
    assert finished.returncode == 0 and "is finished" in finished.stderr, finished
    little = train(*lora, "--out", tmp_path / "full", env=full_disk | {"FREE_BYTES": str(needed - 100)})
    sentence(little, f"--out {tmp_path}/full: a checkpoint needs ", "KiB, and the disk has ", "KiB left")
    assert not (tmp_path / "full/log.jsonl").exists()
    enough = train(*lora, "--out", tmp_path / "enough", env=full_disk | {"FREE_BYTES": str(needed + 100)})
    assert enough.returncode == 0, enough


@pytest.mark.parametrize("file", ["optimizer.safetensors", "model.safetensors", "config.json", "trainer.json"])
def test_a_disk_that_is_full(train, tmp_path, full_disk, file):
    """The system's reason, and no half of a checkpoint stays."""
    done = train(env=full_disk | {"FULL": file})
    assert done.returncode == 1, done
    said = done.stderr.splitlines()[-1]
    assert re.fullmatch(rf"liger-train: {tmp_path}/out/checkpoint-2\.tmp/{file}: No space left on device", said), said
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["log.jsonl"]
    again = train("--resume")
    assert again.returncode == 0, again


def test_a_file_that_may_not_grow(train, tmp_path):
    def limited():
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))

    done = train(preexec_fn=limited)
    assert done.returncode == 1 and done.stderr.splitlines()[-1].endswith("optimizer.safetensors: File too large"), done


def stopped(command, number, at_step, wait_for="step"):
    """Sends a signal after a step; returns the exit code and what was said. The pipe holds a hundred lines: a process
    that is ahead waits."""
    pipe = {"stderr": subprocess.PIPE, "text": True, "bufsize": 1, "pipesize": 4096}
    process = subprocess.Popen(list(map(str, command)), **pipe)
    said = []
    for line in process.stderr:
        said.append(line)
        if line.startswith(f"{wait_for} {at_step}/"):
            process.send_signal(number)
            break
    said.append(process.stderr.read())
    process.stderr.close()
    return process.wait(timeout=60), "".join(said)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("options", [[], ["--lora-rank", 2, "--lora-dropout", 0.1]])
def test_a_signal_ends_after_the_step(runs, tmp_path, number, options):
    """The command that is said goes on with the run, to the bits of one that was not stopped."""
    common = [
        "--data", runs.folder / "texts.jsonl", "--length", 32, "--batch", 2, "--steps", 300, "--lr", 1e-2, *options,
    ]  # fmt: skip
    whole = subprocess.run(runs.command(tmp_path / "whole", *common), capture_output=True, text=True, check=True)
    assert "stopped" not in whole.stderr
    out = tmp_path / "it's cut"
    code, said = stopped(runs.command(out, *common), number, 3)
    assert code == 130, said
    step = int(re.search(r"stopped after step (\d+) of 300", said)[1])
    assert 3 <= step < 300 and f"saved {out}/checkpoint-{step}\n" in said and "Ctrl-C again" in said
    assert [path.name for path in out.glob("checkpoint*")] == [f"checkpoint-{step}"]
    (command,) = re.findall(r"Go on with:\n  (.*)\n", said)
    assert shlex.split(command) == [*runs.command(out, *common), "--resume"]
    again = subprocess.run(command, shell=True, capture_output=True, text=True, check=True)
    assert again.stderr.count("\nstep ") == 300 - step
    for file in (tmp_path / "whole/checkpoint-300").iterdir():
        if file.name != "adapter_config.json":
            assert filecmp.cmp(file, out / "checkpoint-300" / file.name, shallow=False), file.name
    losses = [[line["loss"] for line in training_runs.log(folder)] for folder in (tmp_path / "whole", out)]
    assert len(losses[0]) == 300 and losses[0] == losses[1]


def test_a_second_ctrl_c_ends_at_once(runs, tmp_path):
    """In a step that lasts: without a checkpoint, as a signal ends any program."""
    options = [
        "--data",
        runs.folder / "texts.jsonl",
        "--length",
        64,
        "--batch",
        2,
        "--steps",
        3,
        "--accumulate",
        1 << 13,
    ]
    process = subprocess.Popen(runs.command(tmp_path / "out", *options), stderr=subprocess.PIPE, text=True, bufsize=1)
    for line in process.stderr:
        if line.startswith("data: "):
            break
    while not re.search(rf"SigCgt:\s*\w*[{'2367abefABEF'}]$", sigcgt(process.pid)):  # it listens
        pass
    process.send_signal(signal.SIGINT)
    for line in process.stderr:
        if "Ctrl-C again ends at once" in line:
            break
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == -signal.SIGINT
    process.stderr.close()
    assert not list((tmp_path / "out").glob("checkpoint*"))


def sigcgt(pid):
    """The line of the signals that a process catches, of which SIGINT is the second."""
    return next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigCgt"))


def test_a_signal_before_the_first_step(runs, tmp_path):
    """There is nothing to save: it ends the process as any other."""
    fifo = tmp_path / "data.jsonl"
    os.mkfifo(fifo)
    process = subprocess.Popen(runs.command(tmp_path / "out", "--data", fifo), stderr=subprocess.PIPE)
    with fifo.open("w"):  # it reads its data
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == -signal.SIGTERM
    process.stderr.close()
    assert not list((tmp_path / "out").glob("checkpoint*"))


def test_a_signal_in_the_last_step(runs, tmp_path):
    """The run is finished, with its checkpoint and evaluation."""
    texts = runs.folder / "texts.jsonl"
    options = ["--data", texts, "--eval", texts, "--length", 64, "--batch", 2, "--steps", 1, "--accumulate", 512]
    process = subprocess.Popen(runs.command(tmp_path / "out", *options), stderr=subprocess.PIPE, text=True, bufsize=1)
    for line in process.stderr:
        if line.startswith("evaluation: "):
            break
    while not re.search(rf"SigCgt:\s*\w*[{'2367abefABEF'}]$", sigcgt(process.pid)):
        pass
    process.send_signal(signal.SIGTERM)
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 0 and "stopped" not in said and "evaluation after step 1" in said, said
    assert [line["step"] for line in training_runs.log(tmp_path / "out")] == [1, 1]
    assert (tmp_path / "out/checkpoint-1").exists()


def test_checkpoints_of_another_version(train, tmp_path):
    """One that does not know an option has its default; one that is none is named."""
    assert train().returncode == 0
    state = tmp_path / "out/checkpoint-2/trainer.json"
    content = json.loads(state.read_text())
    assert content["options"].pop("dpo_label_smoothing") == 0
    state.write_text(json.dumps(content))
    done = train("--resume")
    assert done.returncode == 0 and "is finished" in done.stderr, done
    for broken, words in (
        ("{}", "there is no options"),
        ("[]", "no JSON object"),
        ('{"options": 1}', "there is no data"),
    ):
        state.write_text(broken)
        sentence(train("--resume"), f"{state}: {words}")
