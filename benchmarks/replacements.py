"""Times what liger_kernel.trl.patch() and the layers of use_as_hub_kernels() put in the place of others' code, against
that code, in turns: none may be slower than what it replaces.

    python benchmarks/replacements.py --trl DIR --out out/replacements.json
    python benchmarks/replacements.py --device cpu      whether the layers' part works, with small shapes

Without --trl its functions are left out. DIR is an unpacked wheel of TRL 1.16, of which these need torch and
transformers alone. Forward and backward, bfloat16, with the shapes of a 1B model: 8192 tokens, 2048 (teacher: 4096)
columns, 128256 classes.
"""

import argparse
import json
import statistics
from pathlib import Path

import torch
from liger_kernel.measure.machine import machine
from provenance import ROOT
from rivals import trl_kernels
from tabulate import tabulate
from torch.utils.benchmark import Timer
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.llama import modeling_llama

TOKENS, WIDTH, TEACHER, CLASSES = 8192, 2048, 4096, 128256


def leaf(*shape, device="cuda", scale=1.0, dtype=torch.bfloat16):
    return (torch.randn(shape, device=device, dtype=dtype) * scale).requires_grad_()


def trl_parts(folder):
    """(name, what runs the original, what runs the replacement) of each part of patch()."""
    import liger_kernel.trl as ours

    kernels = trl_kernels(folder)
    log_prob = ours._log_prob_function(kernels.ChunkedLogProbFunction, 0)
    divergence = ours._divergence_function(kernels.ChunkedDivergenceFunction, 0)
    both = ours._fused_logprob_entropy(kernels.selective_log_softmax_and_entropy, 0)
    x, w = leaf(TOKENS, WIDTH), leaf(CLASSES, WIDTH, scale=0.02)
    t, u = leaf(TOKENS, TEACHER).detach(), leaf(CLASSES, TEACHER, scale=0.02).detach()
    ids = torch.randint(CLASSES, (TOKENS,), device="cuda")

    def log_probs(function):
        def run():
            logp, entropy, *_ = function.apply(x, w, None, ids, 1.0, 256)
            return (logp + 0.1 * entropy).sum()

        return run

    def divergences(function, beta):
        return lambda: function.apply(x, w, None, t, u, None, beta)[0].sum()

    def selected(function, logits):
        def run():
            logp, entropy = function(logits, ids[: len(logits)])
            return (logp + 0.1 * entropy).sum()

        return run

    yield "log-probabilities of a head", log_probs(kernels.ChunkedLogProbFunction), log_probs(log_prob), (x, w)
    for beta in (0.0, 0.5, 1.0):
        functions = kernels.ChunkedDivergenceFunction, divergence
        yield f"divergence, beta {beta}", *(divergences(function, beta) for function in functions), (x, w)
    for dtype in (torch.bfloat16, torch.float32):
        logits = leaf(TOKENS // 2, CLASSES, dtype=dtype)
        functions = kernels.selective_log_softmax_and_entropy, both
        name = f"log-probabilities of logits, {str(dtype).removeprefix('torch.')}"
        yield name, *(selected(function, logits) for function in functions), (logits,)


def hub_parts(device):
    from liger_kernel.hub import layers

    tokens, width = (TOKENS, WIDTH) if device == "cuda" else (16, 32)
    config = modeling_llama.LlamaConfig(hidden_size=width, intermediate_size=4 * width)
    gemma = modeling_gemma2.Gemma2Config(hidden_size=width, intermediate_size=4 * width)
    x = leaf(1, tokens, width, device=device)
    for module, layer in (
        (modeling_llama.LlamaRMSNorm(width), layers.LigerRMSNorm),
        (modeling_gemma2.Gemma2RMSNorm(width), layers.LigerZeroCenteredRMSNorm),
        (modeling_llama.LlamaMLP(config), layers.LigerGatedMLP),
        (modeling_gemma2.Gemma2MLP(gemma), layers.LigerGatedMLP),
    ):
        module = module.to(device, torch.bfloat16)
        yield (
            f"{type(module).__name__}", lambda m=module: m(x).sum(), lambda m=module, f=layer: f.forward(m, x).sum(),
            (x, *module.parameters()),
        )  # fmt: skip
    rows, length = 4, tokens // 4
    q, k = (leaf(rows, heads, length, 64, device=device) for heads in (32, 8))
    cos, sin = (torch.randn(rows, length, 32, device=device, dtype=torch.bfloat16).repeat(1, 1, 2) for _ in range(2))
    holder = type("Holder", (), {"forward": lambda self, *args: modeling_llama.apply_rotary_pos_emb(*args)})()
    add = lambda results: sum(r.sum() for r in results)
    yield (
        "apply_rotary_pos_emb", lambda: add(modeling_llama.apply_rotary_pos_emb(q, k, cos, sin)),
        lambda: add(layers.LigerRotaryEmbedding.forward(holder, q, k, cos, sin)), (q, k),
    )  # fmt: skip


def step(run, leaves):
    for t in leaves:
        t.grad = None
    run().backward()


def milliseconds(run, leaves, times):
    timer = Timer("step(run, leaves)", globals=dict(step=step, run=run, leaves=leaves))
    return 1e3 * timer.timeit(times).mean


def peak(run, leaves):
    """MiB above what was there before a step; of a CPU none."""
    if leaves[0].device.type == "cpu":
        return 0.0
    step(run, leaves)
    for t in leaves:
        t.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step(run, leaves)
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl", metavar="DIR")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    rows = []
    for name, original, replacement, leaves in (*(trl_parts(args.trl) if args.trl else ()), *hub_parts(args.device)):
        both = original, replacement
        peaks = [peak(run, leaves) for run in both]
        times = [max(1, int(100 / milliseconds(run, leaves, 2))) for run in both]
        taken = [[milliseconds(run, leaves, n) for run, n in zip(both, times)] for _ in range(args.rounds)]
        theirs, ours = (statistics.median(column) for column in zip(*taken))
        ratio = statistics.median(b / a for a, b in taken)
        rows.append(
            dict(part=name, original_ms=theirs, ours_ms=ours, ratio=ratio, original_mib=peaks[0], ours_mib=peaks[1])
        )
    print(tabulate(rows, headers="keys", floatfmt=(None, ".3f", ".3f", ".3f", ".0f", ".0f")))
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        report = {"machine": machine(args.device, sources=ROOT), "rows": rows}
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
