"""Has the parsers of liger::models read broken files for some seconds: fuzz_files.py <fuzz_files> [seconds] [seed].

It makes the files to begin with: checkpoints, configurations and tokenizers as transformers and PEFT write them.
"""

import json
import pathlib
import random
import subprocess
import sys
import tempfile

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CONFIG = dict(
    architectures=["LlamaForCausalLM"], model_type="llama", hidden_act="silu", hidden_size=64, intermediate_size=128,
    max_position_embeddings=128, num_attention_heads=4, num_hidden_layers=2, num_key_value_heads=2, rms_norm_eps=1e-5,
    rope_theta=10000.0, vocab_size=512, tie_word_embeddings=False, torch_dtype="float32",
    rope_scaling=dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64,
                      rope_type="llama3"),
)  # fmt: skip
ADAPTER = dict(
    peft_type="LORA", task_type="CAUSAL_LM", r=4, lora_alpha=8, use_rslora=False, lora_dropout=0.1, bias="none",
    target_modules=["q_proj", "v_proj"], base_model_name_or_path="base", fan_in_fan_out=False, modules_to_save=None,
)  # fmt: skip
WORDS = r"(?i:'s|'t|'re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def tokenizer(folder):
    words = pre_tokenizers.Split(Regex(WORDS), behavior="isolated")
    made = Tokenizer(models.BPE())
    made.normalizer, made.decoder = normalizers.NFC(), decoders.ByteLevel()
    made.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(False, use_regex=False)])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|begin|>", "<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(["hello hello don't stop stopping 12345 12345"] * 9, trainer)
    made.add_tokens([AddedToken("<left>", lstrip=True, normalized=False), AddedToken("whole", single_word=True)])
    made.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", pair="<|begin|> $A <|end|> $B:1", special_tokens=[("<|begin|>", 0), ("<|end|>", 1)]
    )
    made.save(str(folder / "tokenizer.json"))
    tokens = dict(bos_token="<|begin|>", eos_token="<|end|>")
    (folder / "tokenizer_config.json").write_text(json.dumps(dict(tokenizer_class="PreTrainedTokenizerFast", **tokens)))
    (folder / "special_tokens_map.json").write_text(json.dumps(tokens))


def checkpoint(folder):
    tensors = {"a": torch.randn(3, 5), "b": torch.arange(4), "c": torch.ones(2, dtype=torch.bfloat16)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "adapter_config.json").write_text(json.dumps(ADAPTER))


def shards(folder):
    for i, name in enumerate("ab"):
        save_file({name: torch.randn(i + 1, 3)}, folder / f"part-{i}.safetensors")
    files = {name: f"part-{i}.safetensors" for i, name in enumerate("ab")}
    index = dict(metadata=dict(total_size=36), weight_map=files)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def main(program, seconds="10", seed=None):
    seed = seed or str(random.randrange(2**32))
    with tempfile.TemporaryDirectory() as temporary:
        seeds, work = pathlib.Path(temporary, "seeds"), pathlib.Path(temporary, "broken")
        for make in (tokenizer, checkpoint, shards):
            folder = seeds / make.__name__
            folder.mkdir(parents=True)
            make(folder)
        print(f"seed {seed}", flush=True)
        done = subprocess.run([program, seconds, seed, str(seeds), str(work)])
        if done.returncode:
            kept = pathlib.Path("fuzz_files-broken")
            work.rename(kept) if work.exists() and not kept.exists() else None
            print(f"the files are in {kept}", file=sys.stderr)
        return done.returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
