"""liger_kernel.batch_invariant: a document's hidden states and log-probabilities have the bits that it has alone,
wherever it is in a batch. Everything is compared by equality."""

import copy
import functools
import pathlib
import sys

import liger_kernel
import peft
import pytest
import torch
import transformers
from conftest import VOCABULARY, assert_close, can_be_made, make
from liger_kernel import routing
from liger_kernel.operators.head import linear_log_prob
from liger_kernel.transformers.patching.apply import patch
from packaging.version import parse
from shrink import shrunk
from test_distributed import fsdp2
from tiny import randomised
from torch import nn

sys.path.append(str(pathlib.Path(__file__).parents[1]))
from ranks import each_on_ranks  # noqa: E402

NEW = parse(transformers.__version__) >= parse("5.15")  # whose mixers call functions that are replaced
DENSE = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "phi3", "olmo2")
EXPERTS = ("mixtral", "qwen3_moe")
FAMILIES = (*DENSE, *EXPERTS, *(("gpt_oss", "qwen3_next", "falcon_h1", "deepseek_v3", "lfm2") if NEW else ()))
DTYPES = (torch.float32, torch.bfloat16)
# Of an odd number of rows and of one, on both sides of the window and of the convolutions' width.
LENGTHS = (1, 2, 3, 5, 7, 8, 11, 13, 16, 17, 23, 30)


@functools.cache
def _made(family):
    if family in ("deepseek_v3", "lfm2"):
        torch.manual_seed(0)
        model = randomised(transformers.AutoModelForCausalLM.from_config(shrunk(family))).eval()
        liger_kernel.patch(model)
        return model
    model = make(family).eval()
    patch(family, model)
    return model


def made(family, dtype=torch.float32):
    if family not in ("deepseek_v3", "lfm2") and not can_be_made(family):
        pytest.skip(f"{family} is not in transformers {transformers.__version__}")
    return copy.deepcopy(_made(family)).to(dtype)


def documents(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCABULARY, (n,), generator=generator) for n in LENGTHS]


def packed(rows):
    """Inputs in which each row has several documents of the same total length, and where each document is."""
    ids = torch.stack([torch.cat(row) for row in rows])
    positions = torch.stack([torch.cat([torch.arange(len(d)) for d in row]) for row in rows])
    places = torch.arange(ids.numel()).split([len(d) for row in rows for d in row])
    return {"input_ids": ids, "position_ids": positions}, places


def padded(documents, length):
    ids, mask = torch.zeros(len(documents), length, dtype=torch.long), torch.zeros(len(documents), length).long()
    for row, document in enumerate(documents):
        ids[row, : len(document)], mask[row, : len(document)] = document, 1
    places = [row * length + torch.arange(len(d)) for row, d in enumerate(documents)]
    return {"input_ids": ids, "attention_mask": mask}, places


def results(model, inputs, max_bytes=0):
    """Hidden states, the logits' and the head operator's log-probabilities of the next token: a row per token."""
    ids = inputs["input_ids"].flatten().roll(-1)
    with torch.no_grad():
        hidden = model.get_decoder()(**inputs, use_cache=False).last_hidden_state.flatten(0, 1)
        logits = model(**inputs, use_cache=False).logits.flatten(0, 1)
    by_head = linear_log_prob(hidden, model.get_output_embeddings().weight.detach(), ids, max_bytes=max_bytes)
    log_probs = logits.float().log_softmax(-1)
    # The last token of a document has the next one's first as its label.
    return hidden, log_probs, by_head


def arrangements(all_documents):
    """(the inputs, the documents' numbers, where each is) of batches that have the documents in other places."""
    number = list(range(len(all_documents)))
    shuffled = torch.randperm(len(number), generator=torch.Generator().manual_seed(1)).tolist()
    for order in (number, number[::-1], shuffled):
        some = [all_documents[n] for n in order]
        yield *packed([some]), order
        yield *padded(some, max(LENGTHS)), order
    yield *padded([all_documents[n] for n in shuffled[:5]], 37), shuffled[:5]
    # Two rows of one length: 1 + 30 + 5 and 13 + 23.
    chosen = [0, 11, 3, 7, 10]
    first, second = [all_documents[n] for n in chosen[:3]], [all_documents[n] for n in chosen[3:]]
    yield *packed([first, second]), chosen


def compare(model, expected, inputs, places, order, max_bytes=0):
    """How many rows were compared, and which documents differ."""
    found, pairs, differ = results(model, inputs, max_bytes), 0, []
    for n, where in zip(order, places):
        inner = where[:-1]  # whose label is of the document
        same = [torch.equal(a[where], b) for a, b in zip(found[:2], expected[n][:2])]
        same.append(torch.equal(found[2][inner], expected[n][2][:-1]))
        pairs += len(where)
        if not all(same):
            differ.append((n, same))
    return pairs, differ


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_document_has_the_bits_that_it_has_alone(family, dtype):
    """Packed at any place, padded, in another order, with other chunks of the head: 10,000 rows over 12 families."""
    model, every, pairs = made(family, dtype), documents(), 0
    with liger_kernel.batch_invariant(model):
        alone = [results(model, {"input_ids": document[None]}) for document in every]
        for inputs, places, order in arrangements(every):
            for max_bytes in (0, 20 * VOCABULARY * 4):
                count, differ = compare(model, alone, inputs, places, order, max_bytes)
                pairs += count
                assert not differ, (list(inputs), max_bytes, differ)
    assert pairs >= 10_000 / 12


@pytest.mark.parametrize("family", FAMILIES)
def test_results_are_those_of_the_model(family):
    """With its windows, caps and sinks: log-probabilities are those without the switch but for the order of sums."""
    model, every = made(family), documents()
    for inputs, places in (packed([every]), padded(every, max(LENGTHS))):
        expected = results(model, inputs)[1]
        with liger_kernel.batch_invariant(model):
            found = results(model, inputs)[1]
        for where in places:
            assert_close(found[where], expected[where])


def test_threads_do_not_matter_to_what_is_compared():
    """The comparison above holds with another number of threads, too."""
    model, every = made("qwen3_moe"), documents()
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with liger_kernel.batch_invariant(model):
            alone = [results(model, {"input_ids": document[None]}) for document in every]
            for inputs, places, order in arrangements(every):
                assert not compare(model, alone, inputs, places, order)[1]
    finally:
        torch.set_num_threads(before)


def test_adapters():
    """LoRA's A and B, whose products have few columns."""
    model = made("llama")
    config = peft.LoraConfig(r=3, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(model, config).eval()
    liger_kernel.patch(adapted)
    every = documents()
    with liger_kernel.batch_invariant(adapted) as invariant:
        alone = [results(model, {"input_ids": document[None]}) for document in every]
        for inputs, places, order in arrangements(every):
            assert not compare(model, alone, inputs, places, order)[1]
    assert not invariant.report.skipped


def gradients(model, inputs):
    model.zero_grad()
    loss = model(**inputs, labels=inputs["input_ids"], use_cache=False).loss
    loss.backward()
    return {
        "loss": loss.detach(),
        **{name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None},
    }


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_moe", "gpt_oss", "falcon_h1"])
def test_backward_is_deterministic(family, checkpointed):
    if family in ("gpt_oss", "falcon_h1") and not NEW:
        pytest.skip("served from transformers 5.15 on")
    model = made(family).train()
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    inputs, _ = packed([documents()])
    with liger_kernel.batch_invariant(model):
        assert torch.are_deterministic_algorithms_enabled()
        one, other = gradients(model, inputs), gradients(model, inputs)
    assert one.keys() == other.keys() and len(one) > 5
    for name, value in one.items():
        assert torch.equal(value, other[name]), name
        assert value.abs().max() > 0 or "router" in name or "experts" in name, name


def test_gradients_are_right():
    """Those of the switched model are those of the model before, but for the order of sums in float32."""
    model = made("llama").train()
    inputs = {"input_ids": torch.stack([documents()[-1], documents(1)[-1]])}
    expected = gradients(model, inputs)
    with liger_kernel.batch_invariant(model):
        found = gradients(model, inputs)
    for name, value in expected.items():
        # Sums of some hundred terms: 2^7 roundings of 2^-24, of the largest element's size.
        assert (found[name] - value).abs().max() <= 2.0**-14 * value.abs().max(), name


@pytest.mark.parametrize("family", EXPERTS)
def test_a_token_that_moves_to_another_expert_leaves_the_others(family):
    model, every = made(family), documents()
    inputs, places = packed([every])
    with liger_kernel.batch_invariant(model):
        with routing.record(model) as recorded:
            before = results(model, inputs)
        ids = recorded.ids.clone()
        moved = places[6][4]
        layers = (ids[moved] >= 0).all(-1)
        ids[moved, layers] = (ids[moved, layers] + 1) % 4
        with routing.replay(model, ids.clamp_min(0)):
            after = results(model, inputs)
    others = torch.ones(len(ids), dtype=torch.bool)
    others[places[6][4:]] = False  # tokens behind it in its document attend to it
    for a, b in zip(before[:2], after[:2]):
        assert torch.equal(a[others], b[others])
        assert not torch.equal(a[moved], b[moved])


class Mixing(nn.Module):
    """Adds what depends on the other rows."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x) + 1e-3 * x.mean()


def test_the_audit_names_the_first_module_that_differs():
    model, every = made("llama"), documents()
    inputs, places = packed([every])
    call = nn.Module.__call__
    with liger_kernel.batch_invariant(model, audit=True) as invariant:
        model(every[-1][None], use_cache=False), model(**inputs, use_cache=False)
        assert invariant.audit.first_difference(slice(0, LENGTHS[-1]), places[-1]) is None
        model.model.layers[1].mlp = Mixing(model.model.layers[1].mlp)
    assert nn.Module.__call__ is call
    with liger_kernel.batch_invariant(model, audit=True) as invariant:
        model(every[-1][None], use_cache=False), model(**inputs, use_cache=False)
        found = invariant.audit.first_difference(slice(0, LENGTHS[-1]), places[-1])
        assert (found.name, found.kind) == ("model.layers.1.mlp", "Mixing") and len(found.tokens) > 20
        assert str(found).startswith("model.layers.1.mlp (Mixing) differs in ")
        model.model(every[-1][None], use_cache=False)  # no call of the whole model: no run
        assert len(invariant.audit.runs) == 2


def test_what_is_switched_comes_back():
    """Of two models, the last one that is switched off switches the process off."""
    one, other = made("llama"), made("mistral")
    configs = [model.config._attn_implementation for model in (one, other)]
    flags = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    x, w = torch.randn(3, 64), torch.randn(48, 64)
    wide = torch.nn.functional.linear(torch.cat([x, torch.zeros(509, 64)]), w)[:3]
    plain = torch.nn.functional.linear(x, w)
    first = liger_kernel.batch_invariant(one)
    second = liger_kernel.batch_invariant(other)
    assert torch.equal(torch.nn.functional.linear(x, w), wide)
    first.undo()
    assert one.config._attn_implementation == configs[0]
    assert torch.equal(torch.nn.functional.linear(x, w), wide) and torch.are_deterministic_algorithms_enabled()
    first.undo()  # a second time does nothing
    assert torch.are_deterministic_algorithms_enabled()
    second.undo()
    assert [model.config._attn_implementation for model in (one, other)] == configs
    assert torch.equal(torch.nn.functional.linear(x, w), plain)
    assert flags == (
        torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    )  # fmt: skip


def test_the_report_names_every_kind_of_module():
    model = made("qwen3_moe")
    with liger_kernel.batch_invariant(model) as invariant:
        pass
    ways = {entry.name: entry.by for entry in invariant.report.replaced}
    assert ways["Linear"] == ways["LinearWithLoss"] == "products of 512 rows each"
    assert ways["Qwen3MoeAttention"] == "attention to one document at a time"
    assert ways["Embedding"] == "one row at a time"
    experts = ("LigerExperts", "LigerSoftmaxRouter") if parse(transformers.__version__) >= parse("5") else ()
    for ours in ("LigerRMSNorm", "LigerSwiGLUMLP", *experts):
        assert ways[ours] == "this package's kernels", ours
    assert "products of 512 rows each" in str(invariant) and not invariant.report.skipped


def refusal(model):
    with pytest.raises(ValueError, match="batch_invariant refuses") as caught:
        liger_kernel.batch_invariant(model)
    assert not torch.are_deterministic_algorithms_enabled()
    return str(caught.value)


def test_modules_that_are_refused():
    plain = make("llama")
    assert "LlamaRMSNorm: its mean is one of torch's" in refusal(plain)
    with liger_kernel.batch_invariant(plain, strict=False) as invariant:
        assert [skip.name for skip in invariant.report.skipped] == ["LlamaRMSNorm"]
    model = made("llama")
    model.model.layers[1].mlp.up_proj = nn.Sequential(model.model.layers[1].mlp.up_proj, nn.Dropout(0.1)).train()
    assert "Dropout: dropout draws by the place in the batch" in refusal(model)
    model.eval()
    with liger_kernel.batch_invariant(model):
        pass
    model = made("llama").train()
    model.model.layers[0].self_attn.attention_dropout = 0.5
    assert "LlamaAttention: it drops attention weights" in refusal(model)
    model.model.layers[0].self_attn.is_causal = False
    assert "LlamaAttention: its attention is not causal" in refusal(model)
    model = made("llama")
    model.model.norm = nn.Sequential(model.model.norm, nn.BatchNorm1d(8))
    assert "BatchNorm1d: it computes several rows together (model.norm.1)" in refusal(model)
    liger_kernel.quantise(made_wide := wide_llama())
    assert "LigerLinear8bit: products with quantised weights have not been measured" in refusal(made_wide)
    compiled = made("llama")
    compiled.model.layers[0].compile()
    assert "torch.compile chooses kernels by the shape of the batch" in refusal(compiled)
    split = made("llama")
    split._tp_size = 2
    assert "LlamaForCausalLM: tensor and expert parallelism sum over ranks in no fixed order" in refusal(split)
    with pytest.raises(TypeError, match="no model of transformers"):
        liger_kernel.batch_invariant(nn.Linear(2, 2))


def wide_llama():
    model = make("llama", hidden_size=128, intermediate_size=256).eval().requires_grad_(False)
    patch("llama", model)
    return model


@pytest.mark.skipif(not NEW, reason="its functions are those of transformers 5.15")
def test_recurrences_that_are_refused():
    model = transformers.AutoModelForCausalLM.from_config(shrunk("mamba")).eval()
    liger_kernel.patch(model)
    assert "MambaMixer: its recurrence is not this package's" in refusal(model)


def test_calls_that_are_refused():
    model, ids = made("llama"), documents()[-1][None]
    with liger_kernel.batch_invariant(model):
        left = torch.ones_like(ids)
        left[0, :3] = 0
        with pytest.raises(ValueError, match="pad on the right, or pack"):
            model(ids, attention_mask=left, use_cache=False)
        with pytest.raises(NotImplementedError, match="a cache is refused"):
            model.generate(ids, max_new_tokens=3, do_sample=False, use_cache=True)
        with pytest.raises(NotImplementedError, match="LlamaAttention has a mask of its own"):
            model(ids, attention_mask=torch.zeros(1, 1, ids.shape[1], ids.shape[1]), use_cache=False)
    assert model.generate(ids, max_new_tokens=3, do_sample=False).shape[1] == ids.shape[1] + 3


def test_boundaries_by_keyword():
    """cu_seq_lens_q tells documents as position_ids do."""
    model, every = made("llama"), documents()
    inputs, _ = packed([every])
    ends = torch.tensor((0, *LENGTHS), dtype=torch.int32).cumsum(0, dtype=torch.int32)
    with liger_kernel.batch_invariant(model), torch.no_grad():
        expected = model(**inputs, use_cache=False).logits
        found = model(**inputs, cu_seq_lens_q=ends, cu_seq_lens_k=ends, use_cache=False).logits
    assert torch.equal(found, expected)


def of_rank(rank, family, mode):
    """Each rank has its own documents, in a batch of its own; the reference is the model before it was wrapped."""
    torch.set_num_threads(1)
    model, every = made(family), documents()
    mine = [*range(rank, len(every), 2)][::-1]
    inputs, places = padded([every[n] for n in mine], max(LENGTHS))
    with liger_kernel.batch_invariant(model), torch.no_grad():
        alone = [model(document[None], use_cache=False).logits[0] for document in every]
    wrapped = nn.parallel.DistributedDataParallel(model) if mode == "ddp" else fsdp2(model)
    with liger_kernel.batch_invariant(wrapped), torch.no_grad():
        found = wrapped(**inputs, use_cache=False).logits.flatten(0, 1)
        for n, where in zip(mine, places):
            assert torch.equal(found[where], alone[n]), n
        ids, positions = packed([[every[n] for n in mine]])[0].values()
        found = wrapped(input_ids=ids, position_ids=positions, use_cache=False).logits[0]
        for n, part in zip(mine, found.split([LENGTHS[n] for n in mine])):
            assert torch.equal(part, alone[n]), n


RANKED = [(of_rank, family, mode) for family in ("llama", "qwen3_moe") for mode in ("ddp", "fsdp2")]


@pytest.fixture(scope="module")
def ranked():
    return each_on_ranks(RANKED)


@pytest.mark.parametrize("arguments", RANKED, ids=lambda arguments: "-".join(arguments[1:]))
def test_ranks(ranked, arguments):
    assert not ranked[arguments], ranked[arguments]
