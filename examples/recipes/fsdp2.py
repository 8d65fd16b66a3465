"""Fine-tunes all weights of a model on several GPUs with FSDP2, in a loop of its own.

    torchrun --nproc-per-node 4 examples/recipes/fsdp2.py --model Qwen/Qwen3-8B --data texts.jsonl --out out/fsdp2

Each line of --data is {"text": ...}. Texts follow one another in rows of --length tokens.
"""

import argparse
import json
import os

import liger_kernel
import torch
import torch.distributed as dist
from liger_kernel.optim import LigerAdamW
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM, AutoTokenizer


def rows(file, tokenizer, length):
    """Tokens of all texts, one after the other, in rows [length]."""
    tokens = []
    with open(file) as lines:
        for line in lines:
            tokens += tokenizer(json.loads(line)["text"])["input_ids"] + [tokenizer.eos_token_id]
    return torch.tensor(tokens[: len(tokens) // length * length]).view(-1, length)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="Qwen/Qwen3-8B", help="folder, or name on the hub (default: %(default)s)")
    parser.add_argument("--data", required=True, help="lines of JSON")
    parser.add_argument("--out", required=True, help="folder for the trained model")
    parser.add_argument("--length", type=int, default=4096, help="tokens of a row (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=1, help="rows of a GPU and step (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=1000, help="at most (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=1e-5, help="learning rate (default: %(default)s)")
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    mesh = init_device_mesh(device, (int(os.environ["WORLD_SIZE"]),))
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32, use_cache=False).train()
    liger_kernel.patch(model)
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    fully_shard(model, mesh=mesh, mp_policy=precision)
    model.to(device)
    optimizer = LigerAdamW(model.parameters(), lr=args.lr, weight_decay=0.1)

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    mine = rows(args.data, tokenizer, args.length)[dist.get_rank() :: dist.get_world_size()]
    # The same number of steps on each rank.
    steps = torch.tensor(min(args.steps, len(mine) // args.batch), device=device)
    dist.all_reduce(steps, dist.ReduceOp.MIN)
    if steps == 0:
        raise SystemExit(f"{args.data} has no row of {args.length} tokens for each rank")
    for step in range(int(steps)):
        ids = mine[step * args.batch : (step + 1) * args.batch].to(device)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and step % 10 == 0:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)

    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        model.save_pretrained(args.out, state_dict=state)
        tokenizer.save_pretrained(args.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
