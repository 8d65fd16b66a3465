"""The files of a tokenizer, in C++ and in transformers: what compare_tokenizers.py runs on folders.

Each field of tokenizer.json, tokenizer_config.json, special_tokens_map.json and added_tokens.json is set to other
values, alone and with what goes with it. Then the ids of texts, the end token and whether there is a chat template are
those of transformers' AutoTokenizer on the same folder, or the C++ error names the file and the field.
"""

import ast
import inspect
import json
import re
import subprocess

import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import tokenization_utils_base, tokenization_utils_tokenizers

READ, HARMLESS, REFUSED = range(3)
DEEP = "DEEP"
END, BEGIN = "<|end|>", "<|begin|>"
TEXTS = [
    "",
    "one two  three",
    "a<|begin|>b<|end|>",
    " <new> word<new>s <more> x<|image|>y <pad>",
    "e\u0301t\u00e9 <e\u0301> <\u00e9>",
    "12345 don't DON'T",
    "  <|end|>  <new>  x <unk> [PAD] ",
    "<|endoftext|>end of text",
    "<s>mid</s>",
]


def token(content, **fields):
    """An AddedToken as tokenizer_config.json has it."""
    return {"content": content, "lstrip": False, "rstrip": False, "single_word": False, "normalized": False} | fields


def saved(content, **fields):
    return {"__type": "AddedToken"} | token(content, **fields)


def base():
    """A tokenizer.json with a normalizer, special and other added tokens, and a template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=[END, BEGIN], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    tokenizer.add_tokens([AddedToken("<more>", normalized=False)])
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BEGIN} $A", special_tokens=[(BEGIN, 1)])
    return json.loads(tokenizer.to_str())


# What makes another of each field of tokenizer_config.json: a list of values, and what goes with them.
NAMED = [END, "<new>", saved("<new>", lstrip=True), saved("<e\u0301>", normalized=True), token("<new>"), None, 3]
OTHERS = {
    **{
        name: NAMED
        for name in ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
    },
    "tokenizer_class": [
        "PreTrainedTokenizerFast",
        "PreTrainedTokenizer",
        "TokenizersBackend",
        "LlamaTokenizer",
        "LlamaTokenizerFast",
        "Qwen2Tokenizer",
        "Qwen2TokenizerFast",
        "Qwen3_5Tokenizer",
        "GPT2Tokenizer",
        "GPT2TokenizerFast",
        "GPTNeoXTokenizerFast",
        "BertTokenizer",
        "T5TokenizerFast",
        "MistralCommonBackend",
    ],
    "additional_special_tokens": [
        ["<new>", "<pad>"],
        [saved("<new>", rstrip=True), "<|image|>"],
        [],
        None,
        ["<new>", 3],
        {"a_token": "<new>"},
    ],
    "extra_special_tokens": [
        ["<new>", "<pad>"],
        [saved("<new>", rstrip=True)],
        {"image_token": "<|image|>", "x": saved("<new>")},
        [],
        None,
        {"image_token": 3},
        "<new>",
    ],
    "model_specific_special_tokens": [{"image_token": "<|image|>", "some": "<new>"}, {}, None, ["<new>"]],
    "added_tokens_decoder": [
        {"0": token(END, special=True), "330": token("<new>", special=True), "331": token("<pad>")},
        {"500": token("<new>", lstrip=True), "400": token("<pad>", rstrip=True)},
        {"330": token("<more>", lstrip=True)},
        {"5": token("w", special=True)},
        {},
        {"x": token("<new>")},
        {"5": "w"},
        {"330": token("<e\u0301>", normalized=True)},
        {"330": {"content": "<e\u0301>"}},
        {"330": {"content": "<new>", "special": True}},
    ],
    "add_prefix_space": [True, False, None],
    "split_special_tokens": [True, False],
    "chat_template": ["{{ messages }}", [{"name": "default", "template": "x"}], None],
    "padding_side": ["left", "right", "middle"],
    "truncation_side": ["left", "right", "middle"],
    "auto_map": [{"AutoTokenizer": [None, "x.Y"]}],
    "fast_tokenizer_files": [["tokenizer.json", "tokenizer.4.0.0.json"]],
    "init_inputs": [[], ["x"]],
    "model_max_length": [3, 1e30],
    "max_len": [3],
    "model_input_names": [["input_ids"]],
    "errors": ["strict"],
    "max_length": [3],
    "stride": [2],
    "truncation_strategy": ["only_first"],
    "pad_to_multiple_of": [8],
    "pad_token_type_id": [2],
    "chat_control_tokens": [["<new>"]],
    "vocab": [{"a": 0}],
    "merges": [[["a", "b"]]],
    "sp_model_kwargs": [{"enable_sampling": True}],
    "name_or_path": ["x"],
    "backend": ["x"],
    "files_loaded": [["x"]],
    "processor_class": ["X"],
    "_commit_hash": ["0"],
    "response_template": [{"a": 1}],
    "response_schema": [{"a": 1}],
    "vocab_file": ["x"],
    "merges_file": ["x"],
    "tokenizer_file": ["x"],
    "unk_id": [3],
    "token": ["x"],
    "_spm_precompiled_charsmap": ["x"],
    "local_files_only": [True],
    "is_local": [False],
}
# Several fields at once, of all files.
FOLDERS = {
    "both lists": {"tokenizer_config": {"additional_special_tokens": ["<new>"], "extra_special_tokens": ["<pad>"]}},
    "an empty list first": {"tokenizer_config": {"additional_special_tokens": ["<new>"], "extra_special_tokens": []}},
    "names of other tokens": {"tokenizer_config": {"image_token": "<|image|>", "pad_token": "<pad>", "x_token": 3}},
    "brackets": {"tokenizer_config": {"eos_token": DEEP}},
    "an object with another name": {"tokenizer_config": {"image_token": saved("<|image|>"), "a_token": "<new>"}},
    "their order": {
        "tokenizer_config": {"z_token": "<new>", "a_token": "<pad>", "unk_token": "<unk>", "bos_token": "<s>"}
    },
    "two names of one token": {"tokenizer_config": {"eos_token": saved("<new>", lstrip=True), "pad_token": "<new>"}},
    "a token of the vocabulary": {"tokenizer_config": {"eos_token": "w", "pad_token": "th"}},
    "a decoder names the end": {
        "tokenizer_config": {
            "eos_token": "<new>",
            "added_tokens_decoder": {"0": token(END, special=True), "330": token("<new>", rstrip=True)},
        }
    },
    "a decoder keeps the map out": {
        "tokenizer_config": {"added_tokens_decoder": {}},
        "special_tokens_map": {"eos_token": "<new>"},
        "added_tokens": {"<pad>": 400},
    },
    "split and a normalized one": {
        "tokenizer_config": {"split_special_tokens": True, "eos_token": saved("<e\u0301>", normalized=True)}
    },
    "split what the file has": {"tokenizer_config": {"split_special_tokens": True, "eos_token": END}},
    "the map": {"special_tokens_map": {"eos_token": "<new>", "bos_token": token("<s>"), "image_token": "<|image|>"}},
    "the map is first": {"special_tokens_map": {"eos_token": "<new>"}, "tokenizer_config": {"eos_token": END}},
    "the map has none": {"special_tokens_map": {"eos_token": None}, "tokenizer_config": {"eos_token": "<new>"}},
    "the map's object": {"special_tokens_map": {"eos_token": token("<e\u0301>", normalized=True, lstrip=True)}},
    "the map's old object": {"special_tokens_map": {"eos_token": saved("<new>", special=False)}},
    "the map's list": {"special_tokens_map": {"additional_special_tokens": ["<new>", "<pad>"]}},
    "the map's objects": {"special_tokens_map": {"additional_special_tokens": [token("<new>"), "<pad>"]}},
    "the map's extra list": {
        "special_tokens_map": {"extra_special_tokens": [token("<new>", rstrip=True), "<pad>", "<s>"]},
        "tokenizer_config": {"extra_special_tokens": ["<pad>"]},
    },
    "the map's extra names": {"special_tokens_map": {"extra_special_tokens": {"image_token": "<|image|>"}}},
    "two lists in two files": {
        "special_tokens_map": {"additional_special_tokens": ["<new>"]},
        "tokenizer_config": {"extra_special_tokens": []},
    },
    "the map's other field": {"special_tokens_map": {"add_bos_token": True}},
    "added tokens": {"added_tokens": {"<new>": 400, "<pad>": 390, "<e\u0301>": 380}},
    "added tokens that are special": {
        "added_tokens": {"<new>": 330, "<e\u0301>": 331},
        "tokenizer_config": {"eos_token": "<e\u0301>"},
    },
    "added tokens, of a list": {
        "added_tokens": {"<new>": 330, "<e\u0301>": 331},
        "tokenizer_config": {"additional_special_tokens": ["<e\u0301>"]},
    },
    "added tokens, of the map's list": {
        "added_tokens": {"<new>": 330, "<e\u0301>": 331},
        "special_tokens_map": {"additional_special_tokens": ["<e\u0301>"]},
    },
    "added tokens that the file has": {"added_tokens": {"<more>": 330, "<new>": 0}},
    "added tokens without an id": {"added_tokens": {"<new>": "x"}},
    "a class of config.json": {"config": {"tokenizer_class": "GPT2Tokenizer"}},
    "two classes": {
        "config": {"tokenizer_class": "GPT2Tokenizer"},
        "tokenizer_config": {"tokenizer_class": "Qwen2Tokenizer"},
    },
    "a class and a prefix": {"tokenizer_config": {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True}},
    "a class and an end": {
        "tokenizer_config": {"tokenizer_class": "Qwen2Tokenizer", "eos_token": saved("<new>", lstrip=True)}
    },
    "a class and no end": {
        "tokenizer_config": {"tokenizer_class": "Qwen2Tokenizer", "eos_token": None, "add_prefix_space": True}
    },
    "a class and a decoder": {
        "tokenizer_config": {
            "tokenizer_class": "Qwen2Tokenizer",
            "added_tokens_decoder": {"331": token("<new>", special=True)},
        }
    },
    "a class and padding": {
        "tokenizer_config": {"tokenizer_class": "GPT2Tokenizer"},
        "tokenizer": {
            "padding": {
                "strategy": "BatchLongest",
                "direction": "Right",
                "pad_to_multiple_of": None,
                "pad_id": 0,
                "pad_type_id": 0,
                "pad_token": "[PAD]",
            }
        },
    },
    "a template's file": {"files": {"chat_template.jinja": "{{ messages }}"}},
    "more templates": {"files": {"additional_chat_templates/tool.jinja": "{{ messages }}"}},
    "a generation config": {"files": {"generation_config.json": json.dumps({"eos_token_id": 5, "bos_token_id": 6})}},
}
# Of tokenizer.json: what changes it, and whether that is known.
ADDED = {"id": 0, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
TOKENIZER_FILES = {
    "version": [{"version": "1.0"}, {"version": "2.0"}],
    "truncation": [{"truncation": {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}}],
    "padding": [
        {
            "padding": {
                "strategy": {"Fixed": 9},
                "direction": "Left",
                "pad_to_multiple_of": 4,
                "pad_id": 7,
                "pad_type_id": 0,
                "pad_token": "[PAD]",
            }
        }
    ],
    "added_tokens": [
        {"added_tokens": []},
        {
            "added_tokens": [
                ADDED | {"id": 999, "content": "<new>"},
                ADDED | {"id": 500, "content": "<pad>", "special": True},
            ]
        },
        {"added_tokens": [ADDED | {"content": "<new>", "lstrip": True}, ADDED | {"content": "<new>", "rstrip": True}]},
        {"added_tokens": [ADDED | {"content": "<e\u0301>", "normalized": True, "single_word": True}]},
    ],
    "normalizer": [{"normalizer": None}, {"normalizer": {"type": "NFKD"}}, {"normalizer": {"type": "Lowercase"}}],
    "pre_tokenizer": [
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}},
        {"pre_tokenizer": {"type": "Metaspace", "replacement": "_", "prepend_scheme": "always", "split": True}},
    ],
    "post_processor": [{"post_processor": None}],
    "decoder": [{"decoder": {"type": "Fuse"}}],
    "unknown": [{"unknown": 1}],
    "brackets": [{"pre_tokenizer": DEEP}, {"normalizer": DEEP}, {"post_processor": DEEP}],
}


def text_of(value):
    """JSON, with steps within steps at DEEP, which json itself would not go down."""
    inner = '{"type": "Sequence", "pretokenizers": [', "]}"
    return json.dumps(value).replace(f'"{DEEP}"', inner[0] * 100_000 + inner[1] * 100_000)


def names_in_code():
    """The fields that the code of transformers takes from tokenizer_config.json: keys of its dictionaries of arguments,
    and parameters of the classes that are known."""
    names = set()
    functions = [
        tokenization_utils_base.PreTrainedTokenizerBase.__init__,
        tokenization_utils_base.PreTrainedTokenizerBase._from_pretrained,
        tokenization_utils_tokenizers.TokenizersBackend.__init__,
        tokenization_utils_tokenizers.TokenizersBackend.convert_to_native_format,
    ]
    for function in functions:
        source = inspect.cleandoc("\n" + inspect.getsource(function))
        for node in ast.walk(ast.parse(re.sub(r"^@classmethod\n", "", source))):
            owner = key = None
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
                owner, key = node.func.value, node.args[0]
            elif isinstance(node, ast.Subscript):
                owner, key = node.value, node.slice
            if isinstance(owner, ast.Name) and owner.id in ("kwargs", "init_kwargs", "local_kwargs"):
                if isinstance(key, ast.Constant) and isinstance(key.value, str):
                    names.add(key.value)
    for known in (transformers.LlamaTokenizer, transformers.Qwen2Tokenizer, transformers.GPT2Tokenizer):
        names |= {name for name in inspect.signature(known.__init__).parameters if name not in ("self", "kwargs")}
    return names | set(tokenization_utils_base.PreTrainedTokenizerBase.SPECIAL_TOKENS_ATTRIBUTES)


def write(folder, what):
    folder.mkdir()
    content = {
        "config": {"model_type": "llama"} | what.get("config", {}),
        "tokenizer": base() | what.get("tokenizer", {}),
        "tokenizer_config": what.get("tokenizer_config", {}),
        **{name: what[name] for name in ("special_tokens_map", "added_tokens") if name in what},
    }
    for name, value in content.items():
        (folder / f"{name}.json").write_text(text_of(value))
    for name, text in what.get("files", {}).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)


def theirs(folder):
    """What AutoTokenizer makes of the texts, or its error."""
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        return made_by(tokenizer)
    except Exception as error:  # noqa: BLE001 any: it is compared with whether C++ refuses
        return f"{type(error).__name__}: {error}"


def made_by(tokenizer):
    return [
        {
            "ids": tokenizer(text)["input_ids"],
            "bare": tokenizer(text, add_special_tokens=False)["input_ids"],
            "pair": tokenizer(before, text)["input_ids"] if text else None,
            "all": tokenizer.decode(tokenizer(text)["input_ids"]),
            "end": tokenizer.eos_token_id,
            "template": bool(tokenizer.chat_template),
        }
        for before, text in zip(["", *TEXTS], TEXTS)
    ]


def cases(fields):
    """(what it is, what is set, the field, whether it is known: None where transformers says that)."""
    for name, field in fields.items():
        values = OTHERS.get(name, [True, "x", 3] if field["use"] == REFUSED else [True, False])
        for value in values:
            harmless = field["use"] == HARMLESS or value is None or value in field["allowed"]
            known = None if field["use"] == READ else harmless
            yield f"{name} {value!r}", {"tokenizer_config": {name: value}}, name, known
    for name, what in FOLDERS.items():
        yield name, what, "", None
    for name, changes in TOKENIZER_FILES.items():
        for change in changes:
            field = "no JSON object" if name == "brackets" else name
            yield f"tokenizer.json: {change}", {"tokenizer": change}, field, None
    for kind in ("llama", "mistral", "qwen2", "qwen3", "qwen3_5", "qwen3_5_text"):
        for name in [None, *OTHERS["tokenizer_class"]]:
            config = {} if name is None else {"tokenizer_class": name}
            what = {"config": {"model_type": kind}, "tokenizer_config": config}
            yield f"{name} of {kind}", what, "tokenizer_class", None


def compare_files(run, folder):
    """Returns nothing; raises AssertionError for the first folder that differs."""
    fields = json.loads(subprocess.run([run], capture_output=True, text=True, check=True).stdout)
    missing = names_in_code() - fields.keys()
    assert not missing, f"the table has no {missing}"
    (folder / "documents.jsonl").write_text("".join(json.dumps(text) + "\n" for text in TEXTS))
    all_cases = [(folder / f"case{i}", *case) for i, case in enumerate(cases(fields))]
    for place, _, what, _, _ in all_cases:
        write(place, what)
    command = [run, folder / "documents.jsonl", *(place for place, *_ in all_cases)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = iter([json.loads(line) for line in done.stdout.split("\n")[:-1]])
    agree = refused = 0
    for place, name, what, field, known in all_cases:
        found = next(lines)
        expected = theirs(place)
        if "error" in found:
            assert known is not True, f"{name}: {found['error']}"
            assert field in found["error"] and ".json: " in found["error"], f"{name}: {found['error']}"
            refused += 1
            continue
        assert known is not False, f"{name} is not refused"
        assert not isinstance(expected, str), f"{name}: {expected}, and C++ takes it"
        for text, value in zip(TEXTS, expected, strict=True):
            for key, wanted in value.items():
                assert wanted is None or found[key] == wanted, f"{name}: {key} of {text!r}: {found[key]}, not {wanted}"
            found = next(lines) if text != TEXTS[-1] else None
        agree += 1
    assert next(lines, None) is None
    print(f"files of tokenizers: {agree} folders agree, {refused} are refused by name", flush=True)
