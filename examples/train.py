"""Train Hugging Face's Llama on real text twice, plain and with this library's one-line patch, and compare.

Each run has a process of its own, the same seed and the same data. A third, shorter run is plain with one weight matrix
changed in its last bit: how far it strays from the plain run is what "the same loss" means in this arithmetic.
"""

import argparse
import ctypes
import gc
import json
import math
import os
import platform
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy
import text
import torch

COLUMNS = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
           "num_key_value_heads", "tie_word_embeddings")  # fmt: skip
SIZES = {  # a LlamaConfig, and a learning rate that suits it
    "tiny": ((1024, 64, 192, 2, 4, 1, False), 1e-3),
    "small": ((32768, 256, 688, 4, 4, 1, False), 1e-3),
    "160m": ((32768, 768, 2048, 12, 12, 3, False), 6e-4),
    "1b": ((128256, 2048, 8192, 16, 32, 8, True), 3e-4),
}
WARM_UP = 3  # first steps, which the speed does not count
PROBED = 2  # last steps, whose memory is measured instead, because measuring it makes them slower
FACTOR = 10  # the patched run may differ from the plain one this many times as much as plain from itself


def arguments(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--text", metavar="FILE", help='text, or .jsonl with "text" or "messages" (default: Python\'s own sources)')
    add("--model", metavar="DIR_OR_NAME", help="train this checkpoint or hub model, not a fresh Llama of size --config")
    add("--config", choices=SIZES, help="size of the fresh Llama (default: small on a CPU, 1b on a GPU)")
    add("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    add("--dtype", choices=("float32", "bfloat16"), help="default: float32 on a CPU, bfloat16 on a GPU")
    add("--steps", type=int, help="default: 20 on a CPU, 60 on a GPU")
    add("--noise-steps", type=int, help="steps of the third run (default: a third of --steps on a CPU, all on a GPU)")
    add("--batch", type=int, help="sequences in a step (default: 4 on a CPU, up to 8 on a GPU, by its memory)")
    add("--length", type=int, help="tokens in a sequence (default: 1024 on a CPU, 2048 on a GPU)")
    add("--lr", type=float, help="learning rate (default: by size; 1e-5 with --model)")
    add("--gradient-checkpointing", action="store_true", help="in both runs")
    add("--seed", type=int, default=0, help="default: %(default)s")
    add("--out", type=Path, default=Path("out"), metavar="DIR", help="for train.json and train.png (default: out)")
    add("--only", choices=("plain", "liger"), help="one run, nothing compared")
    add("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.worker:
        return args

    gpu = torch.cuda.is_available()
    if args.device == "cuda" and not gpu:
        parser.error("torch sees no CUDA device: take --device cpu, or install a torch with CUDA")
    args.device = args.device or ("cuda" if gpu else "cpu")
    cpu = args.device == "cpu"
    args.config = None if args.model else args.config or ("small" if cpu else "1b")
    args.dtype = args.dtype or ("float32" if cpu else "bfloat16")
    args.steps = args.steps or (20 if cpu else 60)
    args.length = args.length or (1024 if cpu else 2048)
    # A plain sequence of the 1b model takes about 9 GB, on top of 12 for the model and its optimiser.
    fitting = 4 if cpu else (torch.cuda.get_device_properties(0).total_memory // 10**9 - 12) // 9
    args.batch = args.batch or min(8, max(1, fitting))
    args.lr = args.lr or (1e-5 if args.model else SIZES[args.config][1])
    fewest = WARM_UP + PROBED + 1
    args.noise_steps = min(args.steps, args.noise_steps or (max(fewest, args.steps // 3) if cpu else args.steps))
    if args.noise_steps < fewest:
        parser.error(f"--steps and --noise-steps must be at least {fewest}: some warm up, some measure memory")
    if args.text and not Path(args.text).is_file():
        parser.error(f"there is no file {args.text}")
    if args.only != "plain" and not find_spec("liger_kernel"):
        parser.error("the package liger_kernel is not installed: run `make train`, or `pip install .` first")
    if not args.model or Path(args.model).is_dir():
        os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: nothing is fetched
    return args


def write_tokens(args, path):
    """The tokens of every step into path; returns a line that says what they are."""
    from transformers import AutoConfig, AutoTokenizer

    tokenizer = None
    if args.model:
        vocab_size = AutoConfig.from_pretrained(args.model).get_text_config().vocab_size
        try:
            tokenizer = AutoTokenizer.from_pretrained(args.model)
        except (OSError, ValueError):
            pass  # a checkpoint without a tokenizer
    else:
        vocab_size = SIZES[args.config][0][0]
    texts = text.documents(args.text, tokenizer)
    tokenizer = tokenizer or text.bpe(texts, vocab_size)
    numpy.save(path, text.blocks(texts, tokenizer, args.steps * args.batch, args.length, args.seed))
    source = args.text or "Python's standard library"
    return f"{source}: {sum(map(len, texts)) / 1e6:.1f} million characters, a vocabulary of {len(tokenizer)} tokens"


class Memory:
    """The peak of one step: resident memory of the process on a CPU, torch's own count on a GPU."""

    def __init__(self, device):
        self.cuda, self.linux = device == "cuda", os.path.exists("/proc/self/clear_refs")
        self.before, self.highest = self.now("VmHWM"), 0

    def now(self, field):
        if self.linux:
            return int(Path("/proc/self/status").read_text().split(field + ":")[1].split()[0]) * 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

    def start(self):
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        elif self.linux:
            self.highest = self.process()
            gc.collect()
            libc = ctypes.CDLL(None)
            if hasattr(libc, "malloc_trim"):
                # glibc keeps freed blocks resident, which hides what a step needs, or adds to it: have it return what
                # it holds, and give every tensor (M_MMAP_THRESHOLD, -3) pages of its own from here on.
                libc.malloc_trim(0)
                libc.mallopt(-3, 1 << 16)
            Path("/proc/self/clear_refs").write_text("5")
            self.before = self.now("VmRSS")

    def step(self, parameters, gradients, optimiser):
        """Bytes since start beyond model, gradients and optimiser state; at start there were no gradients."""
        if self.cuda:
            return torch.cuda.max_memory_allocated() - parameters - gradients - optimiser
        # Elsewhere than on Linux the mark cannot be reset: it counts from before there was an optimiser state.
        return self.now("VmHWM") - self.before - gradients - (0 if self.linux else optimiser)

    def process(self):
        return torch.cuda.max_memory_reserved() if self.cuda else max(self.highest, self.now("VmHWM"))


def work(run):
    """One training run, in a process of its own: its result goes to the file run.result."""
    from tqdm import tqdm
    from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, Trainer, TrainerCallback, TrainingArguments
    from transformers import PrinterCallback, set_seed

    if run.model:
        config = AutoConfig.from_pretrained(run.model)
    else:
        config = LlamaConfig(**dict(zip(COLUMNS, SIZES[run.config][0])), max_position_embeddings=run.length)
    if run.side == "liger":
        import liger_kernel.transformers

        # For a Llama: from liger_kernel.transformers import apply_liger_kernel_to_llama; apply_liger_kernel_to_llama()
        getattr(liger_kernel.transformers, f"apply_liger_kernel_to_{config.model_type}")()
    set_seed(run.seed)
    dtype = getattr(torch, run.dtype)
    if run.model:
        model = AutoModelForCausalLM.from_pretrained(run.model, dtype=dtype)
    else:
        with torch.device(run.device):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    if run.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if run.side == "noise":
        weight = next(p.data for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name)
        weight.view(torch.int32 if run.dtype == "float32" else torch.int16).bitwise_xor_(1)

    synchronize = torch.cuda.synchronize if run.device == "cuda" else lambda: None
    parameters = sum(p.nbytes for p in model.parameters())
    gradients = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    memory = Memory(run.device)
    losses, seconds, step_bytes = [], [], []

    class Recorded(Trainer):
        def training_step(self, *args, **kwargs):
            self.loss = super().training_step(*args, **kwargs)
            return self.loss

    class Watch(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step >= run.steps - PROBED:
                memory.start()
            synchronize()
            self.start = time.perf_counter()

        def on_step_end(self, args, state, control, optimizer, **kwargs):
            synchronize()
            seconds.append(time.perf_counter() - self.start)
            losses.append(trainer.loss.item())
            if state.global_step > run.steps - PROBED:
                tensors = (t for values in optimizer.state.values() for t in values.values() if torch.is_tensor(t))
                self.optimiser = sum(t.nbytes for t in tensors)
                step_bytes.append(memory.step(parameters, gradients, self.optimiser))
            bar.set_postfix_str(f"loss {losses[-1]:.4f}", refresh=False)
            bar.update()

    watch = Watch()
    with tempfile.TemporaryDirectory() as folder, tqdm(total=run.steps, desc=run.side) as bar:
        trainer = Recorded(
            model=model,
            args=TrainingArguments(
                output_dir=folder,
                max_steps=run.steps,
                per_device_train_batch_size=run.batch,
                learning_rate=run.lr,
                lr_scheduler_type="constant",  # so that a shorter run takes the same steps
                use_cpu=run.device == "cpu",
                dataloader_pin_memory=run.device == "cuda",
                seed=run.seed,
                logging_strategy="no",
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
            ),
            train_dataset=[{"input_ids": row, "labels": row} for row in torch.from_numpy(numpy.load(run.tokens))],
            callbacks=[watch],
        )
        trainer.remove_callback(PrinterCallback)
        try:
            trainer.train()
        except torch.OutOfMemoryError as error:
            sys.exit(f"{error}\nOut of memory: try a smaller --batch, --length or --config")

    median = statistics.median(seconds[WARM_UP:-PROBED])
    result = {
        "tokens_per_second": run.batch * run.length / median,
        "step_seconds": median,
        "peak_bytes": memory.process(),
        "step_peak_bytes": max(step_bytes),
        "state_bytes": parameters + gradients + watch.optimiser,
        "losses": losses,
        "seconds": seconds,
    }
    Path(run.result).write_text(json.dumps(result))


def run_apart(args, side, steps):
    """work() in a process of its own, so that no run inherits another's patch or memory."""
    run = {**vars(args), "side": side, "steps": steps, "out": None, "result": f"{args.tokens}.{side}"}
    environment = dict(os.environ)
    if args.device == "cuda":  # one GPU: the Trainer would spread over all it sees
        environment["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    command = [sys.executable, os.path.abspath(__file__), "--worker", json.dumps(run)]
    code = subprocess.run(command, env=environment).returncode
    if code:
        sys.exit(f"The {side} run failed with code {code}: see above.")
    return json.loads(Path(run["result"]).read_text())


def distance(a, b):
    """The largest difference of two loss curves, over the steps that both have."""
    differences = [abs(x - y) for x, y in zip(a, b)]
    return max(differences) if all(map(math.isfinite, differences)) else math.inf


def compare(plain, liger, noise, eps, tokens):
    """Whether two loss curves are the same, by how far noise, plain with a last bit changed, strays from plain."""
    # A loss is a float32, and the mean of tokens that are each rounded in the dtype: nothing repeats more closely.
    floor = max(2**-23, eps / math.sqrt(tokens)) * max(plain)
    strayed, difference = distance(plain, noise), distance(plain[: len(noise)], liger)
    limit = FACTOR * max(strayed, floor)
    return {
        "same": difference <= limit,
        "steps": len(noise),
        "difference": difference,
        "limit": limit,
        "noise": strayed,
        "floor": floor,
        "difference_of_all_steps": distance(plain, liger),
    }


def machine(args):
    cpuinfo = Path("/proc/cpuinfo")
    name = re.search("model name\\s*: (.*)", cpuinfo.read_text()) if cpuinfo.exists() else None
    import transformers

    return {
        "device": torch.cuda.get_device_name() if args.device == "cuda" else name[1] if name else platform.processor(),
        "threads": torch.get_num_threads(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def size(count):
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


def show(runs, comparison):
    speed, less = (lambda p, q: f"{q / p:.2f}x"), (lambda p, q: f"{q / p - 1:+.0%}")
    rows = [("", *runs, "difference")]
    for title, key, form, relation in (
        ("tokens per second", "tokens_per_second", "{:,.0f}".format, speed),
        ("time of a step (median)", "step_seconds", "{:.3f} s".format, less),
        ("peak memory of a step *", "step_peak_bytes", size, less),
        ("peak memory of everything", "peak_bytes", size, less),
        ("final loss", "losses", lambda losses: f"{losses[-1]:.6f}", lambda p, q: f"{q[-1] - p[-1]:+.1e}"),
    ):
        values = [run[key] for run in runs.values()]
        rows.append((title, *map(form, values), relation(*values) if comparison else ""))
    if comparison:
        rows.append(("loss, where it differs most", "", "", f"{comparison['difference_of_all_steps']:.1e}"))
    print()
    for title, *cells in rows if comparison else (row[:-1] for row in rows):
        print(f"{title:28}" + "".join(f"{cell:>14}" for cell in cells))
    print("* beyond model, gradients and optimiser state\n")


def draw(path, runs):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    looks = {"plain": {"color": "#a9b1ba", "lw": 6}, "liger": {"color": "#0b8f77", "lw": 1.8}}
    colours = [looks[name]["color"] for name in runs]
    pyplot.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "axes.titlelocation": "left"})
    figure, (curves, speed, memory) = pyplot.subplots(
        1, 3, figsize=(12, 4), width_ratios=(2.2, 1, 1.2), layout="constrained"
    )
    for name, run in runs.items():
        curves.plot(range(1, len(run["losses"]) + 1), run["losses"], label=name, solid_capstyle="round", **looks[name])
    curves.set(title="Training loss", xlabel="step")
    curves.xaxis.get_major_locator().set_params(integer=True)
    curves.legend(frameon=False)

    bars = speed.bar(list(runs), [run["tokens_per_second"] for run in runs.values()], color=colours, width=0.6)
    speed.bar_label(bars, fmt="{:,.0f}", padding=3)
    speed.set_title("Tokens per second")

    states, steps = ([run[key] for run in runs.values()] for key in ("state_bytes", "step_peak_bytes"))
    bars = memory.bar(list(runs), states, color="#e3e6ea", width=0.6)
    memory.bar_label(bars, ["model, gradients,\noptimiser"] * len(bars), label_type="center", fontsize=7)
    bars = memory.bar(list(runs), steps, bottom=states, color=colours, width=0.6)
    memory.bar_label(bars, [f"{size(step)} a step" for step in steps], padding=3)
    memory.set_title("Peak memory")
    for axes in (speed, memory):
        axes.spines["left"].set_visible(False)
        axes.set_yticks([])
        axes.tick_params(length=0)
        axes.margins(y=0.12)
    figure.get_layout_engine().set(w_pad=0.15, h_pad=0.1)
    figure.savefig(path, dpi=150)


def main():
    args = arguments()
    if args.worker:
        return work(SimpleNamespace(**json.loads(args.worker)))
    runs, noise, comparison = {}, None, None
    with tempfile.TemporaryDirectory() as folder:
        args.tokens = os.path.join(folder, "tokens.npy")
        print(write_tokens(args, args.tokens), flush=True)
        for side in [args.only] if args.only else ["plain", "liger"]:
            runs[side] = run_apart(args, side, args.steps)
        if not args.only:
            noise = run_apart(args, "noise", args.noise_steps)
            curves = (run["losses"] for run in (*runs.values(), noise))
            comparison = compare(*curves, torch.finfo(getattr(torch, args.dtype)).eps, args.batch * args.length)

    show(runs, comparison)
    args.out.mkdir(parents=True, exist_ok=True)
    draw(args.out / "train.png", runs)
    settings = {name: value for name, value in vars(args).items() if name not in ("out", "only", "tokens", "worker")}
    report = {**runs, "machine": machine(args), "settings": settings, "noise": noise, "comparison": comparison}
    (args.out / "train.json").write_text(json.dumps(report, indent=1) + "\n")
    print(f"written: {args.out / 'train.png'} and {args.out / 'train.json'}")
    if comparison:
        print(
            f"The loss is {'' if comparison['same'] else 'NOT '}the same: over the first {comparison['steps']} steps "
            f"it differs by up to {comparison['difference']:.1e}. Allowed is {comparison['limit']:.1e}, {FACTOR} times "
            f"what plain differs from itself after a change of one weight matrix in its last bit "
            f"({comparison['noise']:.1e}, counted as the rounding of the loss, {comparison['floor']:.1e}, if less)."
        )
        sys.exit(not comparison["same"])


if __name__ == "__main__":
    main()
