"""Trains whole models on one GPU or several: plain transformers, liger with Triton, and this library, in turns.

    python benchmarks/e2e.py --models llama-8b --cap-gb 80                       FSDP2 over all GPUs of the machine
    python benchmarks/e2e.py --models llama-1b,gemma2-2b --lengths 2048,8192 --arms plain,ours --gpus 1

Weights and tokens are random; weights, gradients and AdamW's moments are bfloat16, layers are checkpointed. On several
GPUs FSDP2 shards each layer, and the embedding with the head. Each model and arm has processes of its own, which take
one length of sequences after another, each with --batch sequences a GPU or, where those do not fit, half as many, and
so on. Results are added to the file --out when a process ends: a run that was cut off goes on where it was.

An arm is plain transformers, liger with Triton or this library, with options: plain+compile, ours+adamw+graph.

    compile  torch.compile of the model
    adamw    LigerAdamW in place of torch's fused AdamW
    graph    liger_kernel.graphs.capture_step
    passes   liger_kernel.graphs.capture_model
    plan     layers keep what fits into --budget, by liger_kernel.memory.plan
"""

import argparse
import datetime
import importlib
import json
import os
import platform
import re
import subprocess
import sys
import time
from pathlib import Path

import torch

LLAMA = {"vocab_size": 128256, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5}
MODELS = {  # the class of the configuration, and its fields: those of the published models
    "llama-1b": ("llama", {**LLAMA, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
                           "num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": True}),
    "llama-3b": ("llama", {**LLAMA, "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28,
                           "num_attention_heads": 24, "num_key_value_heads": 8, "tie_word_embeddings": True}),
    "llama-8b": ("llama", {**LLAMA, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
                           "num_attention_heads": 32, "num_key_value_heads": 8}),
    "qwen3-1.7b": ("qwen3", {"vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144,
                             "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
                             "head_dim": 128, "tie_word_embeddings": True, "max_position_embeddings": 40960}),
    "gemma2-2b": ("gemma2", {"vocab_size": 256000, "hidden_size": 2304, "intermediate_size": 9216,
                             "num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4,
                             "head_dim": 256}),
    # The first 6 of 48 layers of Qwen3-30B-A3B, and the first 2 of Mixtral's.
    "qwen3-moe-4b": ("qwen3_moe", {"vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144,
                                   "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
                                   "num_hidden_layers": 6, "num_attention_heads": 32, "num_key_value_heads": 4,
                                   "head_dim": 128, "norm_topk_prob": True}),
    "mixtral-3b": ("mixtral", {"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336,
                               "num_local_experts": 8, "num_experts_per_tok": 2, "num_hidden_layers": 2,
                               "num_attention_heads": 32, "num_key_value_heads": 8}),
    # The first 4 of 24 layers of gpt-oss-20b.
    "gpt-oss-4b": ("gpt_oss", {"vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880,
                               "num_local_experts": 32, "num_experts_per_tok": 4, "num_hidden_layers": 4,
                               "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
                               "sliding_window": 128}),
    "tiny": ("llama", {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
                       "num_attention_heads": 4, "num_key_value_heads": 2}),
}  # fmt: skip
ARMS = ("plain", "triton", "ours")
OPTIONS = ("compile", "adamw", "graph", "passes", "plan")
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
FEWEST = 2  # steps that are measured, after one that warms up and one that tells how many there is time for
SECONDS = 4  # to measure for, where the fewest steps take less
# What a kernel belongs to, by its name: the first that fits.
PARTS = (
    ("communication", "nccl"),
    ("attention", "flash|fmha|softmax_warp|attention"),
    ("GEMM", "gemm|nvjet|cutlass|xmma|cublas"),
    ("optimiser", "adam|multi_tensor"),
    ("ours", "liger::"),
    ("Triton", "triton|^_[a-z]|^liger_|^element_mul_kernel"),
    ("other", ""),
)


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--models", default="llama-8b", help=f"of {', '.join(MODELS)} (default: %(default)s)")
    add("--arms", default=",".join(ARMS), help="default: %(default)s")
    add("--no-checkpointing", action="store_true", help="layers keep what backward needs")
    add("--lengths", default=",".join(map(str, LENGTHS)), help="tokens in a sequence (default: %(default)s)")
    add("--batch", type=int, default=8, help="sequences a GPU (default: %(default)s)")
    add("--gpus", type=int, default=torch.cuda.device_count() or 1, help="default: all")
    add("--cap-gb", type=float, help="memory that a process may take of a GPU")
    add("--budget", default="70GiB", help="of memory, for the option plan (default: %(default)s)")
    add("--profile", action="store_true", help="also where the time of a step goes, by the name of each kernel")
    add("--triton-liger", metavar="DIR", default="", help="a folder that holds liger_kernel with Triton")
    add("--again", action="store_true", help="measure also what --out has")
    add("--out", type=Path, default=Path("out/e2e.json"), help="default: %(default)s")
    add("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return args
    args.models, args.arms = args.models.split(","), args.arms.split(",")
    sides = [arm.split("+")[0] for arm in args.arms]
    options = [option for arm in args.arms for option in arm.split("+")[1:]]
    for given, known in ((args.models, MODELS), (sides, ARMS), (options, OPTIONS)):
        if unknown := set(given).difference(known):
            parser.error(f"there is no {', '.join(sorted(unknown))}")
    args.lengths = sorted(int(n) for n in args.lengths.split(","))
    if any(arm.startswith("triton") for arm in args.arms) and not Path(args.triton_liger, "liger_kernel").is_dir():
        parser.error("--arms triton: --triton-liger names the folder that holds that liger_kernel")
    return args


def make_model(name, device, ranks, checkpointing=True):
    import transformers

    family, fields = MODELS[name]
    config = transformers.AutoConfig.for_model(family, **fields, use_cache=False)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if ranks > 1:
        from torch.distributed.fsdp import fully_shard

        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    return model


def tune_less(module):
    """Triton's tuner tries three configurations, not all, for minutes, of each kernel of a module."""
    for kernel in vars(module).values():
        if type(kernel).__name__ == "Autotuner":
            kernel.configs = kernel.configs[:3]


def kernel_times(step):
    """{part: ms} of one step, the time in it when the GPU only communicates, and when it is idle; its launches."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        begin = time.perf_counter()
        step()
        torch.cuda.synchronize()
        whole = (time.perf_counter() - begin) * 1e3
    parts = {part: 0.0 for part, _ in PARTS}
    unnamed, launches = {}, 0
    spans = {"computing": [], "busy": []}
    for event in profiler.events():
        if event.device_type != torch.autograd.DeviceType.CUDA or event.is_user_annotation:
            continue
        part = next(part for part, names in PARTS if re.search(names, event.name))
        span = (event.time_range.start / 1e3, event.time_range.end / 1e3)
        parts[part] += span[1] - span[0]
        launches += 1
        spans["busy"].append(span)
        if part != "communication":
            spans["computing"].append(span)
        if part == "other":
            unnamed[event.name[:80]] = unnamed.get(event.name[:80], 0.0) + span[1] - span[0]
    largest = dict(sorted(unnamed.items(), key=lambda item: -item[1])[:8])
    busy, computing = covered(spans["busy"]), covered(spans["computing"])
    parts |= {"communication alone": busy - computing, "idle": max(0.0, whole - busy)}
    return {"ms": parts, "step": whole, "launches": launches, "largest of other": largest}


def covered(spans):
    """The time that is in at least one of some spans."""
    total, end = 0.0, float("-inf")
    for first, last in sorted(spans):
        total += max(0.0, last - max(first, end))
        end = max(end, last)
    return total


class Worker:
    """One rank of one model and arm."""

    def __init__(self, model, arm, args):
        self.args, self.cuda = args, torch.cuda.is_available()
        self.rank, self.ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if self.cuda else torch.device("cpu")
        if self.cuda:
            torch.cuda.set_device(self.device)
            if args["cap_gb"]:
                total = torch.cuda.get_device_properties(self.device).total_memory
                torch.cuda.set_per_process_memory_fraction(min(1.0, args["cap_gb"] * 1e9 / total))
        if self.ranks > 1:
            torch.distributed.init_process_group("nccl" if self.cuda else "gloo")
        side, *self.options = arm.split("+")
        if side != "plain":
            import liger_kernel.transformers

            getattr(liger_kernel.transformers, f"apply_liger_kernel_to_{MODELS[model][0]}")()
            if side == "triton":
                tune_less(importlib.import_module("liger_kernel.ops.fused_moe"))
        torch.manual_seed(0)
        self.model = make_model(model, self.device, self.ranks, args["checkpointing"])
        if "adamw" in self.options:
            from liger_kernel.optim import LigerAdamW

            self.optimizer = LigerAdamW(self.model.parameters(), lr=1e-5)
        else:  # PyTorch's fused AdamW, as transformers' Trainer takes it
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        if "compile" in self.options:
            self.model = torch.compile(self.model)
        self.captured = self.plan = None
        if "passes" in self.options:
            from liger_kernel.graphs import capture_model

            capture_model(self.model, warmup=1, shapes=len(args["lengths"]))
        self.vocabulary = MODELS[model][1]["vocab_size"]

    def synchronize(self):
        if self.cuda:
            torch.cuda.synchronize()

    def tokens(self, length, batch, number):
        generator = torch.Generator().manual_seed(number * self.ranks + self.rank)
        return torch.randint(self.vocabulary, (batch, length), generator=generator).to(self.device)

    def make_plan(self, length, batch):
        from liger_kernel.memory import plan

        if self.plan is not None:
            self.plan.undo()
        ids = self.tokens(length, batch, 0)
        inputs = {"input_ids": ids, "labels": ids}
        self.plan = plan(self.model, inputs, self.args["budget"], optimizer=self.optimizer).apply()
        if self.rank == 0:
            print(self.plan, flush=True)

    def step(self, length, batch, number):
        """The mean loss of this rank's tokens, which number, the rank and the shape draw."""
        ids = self.tokens(length, batch, number)
        if "graph" in self.options:
            return self.captured_step({"input_ids": ids, "labels": ids})
        loss = self.model(input_ids=ids, labels=ids).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def captured_step(self, batch):
        if self.captured is None:
            from liger_kernel.graphs import capture_step

            self.captured = capture_step(self.model, self.optimizer, batch, warmup=1)
        return self.captured(batch)

    def measure(self, length, batch):
        begin, self.captured = time.perf_counter(), None
        losses = [self.step(length, batch, 0)]
        if "plan" in self.options:
            self.make_plan(length, batch)
        if {"compile", "graph", "passes"} & set(self.options):  # these steps compile, and capture
            losses += [self.step(length, batch, 0), self.step(length, batch, 0)]
        self.synchronize()
        warm_up = time.perf_counter() - begin
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        self.synchronize()
        begin = time.perf_counter()
        losses.append(self.step(length, batch, 1))
        self.synchronize()
        one = torch.tensor(time.perf_counter() - begin)
        if self.ranks > 1:  # all take as many steps
            one = one.to(self.device)
            torch.distributed.all_reduce(one, torch.distributed.ReduceOp.MAX)
        steps = min(20, max(FEWEST, int(SECONDS / one.item())))
        begin = time.perf_counter()
        losses += [self.step(length, batch, 2 + i) for i in range(steps)]
        self.synchronize()
        seconds = (time.perf_counter() - begin) / steps
        result = {
            "batch": batch,
            "seconds": seconds,
            "warm_up_seconds": warm_up,
            "tokens_per_second": batch * length / seconds,
            "losses": [loss.item() for loss in losses],
        }
        if self.cuda:
            result["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
            if self.plan is not None:
                result["predicted_gb"], result["predicted_seconds"] = self.plan.peak_bytes / 1e9, self.plan.seconds
            result["reserved_gb"] = torch.cuda.max_memory_reserved() / 1e9
            if self.args["profile"]:
                result["profile"] = kernel_times(lambda: self.step(length, batch, 99))
        return result

    def largest(self, length):
        """The result with the largest batch that fits; None where not even one sequence does."""
        batch = self.args["batch"]
        while batch:
            result = None
            try:
                result = self.measure(length, batch)
            except torch.OutOfMemoryError:
                pass  # what the failed step holds goes with its frame
            if self.cuda:
                self.optimizer.zero_grad()
                torch.cuda.empty_cache()
            if result:
                return result
            if self.ranks > 1:
                self.write({"length": length, "out of memory": batch})
                sys.exit(1)  # the other ranks wait in a collective: torchrun ends them
            batch //= 2
        return None

    def write(self, line):
        with open(self.args["results"], "a") as file:
            file.write(json.dumps(line) + "\n")

    def run(self):
        for length in self.args["lengths"]:
            result = self.largest(length)
            if self.rank == 0:
                self.write({"length": length, "result": result})
        if self.ranks > 1:
            torch.distributed.destroy_process_group()


def launch(args, model, arm, lengths, batch, results):
    """A process a GPU; returns the code that they end with."""
    worker = {"model": model, "arm": arm, "lengths": lengths, "batch": batch, "cap_gb": args.cap_gb,
              "checkpointing": not args.no_checkpointing, "budget": args.budget, "profile": args.profile,
              "results": str(results)}  # fmt: skip
    environment = dict(os.environ)
    if arm.startswith("triton"):  # that package has the name of ours
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (args.triton_liger, os.environ.get("PYTHONPATH"))))
        environment.pop("LIGER_LIBRARY", None)
    command = [sys.executable]
    if args.gpus > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={args.gpus}"]
    return subprocess.run([*command, __file__, "--worker", json.dumps(worker)], env=environment).returncode


def lengths_of(args, model, arm, lengths, results):
    """Yields (length, its result) of one model and arm: None where not even one sequence a GPU fits."""
    batch = args.batch
    while lengths and batch:
        results.unlink(missing_ok=True)
        code = launch(args, model, arm, lengths, batch, results)
        lines = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
        for line in lines:
            if "result" in line:
                lengths.remove(line["length"])
                yield line["length"], line["result"]
        if code and not any("out of memory" in line for line in lines):
            print(f"{model}, {arm}: failed with code {code} at length {lengths[0]}: see above", flush=True)
            return
        batch //= 2
    for length in lengths:
        yield length, None


def machine(args):
    import transformers

    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor(),
        "gpus": args.gpus,
        "cap_gb": args.cap_gb,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "transformers": transformers.__version__,
        "date": datetime.date.today().isoformat(),
    }


def in_words(key, result):
    if not result:
        return [*key, "", "out of memory", "", ""]
    peak = f"{result['peak_gb']:.1f} GB" if "peak_gb" in result else ""
    warm_up = f"{result['warm_up_seconds']:.0f} s" if "warm_up_seconds" in result else ""
    return [*key, result["batch"], f"{result['tokens_per_second']:,.0f}", peak, warm_up]


def main():
    args = arguments()
    if args.worker:
        worker = json.loads(args.worker)
        return Worker(worker["model"], worker["arm"], worker).run()
    from tabulate import tabulate

    args.out.parent.mkdir(parents=True, exist_ok=True)
    report = json.loads(args.out.read_text()) if args.out.exists() else {"rows": []}
    report["machine"] = machine(args)
    rows = {(row["model"], row["length"], row["arm"]): row["result"] for row in report["rows"]}
    for model in args.models:
        for arm in args.arms:
            left = [n for n in args.lengths if args.again or (model, n, arm) not in rows]
            for length, result in lengths_of(args, model, arm, left, args.out.with_suffix(".part")):
                rows[model, length, arm] = result
                report["rows"] = [
                    {"model": m, "length": n, "arm": a, "result": found} for (m, n, a), found in sorted(rows.items())
                ]
                args.out.write_text(json.dumps(report, indent=1) + "\n")
    args.out.with_suffix(".part").unlink(missing_ok=True)
    headers = ["model", "length", "arm", "batch", "tokens/s a GPU", "peak memory", "warm-up"]
    table = [in_words(key, result) for key, result in sorted(rows.items())]
    print(tabulate(table, headers, tablefmt="github", disable_numparse=True))
    for key, result in sorted(rows.items()):
        if result and "profile" in result:
            parts = ", ".join(f"{part} {ms:.0f}" for part, ms in result["profile"]["ms"].items())
            print(f"{' '.join(map(str, key))}: {result['profile']['step']:.0f} ms: {parts}")


if __name__ == "__main__":
    main()
