"""Whether documents keep their bits in any batch while liger_kernel.batch_invariant is on, and what a step costs.

    python benchmarks/batch_invariance.py --out out/batch-invariance.json
    python benchmarks/batch_invariance.py --models tiny:llama,llama-1b --layers 4 --tokens 512       smaller

A model is one of liger_kernel.measure.shapes or tiny:FAMILY, the small one of examples/random_models.py; weights are
random. For each there is a row with

    pairs      how many rows of logits, of all documents in all batches, were compared with those of the document alone
    off, on    how many of them differ without and with batch_invariant
    first      where rows differ with it: the module that the audit names
    backward   whether two backward passes of a packed batch have the same gradients, without and with it
    seconds    of a training step without and with it, in turns, each measurement; and the peak of memory

Batches: all documents packed in one row, in two orders; padded on the right, in two orders; some of them, padded to
another length.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import liger_kernel
import torch
from liger_kernel.measure.machine import machine
from liger_kernel.measure.report import table
from liger_kernel.measure.shapes import SHAPES, config_of

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from random_models import MODELS  # noqa: E402

TINY = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "phi3", "olmo2", "mixtral", "qwen3_moe",
        "gpt_oss", "qwen3_next", "falcon_h1")  # fmt: skip
DEFAULT = (*(f"tiny:{family}" for family in TINY), "llama-1b", "qwen3-1.7b", "qwen3-moe-4b")


def model_of(name, layers, dtype, device):
    torch.manual_seed(0)
    if not name.startswith("tiny:"):
        from transformers import AutoModelForCausalLM

        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config_of(name, layers)[0], dtype=dtype)
    else:
        import transformers

        family = name.removeprefix("tiny:")
        kind, config = next(iter(MODELS[family].items()))
        made = config()
        made.max_position_embeddings = 65536  # of packed rows
        model = getattr(transformers, kind)(made).to(device, dtype)
    liger_kernel.patch(model)
    return model.train()


def documents(count, longest, vocabulary, device):
    """Of one token up to `longest`, with few multiples of anything among their lengths."""
    generator = torch.Generator().manual_seed(0)
    lengths = [1, longest, *torch.randint(2, longest, (count - 2,), generator=generator).tolist()]
    return [torch.randint(3, min(vocabulary, 110), (n,), generator=generator).to(device) for n in lengths]


def packed(some):
    positions = torch.cat([torch.arange(len(d), device=d.device) for d in some])[None]
    places = torch.arange(sum(map(len, some))).split([len(d) for d in some])
    return {"input_ids": torch.cat(some)[None], "position_ids": positions}, places


def padded(some, length):
    ids = torch.zeros(len(some), length, dtype=torch.long, device=some[0].device)
    mask = torch.zeros_like(ids)
    for row, document in enumerate(some):
        ids[row, : len(document)], mask[row, : len(document)] = document, 1
    places = [row * length + torch.arange(len(d)) for row, d in enumerate(some)]
    return {"input_ids": ids, "attention_mask": mask}, places


def batches(every):
    longest, order = max(map(len, every)), torch.randperm(len(every), generator=torch.Generator().manual_seed(1))
    for numbers in ([*range(len(every))], order.tolist()):
        some = [every[n] for n in numbers]
        yield numbers, *packed(some)
        yield numbers, *padded(some, longest)
    numbers = order.tolist()[: len(every) // 2]
    yield numbers, *padded([every[n] for n in numbers], longest + 9)


def compared(model, every):
    """(rows that were compared, rows that differ, the numbers of the runs of the first document that does, its tokens
    in both)."""
    pairs = differ = 0
    first = None
    with torch.no_grad():
        alone = [model(input_ids=d[None], use_cache=False).logits[0] for d in every]
        for run, (numbers, inputs, places) in enumerate(batches(every)):
            logits = model(**inputs, use_cache=False).logits.flatten(0, 1)
            for n, where in zip(numbers, places):
                rows = (logits[where.to(logits.device)] != alone[n]).any(-1)
                pairs, differ = pairs + len(rows), differ + int(rows.sum())
                if first is None and rows.any():
                    first = (n, len(every) + run), slice(0, len(rows)), where
    return pairs, differ, first


def gradients(model, inputs):
    model.zero_grad(set_to_none=True)
    model(**inputs, labels=inputs["input_ids"], use_cache=False).loss.backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def is_deterministic(model, inputs):
    one = [grad.clone() for grad in gradients(model, inputs)]
    return all(torch.equal(a, b) for a, b in zip(one, gradients(model, inputs)))


def bits(model, every):
    pairs, off, _ = compared(model.eval(), every)
    model.train()
    inputs, _ = packed(every)
    found = {"pairs": pairs, "off": off, "backward off": is_deterministic(model, inputs)}
    with liger_kernel.batch_invariant(model) as invariant:
        found["backward on"] = is_deterministic(model, inputs)
        found["report"] = str(invariant).splitlines()
        _, found["on"], first = compared(model.eval(), every)
    model.train()
    if first is not None:
        with liger_kernel.batch_invariant(model.eval(), audit=True) as invariant:
            compared(model, every)
            runs, tokens, others = first
            found["first"] = str(invariant.audit.first_difference(tokens, others, runs))
    model.zero_grad(set_to_none=True)
    return found


def step_seconds(model, inputs, device, steps):
    def synchronise():
        if device == "cuda":
            torch.cuda.synchronize()

    gradients(model, inputs)
    times = []
    for _ in range(steps):
        synchronise()
        start = time.perf_counter()
        gradients(model, inputs)
        synchronise()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def cost(model, rows, length, vocabulary, device, rounds, steps):
    """Seconds and bytes of a step over whole rows, without and with, in turns."""
    ids = torch.randint(3, vocabulary, (rows, length), device=device)
    found = {"seconds off": [], "seconds on": []}
    for _ in range(rounds):
        for arm in ("off", "on"):
            invariant = liger_kernel.batch_invariant(model) if arm == "on" else None
            if device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            found[f"seconds {arm}"].append(step_seconds(model, {"input_ids": ids}, device, steps))
            if device == "cuda":
                found[f"peak {arm}"] = torch.cuda.max_memory_allocated()
            if invariant is not None:
                invariant.undo()
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--models", default=",".join(DEFAULT), help=f"tiny:FAMILY, {', '.join(SHAPES)} (default: %(default)s)")
    add("--layers", type=int, help="of the shapes that are not tiny; default: all")
    add("--dtype", default="bfloat16", help="default: %(default)s")
    add("--documents", type=int, default=24, help="default: %(default)s")
    add("--longest", type=int, default=300, help="tokens of a document (default: %(default)s)")
    add("--tokens", type=int, default=8192, help="of a measured step, in rows of 2048; 0: none (default: %(default)s)")
    add("--rounds", type=int, default=3, help="default: %(default)s")
    add("--steps", type=int, default=5, help="of a measurement, whose median counts (default: %(default)s)")
    add("--out", type=Path, default=Path("out/batch-invariance.json"), help="default: %(default)s")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    args.out.parent.mkdir(parents=True, exist_ok=True)
    report = {"machine": machine(device, sources=Path(__file__).parent), "dtype": args.dtype, "rows": []}
    lines = []
    for name in args.models.split(","):
        model = model_of(name, args.layers, getattr(torch, args.dtype), device)
        vocabulary = model.config.get_text_config().vocab_size
        row = {"model": name, **bits(model, documents(args.documents, args.longest, vocabulary, device))}
        if args.tokens and not name.startswith("tiny:"):
            length = min(2048, args.tokens)
            row |= cost(model, args.tokens // length, length, vocabulary, device, args.rounds, args.steps)
        report["rows"].append(row)
        args.out.write_text(json.dumps(report, indent=1) + "\n")
        off, on = (min(row.get(f"seconds {arm}", [0])) for arm in ("off", "on"))  # another process may slow some
        ratio = f"{on / off:.3f}" if off else ""
        lines.append([name, *(str(row[key]) for key in ("pairs", "off", "on", "backward off", "backward on")), ratio])
        print(*lines[-1], row.get("first", ""), flush=True)
        del model
    print(table(["model", "pairs", "differ off", "differ on", "same gradients off", "on", "step"], lines))


if __name__ == "__main__":
    main()
