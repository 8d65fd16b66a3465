"""liger-train against plain torch, and against itself cut off: compare_training.py <liger-train> [gloo] [cuda] [nccl].

The losses, gradient norms and weights of its steps are those of a loop of transformers' model, torch's AdamW and
transformers' schedule, on the tokens that TRL makes of the data; a run that is killed again and again and resumed
gives the bits of one that was not, and is refused with another option.
With gloo or nccl also in several processes; with cuda on a GPU.
"""

import functools
import itertools
import json
import operator
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile

import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer, processors
from training_ranks import test_ranks, test_stopped_ranks
from training_runs import (
    ALL,
    BEGIN,
    END,
    HYBRID,
    LENGTH,
    PAIRS,
    TEXTS,
    VOCABULARY,
    Runs,
    about_data,
    answer,
    checkpoint,
    close,
    log,
    nll,
    plain_steps,
    write,
)


def test_steps(runs, model, dtype, passes, *options):
    """Rows given as tensors, in an epoch's order, with warm-up, decay, accumulation and labels that do not count; the
    plain steps are the model's as it is given."""
    torch.manual_seed(1)
    rows, batch, steps = 10, 2, 6
    ids = torch.randint(1, VOCABULARY, (rows, LENGTH))
    labels = torch.where(torch.rand(ids.shape) < 0.3, -100, ids)
    save_file({"input_ids": ids, "labels": labels}, runs.folder / "rows.safetensors")
    settings = {"steps": steps, "lr": 1e-2, "warmup": 2, "decay": 0.1}
    out, lines = runs(
        "--data", runs.folder / "rows.safetensors", "--batch", batch, "--accumulate", passes, "--steps", steps,
        "--lr", settings["lr"], "--warmup", settings["warmup"], "--weight-decay", settings["decay"], "--seed", 3,
        "--dtype", dtype, "--eval", runs.folder / "rows.safetensors", "--gradient-checkpointing", *options,
    )  # fmt: skip
    order = torch.cat([torch.randperm(rows, generator=torch.Generator().manual_seed(3 + e)) for e in range(3)])

    def losses(step):
        picked = order[step * batch * passes :][: batch * passes].split(batch)
        counted = sum(labels[rows, 1:].ne(-100).sum() for rows in picked)
        for part in picked:
            yield nll(model, ids[part], labels[part]) / counted

    # Rounding, which steps make larger: AdamW's first steps are signs of gradients. bfloat16's is that of its weights.
    bound = 1e-4 if dtype == "float32" else 2**-6
    for line, (loss, norm) in zip(lines, plain_steps(model, losses, **settings), strict=False):
        close(f"loss of step {line['step']}", line["loss"], loss, bound)
        close(f"norm of step {line['step']}", line["gradient_norm"], norm, 10 * bound)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6, 6]
    trained = transformers.AutoModelForCausalLM.from_pretrained(out / f"checkpoint-{steps}", dtype="auto")
    assert trained.dtype == getattr(torch, dtype)
    with torch.no_grad():
        expected = nll(trained, ids, labels) / labels[:, 1:].ne(-100).sum()
    close("evaluation", lines[-1]["eval_loss"], expected.item(), bound)
    for key, value in model.state_dict().items():
        difference = (trained.state_dict()[key].float() - value.float()).abs().mean()
        assert difference <= 0.1 * settings["lr"] * (1 + 10 * (dtype != "float32")), f"{key} differs by {difference}"


def test_packing(runs, model, tokenizer):
    path = runs.folder / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    documents = [tokenizer.encode(text).ids + [0] for text in TEXTS]
    common = ("--data", path, "--length", LENGTH, "--steps", 1, "--no-shuffle", "--lr", 0)
    everything = torch.tensor(functools.reduce(operator.iadd, documents, []))
    rows = everything[: everything.numel() // LENGTH * LENGTH].view(-1, LENGTH)
    with torch.no_grad():
        (line,) = runs(*common, "--batch", len(rows), "--packing", "join")[1]
        close("joined", line["loss"], (nll(model, rows, rows) / rows[:, 1:].numel()).item(), 1e-5)

        begins = torch.tensor(
            functools.reduce(operator.iadd, ([1] + [0] * (len(document) - 1) for document in documents), [])
        )
        spans = []
        for row, begin in zip(rows, begins[: rows.numel()].view_as(rows)):
            places = [0, *(i for i in begin.nonzero().flatten().tolist() if i), LENGTH]
            spans += [row[a:b] for a, b in itertools.pairwise(places)]
        total = sum(nll(model, span[None], span[None]) for span in spans if len(span) > 1)
        counted = sum(len(span) - 1 for span in spans)
        (line,) = runs(*common, "--batch", len(rows), "--packing", "apart")[1]
        close("apart", line["loss"], (total / counted).item(), 1e-5)

        cut = [torch.tensor(document[:LENGTH])[None] for document in documents]
        total, counted = sum(nll(model, d, d) for d in cut), sum(d.numel() - 1 for d in cut)
        (line,) = runs(*common, "--batch", len(cut), "--packing", "none")[1]
        close("a row each", line["loss"], (total / counted).item(), 1e-5)

        answers = runs.folder / "answers.jsonl"
        rows = [{"prompt": pair["prompt"], "completion": pair["chosen"]} for pair in PAIRS]
        answers.write_text("".join(json.dumps(row) + "\n" for row in rows))
        total, counted = 0, 0
        for row in rows:
            ids, labels = answer(tokenizer, row["prompt"], row["completion"])
            total, counted = total + nll(model, ids, labels), counted + labels.ne(-100).sum()
        options = ("--data", answers, "--batch", len(rows), "--packing", "none", "--steps", 1, "--lr", 0)
        close("answers", runs(*options)[1][0]["loss"], (total / counted).item(), 1e-5)


def test_special_tokens(runs, model, tokenizer):
    """Text and answers become what TRL's SFTTrainer and DPOTrainer make of them: `tokenizer(text + eos)`, and
    `tokenizer(prompt + completion + eos)`, of which what it shares with `tokenizer(prompt)` is not learnt."""
    special = [(BEGIN, 1), (END, 0)]
    ends = processors.TemplateProcessing(single=f"{BEGIN} $A {END}", special_tokens=special)
    for name, processor in {
        "begin": processors.TemplateProcessing(single=f"{BEGIN} $A", special_tokens=special),
        "begin and end": ends,
        "sequence": processors.Sequence([processors.ByteLevel(), processors.RobertaProcessing((END, 0), (BEGIN, 1))]),
    }.items():
        changed = Tokenizer.from_str(tokenizer.to_str())
        changed.post_processor = processor
        changed.save(str(runs.folder / "tokenizer.json"))
        fast = transformers.PreTrainedTokenizerFast(tokenizer_file=str(runs.folder / "tokenizer.json"))
        for added in (True, False) if ALL or name == "begin and end" else (True,):

            def ids_of(text, added=added, fast=fast):
                return fast(text, add_special_tokens=added)["input_ids"]

            compare_special_tokens(runs, model, f"{name}, {added}", ids_of, tokenizer, added)
    tokenizer.save(str(runs.folder / "tokenizer.json"))


def compare_special_tokens(runs, model, name, ids_of, bare, added):
    option = () if added else ("--no-special-tokens",)
    common = ("--packing", "none", "--steps", 1, "--lr", 0, "--length", 200, *option)

    def ended(text):
        return text if text.endswith(END) else text + END

    def parts(prompt, completion):
        ids, alone = ids_of(prompt + ended(completion)), ids_of(prompt)
        pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(ids, alone, strict=False))
        shared = len(list(pairs))
        return torch.tensor([ids]), torch.tensor([[-100] * shared + ids[shared:]])

    texts = [*TEXTS[:6], f"It ends.{END}"]
    text_rows = [(torch.tensor([ids_of(ended(text))]),) * 2 for text in texts]
    answers = [(pair["prompt"], pair["chosen"]) for pair in PAIRS]
    for what, file, rows, sources in (
        ("text", [{"text": text} for text in texts], text_rows, [ended(text) for text in texts]),
        (
            "answers",
            [{"prompt": prompt, "completion": completion} for prompt, completion in answers],
            [parts(*pair) for pair in answers],
            [prompt + ended(completion) for prompt, completion in answers],
        ),
    ):
        path = write(runs.folder / "special.jsonl", file)
        out, (line,) = runs("--data", path, *common, "--batch", len(rows))
        with torch.no_grad():
            total = sum(nll(model, *row) for row in rows).item()
        counted = sum(labels[:, 1:].ne(-100).sum() for _, labels in rows).item()
        close(f"{what}, special tokens: {name}", line["loss"], total / counted, 1e-5)
        all_added = sum(ids.numel() for ids, _ in rows) - sum(len(bare.encode(source).ids) for source in sources)
        assert (all_added > 0) == added
        expected = {"step": 0, "rows": len(rows), "special_tokens": all_added, "rows_without_labels": 0}
        assert about_data(out) == expected, (name, about_data(out), expected)

    def losses(step):
        for pair in PAIRS[:4]:
            chosen, rejected = (nll(model, *parts(pair["prompt"], pair[which])) for which in ("chosen", "rejected"))
            difference = (chosen.detach() - chosen) - (rejected.detach() - rejected)  # the reference is the model
            yield -F.logsigmoid(0.1 * difference) / 4

    path = write(runs.folder / "special.jsonl", PAIRS[:4])
    _, (line,) = runs("--data", path, *common, "--batch", 4, "--loss", "dpo")
    ((_, norm),) = plain_steps(model, losses, 1, 0.0, 0, 0.0)
    close(f"DPO norm, special tokens: {name}", line["gradient_norm"], norm, 1e-4)


def test_rows_without_labels(runs, model, tokenizer):
    """Prompts that fill --length have nothing to learn: they are counted, and a run of them alone is refused."""
    long, short = ({"prompt": prompt, "completion": " 5"} for prompt in ("1 + 2 + 3 + 4 + 5 + 6 + 7 =", "2 + 3 ="))
    path = runs.folder / "prompts.jsonl"
    options = ("--data", path, "--packing", "none", "--length", 10, "--steps", 1, "--lr", 0, "--no-shuffle")
    write(path, [long, short, long])
    out, (line, evaluation) = runs(*options, "--batch", 3, "--eval", path)
    assert about_data(out) == {"step": 0, "rows": 3, "special_tokens": 0, "rows_without_labels": 2}, about_data(out)
    ids, labels = answer(tokenizer, short["prompt"], short["completion"])
    with torch.no_grad():
        expected = (nll(model, ids, labels) / labels.ne(-100).sum()).item()
    close("a row with labels", line["loss"], expected, 1e-5)
    close("a row with labels, evaluated", evaluation["eval_loss"], expected, 1e-5)
    done = subprocess.run(runs.command(runs.folder / "said", *options), capture_output=True, text=True, check=True)
    assert "rows without a label that is learnt: 2" in done.stderr, done.stderr
    write(path, [long, long])
    runs.refused("no row has a label that is learnt: prompts fill --length 10", *options)
    runs.refused(
        "prompts.jsonl: no row has a label", "--data", runs.folder / "texts.jsonl", "--eval", path, *options[2:]
    )
    write(path, [{"input_ids": [5, 6, 7], "labels": [5, -100, -100]}, {"input_ids": [5]}])  # labels[0] is not predicted
    runs.refused("no row has a label", *options)
    runs.refused("no row has a label", "--data", path, "--length", 2, "--packing", "apart")
    write(path, [{"prompt": long["prompt"], "chosen": " 5", "rejected": " 6"}])
    runs.refused("line 1: nothing of chosen is learnt: the prompt fills --length 10", *options, "--loss", "dpo")


# Another value of each option: those that --resume refuses, and those with which it goes on.
REFUSED = {
    "--loss": ["dpo"], "--dpo-loss": ["robust"], "--dpo-beta": [0.2], "--dpo-label-smoothing": [0.1], "--length": [16],
    "--batch": [3],
    "--accumulate": [2], "--packing": ["join"], "--no-special-tokens": [], "--no-shuffle": [], "--steps": [3],
    "--lr": [1e-3], "--schedule": ["linear"], "--warmup": [1], "--weight-decay": [0.2], "--beta1": [0.8],
    "--beta2": [0.9], "--eps": [1e-6], "--clip": [2], "--seed": [1], "--dtype": ["bfloat16"], "--no-master-weights": [],
    "--shard-optimizer": [], "--fresh": [],
}  # fmt: skip
REFUSED_LORA = {
    "--lora-rank": [3], "--lora-alpha": [8], "--lora-target": ["mlp"], "--lora-dropout": [0.5], "--lora-rslora": [],
    "--base": ["int8"], "--lr": [1e-3],
}  # fmt: skip
ALLOWED = {
    "--epochs": [2], "--no-deterministic": [], "--gradient-checkpointing": [], "--eval-steps": [1], "--save-steps": [1],
    "--keep": [1], "--log-steps": [2], "--threads": [2], "--device": ["cpu"], "--cuda-graphs": ["off"],
}  # fmt: skip


def test_changed_options(runs):
    """A run that goes on has every option of the one before, but those that do not change its steps."""
    path, other = runs.folder / "texts.jsonl", runs.folder / "other.jsonl"
    before = {"--data": [path], "--length": [LENGTH], "--steps": [2], "--batch": [2]}
    lora = before | {"--lora-rank": [2]}

    def listed(options):
        return list(itertools.chain.from_iterable((option, *value) for option, value in options.items()))

    out, lora_out = (runs(*listed(options))[0] for options in (before, lora))

    def resumed(changes, before=before, out=out, folder=runs.folder, resume=("--resume",)):
        command = [runs.binary, folder, "--out", out, *resume, *listed(before | changes)]
        return subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)

    def name(option):
        return option.removeprefix("--no-").removeprefix("--").replace("-", "_")

    for changes, run in (
        (REFUSED, {}),
        (REFUSED_LORA, {"before": lora, "out": lora_out}),
        ({"--adapter": [lora_out / "checkpoint-2"]}, {}),
    ):
        done = resumed(changes, **run)
        changed = re.findall(r"(?:was made with|;) (\w+) [^;]*?, not ", done.stderr)
        assert done.returncode == 1 and sorted(changed) == sorted(map(name, changes)), (changes, done)
        assert "--clip" not in changes or "clip 1.0, not 2.0" in done.stderr, done
    write(other, [{"text": text} for text in TEXTS])  # the same data in another file
    done = resumed(ALLOWED | {"--data": [other], "--eval": [other]})
    assert done.returncode == 0 and "is finished" in done.stderr, done
    write(other, [{"text": text} for text in TEXTS[1:]])
    assert "was made with other data" in resumed({"--data": [other]}).stderr
    again = runs.folder / "again"
    again.mkdir()
    for file in runs.folder.glob("*.json*"):
        shutil.copy(file, again)
    shutil.copy(runs.folder / "model.safetensors", again)
    assert "was made with model " in resumed({}, folder=again).stderr
    done = resumed({}, resume=())
    assert done.returncode == 1 and "--resume" in done.stderr, done
    help_text = subprocess.run([runs.binary, "--help"], capture_output=True, text=True, check=True).stdout
    options = set(re.findall(r"^  (?:-\w,)?(--[\w-]+(?:,--[\w-]+)?)", help_text, re.MULTILINE))
    known = {
        *REFUSED,
        *REFUSED_LORA,
        *ALLOWED,
        "--adapter",
        "--help",
        "--version",
        "--data",
        "--eval",
        "--out",
        "--resume",
    }
    unknown = [option for option in options if not known & set(option.split(","))]
    assert len(options) > 30 and not unknown, f"no value is known for {unknown}"


def test_dpo(runs, model, tokenizer):
    path = runs.folder / "pairs.jsonl"
    path.write_text("".join(json.dumps(pair) + "\n" for pair in PAIRS))
    steps, batch, passes, lr, beta, smoothing = 4, 2, 2, 1e-2, 0.3, 0.2
    out, lines = runs(
        "--data", path, "--loss", "dpo", "--dpo-beta", beta, "--steps", steps, "--batch", batch, "--lr", lr,
        "--accumulate", passes, "--no-shuffle", "--length", 64, "--dpo-loss", "robust", "--dpo-label-smoothing",
        smoothing, "--eval", path,
    )  # fmt: skip
    reference = transformers.AutoModelForCausalLM.from_pretrained(runs.folder)
    margins = []

    def margin_of(pair, model=model):
        difference = 0
        for sign, which in ((1, "chosen"), (-1, "rejected")):
            ids, labels = answer(tokenizer, pair["prompt"], pair[which])
            with torch.no_grad():
                of_reference = nll(reference, ids, labels)
            difference = difference + sign * (of_reference - nll(model, ids, labels))
        return beta * difference

    def losses(step):
        margins.clear()
        for i in range(step * batch * passes, (step + 1) * batch * passes):
            margin = margin_of(PAIRS[i % len(PAIRS)])
            margins.append(margin.item())
            loss = (smoothing - 1) * F.logsigmoid(margin) + smoothing * F.logsigmoid(-margin)  # of robust DPO
            yield loss / (1 - 2 * smoothing) / (batch * passes)

    def check_margins(line, prefix=""):
        close(f"margin: {line}", line[f"{prefix}margin"] + 1, sum(margins) / len(margins) + 1, 1e-4)
        # Rewards that are equal, as those of the first step, may round to either side.
        doubtful = sum(abs(margin) < 1e-6 for margin in margins)
        right = sum(margin > 0 for margin in margins)
        assert abs(line[f"{prefix}accuracy"] * len(margins) - right) <= doubtful, (line, margins)

    *lines, evaluation = lines
    for line, (loss, norm) in zip(lines, plain_steps(model, losses, steps, lr, 0, 0.0), strict=True):
        close(f"DPO loss of step {line['step']}", line["loss"], loss, 1e-3)
        close(f"DPO norm of step {line['step']}", line["gradient_norm"], norm, 1e-2)
        check_margins(line)
    trained = transformers.AutoModelForCausalLM.from_pretrained(out / f"checkpoint-{steps}")
    with torch.no_grad():
        margins[:] = [margin_of(pair, trained).item() for pair in PAIRS]
    check_margins(evaluation, "eval_")


def test_resume(runs, dtype, *more):
    """Killed after some steps, in one run, with checkpoints between them and before the first one."""
    options = (
        "--data", runs.folder / "texts.jsonl", "--length", LENGTH, "--steps", 9, "--save-steps", 2, "--batch", 2,
        "--lr", 1e-2, "--dtype", dtype, "--keep", 2, "--weight-decay", 0.1, *more,
    )  # fmt: skip
    out, whole = runs(*options)
    cut = runs.folder / f"cut-{out.name}"
    (cut / "checkpoint-4.tmp").mkdir(parents=True)  # as if one had been killed while it wrote
    (cut / "checkpoint-4.tmp/config.json").touch()
    for last in (1, 2, 3, 6, 8) if ALL else (1, 2, 5):
        process = subprocess.Popen(
            runs.command(cut, "--resume", *options), stderr=subprocess.PIPE, text=True, bufsize=1
        )
        for line in process.stderr:
            if line.startswith(f"step {last}/"):
                break
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stderr.close()
    subprocess.run(runs.command(cut, "--resume", *options), check=True, capture_output=True)
    decisive = ("step", "loss", "gradient_norm", "lr", "tokens")
    found, expected = ([[line[name] for name in decisive] for line in lines] for lines in (log(cut), whole))
    assert found == expected, f"{dtype}: a run that was killed has the steps\n{found}\nand not\n{expected}"
    names = sorted(path.name for path in out.iterdir())
    assert names == sorted(path.name for path in cut.iterdir()), (names, sorted(cut.iterdir()))
    assert [name for name in names if name.startswith("checkpoint")] == ["checkpoint-8", "checkpoint-9"]
    model = ("adapter_model.safetensors", "adapter_config.json") if more else ("model.safetensors", "config.json")
    for name in (*model, "optimizer.safetensors", "tokenizer.json"):
        ours, theirs = ((folder / "checkpoint-9" / name).read_bytes() for folder in (cut, out))
        assert ours == theirs, f"{dtype}: {name} differs after {len(whole)} steps, some of them resumed"


def test_graphs(runs):
    """Passes that a CUDA graph computes, from the fourth of a shape, have the losses of those that are launched one by
    one, to the bit; where none can be captured, the reason is said."""
    texts = write(runs.folder / "texts.jsonl", [{"text": text} for text in TEXTS])
    for options in (
        ("--packing", "join"),
        ("--packing", "apart"),
        ("--dtype", "bfloat16", "--accumulate", 2),
        ("--lora-rank", 4, "--lora-dropout", 0.2),
    )[: None if runs.device == "cuda" else 1]:  # a CPU has none, and says nothing of it
        losses = []
        for graphs in ("auto", "off"):
            out = runs.folder / f"graphs-{len(list(runs.folder.glob('graphs-*')))}"
            data = ["--data", texts, "--length", LENGTH, "--batch", 2, "--steps", 8, "--lr", 1e-2]
            command = runs.command(out, *data, "--cuda-graphs", graphs, *options)
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            told = f"no CUDA graphs: --cuda-graphs {graphs}" if graphs == "off" else "no CUDA graphs"
            assert (told in done.stderr) == (graphs == "off" and runs.device == "cuda"), done.stderr
            losses.append([(line["loss"], line["gradient_norm"]) for line in log(out) if "loss" in line])
        assert len(losses[0]) == 8 and losses[0] == losses[1], (options, *losses)


def test_refusals(runs):
    texts, lines = runs.folder / "texts.jsonl", runs.folder / "lines.jsonl"

    runs.refused("--loss", "--data", texts, "--loss", "none")
    runs.refused("nowhere", "--data", runs.folder / "nowhere")
    runs.refused(
        "--lora-target: head is none of all, attention", "--data", texts, "--lora-rank", 2, "--lora-target", "mlp,head"
    )
    runs.refused("--lora-target: ", "--data", texts, "--lora-rank", 2, "--lora-target", "q_proj,,v_proj")
    runs.refused("--lora-alpha requires --lora-rank", "--data", texts, "--lora-alpha", 2)
    runs.refused("--lora-rank excludes --adapter", "--data", texts, "--adapter", runs.folder, "--lora-rank", 2)
    runs.refused("--fresh excludes --lora-rank", "--data", texts, "--fresh", "--lora-rank", 2)
    runs.refused("no row of 100000 tokens", "--data", texts, "--length", 100000)
    for line, words in (
        ('{"text": "fine"}\n\n{"text": 1}', "line 3"),
        ("{", "line 1"),
        ('{"other": "text"}', 'expected "text"'),
        ('{"input_ids": [1, 400]}', "there is no token 400"),
        ('{"input_ids": [1, 2], "labels": [1]}', "labels must be as many"),
    ):
        lines.write_text(line)
        runs.refused(words, "--data", lines, "--length", 2)
    lines.write_text('{"text": "no pair"}')
    runs.refused("prompt", "--data", lines, "--loss", "dpo")
    help_text = subprocess.run([runs.binary, "--help"], capture_output=True, text=True, check=True).stdout
    assert "--resume" in help_text and "--gradient-checkpointing" in help_text
    (runs.folder / "chat_template.jinja").write_text("{{ messages }}")
    lines.write_text('{"messages": [{"role": "user", "content": "hello"}]}')
    runs.refused("chat template", "--data", lines)


def main(binary, features):
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        _, tokenizer = checkpoint(folder)
        runs = Runs(binary, folder, "cuda" if "cuda" in features else "cpu")

        def fresh():
            return transformers.AutoModelForCausalLM.from_pretrained(folder)

        for dtype in ("float32", "bfloat16"):
            for passes in (1, 2):  # of one, gradients are read in the weights' dtype
                test_steps(runs, fresh(), dtype, passes)
        test_steps(runs, fresh().bfloat16(), "bfloat16", 2, "--no-master-weights")
        test_packing(runs, fresh(), tokenizer)
        test_special_tokens(runs, fresh(), tokenizer)
        test_rows_without_labels(runs, fresh(), tokenizer)
        test_changed_options(runs)
        test_dpo(runs, fresh(), tokenizer)
        lora = ("--lora-rank", 4, "--lora-dropout", 0.2, "--gradient-checkpointing")
        for dtype, more in itertools.product(("float32", "bfloat16"), ((), lora)):
            if ALL or (dtype == "float32") == bool(more):
                test_resume(runs, dtype, *more)
        if {"gloo", "nccl"} & features:
            for how, more in itertools.product(("replicated", "sharded"), ((), ("--lora-rank", 4))):
                if ALL or (how == "replicated") == bool(more):
                    test_ranks(runs, 2, how, *more, torchrun=how == "sharded" and not more)
            for number, torchrun, whom in ((signal.SIGTERM, False, 1), (signal.SIGINT, True, 0)):
                test_stopped_ranks(runs, 2, number, torchrun=torchrun, whom=whom)
        test_graphs(runs)
        test_refusals(runs)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        model, tokenizer = checkpoint(folder, transformers.Qwen3_5TextConfig, **HYBRID)
        runs = Runs(binary, folder, "cuda" if "cuda" in features else "cpu")
        test_packing(runs, model, tokenizer)
        test_resume(runs, "float32", *lora)
        test_steps(runs, model, "float32", 2)
    print("liger-train agrees with plain torch, and with itself when it is killed")


if __name__ == "__main__":
    main(sys.argv[1], set(sys.argv[2:]))
