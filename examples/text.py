"""Text that every machine has, and tokens of it: what the examples train on when they are given no text of the user's own."""

import hashlib
import json
import os
import random
import sysconfig
from pathlib import Path

import numpy

END = "<|endoftext|>"
# Tests and generated tables say little that is worth learning; installed packages differ from machine to machine.
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data", "lib2to3"}


def standard_library():
    """The sources of Python's standard library and pydoc's help topics, in a fixed order."""
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(f for f in root.rglob("*.py") if SKIPPED.isdisjoint(f.relative_to(root).parts))
    texts = [f.read_text("utf-8", errors="ignore") for f in files]
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some distributions leave it out
        topics = {}
    return texts + [topics[name] for name in sorted(topics)]


def documents(path=None, tokenizer=None):
    """A list of texts: of the standard library, of a text file, or of JSON lines with a field "text" or "messages"."""

    def document(row):
        if "text" in row:
            return row["text"]
        if getattr(tokenizer, "chat_template", None):
            return tokenizer.apply_chat_template(row["messages"], tokenize=False)
        return "\n".join(f"{message['role']}: {message['content']}" for message in row["messages"])

    content = Path(path).read_text("utf-8") if path else None
    texts = [content] if path else standard_library()
    if path and Path(path).suffix == ".jsonl":
        texts = []
        for number, line in enumerate(content.split("\n"), 1):
            try:
                texts += [document(json.loads(line))] if line.strip() else []
            except (ValueError, KeyError, TypeError) as error:
                expected = 'expected JSON with "text" or "messages"'
                raise SystemExit(f"{path}, line {number}: {expected}, got {error!r}") from None
    if not any(text.strip() for text in texts):
        raise SystemExit(f"{path or 'The standard library'} holds no text: give a file of your own with --text")
    return texts


def description(path, texts, tokenizer):
    source = path or "Python's standard library"
    return f"{source}: {sum(map(len, texts)) / 1e6:.1f} million characters, a vocabulary of {len(tokenizer)} tokens"


def bpe(texts, vocab_size, cache=None):
    """A byte-level BPE of at most vocab_size tokens trained on the texts, kept in the cache for the next time."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    cache = Path(cache or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "liger_kernel")
    path = cache / f"bpe-{vocab_size}-{hashlib.sha256(repr(texts).encode()).hexdigest()[:16]}.json"
    if not path.exists():
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
        )
        tokenizer.train_from_iterator(texts, trainer)
        cache.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}")  # another process must not read half a file
        tokenizer.save(str(unfinished))
        unfinished.replace(path)
    return PreTrainedTokenizerFast(tokenizer_file=str(path), eos_token=END)


def blocks(texts, tokenizer, count, length, seed):
    """count rows of length tokens: the texts, in an order drawn from seed, one after another, and again if too few."""
    texts = random.Random(seed).sample(texts, len(texts))
    ids = []
    while len(ids) < count * length:
        for text in texts:
            ids += tokenizer(text, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id or 0]
            if len(ids) >= count * length:
                break
    return numpy.array(ids[: count * length]).reshape(count, length)
