"""What the tests of liger-train share: a tiny checkpoint, runs of the program, and the steps of plain torch."""

import json
import os
import pathlib
import socket
import subprocess
import sys

import torch
import torch.nn.functional as F
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

sys.path.append(str(pathlib.Path(__file__).parents[1]))
from tiers import ALL  # noqa: E402, F401

VOCABULARY, LENGTH = 400, 32
END, BEGIN = "<|end|>", "<|begin|>"
TEXTS = [f"Document {i} counts: " + ", ".join(str(i * j) for j in range(i + 3)) + ".\n" for i in range(30)]
PAIRS = [{"prompt": f"{i} + {i} =", "chosen": f" {2 * i}, so it is.", "rejected": f" {i}."} for i in range(12)]


HYBRID = {
    "head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 6, "linear_conv_kernel_dim": 3, "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip


def checkpoint(folder, config_class=transformers.LlamaConfig, **fields):
    """A tiny model with a tokenizer; returns both."""
    torch.manual_seed(0)
    sizes = dict(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.2, eos_token_id=0,
    )  # fmt: skip
    config = config_class(**sizes | fields)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[END, BEGIN], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    fields = {"eos_token": END, "tokenizer_class": "PreTrainedTokenizerFast"}  # tokenizer.json as it is
    (folder / "tokenizer_config.json").write_text(json.dumps(fields))
    return model, tokenizer


class Runs:
    def __init__(self, binary, folder, device):
        self.binary, self.folder, self.device, self.count = binary, folder, device, 0

    def command(self, out, *options):
        where = ["--device", self.device, "--threads", "1"]
        return [self.binary, str(self.folder), "--out", str(out), *where, *map(str, options)]

    def __call__(self, *options):
        """The folder of a run's results and its log."""
        self.count += 1
        out = self.folder / f"out{self.count}"
        done = subprocess.run(self.command(out, *options), capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{done.stderr}\nexit code {done.returncode}"
        return out, log(out)

    def on_ranks(self, count, out, *options, torchrun=False):
        """The same of a run in `count` processes."""
        for process in self.start_ranks(count, out, *options, torchrun=torchrun):
            said = process.communicate()[1]
            assert process.returncode == 0, f"{said}\nexit code {process.returncode}"
        return log(out)

    def start_ranks(self, count, out, *options, torchrun=False):
        """Their processes, or torchrun's; without that one, whose start takes seconds, with its variables."""
        command = self.command(out, *options)
        pipe = {"stderr": subprocess.PIPE, "text": True, "pipesize": 4096}  # of a hundred lines: who is ahead waits
        if torchrun:
            launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(count), "--no-python"]
            launcher += ["--master-port", "0", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
            started = [subprocess.Popen([*launcher, *command], **pipe)]
        else:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                group = {
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(free.getsockname()[1]),
                    "WORLD_SIZE": str(count),
                }
            started = [
                subprocess.Popen(command, env=os.environ | group | {"RANK": rank, "LOCAL_RANK": rank}, **pipe)
                for rank in map(str, range(count))
            ]
        return started

    def refused(self, words, *options):
        done = subprocess.run(
            self.command(self.folder / "refused", *options), capture_output=True, text=True, check=False
        )
        assert done.returncode != 0 and words in done.stderr + done.stdout, (words, done)


def log(out):
    """Without its first line, which is about the data."""
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()][1:]


def about_data(out):
    line = json.loads((out / "log.jsonl").read_text().splitlines()[0])
    assert line.pop("trainable_parameters") == line.pop("parameters") > 1000  # without adapters
    return line


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def close(what, got, want, bound):
    assert abs(got - want) <= bound * abs(want), f"{what}: {got}, plain {want}"


def nll(model, ids, labels):
    """The sum over the labels that count."""
    logits = model(ids).logits[:, :-1].flatten(0, 1)
    return F.cross_entropy(logits.float(), labels[:, 1:].flatten(), ignore_index=-100, reduction="sum")


def plain_steps(model, losses_of_step, steps, lr, warmup, decay):
    """Yields the loss and the norm of each step; losses_of_step(step) yields the parts of its loss."""
    matrices, vectors = ([p for p in model.parameters() if (p.ndim > 1) == m] for m in (True, False))
    groups = [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr)
    schedule = transformers.get_cosine_schedule_with_warmup(optimizer, warmup, steps)
    for step in range(steps):
        total = 0.0
        for loss in losses_of_step(step):
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        yield total, norm.item()


def answer(tokenizer, prompt, completion):
    prompt, completion = tokenizer.encode(prompt).ids, [*tokenizer.encode(completion).ids, 0]
    return torch.tensor([prompt + completion]), torch.tensor([[-100] * len(prompt) + completion])
