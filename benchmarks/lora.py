"""Trains LoRA adapters of PEFT on one GPU: plain, liger with Triton, and this library, in turns.

    python benchmarks/lora.py --models llama-1b,llama-8b --shapes 4x2048 --arms plain,peft,ours,frozen
    python benchmarks/lora.py --models llama-1b --checkpointing off --profile

The base model is in bfloat16, with random weights; adapters of rank 16 on all linear layers of the blocks, and on
experts, are in float32, under autocast to bfloat16, as in transformers' Trainer. Each arm has a process of its own, and
the arms run in turns, --rounds times; the median of the rounds is shown.

    plain   transformers and PEFT
    triton  liger_kernel with Triton, which --triton-liger names
    peft    this library with lora=False: PEFT's own layers
    ours    this library
    frozen  this library and no adapters: the gradient passes through the frozen layers to the embeddings

"ours+host" has layers keep their input on the host, and "ours+plan" what fits into --budget (liger_kernel.memory). A
step that takes longer than 20 s is measured once, and not warmed up.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from e2e import MODELS, kernel_times, machine

MODELS = MODELS | {
    "qwen3-4b": ("qwen3", {"vocab_size": 151936, "hidden_size": 2560, "intermediate_size": 9728,
                           "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
                           "head_dim": 128, "tie_word_embeddings": True, "max_position_embeddings": 40960}),
}  # fmt: skip
ARMS = ("plain", "triton", "peft", "ours", "frozen")
SECONDS = 5  # to measure for
LONG = 20  # seconds of a step that is measured once
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--models", default="llama-1b", help=f"of {', '.join(MODELS)} (default: %(default)s)")
    add("--arms", default="plain,peft,ours,frozen", help=f"of {', '.join(ARMS)} (default: %(default)s)")
    add("--shapes", default="4x2048", help="sequences x tokens, separated by commas (default: %(default)s)")
    add("--checkpointing", default="on,off", help="default: %(default)s")
    add("--rank", type=int, default=16)
    add("--budget", default="70GiB", help="of memory, for the option plan (default: %(default)s)")
    add("--nf4", action="store_true", help="weights of the layers in 4 bits, by bitsandbytes (QLoRA)")
    add("--rounds", type=int, default=2, help="default: %(default)s")
    add("--profile", action="store_true", help="also where the time of a step goes, and its launches")
    add("--triton-liger", metavar="DIR", default="", help="a folder that holds liger_kernel with Triton")
    add("--out", type=Path, default=Path("out/lora.json"), help="default: %(default)s")
    add("--worker", help=argparse.SUPPRESS)
    return parser.parse_args()


def quantise(module):
    """Holds the weights of the blocks' linear layers in nf4."""
    import bitsandbytes

    for name, child in list(module.named_children()):
        if name in TARGETS:
            weight = bitsandbytes.nn.Params4bit(child.weight.data.cpu(), requires_grad=False, quant_type="nf4")
            linear = bitsandbytes.nn.Linear4bit(
                child.in_features, child.out_features, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4"
            )
            linear.weight = weight
            setattr(module, name, linear.to(child.weight.device))
        else:
            quantise(child)


def make(model, arm, rank, checkpointing, nf4, device):
    import transformers

    family, fields = MODELS[model]
    config = transformers.AutoConfig.for_model(family, **fields, use_cache=False)
    torch.manual_seed(0)
    with torch.device(device):
        made = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
    made.requires_grad_(False)
    if nf4:
        quantise(made)
        made.is_loaded_in_4bit = True  # what PEFT asks for
    if checkpointing:
        made.gradient_checkpointing_enable({"use_reentrant": False})
    if checkpointing or arm == "frozen":
        made.enable_input_require_grads()
    if arm != "frozen":
        from peft import LoraConfig, get_peft_model

        adapters = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=list(TARGETS), task_type="CAUSAL_LM")
        if "moe" in family:
            adapters.target_parameters = ["experts.gate_up_proj", "experts.down_proj"]
        made = get_peft_model(made, adapters)
        for name, parameter in made.named_parameters():  # as in training, where B is no longer 0
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.01)
    if arm != "plain":
        import liger_kernel.transformers

        switches = {"lora": False} if arm == "peft" else {}
        base = made if arm == "frozen" else made.base_model.model
        getattr(liger_kernel.transformers, f"apply_liger_kernel_to_{family}")(model=base, **switches)
    return made


def work(model, arm, batch, length, checkpointing, rank, nf4, profile, budget):
    cuda = torch.cuda.is_available()
    device = "cuda" if cuda else "cpu"
    arm, _, option = arm.partition("+")
    made = make(model, arm, rank, checkpointing, nf4, device)
    trained = [p for p in made.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=cuda) if trained else None
    vocabulary = MODELS[model][1]["vocab_size"]

    def tokens(number):
        return torch.randint(vocabulary, (batch, length), generator=torch.Generator().manual_seed(number)).to(device)

    def loss_of(model, ids):
        with torch.autocast(device, torch.bfloat16):
            return model(input_ids=ids, labels=ids).loss

    def step(number=0):
        loss = loss_of(made, tokens(number))
        loss.backward()
        if optimizer:
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    def timed(steps):
        torch.cuda.synchronize() if cuda else None
        begin = time.perf_counter()
        losses = [step(1 + i) for i in range(steps)]
        torch.cuda.synchronize() if cuda else None
        return (time.perf_counter() - begin) / steps, losses

    if option == "host":
        from liger_kernel.memory import keep

        keep(made, "host")
    elif option == "plan":
        from liger_kernel.memory import plan

        planned = plan(made, tokens(0), budget, loss=loss_of, optimizer=optimizer).apply()
        print(planned, file=sys.stderr, flush=True)
    seconds, losses = timed(1)
    if seconds < LONG:
        losses += timed(1)[1]
        torch.cuda.reset_peak_memory_stats() if cuda else None
        one, _ = timed(1)
        seconds, more = timed(max(2, min(20, int(SECONDS / one))))
        losses += more
    result = {"seconds": seconds, "tokens_per_second": batch * length / seconds,
              "losses": [loss.item() for loss in losses]}  # fmt: skip
    if cuda:
        result["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
        if profile:
            result["profile"] = kernel_times(step)
    return result


def launch(args, worker):
    environment = dict(os.environ)
    if worker["arm"].startswith("triton"):  # that package has the name of ours
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (args.triton_liger, os.environ.get("PYTHONPATH"))))
        environment.pop("LIGER_LIBRARY", None)
    command = [sys.executable, __file__, "--worker", json.dumps(worker)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        print(f"{worker}: failed with code {done.returncode}", flush=True)
        return None
    return json.loads(lines[-1])


def main():
    args = arguments()
    if args.worker:
        return print(json.dumps(work(**json.loads(args.worker))))
    from tabulate import tabulate

    args.gpus, args.cap_gb = 1, None
    args.out.parent.mkdir(parents=True, exist_ok=True)
    report = {"machine": machine(args), "rank": args.rank, "nf4": args.nf4, "rows": []}
    table = []
    for model in args.models.split(","):
        for shape in args.shapes.split(","):
            batch, length = map(int, shape.split("x"))
            for checkpointing in args.checkpointing.split(","):
                found = {arm: [] for arm in args.arms.split(",")}
                for _ in range(args.rounds):
                    for arm, results in found.items():
                        worker = {"model": model, "arm": arm, "batch": batch, "length": length, "rank": args.rank,
                                  "nf4": args.nf4, "checkpointing": checkpointing == "on",
                                  "profile": args.profile, "budget": args.budget}  # fmt: skip
                        if result := launch(args, worker):
                            results.append(result)
                for arm, results in found.items():
                    if not results:
                        continue
                    key = {"model": model, "shape": shape, "checkpointing": checkpointing, "arm": arm}
                    report["rows"].append({**key, "results": results})
                    rate = statistics.median(result["tokens_per_second"] for result in results)
                    table.append([*key.values(), f"{rate:,.0f}", f"{results[0].get('peak_gb', 0):.1f} GB"])
                    if args.profile and "profile" in results[0]:
                        print(*key.values(), json.dumps(results[0]["profile"]), flush=True)
                args.out.write_text(json.dumps(report, indent=1) + "\n")
    headers = ["model", "shape", "checkpointing", "arm", "tokens/s", "peak memory"]
    print(tabulate(table, headers, tablefmt="github", disable_numparse=True))


if __name__ == "__main__":
    main()
