"""Sentence Transformers on tiny models: patch(model) finds transformers' model in an embedding model, a sparse encoder
and a reranker, and they train as unpatched ones; and examples/recipes/embeddings.py."""

import runpy
import sys

import liger_kernel
import pytest
import torch
from conftest import COMMON, json_lines, words
from datasets import Dataset
from sentence_transformers import CrossEncoder, SentenceTransformer, SparseEncoder
from sentence_transformers.cross_encoder import CrossEncoderTrainer, CrossEncoderTrainingArguments
from sentence_transformers.cross_encoder.losses import BinaryCrossEntropyLoss
from sentence_transformers.losses import MultipleNegativesRankingLoss
from sentence_transformers.sentence_transformer import SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sparse_encoder import SparseEncoderTrainer, SparseEncoderTrainingArguments
from sentence_transformers.sparse_encoder.losses import SparseMultipleNegativesRankingLoss, SpladeLoss
from snippets import RECIPES
from transformers import (
    ModernBertConfig,
    ModernBertForMaskedLM,
    ModernBertForSequenceClassification,
    Qwen3Config,
    Qwen3Model,
)
from watched import CHANGE, TOLERANCE, Seen

SIZES = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, initializer_range=0.2)


def _splade(model):
    ranking = SparseMultipleNegativesRankingLoss(model)
    return SpladeLoss(model, ranking, query_regularizer_weight=5e-5, document_regularizer_weight=3e-5)


#: Kind -> what loads it, its trainer, the trainer's arguments, its loss, transformers' model, and operators that run.
KINDS = {
    "embeddings": (
        *(SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments),
        *(MultipleNegativesRankingLoss, Qwen3Model, {"rms_norm", "qk_norm_rope"}),
    ),
    "sparse": (
        *(SparseEncoder, SparseEncoderTrainer, SparseEncoderTrainingArguments),
        *(_splade, ModernBertForMaskedLM, {"layer_norm", "gated_packed", "rope"}),
    ),
    "reranker": (
        *(CrossEncoder, CrossEncoderTrainer, CrossEncoderTrainingArguments),
        *(BinaryCrossEntropyLoss, ModernBertForSequenceClassification, {"layer_norm", "gated_packed", "rope"}),
    ),
}


@pytest.fixture
def folder(tokenizer, tmp_path):
    """Makes a model of a class and its tokenizer, as the tool loads them."""

    def make(cls):
        torch.manual_seed(0)
        sizes = SIZES | {"vocab_size": len(tokenizer), "pad_token_id": 0}
        if cls is Qwen3Model:
            config = Qwen3Config(**sizes, num_key_value_heads=2, head_dim=8)
        else:
            config = ModernBertConfig(**sizes, **dict.fromkeys(("bos_token_id", "cls_token_id"), 1),
                                      **dict.fromkeys(("eos_token_id", "sep_token_id"), 2), num_labels=1)  # fmt: skip
        cls(config).save_pretrained(tmp_path / "home")
        tokenizer.padding_side, tokenizer.mask_token = "right", "<unk>"
        tokenizer.save_pretrained(tmp_path / "home")
        return str(tmp_path / "home")

    return make


def _trained(kind, home, out, patched):
    """The losses, the change of all weights, and what ran."""
    load, trainer, arguments, loss, _, _ = KINDS[kind]
    model = load(home, device="cpu")
    if patched:
        liger_kernel.patch(model)
    texts = [(words(i, 3 + i % 5), words(20 + i, 4 + i % 3)) for i in range(16)]
    rows = {"anchor": [a for a, _ in texts], "positive": [b for _, b in texts]}
    if kind == "reranker":
        rows["label"] = [float(i % 2) for i in range(len(texts))]
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with Seen() as seen:
        run = trainer(model=model, args=arguments(output_dir=out, **COMMON), train_dataset=Dataset.from_dict(rows),
                      loss=loss(model))  # fmt: skip
        run.train()
    losses = [row["loss"] for row in run.state.log_history if "loss" in row]
    changes = {key: value - before[key] for key, value in model.state_dict().items() if value.is_floating_point()}
    return losses, changes, {name.removesuffix("_forward") for name in seen.counts}


@pytest.mark.parametrize("kind", KINDS)
def test_training(kind, folder, tmp_path, record_property):
    home = folder(KINDS[kind][4])
    losses, changes, ran = _trained(kind, home, tmp_path / "plain", False)
    ours, our_changes, our_ran = _trained(kind, home, tmp_path / "ours", True)
    assert not ran and KINDS[kind][5] <= our_ran
    assert torch.allclose(torch.tensor(ours), torch.tensor(losses), rtol=TOLERANCE) and len(losses) == 2
    largest = max(change.norm() for change in changes.values())
    for key, change in changes.items():
        assert (our_changes[key] - change).norm() <= CHANGE * max(change.norm(), 1e-3 * largest), key
    record_property("setup", f"`liger_kernel.patch` of a {KINDS[kind][0].__name__}")
    record_property("result", "as unpatched")


def test_recipe(folder, tmp_path, monkeypatch, record_property):
    home, data, out = folder(Qwen3Model), tmp_path / "pairs.jsonl", tmp_path / "out"
    json_lines(data, ({"anchor": words(i, 4), "positive": words(20 + i, 5)} for i in range(16)))
    arguments = ("--model", home, "--data", data, "--out", out, "--length", 16, "--steps", 2, "--batch", 8)
    more = ("--mini-batch", 4, "--lr", 0.05, "--cpu")
    monkeypatch.setattr(sys, "argv", ["embeddings.py", *map(str, (*arguments, *more))])
    with Seen() as seen:
        runpy.run_path(str(RECIPES / "embeddings.py"), run_name="__main__")
    assert {"rms_norm", "qk_norm_rope"} <= {operator.removesuffix("_forward") for operator in seen.counts}
    before, after = (SentenceTransformer(str(each), device="cpu").state_dict() for each in (home, out))
    assert before.keys() == after.keys()
    assert not any(torch.equal(before[key], after[key]) for key in before if "proj" in key)
    record_property("setup", "examples/recipes/embeddings.py")
    record_property("result", "runs")
