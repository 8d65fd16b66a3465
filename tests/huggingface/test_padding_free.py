"""Flash Attention, with rows of one sequence and with several in one row without padding, as trainers hand them to it:
the patch keeps the model's attention, and what the attention is told reaches it."""

import copy

import pytest
import torch
from conftest import VOCABULARY, assert_close, batch, make, run
from liger_kernel.transformers.patching.apply import patch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface

FAMILIES = ("llama", "qwen3", "gemma2")
LENGTHS = (5, 3, 9)
DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def by_sequence(module, query, key, value, attention_mask, scaling, dropout=0.0, cu_seq_lens_q=None, **kwargs):
    """Stands in for flash_attn_varlen_func, which needs a GPU: causal attention within the sequences of cu_seq_lens."""
    by_sequence.calls.append((cu_seq_lens_q.tolist(), kwargs["max_length_q"]))
    groups = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(groups, dim=1) for t in (key, value))
    out = torch.empty_like(query)
    for begin, end in zip(cu_seq_lens_q[:-1], cu_seq_lens_q[1:]):
        part = slice(begin, end)
        scores = query[:, :, part] @ key[:, :, part].transpose(2, 3) * scaling
        ahead = torch.ones(end - begin, end - begin, device=query.device).triu(1).bool()
        out[:, :, part] = scores.masked_fill(ahead, -torch.inf).softmax(-1) @ value[:, :, part]
    return out.transpose(1, 2).contiguous(), None


def padding_free():
    """One row of LENGTHS, as DataCollatorWithFlattening makes it: no label is predicted from another sequence."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, VOCABULARY, (1, sum(LENGTHS)), generator=generator)
    ends = torch.tensor((0, *LENGTHS)).cumsum(0).int()
    labels = ids.clone()
    labels[0, ends[:-1].long()] = -100
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    most = max(LENGTHS)
    lengths = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": most, "max_length_k": most}
    return {"input_ids": ids, "labels": labels, "position_ids": positions, **lengths}


@pytest.mark.parametrize("family", FAMILIES)
def test_sequences_do_not_see_one_another(family):
    AttentionInterface.register("by_sequence", by_sequence)
    inputs = padding_free()
    model = make(family, attn_implementation="by_sequence")
    found = {}
    for name in ("plain", "patched"):
        by_sequence.calls = []
        report = patch(family, model) if name == "patched" else None
        output, gradients = run(model, **inputs)
        found[name] = output.loss.detach(), gradients, by_sequence.calls
    assert output.logits is None and model.config._attn_implementation == "by_sequence" and keeps_attention(report)
    assert found["patched"][2] == found["plain"][2] == [([0, 5, 8, 17], 9)] * model.config.num_hidden_layers
    assert_close(found["patched"][0], found["plain"][0])
    assert found["plain"][1].keys() == found["patched"][1].keys()
    for name, gradient in found["plain"][1].items():
        assert gradient.abs().max() > 0, name
        assert_close(found["patched"][1][name], gradient)

    # The mean over all labels is that of the sequences one by one, weighted by how many labels each has.
    report.undo()
    single, total = 0.0, 0
    for begin, length in zip(inputs["cu_seq_lens_q"].tolist(), LENGTHS):
        ids = inputs["input_ids"][:, begin : begin + length]
        ends = torch.tensor([0, length]).int()
        one = model(ids, labels=ids, cu_seq_lens_q=ends, cu_seq_lens_k=ends, max_length_q=length, max_length_k=length)
        single, total = single + one.loss.detach() * (length - 1), total + length - 1
    assert_close(found["patched"][0], single / total)


def keeps_attention(report):
    """Whether of attention only the projections of its input, and norms with the rotation, are computed otherwise."""
    return all(r.by in ("qkv", "qk_norm_rope") for r in report.replaced if "Attention" in r.name)


def assert_as_exact(model, exact, inputs):
    """A patched model of 16 bits errs no more than the plain one, both against one of float: by a quarter more in
    the loss and in the norm of each gradient, and half a rounding, because two roundings of one number differ."""
    copies = {"exact": exact, "plain": model, "patched": copy.deepcopy(model)}
    report = patch(model.config.model_type, copies["patched"])
    assert keeps_attention(report)
    found = {name: run(one, **inputs) for name, one in copies.items()}
    report.undo()
    assert found["patched"][0].logits is None
    (loss, gradients), (plain_loss, plain), (patched_loss, patched) = (
        (output.loss.detach().float(), got) for output, got in found.values()
    )
    eps = torch.finfo(model.dtype).eps
    assert (patched_loss - loss).abs() <= 1.25 * (plain_loss - loss).abs() + eps / 2 * loss
    assert gradients.keys() == plain.keys() == patched.keys()
    for name, want in gradients.items():
        errors = [(got[name].float() - want).norm() for got in (patched, plain)]
        assert want.abs().max() > 0 and errors[0] <= 1.25 * errors[1] + eps / 2 * want.norm(), (name, errors)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", FAMILIES[:2])
def test_flash_attention_of_torch(family, device):
    exact = make(family, attn_implementation="eager").to(device)
    model = copy.deepcopy(exact).bfloat16()
    model.set_attn_implementation("sdpa")
    inputs = {name: value.to(device) for name, value in batch().items()}
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        assert_as_exact(model, exact, inputs)


def flash(module, query, key, value, attention_mask, scaling, dropout=0.0, cu_seq_lens_q=None, **kwargs):
    """torch's own build of Flash Attention."""
    from torch.nn.attention.varlen import varlen_attn

    groups = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(groups, dim=1) for t in (key, value))
    rows = [t[0].transpose(0, 1).contiguous() for t in (query, key, value)]
    most = kwargs["max_length_q"]
    return varlen_attn(*rows, cu_seq_lens_q, cu_seq_lens_q, most, most, scale=scaling, window_size=(-1, 0))[None], None


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", FAMILIES[:2])
def test_flash_attention_without_padding(family, device):
    AttentionInterface.register("by_sequence", by_sequence)
    AttentionInterface.register("packed", flash if device == "cuda" else by_sequence)
    by_sequence.calls = []
    exact = make(family, attn_implementation="by_sequence").to(device)
    model = copy.deepcopy(exact).bfloat16()
    model.set_attn_implementation("packed")
    inputs = {name: value.to(device) if torch.is_tensor(value) else value for name, value in padding_free().items()}
    assert_as_exact(model, exact, inputs)
