"""Trains layers of Qwen3-30B-A3B's shape on the GPUs of a machine, with experts sharded by FSDP2 or spread over ranks.

    python benchmarks/expert_parallel.py --gpus 2 --layers 12
    python benchmarks/expert_parallel.py --gpus 4 --arms "fsdp+patch,ours,ours+parts=2+capacity=1.25" --tokens 16384
    python benchmarks/expert_parallel.py --tiny --gpus 2                         on CPUs, to see that it runs

An arm is
    fsdp    FSDP2: each layer is gathered whole, two layers ahead in forward
    ep      transformers' expert parallelism, by all-to-all of the pairs of tokens and experts
    ours    expert parallelism by collectives of equal sizes, with the model patched
with options: patch, of fsdp and ep, replaces the parts of the model by this library's; parts=N, sent=S and capacity=C,
of ours, are those of register_expert_parallel.

Weights and tokens are random, and the same for all arms: loss and gradient norm of the first step are in the results,
to compare. Weights, gradients and AdamW's moments are bfloat16. Routing is the model's own, which is nearly uniform
with random weights, or balanced: every expert gets equally many tokens. Each arm, number of tokens and routing has
processes of its own, which end after --limit seconds. Results are added to --out when they end.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from liger_kernel.measure.machine import machine
from liger_kernel.measure.report import table
from liger_kernel.measure.shapes import SHAPES
from provenance import save

ARMS = ("fsdp", "fsdp+patch", "ep", "ep+patch", "ours")
OPTIONS = {"fsdp": {"patch"}, "ep": {"patch"}, "ours": {"parts", "sent", "capacity"}}
TINY = {
    "hidden_size": 64, "moe_intermediate_size": 32, "intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 256,
}  # fmt: skip


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--arms", default=",".join(ARMS), help="default: %(default)s")
    add("--gpus", type=int, default=torch.cuda.device_count() or 2, help="default: all")
    add("--layers", type=int, default=12, help="default: %(default)s")
    add("--tokens", default="4096,16384", help="of a GPU and step (default: %(default)s)")
    add("--length", type=int, default=4096, help="tokens in a sequence (default: %(default)s)")
    add("--routing", default="balanced,random", help="default: %(default)s")
    add("--no-checkpointing", action="store_true", help="layers keep what backward needs")
    add("--steps", type=int, default=8, help="that are measured, after two (default: %(default)s)")
    add("--limit", type=int, default=400, help="seconds of the processes of one arm (default: %(default)s)")
    add("--tiny", action="store_true", help="two small layers and few tokens")
    add("--again", action="store_true", help="measure also what --out has")
    add("--out", type=Path, default=Path("out/expert_parallel.json"), help="default: %(default)s")
    add("--job", help=argparse.SUPPRESS)  # of a process of an arm
    args = parser.parse_args()
    if args.tiny:
        args.layers, args.tokens, args.length, args.steps = 2, "32,64", 32, 2
    args.arms, args.routing = args.arms.split(","), args.routing.split(",")
    args.tokens = [int(n) for n in args.tokens.split(",")]
    for arm in args.arms:
        side, *options = arm.split("+")
        if side not in OPTIONS or not {option.partition("=")[0] for option in options} <= OPTIONS[side]:
            parser.error(f"there is no arm {arm}")
    return args


def config_of(job):
    import transformers

    _, kind, fields = SHAPES["qwen3-30b-a3b"]
    fields = {**fields, **(TINY if job["tiny"] else {}), "num_hidden_layers": job["layers"]}
    config = transformers.AutoConfig.for_model(kind, **fields)
    config.use_cache = False
    return config


def flops_of_token(config, length):
    """Of forward and backward, without what checkpointing runs again; attention sees half of a sequence on average."""
    heads, head = config.num_attention_heads, config.head_dim
    projections = config.hidden_size * head * (2 * heads + 2 * config.num_key_value_heads)
    experts = config.hidden_size * (3 * config.num_experts_per_tok * config.moe_intermediate_size + config.num_experts)
    layer = projections + experts + length * heads * head  # q kᵀ and p v, of length / 2 each
    return 3 * 2 * (config.num_hidden_layers * layer + config.hidden_size * config.vocab_size)


def fill(model, config, device):
    """Random weights that depend on a parameter's name alone, in whatever way it is sharded."""
    import zlib

    from torch.distributed.tensor import DTensor, distribute_tensor

    with torch.no_grad():
        for name, p in model.named_parameters():
            generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
            whole = torch.ones(p.shape, device=device)
            if p.dim() > 1:
                whole.normal_(0, 0.02, generator=generator)
            whole = whole.to(p.dtype)
            if isinstance(p, DTensor):
                whole = distribute_tensor(whole, p.device_mesh, p.placements, src_data_rank=None)
            p.copy_(whole)
        rotary = model.model.rotary_emb
        for name, buffer in type(rotary)(config).named_buffers():
            rotary.get_buffer(name).copy_(buffer)


def make_model(job, config, device, ranks):
    import transformers
    from torch.distributed.fsdp import fully_shard
    from transformers.distributed import DistributedConfig
    from transformers.distributed.utils import initialize_distributed_mesh

    side, *options = job["arm"].split("+")
    if side == "ours":
        from liger_kernel.transformers import register_expert_parallel

        given = dict(option.split("=") for option in options)
        register_expert_parallel("measured", **{name: json.loads(value) for name, value in given.items()})
    cls = transformers.Qwen3MoeForCausalLM
    with torch.device("meta"):
        model = cls._from_config(config, dtype=torch.float32 if job["tiny"] else torch.bfloat16)
    if side == "fsdp":
        layers = list(model.model.layers)
        for layer in layers:
            fully_shard(layer)
        fully_shard(model)
        for i, layer in enumerate(layers):
            layer.set_modules_to_forward_prefetch(layers[i + 1 : i + 3])
            layer.set_modules_to_backward_prefetch(layers[max(0, i - 2) : i][::-1])
    else:
        name = "measured" if side == "ours" else "all_to_all"
        spread = DistributedConfig(fsdp_size=ranks, ep_size=ranks, ep_implementation=name)
        model = cls.maybe_distribute_model(model, spread, initialize_distributed_mesh(spread)[1])
    model = model.to_empty(device=device).train()
    fill(model, config, device)
    if not job["no_checkpointing"]:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if side == "ours" or "patch" in options:
        from liger_kernel import patch

        report = patch(model)
        if int(os.environ["RANK"]) == 0:
            print(report, flush=True)
    return model


def of_meshes(parameters):
    """The parameters of each device mesh: experts over ranks are on one of their own."""
    from torch.distributed.tensor import DTensor

    found = {}
    for p in parameters:
        found.setdefault(p.device_mesh if isinstance(p, DTensor) else None, []).append(p)
    return list(found.values())


def norm_of(model):
    from torch.distributed.tensor import DTensor

    norms = []
    for parameters in of_meshes(model.parameters()):
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    return torch.stack(norms).float().norm().item()


class Arm:
    """One rank of an arm."""

    def __init__(self, job):
        self.job, self.cuda = job, torch.cuda.is_available()
        self.rank, self.ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if self.cuda else torch.device("cpu")
        if self.cuda:
            torch.cuda.set_device(self.device)
        torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if self.cuda else "gloo")
        self.config = config_of(job)
        self.model = make_model(job, self.config, self.device, self.ranks)
        groups = [{"params": parameters} for parameters in of_meshes(self.model.parameters())]
        if job["arm"] in ("fsdp", "ep"):
            self.optimizer = torch.optim.AdamW(groups, lr=1e-5, fused=True)
        else:
            from liger_kernel.optim import LigerAdamW

            self.optimizer = LigerAdamW(groups, lr=1e-5)

    def context(self):
        """Under balanced routing, the ids of every layer: the experts in turn, from another one on in each layer."""
        from contextlib import nullcontext

        if self.job["routing"] != "balanced":
            return nullcontext()
        from liger_kernel import routing

        k, experts, layers = self.config.num_experts_per_tok, self.config.num_experts, self.config.num_hidden_layers
        of_pairs = torch.arange(self.job["tokens"] * k, device=self.device).view(-1, 1, k)
        ids = (of_pairs + torch.arange(layers, device=self.device).view(1, -1, 1)) % experts
        return routing.replay(self.model, ids)

    def step(self, number):
        length = min(self.job["length"], self.job["tokens"])
        generator = torch.Generator().manual_seed(number * self.ranks + self.rank)
        ids = torch.randint(self.config.vocab_size, (self.job["tokens"] // length, length), generator=generator)
        ids = ids.to(self.device)
        with self.context():
            loss = self.model(input_ids=ids, labels=ids).loss
        loss.backward()
        if number == 0:
            self.first = loss.detach(), norm_of(self.model)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def wait(self):
        if self.cuda:
            torch.cuda.synchronize()
        torch.distributed.barrier()

    def measure(self):
        for number in range(2):
            self.step(number)
        self.wait()
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        times = []
        for number in range(2, 2 + self.job["steps"]):
            begin = time.perf_counter()
            self.step(number)
            self.wait()
            times.append(time.perf_counter() - begin)
        loss = self.first[0].float()
        torch.distributed.all_reduce(loss)
        seconds, tokens = statistics.median(times), self.job["tokens"]
        flops = flops_of_token(self.config, min(self.job["length"], tokens))
        result = {
            "seconds": seconds,
            "times": times,
            "tokens_per_second": tokens / seconds,
            "model_tflops": tokens * flops / seconds / 1e12,
            "loss": loss.item() / self.ranks,
            "gradient_norm": self.first[1],
        }
        if self.cuda:
            from liger_kernel.measure.meters import kernel_times

            peak = torch.tensor(torch.cuda.max_memory_allocated() / 1e9, device=self.device)
            torch.distributed.all_reduce(peak, torch.distributed.ReduceOp.MAX)
            result["peak_gb"] = peak.item()
            result["profile"] = kernel_times(lambda: self.step(99))
        if self.rank == 0:
            Path(self.job["results"]).write_text(json.dumps(result))
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def run(job, gpus, limit):
    """The result of an arm's processes, or {"error": why there is none}."""
    with tempfile.TemporaryDirectory() as folder:
        job["results"] = str(Path(folder, "result"))
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={gpus}", __file__]
        variables = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "NCCL_NVLS_ENABLE": "0"}
        processes = subprocess.Popen(
            [*command, "--job", json.dumps(job)], env={**variables, **os.environ}, start_new_session=True
        )
        try:
            code = processes.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(processes.pid, signal.SIGKILL)
            processes.wait()
            return {"error": f"not done after {limit} s"}
        written = Path(job["results"])
        result = json.loads(written.read_text()) if written.exists() else {}
        if code and "error" not in result or not result:
            return {"error": f"ended with code {code}", "failed": True}
        return result


def in_words(key, result):
    if "error" in result:
        return [*map(str, key), result["error"], *[""] * 5]
    alone = result["profile"]["ms"]["communication alone"] / 1e3 / result["seconds"] if "profile" in result else None
    return [
        *map(str, key),
        f"{result['tokens_per_second']:,.0f}",
        f"{result['model_tflops']:.4g}",
        f"{result['peak_gb']:.1f}" if "peak_gb" in result else "",
        "" if alone is None else f"{100 * alone:.0f} %",
        f"{result['loss']:.5f}",
        f"{result['gradient_norm']:.5f}",
    ]


def main():
    args = arguments()
    if args.job:
        job = json.loads(args.job)
        try:
            Arm(job).measure()
        except torch.OutOfMemoryError:
            Path(job["results"]).write_text(json.dumps({"error": "out of memory"}))
            sys.exit(1)  # the other ranks wait in a collective: torchrun ends them
        return
    args.out.parent.mkdir(parents=True, exist_ok=True)
    report = json.loads(args.out.read_text()) if args.out.exists() else {"rows": []}
    report["machine"] = machine("cuda" if torch.cuda.is_available() else "cpu", args.gpus, None, Path(__file__).parent)
    shared = {"gpus": args.gpus, "layers": args.layers, "length": args.length, "tiny": args.tiny}
    shared["no_checkpointing"] = args.no_checkpointing
    done = {json.dumps(row["job"], sort_keys=True): row for row in report["rows"]}
    for tokens in args.tokens:
        for routing in args.routing:
            for arm in args.arms:
                job = {**shared, "arm": arm, "tokens": tokens, "routing": routing}
                key = json.dumps(job, sort_keys=True)
                if args.again or key not in done or "error" in done[key]["result"]:
                    result = run({**job, "steps": args.steps}, args.gpus, args.limit)
                    done[key] = {"job": job, "result": result}
                    report["rows"] = list(done.values())
                    save(args.out, report)
    headers = ["tokens", "routing", "arm", "tokens/s a GPU", "model TF/s", "GB", "exposed", "loss", "gradient norm"]
    rows = [(row["job"], row["result"]) for row in done.values() if shared.items() <= row["job"].items()]
    print(table(headers, [in_words((job["tokens"], job["routing"], job["arm"]), result) for job, result in rows]))
    sys.exit(any("failed" in result for _, result in rows))


if __name__ == "__main__":
    main()
