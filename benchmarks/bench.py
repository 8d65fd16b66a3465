"""Times the operators and losses against their rivals, in turns, in one process, over the cases of the tests.

    python benchmarks/bench.py                                  every operator at its shapes, on the GPU if there is one
    python benchmarks/bench.py --op rms_norm --shape 4096,4096 --dtype float32 --device cpu
    python benchmarks/bench.py --compare benchmarks/results/h200.json  what changed since that run
    python benchmarks/history.py rms_norm                       that operator over the commits

Rivals: eager torch, torch.compile of the plain operator, torch's own fused operator where there is one, and, where they
can be imported, QuACK (--quack DIR or QUACK_DIR: the unpacked wheels of it, nvidia-cutlass-dsl, its libs-base,
libs-core and libs-cu13, apache-tvm-ffi and torch-c-dlpack-ext), cut_cross_entropy, TRL's functions of a head (--trl,
TRL_DIR: an unpacked wheel of TRL 1.16, of which these need torch and transformers alone), verl's and VeOmni's losses on
few classes (--verl, --veomni, VERL_DIR, VEOMNI_DIR: unpacked wheels, which need torch alone), mamba-ssm's scan
(--mamba-ssm, MAMBA_SSM_DIR: its unpacked sources, of which that is written in Triton), FLA's recurrences (--fla,
FLA_DIR: unpacked wheels of fla-core and einops) and liger_kernel with Triton
(--triton-liger DIR: a folder that holds that package, which has our name). Of activate F.silu is one, torch's own
operator of one tensor, whatever the activation. scaled_matmul rounds its rows and multiplies them; _scaled_mm and
_int_mm get them rounded.

Per shape and rival, forward / forward and backward:
  gpu    time of a call in a CUDA graph of many, inputs rotating over more than twice the L2 cache (ms)
  eager  wall time of a call, the device awaited only at the end of a run of calls (ms)
  host   time until a call returns, on inputs too small to matter (us)
  peak   memory beyond the inputs (MiB)
  extra  the same beyond the results too, which are the gradients where there are some (MiB)
  rate   bytes of the floor over the time, as a fraction of a copy of the first input in the same run, where no
  cache holds that; for
         operators made of GEMMs the time of the bare GEMMs over the operator's: of a loss those of its
         heads, forward of
         all and two backward of the one that is trained
"""

import argparse
import gc
import json
import os
import statistics
import sys
import time
from datetime import date
from pathlib import Path

import torch
from tabulate import tabulate

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(ROOT, "tests"))

import provenance  # noqa: E402
from byte_products import PRODUCTS  # noqa: E402
from cases import all_cases  # noqa: E402
from liger_kernel.measure.machine import commit, processor, version_of  # noqa: E402
from loss_cases import LOSSES  # noqa: E402
from mamba_scan import SCANS  # noqa: E402
from rivals import LIBRARIES, libraries  # noqa: E402

MODES = ("forward", "forward+backward")
UNPACKED = {
    "trl": "TRL", "verl": "verl", "veomni": "VeOmni", "mamba-ssm": "mamba-ssm", "quack": "QuACK and what it needs",
    "fla": "fla-core and einops",
}  # fmt: skip


def in_json(options):
    """Options with dtypes by name."""
    return {name: str(v).removeprefix("torch.") if isinstance(v, torch.dtype) else v for name, v in options.items()}


def rows_of(field, case, shape, options):
    """rival -> its row, without times."""
    options = in_json(options)
    return {c.name: {"case": case.name, "shape": shape, "options": options, "rival": c.name} for c in field}


def inputs(case, shape, options, args, seed=0):
    with torch.device(args.device):
        return case.inputs(shape, options, args.dtype, args.device, seed)


class Contestant:
    """One implementation on several sets of inputs."""

    def __init__(self, name, calls, sets, upstream):
        self.name, self.calls, self.sets, self.upstream = name, calls, sets, upstream

    def run(self, mode, i):
        wanted = [t for t in self.sets[i] if t is not None and t.requires_grad]
        if mode == "forward" or not wanted:
            with torch.no_grad():
                return self.calls[i]()
        out = self.calls[i]()
        out = out if isinstance(out, tuple) else (out,)
        pairs = [(o, g) for o, g in zip(out, self.upstream) if o.requires_grad]  # what is only logged has no gradient
        return torch.autograd.grad([o for o, _ in pairs], wanted, [g for _, g in pairs])


def synchronize(device):
    if device == "cuda":
        torch.cuda.synchronize()


def empty_cache():
    """Gives the device memory that nothing uses any more. The graphs of a case are in cycles of references, and their
    pools of memory live as long as they do."""
    gc.collect()
    torch.cuda.empty_cache()


def timed(f, device, seconds, least=3):
    """The median time of f in ms; each sample is a run of calls long enough for the clock."""
    f()
    synchronize(device)
    start = time.perf_counter()
    f()
    synchronize(device)
    once = time.perf_counter() - start
    calls = max(1, int(0.01 / max(once, 1e-6)))
    samples, end = [], time.perf_counter() + seconds
    while len(samples) < least or time.perf_counter() < end:
        start = time.perf_counter()
        for _ in range(calls):
            f()
        synchronize(device)
        samples.append((time.perf_counter() - start) / calls)
    return statistics.median(samples) * 1e3


def graph_of(calls, ours):
    """A CUDA graph of these calls, one after another, or None where they cannot be captured. ours: all can, though the
    linear loss waits outside of one."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    try:
        # One that waits for the device is found before: a capture that fails leaves torch's allocator and generator in
        # it.
        with torch.cuda.stream(stream):
            calls[0]()
            torch.cuda.set_sync_debug_mode("default" if ours else "error")
            calls[0]()
    except RuntimeError:
        return None
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.current_stream().wait_stream(stream)
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        return graph
    except Exception:
        torch.cuda.synchronize()
        gc.collect()  # the failed capture's autograd graph: other contestants' backward would wait for its stream
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        generator.graphsafe_set_state(torch.Generator("cuda").graphsafe_get_state())  # one that is not in a capture
        return None


def gpu_time(calls, rounds):
    """name -> the median time of one of its calls in ms, by replays of their graphs in turns."""
    graphs = {name: graph for name, each in calls.items() if (graph := graph_of(each, name == "ours"))}
    samples = {name: [] for name in graphs}
    warm = time.perf_counter() + 0.1
    while (
        graphs and time.perf_counter() < warm
    ):  # a GPU that was idle needs some ms to reach its clock (measured: a tenth slower until then)
        for graph in graphs.values():
            graph.replay()
        torch.cuda.synchronize()
    for _ in range(rounds):
        for name, graph in graphs.items():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            samples[name].append(begin.elapsed_time(end) / len(calls[name]))
    return {name: statistics.median(s) for name, s in samples.items()}


def peak_memory(contestant, mode):
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = contestant.run(mode, 0)
    held = torch.cuda.memory_allocated() - before
    del result
    peak = torch.cuda.max_memory_allocated() - before
    return peak / 2**20, (peak - held) / 2**20


def host_times(field, mode, device):
    """Times until a call returns, in us, in turns: each a short burst that the device's queue swallows."""
    samples = {c.name: [] for c in field}
    for turn in range(13):
        for c in field:
            start = time.perf_counter()
            for _ in range(50):
                c.run(mode, 0)
            if turn > 2:
                samples[c.name].append((time.perf_counter() - start) / 50)
            synchronize(device)
    return {name: statistics.median(s) * 1e6 for name, s in samples.items()}


def contestants(case, shape, options, args, sets_wanted):
    sets = [inputs(case, shape, options, args, i) for i in range(sets_wanted)]
    out = case.op(*sets[0], **options)
    torch.manual_seed(0)
    upstream = [
        torch.empty_like(o).copy_(torch.randn(o.shape, device=args.device))
        if o.dim() and o.is_floating_point()
        else torch.ones_like(o)
        for o in (out if isinstance(out, tuple) else (out,))
    ]
    del out
    compiled = torch.compile(lambda *inputs: case.reference(*inputs, **options), dynamic=False)
    # Bound early: each closure has its own inputs.
    makers = {
        "ours": lambda s: lambda: case.op(*s, **options),
        "torch": lambda s: lambda: case.reference(*s, **options),
        "compile": lambda s: lambda: compiled(*s),
    }
    found = {name: [make(s) for s in sets] for name, make in makers.items()}
    if case.rivals:
        each = [case.rivals(s, options) for s in sets]
        found.update({name: [e[name] for e in each] for name in each[0]})
    for name, module in args.libraries.items():
        if call := LIBRARIES[name].get(case.name):
            found[name] = [lambda s=s, call=call, module=module: call(module, s, options) for s in sets]
    wanted = None if args.rivals is None else ["ours", *args.rivals.split(",")]
    chosen = []
    for name, calls in found.items():
        if wanted and name not in wanted:
            continue
        contestant = Contestant(name, calls, sets, upstream)
        try:
            contestant.run(MODES[1], 0)
        except Exception as error:
            print(
                f"  {name} left out: {str(error).splitlines()[0] if str(error) else type(error).__name__}",
                file=sys.stderr,
            )
            continue
        chosen.append(contestant)
    return chosen


def in_the_race(field, device):
    """Without rivals that take 30 times as long as another, and a tenth of a second, as loops over hundreds of experts
    do: nobody would choose them, and they would take most of a run."""
    seconds = {}
    for c in field:
        begin = time.perf_counter()
        c.run(MODES[1], 0)
        synchronize(device)
        seconds[c.name] = time.perf_counter() - begin
    best, name = min(((t, name) for name, t in seconds.items() if name != "ours"), default=(0, ""))
    chosen = []
    for c in field:
        if c.name != "ours" and seconds[c.name] > max(30 * best, 0.1):
            print(f"  {c.name} left out: {seconds[c.name] / best:.0f} times as long as {name}", file=sys.stderr)
        else:
            chosen.append(c)
    return chosen


def floor_time(case, shape, options, args):
    """A function that times the floor, (forward, forward+backward) in ms: a copy's rate for the bytes, or the bare
    GEMMs."""
    if (case.flops or case.heads) and not case.bytes:
        tensors = inputs(case, shape, options, args)
        heads, part = (case.heads(tensors), (1, 1)) if case.heads else ([(*tensors[:2], True)], None)
        if part is None:  # by the rate of the GEMMs between the first two inputs; the head's are all there are
            heads = [(*(t.flatten(0, -2)[: 2**14] for t in tensors[:2]), True)]
            one = 2 * heads[0][0].shape[0] * heads[0][1].numel()
            part = [flops / (one * n) for n, flops in enumerate(case.flops(shape, options), 1)]
        forward, backward = [], []
        for hidden, weight, trained in heads:
            hidden = hidden.detach().flatten(0, -2)
            weight = weight.detach().reshape(-1, hidden.shape[-1])
            logits = hidden @ weight.T
            # Bound early: each head has its own tensors.
            forward.append(lambda x=hidden, w=weight, z=logits: torch.mm(x, w.T, out=z))
            if trained:
                dx, dw = torch.empty_like(hidden), torch.empty_like(weight)
                backward += [
                    lambda x=dx, w=weight, z=logits: torch.mm(z, w, out=x),
                    lambda x=hidden, w=dw, z=logits: torch.mm(z.T, x, out=w),
                ]
        time_of = lambda gemms: sum(timed(g, args.device, args.seconds) for g in gemms)

        def gemms():
            first = time_of(forward) * part[0]
            return first, first + time_of(backward) * part[1]

        return gemms
    if not case.bytes:
        return None
    first = inputs(case, shape, options, args)[0].detach()
    if args.device == "cuda" and first.nbytes <= torch.cuda.get_device_properties(0).L2_cache_size:
        return None
    second = torch.empty_like(first)
    forward, backward = case.bytes(shape, options, first.element_size())
    moved = 2 * first.numel() * first.element_size()

    def copy():
        rate = moved / timed(lambda: second.copy_(first), args.device, args.seconds)
        return forward / rate, (forward + backward) / rate

    return copy


def measure(case, shape, options, args):
    rotate = turns = 1
    if args.device == "cuda":
        size = sum(t.nbytes for t in inputs(case, shape, options, args) if t is not None)
        rotate = max(1, min(8, -(-2 * torch.cuda.get_device_properties(0).L2_cache_size // size)))
        turns = -(
            -max(1, min(64, 2**30 // size)) // rotate
        )  # the start of a replay takes some us, as much as a small call
    field = in_the_race(contestants(case, shape, options, args, rotate), args.device)
    rows = rows_of(field, case, shape, options)
    floor = floor_time(case, shape, options, args)
    for m, mode in enumerate(MODES):
        if args.device == "cuda":
            for name, ms in gpu_time(
                {c.name: [lambda c=c, i=i: c.run(mode, i) for i in range(rotate)] * turns for c in field}, args.rounds
            ).items():
                rows[name][f"gpu {mode}"] = ms
            empty_cache()
        # In turns: every contestant is timed in each of three rounds, and its median counts.
        eager, floors = {c.name: [] for c in field}, []
        for _ in range(3):
            if floor:
                floors.append(floor()[m])
            for c in list(field):
                try:
                    eager[c.name].append(timed(lambda: c.run(mode, 0), args.device, args.seconds / 3))
                except torch.OutOfMemoryError:  # a rival that fits alone, but not beside what graphs hold
                    field.remove(c)
                    print(f"  {c.name} left out: out of memory", file=sys.stderr)
                    if args.device == "cuda":
                        empty_cache()
        for c in field:
            row = rows[c.name]
            row[f"eager {mode}"] = statistics.median(eager[c.name])
            if args.device == "cuda":
                row[f"peak {mode}"], row[f"extra {mode}"] = peak_memory(c, mode)
            if floor:
                row[f"rate {mode}"] = statistics.median(floors) / row.get(f"gpu {mode}", row[f"eager {mode}"])
    return stamped({c.name: rows[c.name] for c in field}, args)


def measure_host(case, options, args):
    """Host time at the case's second test shape, where the work is next to nothing, with the first of its options."""
    field = contestants(case, case.shapes[1], options, args, 1)
    rows = rows_of(field, case, case.shapes[1], options)
    for mode in MODES:
        for name, us in host_times(field, mode, args.device).items():
            rows[name][f"host {mode}"] = us
    return stamped(rows, args)


def key(row):
    return json.dumps([row["case"], list(row["shape"]), row["options"], row["rival"]])


def pair(row, what, digits=".3f"):
    values = [row.get(f"{what} {mode}") for mode in MODES]
    return (
        " / ".join("-" if v is None else format(v, digits) for v in values)
        if any(v is not None for v in values)
        else ""
    )


def table(rows, old):
    lines = []
    for row in rows:
        options = " ".join(f"{k}={v}" for k, v in row["options"].items())
        line = [
            f"{row['case']} {'x'.join(map(str, row['shape']))} {options}".strip(),
            row["rival"],
            pair(row, "gpu"),
            pair(row, "eager"),
            pair(row, "host", ".1f"),
            pair(row, "peak", ".0f"),
            pair(row, "extra", ".0f"),
            pair(row, "rate", ".2f"),
        ]
        if old is not None:
            before = old.get(key(row), {})
            what = next((w for w in ("gpu", "eager", "host") if f"{w} {MODES[1]}" in row), None)
            then = before.get(f"{what} {MODES[1]}")
            line.append(f"{row[f'{what} {MODES[1]}'] / then:.2f}" if then else "new")
        lines.append(line)
    headers = ["case", "rival", "gpu ms", "eager ms", "host us", "peak MiB", "extra MiB", "rate"] + (
        ["time / old"] if old is not None else []
    )
    return tabulate(lines, headers, tablefmt="github", disable_numparse=True)


def device_name(args):
    return torch.cuda.get_device_name() if args.device == "cuda" else processor() or "CPU"


def stamped(rows, args):
    """The rows with what tells them from those of other runs (benchmarks/history.py)."""
    return [
        row | {"commit": args.commit, "date": str(date.today()), "machine": device_name(args)} for row in rows.values()
    ]


def machine(args):
    return {
        "device": device_name(args),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "dtype": str(args.dtype)[6:],
        "transformers": version_of("transformers"),
        "triton": version_of("triton"),
        "liger-kernel": version_of("liger-kernel", args.triton_liger) if args.triton_liger else None,
        "quack-kernels": version_of("quack-kernels", args.quack) if args.quack else None,
        "fla-core": version_of("fla-core", args.fla) if args.fla else None,
        "mamba-ssm": version_of("mamba-ssm", args.mamba_ssm) if args.mamba_ssm else None,
        "commit": commit(ROOT),
        "date": str(date.today()),
    }


def save(rows, args):
    if args.out:
        provenance.save(Path(args.out), {"machine": machine(args), "rows": rows})


def main():
    cases = {name: case for name, case in (all_cases() | LOSSES | PRODUCTS | SCANS).items() if case.bench}
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--op", help=f"operators, separated by commas: {', '.join(cases)}")
    p.add_argument("--shape", help="one shape, numbers separated by commas, instead of the case's")
    p.add_argument(
        "--dtype", default=None, help="bfloat16 (the default on a GPU), float32 (the default on a CPU) or float16"
    )
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--rivals", help="only these, separated by commas: torch, compile, ...")
    p.add_argument("--triton-liger", help="the folder of a liger_kernel with Triton")
    for package, name in UNPACKED.items():
        variable = f"{package.upper().replace('-', '_')}_DIR"
        p.add_argument(
            f"--{package}",
            default=os.environ.get(variable),
            help=f"the folder of unpacked wheels of {name}; default: {variable}, or where it is installed",
        )
    p.add_argument("--seconds", type=float, default=0.3, help="time for each measurement")
    p.add_argument("--rounds", type=int, default=20, help="graph replays in turns")
    p.add_argument("--host", action="store_true", help="host time only")
    p.add_argument("--out", help="write the rows as JSON")
    p.add_argument("--go-on", action="store_true", help="keep the rows that --out has, and measure the others")
    p.add_argument("--compare", help="an earlier --out")
    p.add_argument("--show", help="print the table of an earlier --out, and measure nothing")
    args = p.parse_args()
    if args.show:
        return print(table(json.load(open(args.show))["rows"], None))
    args.dtype = getattr(torch, args.dtype or ("bfloat16" if args.device == "cuda" else "float32"))
    args.libraries, args.commit = libraries(args), commit(ROOT)
    old = {key(row): row for row in json.load(open(args.compare))["rows"]} if args.compare else None
    rows = (
        json.loads(Path(args.out).read_text())["rows"] if args.go_on and args.out and os.path.exists(args.out) else []
    )
    has = {(row["case"], tuple(row["shape"]), json.dumps(row["options"]), f"host {MODES[0]}" in row) for row in rows}
    for name in args.op.split(",") if args.op else cases:
        case = cases[name]
        benches = case.bench_cpu if args.device == "cpu" else case.bench
        if args.shape:
            benches = [(tuple(map(int, args.shape.split(","))), benches[0][1])]
        for shape, options in [] if args.host else benches:
            if (name, tuple(shape), json.dumps(in_json(options)), False) in has:
                continue
            print(f"{name} {shape} {options}", file=sys.stderr)
            found = measure(case, shape, options, args)
            rows += found
            save(rows, args)
            torch._dynamo.reset()
            if args.device == "cuda":
                empty_cache()
        alone = name, tuple(case.shapes[1]), json.dumps(in_json(case.options[0])), True
        if (args.host or args.device == "cuda") and alone not in has:
            rows += measure_host(case, case.options[0], args)
            torch._dynamo.reset()
    print(table(rows, old))
    save(rows, args)


if __name__ == "__main__":
    main()
