"""The C++ tokenizer against Python's `tokenizers`: compare_tokenizers.py <run_tokenizer>.

Tokenizers with the pre-tokenizers, normalizers and templates of Llama 3, Qwen 2 and GPT-2 are trained on documents of
twelve scripts, some with special and added tokens in them. All ids and all decoded texts of 1,000 documents are equal,
and another kind of tokenizer is refused. So are the ids that each kind of post-processor, alone and in sequence, makes
of one text and of two, and those that transformers' AutoTokenizer makes with other files in the folder.
"""

import json
import pathlib
import pydoc_data.topics
import random
import subprocess
import sys
import tempfile

import transformers
from tokenizer_files import compare_files
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")
SCRIPTS = {
    "Latin": (0x61, 0x7A), "accents": (0xC0, 0x17F), "Greek": (0x370, 0x3FF), "Cyrillic": (0x410, 0x45F),
    "Hebrew": (0x5D0, 0x5EA), "Arabic": (0x620, 0x64A), "Devanagari": (0x900, 0x97F), "Thai": (0xE01, 0xE4E),
    "Kana": (0x3041, 0x30FF), "Han": (0x4E00, 0x4FFF), "Hangul": (0xAC00, 0xAE00), "emoji": (0x1F600, 0x1F64F),
}  # fmt: skip
# Contractions in both cases and the long s, spaces that Unicode knows or once knew, marks that compose, joined emoji.
PARTS = [
    "'s", "'LL", "'ſ", "don't", "12345", "½", "Ⅷ", "٣٤", "\r\n", "\n\n", "\t", "   ", "\u00a0", "\u3000", "\u2028",
    "\u180e", "\u0085", "\u200b", "\x0b", "\x00", "e\u0301", "A\u030a\u0323", "\u1100\u1161\u11a8", "\u212b", "ﬁ",
    "👩‍👩‍👧", "🇩🇪", "…", "«", "==", "_x_", "中文。",
]  # fmt: skip
SPECIAL = ["<|begin|>", "<|end|>", "<|end|>er"]
ADDED = [
    AddedToken("<left>", lstrip=True, normalized=False),
    AddedToken("<right>", rstrip=True, normalized=False),
    AddedToken("whole", single_word=True, normalized=False),
    AddedToken("\u00e9te\u0301", normalized=True),
    AddedToken("new  word", normalized=True),
]


def documents(count, generator):
    topics = sorted(pydoc_data.topics.topics.values())
    marks = [*SPECIAL, *(token.content for token in ADDED), "wholesome", "\u00e9t\u00e9"]
    made = ["", " ", "a"]
    while len(made) < count:
        if len(made) % 5 == 0:
            topic = generator.choice(topics)
            begin = generator.randrange(len(topic))
            made.append(topic[begin : begin + generator.randrange(1, 2000)])
            continue
        script = SCRIPTS[generator.choice(list(SCRIPTS))]
        words = []
        for _ in range(generator.randrange(1, 80)):
            kind = generator.random()
            if kind < 0.6:
                words.append("".join(chr(generator.randint(*script)) for _ in range(generator.randrange(1, 9))))
            else:
                words.append(generator.choice(PARTS if kind < 0.9 else marks))
            words.append(generator.choice(["", " ", " ", "  ", ", ", ".\n"]))
        made.append("".join(words))
    return made


def trained(texts, pre_tokenizer, normalizer=None, template=False, ignore_merges=False):
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizer, decoders.ByteLevel()
    if normalizer:
        tokenizer.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=3000, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens(ADDED)
    if template:
        begin = processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[("<|begin|>", 0)])
        tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), begin])
    return tokenizer


def split(pattern):
    words = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def tokenizers(texts):
    bytes_only = pre_tokenizers.ByteLevel
    yield "llama 3", trained(texts, split(LLAMA3), template=True, ignore_merges=True)
    yield "qwen 2", trained(texts, split(QWEN2), normalizers.NFC())
    yield "gpt-2", trained(texts, bytes_only(add_prefix_space=False))
    yield "gpt-2 with a space", trained(texts, bytes_only(add_prefix_space=True))
    digits = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), bytes_only(False)])
    yield "digits", trained(texts, digits, normalizers.NFKC())


def post_processors():
    special = [("<|begin|>", 0), ("<|end|>", 1)]
    ends = ("<|end|>", 1), ("<|begin|>", 0)

    def template(single, pair=None):
        return processors.TemplateProcessing(single=single, pair=pair or "$A:0 $B:1", special_tokens=special)

    both = template("<|begin|> $A <|end|>", "<|begin|> $A <|end|> <|begin|>:1 $B:1 <|end|>:1")
    one = template("<|begin|> $A", "<|begin|> $A $B")
    bert, roberta = processors.BertProcessing(*ends), processors.RobertaProcessing(*ends)
    yield from {
        "none": None, "a template": both, "a template without pairs": template("<|begin|> $A"), "bert": bert,
        "roberta": roberta, "the second text first": template("$A <|end|>", "$B <|end|> $A"),
        "a text twice": template("$A <|end|>", "$A $B $A"),
        "two tokens": template("<|begin|> <|begin|> $A <|end|>"),
    }.items()  # fmt: skip
    for name, parts in {
        "byte-level and a template": [processors.ByteLevel(), both], "two templates": [one, both], "none": [],
        "bert twice": [bert, bert], "bert and roberta": [bert, roberta], "bert and a template": [bert, both],
        "a template and roberta": [both, roberta], "in each other": [processors.Sequence([bert]), one],
    }.items():  # fmt: skip
        yield f"a sequence: {name}", processors.Sequence(parts)


def attempt(encode, *arguments, **options):
    """The ids; None where `tokenizers` panics, as it does for what it has not implemented."""
    try:
        return encode(*arguments, **options).ids
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        return None


def run_all(run, documents, files):
    """What C++ prints of the documents with each of the files."""
    done = subprocess.run([run, documents, *files], capture_output=True, text=True, check=True)
    return [json.loads(line) for line in done.stdout.split("\n")[:-1]]


def compare_processors(run, folder, theirs):
    texts = ["", "a", "one two", "<|begin|>three", "four <|end|>"]
    (folder / "documents.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
    made = {}
    for i, (name, processor) in enumerate(post_processors()):
        changed = json.loads(theirs.to_str()) | {"post_processor": None}
        if processor is not None:
            theirs.post_processor = processor
            changed = json.loads(theirs.to_str())
        made[name] = folder / f"tokenizer{i}.json", Tokenizer.from_str(json.dumps(changed))
        made[name][1].save(str(made[name][0]))
    lines = iter(run_all(run, folder / "documents.jsonl", [file for file, _ in made.values()]))
    for name, (_, one) in made.items():
        for before, text in zip(["", *texts], texts):
            found = next(lines)
            for what, value in {
                "ids": one.encode(text).ids,
                "added": one.encode(text).ids,
                "bare": one.encode(text, add_special_tokens=False).ids,
                "pair": attempt(one.encode, before, text),
                "bare pair": attempt(one.encode, before, text, add_special_tokens=False),
            }.items():
                if value is None:
                    assert "is not known" in found[what], (name, what, found[what])
                else:
                    assert found[what] == value, f"{name}: {what} of {text!r} after {before!r}: {found[what]}, {value}"
    assert next(lines, None) is None
    print(f"{len(made)} post-processors agree", flush=True)


def refused(run, folder, good):
    """What each change of a good tokenizer.json is told."""
    changes = {
        "model is no BPE": lambda t: t["model"].update(type="Unigram"),
        "byte_fallback": lambda t: t["model"].update(byte_fallback=True),
        "normalizer": lambda t: t.update(normalizer={"type": "Lowercase"}),
        "pre_tokenizer is not byte-level": lambda t: t.update(pre_tokenizer=None),
        "pre_tokenizer Metaspace": lambda t: t.update(pre_tokenizer={"type": "Metaspace"}),
        "the pattern (": lambda t: t.update(
            pre_tokenizer={"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated"}
        ),
        "key 'behavior' not found": lambda t: t.update(pre_tokenizer={"type": "Split", "pattern": {"Regex": "a"}}),
        "far away has the id 1073741824": lambda t: t["model"]["vocab"].update({"far away": 2**30}),
        "post_processor Unknown": lambda t: t.update(post_processor={"type": "Unknown"}),
        "post_processor: single has a second text": lambda t: t.update(
            post_processor={"type": "TemplateProcessing", "single": [{"Sequence": {"id": "B"}}], "pair": []}
        ),
        "post_processor: single has its text 0 times": lambda t: t.update(
            post_processor={"type": "TemplateProcessing", "single": [], "pair": []}
        ),
        "post_processor: there is no token 9999": lambda t: t.update(
            post_processor={"type": "BertProcessing", "sep": ["a", 9999], "cls": ["b", 1]}
        ),
        "is not in the vocabulary": lambda t: t["model"]["merges"].append(["never", "seen"]),
        "no token for byte 97": lambda t: t["model"]["vocab"].pop("a"),
        "decoder": lambda t: t.update(decoder={"type": "WordPiece"}),
    }
    files = {words: folder / f"changed{i}.json" for i, words in enumerate(changes)}
    for words, change in changes.items():
        changed = json.loads(good)
        change(changed)
        files[words].write_text(json.dumps(changed))
    for (words, file), found in zip(files.items(), run_all(run, "/dev/null", files.values()), strict=True):
        assert words in found["error"] and file.name in found["error"], (words, found)


def difference(found, value):
    place = next((i for i, pair in enumerate(zip(found, value)) if pair[0] != pair[1]), None)
    return f"differ at {place}: {found}, {value}"


def compare(run, folder):
    texts = documents(1000, random.Random(0))
    (folder / "documents.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
    for name, theirs in tokenizers(texts[500:]):
        theirs.save(str(folder / "tokenizer.json"))
        lines = run_all(run, folder / "documents.jsonl", [folder / "tokenizer.json"])
        for text, found in zip(texts, lines, strict=True):
            ids = theirs.encode(text).ids
            wanted = {
                "ids": ids,
                "bare": theirs.encode(text, add_special_tokens=False).ids,
                "text": theirs.decode(ids),
                "all": theirs.decode(ids, skip_special_tokens=False),
            }
            for what, value in wanted.items():
                assert found[what] == value, f"{name}: {what} {difference(found[what], value)} of {text!r}"
        print(f"{name}: {len(texts)} documents, {theirs.get_vocab_size()} tokens, agree", flush=True)
    refused(run, folder, (folder / "tokenizer.json").read_text())
    compare_processors(run, folder, theirs)


if __name__ == "__main__":
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    with tempfile.TemporaryDirectory() as folder:
        compare(sys.argv[1], pathlib.Path(folder))
        compare_files(sys.argv[1], pathlib.Path(folder))
