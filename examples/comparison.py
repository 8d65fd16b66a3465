"""Two runs of a training, plain and with this library: are their losses the same? What train.py and align.py share.

Each run has a process of its own, the same seed and the same data. A third, shorter run is plain with one weight matrix
changed in its last bit: how far it strays from the plain run is what "the same loss" means in this arithmetic. Where a
model caps its logits in 16 bits, the third run and one more plain run, with whose loss the patched one's is then
compared, cap them in float (cap_in_float).
"""

import argparse
import inspect
import json
import math
import os
import statistics
import sys
import time
from importlib.util import find_spec
from pathlib import Path

#: What these examples import: the extra "examples" of pyproject.toml, and torch.
NEEDED = ("torch transformers accelerate tokenizers safetensors peft matplotlib tabulate tqdm numpy").split()
if missing := [name for name in NEEDED if not find_spec(name)]:
    sys.exit(f"This needs {', '.join(missing)}: run `pip install {' '.join(missing)}`, or `make train` in a clone.")
if not find_spec("liger_kernel"):
    sys.exit("the package liger_kernel is not installed: run `make train`, or `pip install .` first")

import torch
from liger_kernel.measure import launch
from liger_kernel.measure.machine import machine
from liger_kernel.measure.meters import Memory
from liger_kernel.measure.report import size

COLUMNS = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
           "num_key_value_heads", "tie_word_embeddings")  # fmt: skip
SIZES = {  # a LlamaConfig, and a learning rate that suits it
    "tiny": ((1024, 64, 192, 2, 4, 1, False), 1e-3),
    "small": ((32768, 256, 688, 4, 4, 1, False), 1e-3),
    "160m": ((32768, 768, 2048, 12, 12, 3, False), 6e-4),
    "1b": ((128256, 2048, 8192, 16, 32, 8, True), 3e-4),
}
SIDES = ("plain", "liger")
RUNS = (*SIDES, "triton")  # the last, liger with Triton, where its package is given
WARM_UP = 3  # first steps, which the speed does not count
PROBED = 2  # last steps, whose memory is measured instead, because measuring it makes them slower
FACTOR = 10  # the patched run may differ from the plain one this many times as much as plain from itself

OUT_OF_MEMORY = "Out of memory: try a smaller --batch, --length or --config"


def parser(description):
    """The options of every comparison; those of one example are added to it."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--text", metavar="FILE", help='text, or .jsonl with "text" or "messages" (default: Python\'s own sources)')
    add("--config", choices=SIZES, help="size of the fresh Llama (default: small on a CPU, 1b on a GPU)")
    add("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    add("--dtype", choices=("float32", "bfloat16"), help="default: float32 on a CPU, bfloat16 on a GPU")
    add("--steps", type=int, help="default: 20 on a CPU, 60 on a GPU")
    add("--noise-steps", type=int, help="steps of the third run (default: a third of --steps on a CPU, all on a GPU)")
    add("--lr", type=float, help="learning rate (default: by size)")
    add("--seed", type=int, default=0, help="default: %(default)s")
    add("--out", type=Path, default=Path("out"), metavar="DIR", help="for the results (default: out)")
    add("--only", choices=SIDES, help="one run, nothing compared")
    add("--worker", help=argparse.SUPPRESS)
    return parser


def settle(parser, args):
    """Fills in what was not given, by the machine, and ends with advice where something cannot be."""
    gpu = torch.cuda.is_available()
    if args.device == "cuda" and not gpu:
        parser.error("torch sees no CUDA device: take --device cpu, or install a torch with CUDA")
    args.device = args.device or ("cuda" if gpu else "cpu")
    cpu = args.device == "cpu"
    args.config = args.config or ("small" if cpu else "1b")
    args.dtype = args.dtype or ("float32" if cpu else "bfloat16")
    args.steps = args.steps or (20 if cpu else 60)
    fewest = WARM_UP + PROBED + 1
    args.noise_steps = min(args.steps, args.noise_steps or (max(fewest, args.steps // 3) if cpu else args.steps))
    if args.noise_steps < fewest:
        parser.error(f"--steps and --noise-steps must be at least {fewest}: some warm up, some measure memory")
    if args.text and not Path(args.text).is_file():
        parser.error(f"there is no file {args.text}")
    return args


def fitting_batch(device, other_gigabytes):
    """Sequences that a GPU takes beside what else is on it, at most 8: a plain one of the 1b model takes 9 GB."""
    if device == "cpu":
        return 4
    return min(8, max(1, (torch.cuda.get_device_properties(0).total_memory // 10**9 - other_gigabytes) // 9))


def llama_config(run):
    from transformers import LlamaConfig

    return LlamaConfig(**dict(zip(COLUMNS, SIZES[run.config][0])), max_position_embeddings=run.length)


def flip_a_last_bit(model):
    """What the noise run is: one weight matrix is changed in its last bit."""
    weight = next(p.data for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name)
    weight.view({4: torch.int32, 2: torch.int16}[weight.element_size()]).bitwise_xor_(1)


class _Cap(torch.autograd.Function):
    """cap · tanh(y / cap) in float32, in one copy of y."""

    @staticmethod
    def forward(ctx, y, cap):
        z = y.float().div_(cap).tanh_().mul_(cap)
        ctx.save_for_backward(z)
        ctx.cap, ctx.dtype = cap, y.dtype
        return z

    @staticmethod
    def backward(ctx, dz):
        (z,) = ctx.saved_tensors
        dy = torch.empty_like(z, dtype=ctx.dtype)
        for out, of_z, given in zip(*(t.flatten(0, -2).split(1024) for t in (dy, z, dz))):
            out.copy_(given * (1 - (of_z / ctx.cap) ** 2))
        return dy, None


def cap_of(model):
    """The cap of a model's logits where its forward applies it in 16 bits, else None."""
    if model.dtype.itemsize != 2 or "final_logit_softcapping" not in inspect.getsource(type(model).forward):
        return None
    return getattr(model.config.get_text_config(), "final_logit_softcapping", None)


def cap_in_float(model):
    """Has a model cap its logits in float, if it caps them in 16 bits.

    y becomes c · tanh(y / c) ≈ y − y³ / 3c², which 16 bits round to y again for small y: the plain model trains without
    its cap, and its loss is higher, by 6e-4 for logits of standard deviation 0.9 and c = 30.
    """
    if (cap := cap_of(model)) is not None:
        model.config.get_text_config().final_logit_softcapping = None
        model.get_output_embeddings().register_forward_hook(lambda head, inputs, logits: _Cap.apply(logits, cap))


def typical(seconds):
    """A step's time: the median of those that neither warm up nor measure memory."""
    return statistics.median(seconds[WARM_UP:-PROBED])


class Steps:
    """Times the steps of a run, measures the memory of the last ones, and writes what the report says of it."""

    def __init__(self, run, bar, *models):
        self.run, self.bar, self.memory = run, bar, Memory(run.device)
        parameters = [p for model in models for p in model.parameters()]
        self.cap = None  # of logits that plain rounds
        self.parameters = sum(p.nbytes for p in parameters)
        self.count = sum(p.numel() for p in parameters)
        self.losses, self.seconds, self.step_bytes = [], [], []
        self.first = None

    def synchronize(self):
        if self.run.device == "cuda":
            torch.cuda.synchronize()

    def begin(self):
        if len(self.losses) >= self.run.steps - PROBED:
            self.memory.start()
        self.synchronize()
        self.first = self.first or time.time()
        self.start = time.perf_counter()

    def end(self, loss, optimizer):
        self.synchronize()
        self.seconds.append(time.perf_counter() - self.start)
        self.losses.append(loss.item())
        if len(self.losses) > self.run.steps - PROBED:
            tensors = (t for values in optimizer.state.values() for t in values.values() if torch.is_tensor(t))
            self.optimiser = sum(t.nbytes for t in tensors)
            self.gradients = sum(p.nbytes for p in optimizer.state)  # text gives a vision model none
            self.step_bytes.append(self.memory.step(self.parameters, self.gradients, self.optimiser))
        self.bar.set_postfix_str(f"loss {self.losses[-1]:.4f}", refresh=False)
        self.bar.update()

    def write(self):
        median = typical(self.seconds)
        result = {
            "tokens_per_second": self.run.batch * self.run.length / median,
            "step_seconds": median,
            "peak_bytes": self.memory.process(),
            "step_peak_bytes": max(self.step_bytes),
            "state_bytes": self.parameters + self.gradients + self.optimiser,
            "parameters": self.count,
            "losses": self.losses,
            "seconds": self.seconds,
            "first_step_at": self.first,
            "cap": self.cap,
        }
        Path(self.run.result).write_text(json.dumps(result))


def run_apart(script, args, side, steps):
    """One run of the script in a process of its own, so that none inherits another's patch or memory."""
    run = {**vars(args), "side": side, "steps": steps, "out": None, "result": f"{args.tokens}.{side}"}
    if args.device == "cuda":  # one GPU: a Trainer would spread over all it sees
        os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    code = launch.run(
        os.path.abspath(script), "--worker", json.dumps(run), rival=args.triton_liger if side == "triton" else None
    )
    if code and side == "triton":
        return print(f"The {side} run failed with code {code}: see above. It is left out.")
    if code:
        sys.exit(f"The {side} run failed with code {code}: see above.")
    return json.loads(Path(run["result"]).read_text())


def run_sides(script, args, sums=0.0):
    """The report of a comparison, or of the one run that args.only asks for; `sums` as in compare()."""
    runs = {side: run_apart(script, args, side, args.steps) for side in ([args.only] if args.only else SIDES)}
    noise = comparison = capped = None
    if not args.only:
        if getattr(args, "triton_liger", None) and (triton := run_apart(script, args, "triton", args.steps)):
            runs["triton"] = triton
        if runs["plain"].get("cap") is not None:
            capped = run_apart(script, args, "capped", args.noise_steps)
        noise = run_apart(script, args, "noise", args.noise_steps)
        curves = (run["losses"] for run in (capped or runs["plain"], runs["liger"], noise))
        comparison = compare(*curves, torch.finfo(getattr(torch, args.dtype)).eps, args.batch * args.length, sums)
    settings = {name: value for name, value in vars(args).items() if name not in ("out", "only", "tokens", "worker")}
    return {
        **runs,
        "machine": machine(args.device, sources=Path(__file__).parent, rival=getattr(args, "triton_liger", None)),
        "settings": settings,
        **({"capped": capped} if capped else {}),
        "noise": noise,
        "comparison": comparison,
    }


def distance(a, b):
    """The largest difference of two loss curves, over the steps that both have."""
    differences = [abs(x - y) for x, y in zip(a, b)]
    return max(differences) if all(map(math.isfinite, differences)) else math.inf


def compare(plain, liger, noise, eps, tokens, sums=0.0):
    """Whether two loss curves are the same, by how far noise, plain with a last bit changed, strays from plain."""
    # A loss is a float32, perhaps the difference of larger ones, `sums`, and the mean of tokens that are each rounded
    # in the dtype: nothing repeats more closely.
    largest = max(map(abs, plain))
    floor = max(2**-23 * max(largest, sums), eps / math.sqrt(tokens) * largest)
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


def speed(plain, other):
    return f"{other / plain:.2f}x"


def less(plain, other):
    return f"{other / plain - 1:+.0%}"


def table(reports):
    """A block of rows for each report; where there is one alone, its name is left out."""
    from tabulate import tabulate

    measures = (
        ("tokens per second", "tokens_per_second", "{:,.0f}".format, speed),
        ("time of a step (median)", "step_seconds", "{:.3f} s".format, less),
        ("peak memory of a step *", "step_peak_bytes", size, less),
        ("peak memory of everything", "peak_bytes", size, less),
        ("final loss", "losses", lambda losses: f"{losses[-1]:.6f}", lambda p, q: f"{q[-1] - p[-1]:+.1e}"),
    )
    sides = [side for side in RUNS if any(side in report for report in reports.values())]
    compared = all(report["comparison"] for report in reports.values())
    rows = []
    for name, report in reports.items():
        for title, key, form, relation in measures:
            cells = [form(report[side][key]) if side in report else "" for side in sides]
            rows.append([name, title, *cells])
            if compared:
                rows[-1].append(relation(*(report[side][key] for side in SIDES)))
            name = ""
        if compared:
            worst = f"{report['comparison']['difference_of_all_steps']:.1e}"
            rows.append(["", "loss, where it differs most", *[""] * len(sides), worst])
    headers = ["", "", *sides, *(["difference"] if compared else [])]
    alone = int(len(reports) == 1)
    align = ("left", "left", *("right",) * 4)[alone : len(headers)]
    lines = tabulate([row[alone:] for row in rows], headers[alone:], colalign=align, disable_numparse=True)
    return f"{lines}\n* beyond model, gradients and optimiser state"


def sides_of(report):
    return {side: report[side] for side in RUNS if side in report}


def draw(path, reports):
    """A row of three pictures for each report: its loss curves, its speed, its memory."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    looks = (("#a9b1ba", 6), ("#0b8f77", 1.8), ("#c9822b", 1))
    looks = {side: {"color": color, "lw": width} for side, (color, width) in zip(RUNS, looks)}
    pyplot.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "axes.titlelocation": "left"})
    figure, rows = pyplot.subplots(
        len(reports), 3, figsize=(12, 4 * len(reports)), width_ratios=(2.2, 1, 1.2), layout="constrained", squeeze=False
    )
    for (name, report), (curves, speed, memory) in zip(reports.items(), rows):
        runs = sides_of(report)
        colours = [looks[side]["color"] for side in runs]
        for side, run in runs.items():
            places = range(1, len(run["losses"]) + 1)
            curves.plot(places, run["losses"], label=side, solid_capstyle="round", **looks[side])
        curves.set(title=name, xlabel="step")
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


def finish(args, stem, reports, content):
    """Writes the content to stem.json, prints and draws the reports, and ends: with an error where a loss differs."""
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"{stem}.json").write_text(json.dumps(content, indent=1) + "\n")  # first: what follows may fail
    print(f"\n{table(reports)}\n")
    draw(args.out / f"{stem}.png", reports)
    print(f"written: {args.out / stem}.png and {args.out / stem}.json")
    compared = {name: report["comparison"] for name, report in reports.items() if report["comparison"]}
    for name, found in compared.items():
        if "capped" in reports[name]:
            print("Plain's logits are capped in float for this: in 16 bits the cap rounds away (cap_in_float).")
        print(
            f"{name} is {'' if found['same'] else 'NOT '}the same: over the first {found['steps']} steps "
            f"it differs by up to {found['difference']:.1e}. Allowed is {found['limit']:.1e}, {FACTOR} times "
            f"what plain differs from itself after a change of one weight matrix in its last bit "
            f"({found['noise']:.1e}, counted as the rounding of the loss, {found['floor']:.1e}, if less)."
        )
    sys.exit(not all(found["same"] for found in compared.values()))
