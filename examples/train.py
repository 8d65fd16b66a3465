"""Train Hugging Face's Llama, or another family, on real text twice, plain and with this library's patch, and compare.

Each run has a process of its own, the same seed and the same data. A third, shorter run is plain with one weight matrix
changed in its last bit: how far it strays from the plain run is what "the same loss" means in this arithmetic.
"""

import json
import os
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import comparison
import numpy
import random_models
import text
import torch

# Of docs/families.md: dense, softcapped, with experts, with images.
MEASURED = "llama,qwen3,phi3,gemma2,gemma3_text,mixtral,qwen3_moe,qwen2_5_vl"

LORA_LR = 2e-4  # of adapters, whose B starts at zero


def arguments(argv=None):
    parser = comparison.parser(__doc__)
    add = parser.add_argument
    add("--model", metavar="DIR_OR_NAME", help="train this checkpoint or hub model, not a fresh Llama of size --config")
    which = "a fresh model of each of these families of docs/families.md, or of 'measured', those timed there"
    add("--family", metavar="NAME,NAME", default="llama", help=f"{which} (default: %(default)s)")
    add("--triton-liger", metavar="DIR", help="a folder that holds liger_kernel with Triton: a run with that one too")
    add("--batch", type=int, help="sequences in a step (default: 4 on a CPU, up to 8 on a GPU, by its memory)")
    add("--length", type=int, help="tokens in a sequence (default: 1024 on a CPU, 2048 on a GPU)")
    add("--gradient-checkpointing", action="store_true", help="in both runs")
    add(
        "--lora",
        type=int,
        metavar="RANK",
        help="train adapters of PEFT of this rank on all linear layers, in both runs",
    )
    add("--budget", metavar="BYTES", help='memory of a GPU, as "70GiB": layers of the patched run keep what fits in it')
    args = parser.parse_args(argv)
    if args.worker:
        return args
    comparison.settle(parser, args)
    args.family = MEASURED if args.family == "measured" else args.family
    known = random_models.language_models()
    if unknown := set(args.family.split(",")).difference(known):
        parser.error(f"there is no family {', '.join(sorted(unknown))}: take some of {', '.join(known)}")
    if args.model and args.family != "llama":
        parser.error("--family makes fresh models: leave out --model, whose family its configuration says")
    if args.triton_liger and not Path(args.triton_liger, "liger_kernel").is_dir():
        parser.error(f"there is no package liger_kernel in {args.triton_liger}")
    args.length = args.length or (1024 if args.device == "cpu" else 2048)
    args.batch = args.batch or comparison.fitting_batch(args.device, 12)  # GB of the model and its optimiser
    args.lr = args.lr or (LORA_LR if args.lora else 1e-5 if args.model else comparison.SIZES[args.config][1])
    args.config = None if args.model else args.config
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
        # A model with images has ids of its own for them at the end of its vocabulary.
        vocab_size = comparison.SIZES[args.config][0][0] - (args.family != "llama") * random_models.SPECIAL
    texts = text.documents(args.text, tokenizer)
    tokenizer = tokenizer or text.bpe(texts, vocab_size)
    numpy.save(path, text.blocks(texts, tokenizer, args.steps * args.batch, args.length, args.seed))
    return text.description(args.text, texts, tokenizer)


def fresh_model(run, dtype):
    from transformers import AutoModelForCausalLM

    if run.family == "llama":
        return AutoModelForCausalLM.from_config(comparison.llama_config(run), dtype=dtype)
    vocabulary, hidden, intermediate, layers = comparison.SIZES[run.config][0][:4]
    width, depth = hidden // random_models.TEXT["hidden_size"], layers // random_models.TEXT["num_hidden_layers"]
    size = random_models.Size(width, depth, vocabulary, intermediate, run.length)
    return random_models.language_model(run.family, size, dtype)


def work(run):
    """One training run, in a process of its own: its result goes to the file run.result."""
    from tqdm import tqdm
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        PrinterCallback,
        Trainer,
        TrainerCallback,
        TrainingArguments,
        set_seed,
    )

    config = AutoConfig.from_pretrained(run.model) if run.model else None
    family = config.model_type if config else run.family
    if run.side in ("liger", "triton"):
        import liger_kernel.transformers

        home = Path(liger_kernel.__path__[0]).resolve().parent
        if run.side == "triton" and home != Path(run.triton_liger).resolve():
            sys.exit(f"liger_kernel comes from {home}, not from {run.triton_liger}")
        # For a Llama: from liger_kernel.transformers import apply_liger_kernel_to_llama; apply_liger_kernel_to_llama()
        getattr(liger_kernel.transformers, f"apply_liger_kernel_to_{family}")()
    set_seed(run.seed)
    dtype = getattr(torch, run.dtype)
    if run.model:
        model = AutoModelForCausalLM.from_pretrained(run.model, dtype=dtype)
    else:
        with torch.device(run.device):
            model = fresh_model(run, dtype)
    if run.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if run.budget and run.side == "liger":
        import liger_kernel.memory

        liger_kernel.memory.plan_later(model, run.budget)
    cap = comparison.cap_of(model)
    if run.side in ("capped", "noise"):
        comparison.cap_in_float(model)
    if run.side == "noise":
        comparison.flip_a_last_bit(model)
    if run.lora:
        from peft import LoraConfig, get_peft_model

        settings = {"target_modules": "all-linear", "task_type": "CAUSAL_LM"}
        model = get_peft_model(model, LoraConfig(r=run.lora, lora_alpha=2 * run.lora, **settings))

    marks = () if run.model else random_models.MARKS.get(family, {}).items()

    class Recorded(Trainer):
        def training_step(self, *args, **kwargs):
            self.loss = super().training_step(*args, **kwargs)
            return self.loss

    class Watch(TrainerCallback):
        def on_step_begin(self, *args, **kwargs):
            steps.begin()

        def on_step_end(self, *args, optimizer, **kwargs):
            steps.end(trainer.loss, optimizer)

    with tempfile.TemporaryDirectory() as folder, tqdm(total=run.steps, desc=run.side) as bar:
        steps = comparison.Steps(run, bar, model)
        steps.cap = cap
        trainer = Recorded(
            model=model,
            args=TrainingArguments(
                output_dir=folder,
                max_steps=run.steps,
                per_device_train_batch_size=run.batch,
                learning_rate=run.lr,
                lr_scheduler_type="constant",  # so that a shorter run takes the same steps
                bf16=bool(run.lora) and run.dtype == "bfloat16",  # adapters are in float32
                use_cpu=run.device == "cpu",
                dataloader_pin_memory=run.device == "cuda",
                seed=run.seed,
                logging_strategy="no",
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
            ),
            train_dataset=[
                {"input_ids": row, "labels": row, **{name: torch.full_like(row, value) for name, value in marks}}
                for row in torch.from_numpy(numpy.load(run.tokens))
            ],
            callbacks=[Watch()],
        )
        trainer.remove_callback(PrinterCallback)
        try:
            trainer.train()
        except torch.OutOfMemoryError as error:
            sys.exit(f"{error}\n{comparison.OUT_OF_MEMORY}")

    steps.write()


def in_markdown(reports):
    """A row for each family: speed and memory of plain, and of each other run in relation to it."""
    from tabulate import tabulate

    others = [side for side in comparison.RUNS[1:] if any(side in report for report in reports.values())]
    headers = ["family", "parameters", "tokens/s", *others, "memory of a step", *others, "loss differs by"]
    rows = []
    for family, report in reports.items():
        row = [family, f"{report['plain']['parameters'] / 1e6:,.0f} M"]
        for key, form, relation in (
            ("tokens_per_second", "{:,.0f}".format, comparison.speed),
            ("step_peak_bytes", comparison.size, comparison.less),
        ):
            plain, runs = report["plain"][key], (report.get(side) for side in others)
            row += [form(plain), *(run and f"{form(run[key])} ({relation(plain, run[key])})" for run in runs)]
        rows.append([*row, f"{report['comparison']['difference_of_all_steps']:.1e}"])
    return tabulate(rows, headers, tablefmt="github", disable_numparse=True)


def main():
    args = arguments()
    if args.worker:
        return work(SimpleNamespace(**json.loads(args.worker)))
    reports = {}
    with tempfile.TemporaryDirectory() as folder:
        for family in args.family.split(","):
            one = SimpleNamespace(**{**vars(args), "family": family, "tokens": os.path.join(folder, f"{family}.npy")})
            print(write_tokens(one, one.tokens), flush=True)
            reports[family] = comparison.run_sides(__file__, one)
    if len(reports) == 1:
        (report,) = reports.values()
        return comparison.finish(args, "train", {"Training loss": report}, report)
    if not args.only:
        print(f"\n{in_markdown(reports)}")
    comparison.finish(args, "families", reports, reports)


if __name__ == "__main__":
    main()
