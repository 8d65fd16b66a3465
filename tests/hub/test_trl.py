"""TRL's trainers with model_init_kwargs={"use_kernels": True}, on this library's layers, against plain ones. `make
test-hub`."""

import os

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}

import pytest
import torch
import trl
from datasets import Dataset
from liger_kernel.hub import layers
from liger_kernel.transformers import use_as_hub_kernels
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

WORDS = [f"w{i}" for i in range(60)]
COMMON = {
    "max_steps": 2,
    "per_device_train_batch_size": 4,
    "learning_rate": 0.05,
    "optim": "sgd",
    "lr_scheduler_type": "constant",
    "logging_steps": 1,
    "report_to": [],
    "use_cpu": True,
    "seed": 3,
    "save_strategy": "no",
    "bf16": False,
    "gradient_checkpointing": False,
    "disable_tqdm": True,
}


@pytest.fixture
def folder(tmp_path):
    vocabulary = {word: i for i, word in enumerate(["<pad>", "<s>", "</s>", "<unk>", *WORDS])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=words, **names).save_pretrained(tmp_path)
    torch.manual_seed(0)
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(vocabulary),
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            initializer_range=0.2,
            rms_norm_eps=0.03,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        )  # fmt: skip
    ).save_pretrained(tmp_path)
    return tmp_path


def words(seed, count):
    generator = torch.Generator().manual_seed(seed)
    return " ".join(WORDS[i] for i in torch.randint(len(WORDS), (count,), generator=generator).tolist())


def texts():
    return Dataset.from_list([{"prompt": words(i, 4), "completion": " " + words(20 + i, 3 + i % 4)} for i in range(8)])


def preferences():
    return Dataset.from_list(
        [
            {"prompt": words(i, 4), "chosen": " " + words(20 + i, 5), "rejected": " " + words(40 + i, 3 + i % 4)}
            for i in range(8)
        ]
    )


@pytest.mark.parametrize(
    "trainer_class, config_class, data",
    [(trl.SFTTrainer, trl.SFTConfig, texts), (trl.DPOTrainer, trl.DPOConfig, preferences)],
)
def test_a_trainer_takes_the_same_steps(trainer_class, config_class, data, folder, tmp_path_factory, monkeypatch):
    calls = []
    for name in ("LigerRMSNormFunction", "LigerRopeFunction", "LigerSiLUMulFunction"):
        function = getattr(layers, name)
        counted = type(
            name,
            (),
            {
                "apply": staticmethod(
                    lambda *a, function=function, name=name: (calls.append(name), function.apply(*a))[1]
                )
            },
        )
        monkeypatch.setattr(layers, name, counted)
        monkeypatch.setattr(
            layers, "GATES", {act: counted if gate is function else gate for act, gate in layers.GATES.items()}
        )

    def train(use_kernels):
        config = config_class(
            output_dir=str(tmp_path_factory.mktemp("out")),
            **COMMON,
            model_init_kwargs={"use_kernels": use_kernels, "attn_implementation": "eager"},
        )
        trainer = trainer_class(model=str(folder), args=config, train_dataset=data())
        trainer.train()
        return trainer.model, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    plain, expected = train(False)
    assert not calls
    handle = use_as_hub_kernels()
    try:
        model, losses = train(True)
        assert set(calls) == {"LigerRMSNormFunction", "LigerRopeFunction", "LigerSiLUMulFunction"}
        assert len(losses) == 2 and losses == pytest.approx(expected, rel=1e-5)
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(model.get_parameter(name), parameter, rtol=1e-4, atol=1e-5)
    finally:
        handle.undo()
