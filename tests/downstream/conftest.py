"""Tiny random models and data for trainers of others; nothing is fetched."""

import json
import os
import pathlib

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TRL_EXPERIMENTAL_SILENCE": "1",
    "WANDB_MODE": "disabled",
}

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from watched import Reader, logits_of

torch.set_num_threads(1)

#: Of transformers' TrainingArguments: a few steps of plain SGD.
COMMON = dict(
    max_steps=2,
    per_device_train_batch_size=4,
    learning_rate=0.05,
    optim="sgd",
    lr_scheduler_type="constant",
    logging_steps=1,
    report_to=[],
    use_cpu=True,
    seed=3,
    save_strategy="no",
    bf16=False,
    gradient_checkpointing=False,
    disable_tqdm=True,
    max_grad_norm=0,
)

WORDS = [f"w{i}" for i in range(60)]


@pytest.fixture
def roles():
    """Words of a tool's template that the vocabulary has."""
    return ()


@pytest.fixture
def tokenizer(roles):
    vocabulary = {word: i for i, word in enumerate(["<pad>", "<s>", "</s>", "<unk>", *WORDS, *roles])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        padding_side="left",
    )


@pytest.fixture
def width():
    return 32


@pytest.fixture
def model(tokenizer, width, tmp_path):
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=width,
            intermediate_size=3 * width // 2,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            initializer_range=0.2,
            rms_norm_eps=0.03,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            attn_implementation="eager",
        )
    )
    model.save_pretrained(tmp_path)  # from where a trainer loads its reference model
    return LlamaForCausalLM.from_pretrained(tmp_path)


def words(seed, count):
    """A text of `count` random words."""
    generator = torch.Generator().manual_seed(seed)
    return " ".join(WORDS[i] for i in torch.randint(len(WORDS), (count,), generator=generator).tolist())


#: No word that a model learns, but those that every tool's template has.
TEMPLATE = "{% for message in messages %}{{ message['role'] + ' ' + message['content'] + ' </s> ' }}{% endfor %}"


@pytest.fixture
def home(model, tokenizer, tmp_path):
    """A folder with a model and its tokenizer, as the tools load them; its `logits` are the model's."""
    folder = tmp_path / "model"
    model.save_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    torch.save(logits_of(model), folder / "logits.pt")
    return folder


@pytest.fixture
def teacher(home, model, tokenizer):
    """The folder of a model that is near."""
    folder = home.parent / "teacher"
    with torch.no_grad():
        model.lm_head.weight.add_(torch.randn_like(model.lm_head.weight), alpha=0.2)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def initial(home):
    return torch.load(home / "logits.pt")


@pytest.fixture
def initial_in_4_bits(home):
    """The logits of the model with the weights of its layers in nf4, as QLoRA has them."""
    quantised = dict(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    config = BitsAndBytesConfig(**quantised, bnb_4bit_compute_dtype=torch.float32)
    return logits_of(LlamaForCausalLM.from_pretrained(home, quantization_config=config, dtype=torch.float32).train())


@pytest.fixture(scope="session")
def reader():
    return Reader()


def conversation(i):
    """A question and an answer, as messages."""
    answer = words(20 + i, 5 + i % 4)
    return [{"role": "user", "content": words(i, 4 + i % 3)}, {"role": "assistant", "content": answer}]


def unequal(completions):
    """Rewards that differ within a group and from group to group, whatever was drawn."""
    return [sum(map(len, completion)) / 60 + 0.3 * i for i, completion in enumerate(completions)]


def json_lines(file, rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture
def calls(monkeypatch):
    """The arguments of each operator's calls through the patch."""
    import liger_kernel.trl
    from liger_kernel.operators import distillation

    found = {}

    class Counted:
        def __init__(self, ops):
            self.ops = ops

        def __getattr__(self, name):
            def run(*args, **options):
                found.setdefault(name, []).append(args)
                return getattr(self.ops, name)(*args, **options)

            return run

    for module in (liger_kernel.trl, distillation):
        monkeypatch.setattr(module, "ops", Counted(module.ops))
    return found


@pytest.fixture
def timed_loss(monkeypatch):
    """What benchmarks/bench.py takes from a tool as a rival in linear_topk_divergence, beside ours: a function of the
    rival's name, of the tool and of what makes its loss of benchmarks/rivals.py, which gives pairs of the loss of each
    token and the gradients."""
    root = pathlib.Path(__file__).parents[2]
    for folder in ("tests", "benchmarks"):
        monkeypatch.syspath_prepend(str(root / folder))
    import rivals
    from cases import all_cases

    def pairs(rival, tool, make):
        case, folder = all_cases()["linear_topk_divergence"], pathlib.Path(tool.__file__).parents[1]
        options = dict(ignored=0.0, k=8, tail="drop", temperature=0.7)
        tensors = case.inputs(case.shapes[1], options)
        (theirs,) = rivals.LIBRARIES[rival][case.name](make(rivals, folder), tensors, options)
        results = (case.op(*tensors, **options), theirs)
        return zip(*((each, *torch.autograd.grad(each.sum(), tensors[:2])) for each in results), strict=True)

    return pairs
