"""Fine-tunes a model with Lightning.

    pip install lightning
    python examples/recipes/lightning_module.py --model Qwen/Qwen3-0.6B --data texts.jsonl --out out/lightning

Each line of --data is {"text": ...}.
"""

import argparse
import json

import liger_kernel
import lightning
from liger_kernel.optim import LigerAdamW
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer


class Tuned(lightning.LightningModule):
    def __init__(self, name, lr):
        super().__init__()
        self.lr = lr
        # In the dtype of the checkpoint where that is bfloat16: LigerAdamW then adds updates with their rounding error.
        self.model = AutoModelForCausalLM.from_pretrained(name, dtype="auto", use_cache=False).train()
        print(liger_kernel.patch(self.model))

    def training_step(self, batch, index):
        loss = self.model(**batch).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return LigerAdamW(self.parameters(), lr=self.lr)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="Qwen/Qwen3-0.6B", help="folder, or name on the hub (default: %(default)s)")
    parser.add_argument("--data", required=True, help="lines of JSON")
    parser.add_argument("--out", required=True, help="folder for the trained model")
    parser.add_argument("--length", type=int, default=1024, help="of a text, at most (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=4, help="texts of a step (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=1000, help="at most (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=1e-5, help="learning rate (default: %(default)s)")
    args = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    tokenizer.padding_side = "right"

    def collate(texts):
        batch = tokenizer(texts, padding=True, truncation=True, max_length=args.length, return_tensors="pt")
        mask = batch["attention_mask"]
        return {
            "input_ids": batch["input_ids"],
            "attention_mask": mask,
            "labels": batch["input_ids"].masked_fill(mask == 0, -100),
        }

    with open(args.data) as lines:
        texts = [json.loads(line)["text"] for line in lines]
    module = Tuned(args.model, args.lr)
    trainer = lightning.Trainer(max_steps=args.steps, gradient_clip_val=1.0, logger=False, enable_checkpointing=False)
    trainer.fit(module, DataLoader(texts, batch_size=args.batch, shuffle=True, collate_fn=collate))
    module.model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)


if __name__ == "__main__":
    main()
