"""Runs of liger-train in several processes, for compare_training.py."""

import re
import shutil

from training_runs import LENGTH, close


def test_ranks(runs, count, how, *more, torchrun=False):
    """Several processes take the steps of one with as many rows, and go on with their own bits."""
    texts = runs.folder / "texts.jsonl"
    options = ("--data", texts, "--length", LENGTH, "--lr", 1e-2, "--save-steps", 2, "--steps", 4, "--eval", texts)
    _, alone = runs(*options, *more, "--batch", 2 * count)
    options = (*options, *more, "--batch", 2, *(["--shard-optimizer"] if how == "sharded" else []))
    out = runs.folder / f"{how}{'-'.join(map(str, more))}"
    lines = runs.on_ranks(count, out, *options, torchrun=torchrun)
    assert len(lines) == len(alone) == 5
    for line, expected in zip(lines, alone, strict=True):
        for what in ("loss", "gradient_norm", "eval_loss"):
            if what in expected:
                close(f"{how}: {what} of step {line['step']}", line[what], expected[what], 1e-4)
        assert line.get("tokens") == expected.get("tokens")
    states = sorted(path.name for path in (out / "checkpoint-4").glob("optimizer*"))
    shares = [f"optimizer-{rank}.safetensors" for rank in range(count)]
    assert states == (shares if how == "sharded" else ["optimizer.safetensors"])
    shutil.rmtree(out / "checkpoint-4")
    again = runs.on_ranks(count, out, *options, "--resume")
    assert [line["loss"] for line in again[:4]] == [line["loss"] for line in lines[:4]]


def test_stopped_ranks(runs, count, number, *, torchrun, whom):
    """A signal to one of several processes, or to torchrun: all end after the same step, and go on with their bits."""
    texts = runs.folder / "texts.jsonl"
    options = ("--data", texts, "--length", LENGTH, "--lr", 1e-2, "--steps", 300, "--batch", 2, "--shard-optimizer")
    name = f"{whom}-{number.name}-{torchrun}"
    whole = runs.on_ranks(count, runs.folder / f"whole-{name}", *options, torchrun=torchrun)
    out = runs.folder / f"stopped-{name}"
    started = runs.start_ranks(count, out, *options, torchrun=torchrun)
    for line in started[0].stderr:
        if "step 3/" in line:
            break
    started[whom].send_signal(number)
    said = [process.communicate(timeout=120)[1] for process in started]
    codes = [process.returncode for process in started]
    assert all(codes) if torchrun else codes == [130] * count, (codes, said)
    (step,) = re.findall(r"stopped after step (\d+) of 300. Go on in as many processes with:", "".join(said))
    assert sorted(path.name for path in out.glob("checkpoint*")) == [f"checkpoint-{step}"] and int(step) < 300
    again = runs.on_ranks(count, out, *options, "--resume", torchrun=torchrun)
    assert [line["loss"] for line in again] == [line["loss"] for line in whole]
    for file in ("model.safetensors", "optimizer-0.safetensors", "optimizer-1.safetensors"):
        ours, theirs = (folder / "checkpoint-300" / file for folder in (out, runs.folder / f"whole-{name}"))
        assert ours.read_bytes() == theirs.read_bytes(), file
