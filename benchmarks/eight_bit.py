"""How far LoRA on a quantised base is from LoRA on the base that it was made of.

    python benchmarks/eight_bit.py --out out/eight-bit.json

A Llama of 8 layers is trained on the sources of Python's standard library, byte by byte. Then, for each base (bfloat16,
int8 and fp8 of liger_kernel.quantise, and with bitsandbytes its int8 and nf4), with the same adapters of rank 16:

    product    relative error of the linear layers' products with their own inputs: the mean over all layers
    loss       difference from the float64 model's
    gradients  relative error of all adapters' gradients together, and of the worst adapter, against float64
    trained    the mean loss of the last 50 of 500 steps on another text: the descriptions of the
               installed packages

The float64 model has the weights in bfloat16 of which the bases are made.
"""

import argparse
import copy
import json
import statistics
import sysconfig
from pathlib import Path

import torch
from liger_kernel import patch, quantise
from liger_kernel.measure.machine import machine
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

LENGTH, BATCH = 512, 16


def text(pattern, folder, most=20_000_000):
    """Bytes of the files of a folder, in the order of their names."""
    parts, total = [], 0
    for path in sorted(Path(folder).rglob(pattern)):
        if total < most and path.is_file():
            parts.append(path.read_bytes())
            total += len(parts[-1])
    return torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8)


def batches(data, device, seed):
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(data) - LENGTH, (BATCH,), generator=generator)
        yield torch.stack([data[start : start + LENGTH] for start in starts]).long().to(device)


def base_model(data, device, steps):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=512, intermediate_size=1408, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=8, use_cache=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(device)
    report = patch(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=steps)
    for ids, _ in zip(batches(data, device, 0), range(steps)):
        with torch.autocast(device, torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step(), schedule.step(), optimizer.zero_grad()
    print(f"base model: loss {loss.item():.4f} after {steps} steps", flush=True)
    report.undo()
    return model.bfloat16()


def subject(device, steps):
    """The base model, token ids of one batch, and another text."""
    folders = sysconfig.get_paths()
    python, other = text("*.py", folders["stdlib"]), text("*METADATA", folders["purelib"])
    return base_model(python, device, steps), next(batches(python, device, 3)), other


def trained(model, parameters, lr, other, device, steps):
    """The loss of each step of training on another text."""
    optimizer = torch.optim.AdamW(parameters, lr=lr)
    losses = []
    for batch, _ in zip(batches(other, device, 1), range(steps)):
        with torch.autocast(device, torch.bfloat16):
            loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step(), optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


def bitsandbytes_layers(model, kind):
    """The linear layers of the blocks as those of bitsandbytes."""
    import bitsandbytes

    for name, module in list(model.model.named_modules()):
        if type(module) is not nn.Linear:
            continue
        sizes = module.in_features, module.out_features
        if kind == "nf4":
            new = bitsandbytes.nn.Linear4bit(*sizes, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4")
            new.weight = bitsandbytes.nn.Params4bit(module.weight.data.cpu(), requires_grad=False, quant_type="nf4")
        else:
            new = bitsandbytes.nn.Linear8bitLt(*sizes, bias=False, has_fp16_weights=False, threshold=6.0)
            new.weight = bitsandbytes.nn.Int8Params(module.weight.data.cpu(), requires_grad=False)
        parent, _, last = name.rpartition(".")
        setattr(model.model.get_submodule(parent), last, new.to(module.weight.device))
    model.is_loaded_in_4bit, model.is_loaded_in_8bit = kind == "nf4", kind != "nf4"


def adapted(model):
    model.requires_grad_(False)
    torch.manual_seed(1)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules=targets))
    torch.manual_seed(2)
    for name, parameter in model.named_parameters():  # as in training, where B is no longer 0
        if "lora_B" in name:
            parameter.data.copy_(torch.randn(parameter.shape) * 0.01)
    return model


def step(model, ids, autocast):
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=autocast):
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    grads = {n: p.grad.double() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return loss.item(), grads


def product_error(model, plain, ids):
    """The mean relative error of what the linear layers of a model give, against those of the plain model with the same
    inputs in float64."""
    errors, hooks = [], []
    for name, module in plain.model.named_modules():
        if type(module) is nn.Linear:
            other = model.model.get_submodule(name)

            def compare(module, args, y, other=other):
                exact = nn.functional.linear(args[0].double(), module.weight.double())
                errors.append(((other(args[0]).double() - exact).norm() / exact.norm()).item())

            hooks.append(module.register_forward_hook(compare))
    with torch.no_grad():
        plain(input_ids=ids)
    for hook in hooks:
        hook.remove()
    return statistics.mean(errors)


def row(kind, plain, exact, ids, other, device, steps):
    model = copy.deepcopy(plain)
    if kind in ("int8", "fp8"):
        quantise(model, kind)
    elif kind != "bfloat16":
        bitsandbytes_layers(model, kind)
    error = product_error(model, plain, ids)
    model = adapted(model)
    patch(model)
    loss, grads = step(model, ids, True)
    exact_loss, exact_grads = exact
    far = {n: ((grads[n] - g).norm() / g.norm()).item() for n, g in exact_grads.items()}
    total = sum((grads[n] - g).square().sum() for n, g in exact_grads.items()) ** 0.5
    norm = sum(g.square().sum() for g in exact_grads.values()) ** 0.5
    losses = trained(model, [p for p in model.parameters() if p.requires_grad], 3e-4, other, device, steps)
    found = {
        "base": kind, "product": error, "loss": loss - exact_loss, "gradients": (total / norm).item(),
        "worst": max(far.values()), "trained": statistics.mean(losses[-50:]), "losses": losses[:: max(1, steps // 50)],
    }  # fmt: skip
    print({name: value for name, value in found.items() if name != "losses"}, flush=True)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bases", default="bfloat16,int8,fp8,bitsandbytes int8,nf4", help="default: %(default)s")
    parser.add_argument("--base-steps", type=int, default=1500, help="of training the base (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=500, help="of training the adapters (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("out/eight-bit.json"), help="default: %(default)s")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    plain, ids, other = subject(device, args.base_steps)
    exact = step(adapted(copy.deepcopy(plain)).double(), ids, False)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    report = {"machine": machine(device, sources=Path(__file__).parent), "loss": exact[0], "rows": []}
    for kind in args.bases.split(","):
        report["rows"].append(row(kind, plain, exact, ids, other, device, args.steps))
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
