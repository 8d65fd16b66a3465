"""Train Hugging Face's Llama on real text twice, plain and with this library's one-line patch, and compare.

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
import text
import torch


def arguments(argv=None):
    parser = comparison.parser(__doc__)
    add = parser.add_argument
    add("--model", metavar="DIR_OR_NAME", help="train this checkpoint or hub model, not a fresh Llama of size --config")
    add("--batch", type=int, help="sequences in a step (default: 4 on a CPU, up to 8 on a GPU, by its memory)")
    add("--length", type=int, help="tokens in a sequence (default: 1024 on a CPU, 2048 on a GPU)")
    add("--gradient-checkpointing", action="store_true", help="in both runs")
    args = parser.parse_args(argv)
    if args.worker:
        return args
    comparison.settle(parser, args)
    args.length = args.length or (1024 if args.device == "cpu" else 2048)
    args.batch = args.batch or comparison.fitting_batch(args.device, 12)  # GB of the model and its optimiser
    args.lr = args.lr or (1e-5 if args.model else comparison.SIZES[args.config][1])
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
        vocab_size = comparison.SIZES[args.config][0][0]
    texts = text.documents(args.text, tokenizer)
    tokenizer = tokenizer or text.bpe(texts, vocab_size)
    numpy.save(path, text.blocks(texts, tokenizer, args.steps * args.batch, args.length, args.seed))
    return text.description(args.text, texts, tokenizer)


def work(run):
    """One training run, in a process of its own: its result goes to the file run.result."""
    from tqdm import tqdm
    from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments
    from transformers import PrinterCallback, set_seed

    config = AutoConfig.from_pretrained(run.model) if run.model else comparison.llama_config(run)
    if run.side == "liger":
        import liger_kernel.transformers

        # For a Llama: from liger_kernel.transformers import apply_liger_kernel_to_llama; apply_liger_kernel_to_llama()
        getattr(liger_kernel.transformers, f"apply_liger_kernel_to_{config.model_type}")()
    set_seed(run.seed)
    dtype = getattr(torch, run.dtype)
    if run.model:
        model = AutoModelForCausalLM.from_pretrained(run.model, dtype=dtype)
    else:
        with torch.device(run.device):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    if run.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if run.side == "noise":
        comparison.flip_a_last_bit(model)

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
        trainer = Recorded(
            model=model,
            args=TrainingArguments(
                output_dir=folder,
                max_steps=run.steps,
                per_device_train_batch_size=run.batch,
                learning_rate=run.lr,
                lr_scheduler_type="constant",  # so that a shorter run takes the same steps
                use_cpu=run.device == "cpu",
                dataloader_pin_memory=run.device == "cuda",
                seed=run.seed,
                logging_strategy="no",
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
            ),
            train_dataset=[{"input_ids": row, "labels": row} for row in torch.from_numpy(numpy.load(run.tokens))],
            callbacks=[Watch()],
        )
        trainer.remove_callback(PrinterCallback)
        try:
            trainer.train()
        except torch.OutOfMemoryError as error:
            sys.exit(f"{error}\n{comparison.OUT_OF_MEMORY}")

    steps.write()


def main():
    args = arguments()
    if args.worker:
        return work(SimpleNamespace(**json.loads(args.worker)))
    with tempfile.TemporaryDirectory() as folder:
        args.tokens = os.path.join(folder, "tokens.npy")
        print(write_tokens(args, args.tokens), flush=True)
        report = comparison.run_sides(__file__, args)
    comparison.finish(args, "train", {"Training loss": report}, report)


if __name__ == "__main__":
    main()
