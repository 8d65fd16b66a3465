"""Fine-tunes an embedding model on pairs of a question and its answer, with Sentence Transformers.

    pip install "sentence-transformers[train]"
    python examples/recipes/embeddings.py --data pairs.jsonl --out out/embeddings

Each line of --data is {"anchor": ..., "positive": ...}; the positives of other lines are the negatives.
"""

import argparse

import liger_kernel
from datasets import load_dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.losses import CachedMultipleNegativesRankingLoss


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="Qwen/Qwen3-Embedding-0.6B", help="folder, or name on the hub")
    parser.add_argument("--data", required=True, help="lines of JSON")
    parser.add_argument("--out", required=True, help="folder for the trained model")
    parser.add_argument("--length", type=int, default=512, help="of a text, at most (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=1024, help="pairs of a step (default: %(default)s)")
    parser.add_argument("--mini-batch", type=int, default=64, help="texts of a forward (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=1000, help="at most (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=2e-5, help="learning rate (default: %(default)s)")
    parser.add_argument("--cpu", action="store_true", help="leave the GPU alone")
    args = parser.parse_args()

    model = SentenceTransformer(args.model, device="cpu" if args.cpu else None)
    model.max_seq_length = args.length
    print(liger_kernel.patch(model))
    options = SentenceTransformerTrainingArguments(
        output_dir=args.out,
        max_steps=args.steps,
        per_device_train_batch_size=args.batch,
        learning_rate=args.lr,
        bf16=not args.cpu,
        use_cpu=args.cpu,
        logging_steps=min(10, args.steps),
        report_to=[],
    )
    trainer = SentenceTransformerTrainer(
        model=model,
        args=options,
        train_dataset=load_dataset("json", data_files=args.data, split="train"),
        loss=CachedMultipleNegativesRankingLoss(model, mini_batch_size=args.mini_batch),
    )
    trainer.train()
    model.save_pretrained(args.out)


if __name__ == "__main__":
    main()
