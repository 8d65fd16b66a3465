"""Linear layers whose frozen weight is in eight bits: operators, modules, PEFT, quantise."""

import copy
import os
import pickle

import pytest
import torch
import torch.nn.functional as F
from liger_kernel import patch, quantise
from liger_kernel._library import ops
from liger_kernel.operators.eight_bit import LigerLinear8bit, quantise_rows
from liger_kernel.transformers.monkey_patch import _apply_liger_kernel_to_instance
from peft import LoraConfig, PeftModel, get_peft_model
from ranks import DEVICE, off_over_ranks, on_ranks
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.integrations.finegrained_fp8 import FP8Linear

DEVICES = ["cpu"] + ["cuda"] * torch.cuda.is_available()
#: torch 2.11's FSDP2 makes a parameter with a gradient of each shard, which one of bytes cannot be.
SHARDS_BYTES = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)
LARGEST = {"int8": 127.0, "fp8": 448.0}
#: Between neighbours; of float32, that of sums of up to 272 terms.
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24 * 272**0.5}


def rounds(device, dtype, format):
    """Whether the kernels of 8-bit products run there, which round activations and gradients."""
    if device == "cuda":
        capability = torch.cuda.get_device_capability()
    else:
        emulated = os.environ.get("LIGER_EMULATED_DEVICE", "sm_00").removeprefix("sm_")
        capability = int(emulated[:-1]), int(emulated[-1])
    oldest = (8, 0) if format == "int8" else (8, 9)
    return dtype != torch.float32 and capability >= oldest and capability[0] in (8, 9, 12)


def numbers(weight, format):
    return (weight.view(torch.float8_e4m3fn) if format == "fp8" else weight).double()


def rounded(x, format):
    """Rows of x in eight bits, as float64. The arithmetic is in float32, so that no number falls to the other side of
    the middle between two."""
    x = x.float()
    scale = x.abs().amax(1, keepdim=True) / LARGEST[format]
    scale[scale == 0] = 1
    q = (x * (1 / scale)).clamp(-LARGEST[format], LARGEST[format])
    return (q.to(torch.float8_e4m3fn) if format == "fp8" else q.round()).double() * scale.double()


def make(rows, into, out, rank, dtype, format, bias=True):
    weight, scale = quantise_rows(torch.randn(out, into) * torch.rand(out, 1) * into**-0.5, format)
    a = torch.randn(rank, into) * into**-0.5 if rank else None
    b = torch.randn(out, rank) * rank**-0.5 if rank else None
    return weight, scale, *(t if t is None else t.to(dtype) for t in (torch.randn(out) if bias else None, a, b))


def close(found, expected, dtype, terms=1):
    """Within the rounding of `terms` values to the result's type, of which each is at most half of ROUNDING."""
    error = (found.double() - expected).norm() / expected.norm()
    assert error < terms / 2 * ROUNDING[dtype], error


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("format", LARGEST)
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("rows, into, out, rank", [(37, 64, 144, 8), (130, 272, 528, 12), (1, 16, 16, 0)], ids=str)
def test_linear(device, format, dtype, rows, into, out, rank):
    torch.manual_seed(0)
    x = torch.randn(rows, into).to(dtype)
    dy = torch.randn(rows, out).to(dtype)
    weight, weight_scale, bias, a, b = make(rows, into, out, rank, dtype, format)
    on = [None if t is None else t.to(device) for t in (x, weight, bias, a, b, weight_scale)]
    for t in (on[0], *on[3:5]):
        if t is not None:
            t.requires_grad_()
    y = ops.linear(*on[:5], None, on[5], 0.5)
    y.backward(dy.to(device))

    w, scale = numbers(weight, format), weight_scale.double()[:, None]
    to_eight = (lambda t: rounded(t, format)) if rounds(device, dtype, format) else torch.Tensor.double
    expected = to_eight(x) @ (w * scale).T + bias.double()
    dx = to_eight(dy.float() * weight_scale) @ w if rounds(device, dtype, format) else dy.double() @ (w * scale)
    if rank:
        low = (x.double() @ a.double().T).to(dtype).double()
        dlow = (0.5 * (dy.double() @ b.double())).to(dtype).double()
        expected = expected + 0.5 * low @ b.double().T
        dx = dx + dlow @ a.double()
        close(on[3].grad.cpu(), dlow.T @ x.double(), dtype, 3)
        close(on[4].grad.cpu(), 0.5 * dy.double().T @ low, dtype, 3)
    close(y.detach().cpu(), expected, dtype, 2)
    close(on[0].grad.cpu(), dx, dtype, 3)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("format", LARGEST)
def test_qkv_and_gated_mlps(device, format):
    """Layers that share their input: dx is one product of all. Of the last layer of an MLP, the product is rounded."""
    torch.manual_seed(0)
    dtype, into = torch.bfloat16, 96
    x = torch.randn(50, into).to(dtype)
    rounding = rounds(device, dtype, format)
    to_eight = (lambda t: rounded(t, format)) if rounding else torch.Tensor.double

    def forward(t, layer):
        weight, scale, _, a, b = layer
        return to_eight(t) @ (numbers(weight, format) * scale.double()[:, None]).T + (
            (t.double() @ a.double().T).to(dtype).double() @ b.double().T
        )

    def backward(dys, layers):
        scaled = [dy.float() * scale for dy, (_, scale, *_) in zip(dys, layers)]
        w = torch.cat([numbers(layer[0], format) for layer in layers])
        lows = sum((dy.double() @ b.double()).to(dtype).double() @ a.double() for dy, (*_, a, b) in zip(dys, layers))
        return to_eight(torch.cat(scaled, 1)) @ w + lows

    def arguments(layers):
        return [t for weight, _, _, a, b in layers for t in (weight.to(device), None, a.to(device), b.to(device))]

    layers = [make(50, into, out, 8, dtype, format, bias=False) for out in (96, 32, 32)]
    dys = [torch.randn(50, out).to(dtype) for out in (96, 32, 32)]
    inside = x.clone().to(device).requires_grad_()
    results = ops.qkv(inside, *arguments(layers), *(scale.to(device) for _, scale, *_ in layers), 1.0, 1.0, 1.0)
    torch.autograd.backward(results, [dy.to(device) for dy in dys])
    for result, layer in zip(results, layers):
        close(result.detach().cpu(), forward(x, layer), dtype, 2)
    close(inside.grad.cpu(), backward(dys, layers), dtype, 3)

    layers = [make(50, 96, 160, 8, dtype, format, bias=False) for _ in range(2)]
    layers.append(make(50, 160, 96, 8, dtype, format, bias=False))
    dy = torch.randn(50, 96).to(dtype)
    inside = x.clone().to(device).requires_grad_()
    y = ops.gated_mlp(inside, *arguments(layers), *(scale.to(device) for _, scale, *_ in layers), 1.0, 1.0, 1.0)
    y.backward(dy.to(device))
    gate, up = (forward(x, layer).to(dtype).double().requires_grad_() for layer in layers[:2])
    product = F.silu(gate) * up
    close(y.detach().cpu(), forward(product.detach().to(dtype), layers[2]), dtype, 4)
    product.backward(backward([dy], layers[2:]).to(dtype).double())
    close(inside.grad.cpu(), backward([gate.grad.to(dtype), up.grad.to(dtype)], layers[:2]), dtype, 6)

    packed = torch.cat([gate, up], 1).detach().to(device, dtype).requires_grad_()
    y = ops.gated_linear(packed, *arguments(layers[2:]), layers[2][1].to(device), 1.0)
    y.backward(dy.to(device))
    close(y.detach().cpu(), forward(product.detach().to(dtype), layers[2]), dtype, 4)
    close(packed.grad.cpu(), torch.cat([gate.grad, up.grad], 1), dtype, 5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("format", LARGEST)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gated_mlp_has_the_bits_of_its_parts(device, format, dtype):
    """Rows in eight bits that the gated product and its backward write are those of a pass over their results."""
    torch.manual_seed(0)
    into, inner = 64, 4112  # more columns than a block takes at once
    on = lambda t: None if t is None else t.to(device)
    gate, up = (tuple(map(on, make(0, into, inner, 8, dtype, format))) for _ in range(2))
    none = tuple(map(on, make(0, into, 16, 0, dtype, format)))
    down = tuple(map(on, make(0, inner, into, 0, dtype, format)))
    x, dy = torch.randn(5, into).to(dtype), torch.randn(5, into).to(dtype)
    x[1], x[2, 3], dy[3], dy[4, 0] = 0, float("nan"), 0, float("inf")
    first, second = (on(x).requires_grad_() for _ in range(2))

    def arguments(*layers):
        return [t for weight, _, *rest in layers for t in (weight, *rest)] + [layer[1] for layer in layers]

    y = ops.gated_mlp(first, *arguments(gate, up, down), 0.5, 2.0, 1.0)
    y.backward(on(dy))
    # The third layer has no adapter, and its gradient is 0: it adds nothing.
    of_gate, of_up, nothing = ops.qkv(second, *arguments(gate, up, none), 0.5, 2.0, 1.0)
    product = ops.gated(of_gate, of_up, 0, 1.0)
    parts = ops.linear(product, *arguments(down)[:4], None, down[1], 1.0)
    parts.backward(on(dy), retain_graph=True)
    assert torch.equal(y.nan_to_num(), parts.nan_to_num()) and torch.equal(y.isnan(), parts.isnan())
    assert y[[0, 1, 3, 4]].isfinite().all() and y[2].isnan().all()
    found, expected = first.grad, second.grad
    assert torch.equal(found.nan_to_num(), expected.nan_to_num()) and torch.equal(found.isnan(), expected.isnan())
    assert found[[0, 1, 3]].isfinite().all() and found[0].any() and nothing.isfinite().any()


@pytest.mark.parametrize("format", LARGEST)
def test_rounding_of_a_matrix(format):
    """To the nearest number of the format, for every number that it has and for what lies between two."""
    largest = LARGEST[format]
    if format == "fp8":
        codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
        values = codes[codes.isfinite()].unique()
    else:
        values = torch.arange(-127.0, 128.0)
    between = (values[1:] + values[:-1]) / 2
    points = torch.cat([values, between * (1 + 1e-3), between * (1 - 1e-3)])
    bytes, scale = quantise_rows(torch.cat([points, torch.tensor([largest])])[None], format)
    found = numbers(bytes, format)[0, :-1] * scale.double()
    nearest = values.double()[(points.double()[:, None] - values.double()).abs().argmin(1)]
    assert scale.item() == 1 and torch.equal(found, nearest)
    zeros, scale = quantise_rows(torch.zeros(2, 16), format)
    assert torch.equal(scale, torch.ones(2)) and not numbers(zeros, format).any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("format", LARGEST)
def test_every_number(device, format):
    """In float32 the weight is dequantised: its numbers times their row's scale, each of the 256 rounded once."""
    codes = torch.arange(256, dtype=torch.uint8).view(16, 16)
    if format == "fp8":
        codes = torch.where(codes.view(torch.float8_e4m3fn).float().isfinite(), codes, 0)
    weight = codes.view(torch.int8) if format == "int8" else codes
    scale = torch.rand(16) + 0.5
    y = ops.linear(torch.eye(16, device=device), weight.to(device), None, None, None, None, scale.to(device), 1.0)
    assert torch.equal(y.cpu().T, (numbers(weight, format) * scale.double()[:, None]).float())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("format", LARGEST)
def test_values_that_are_not_finite(device, format):
    """A row with a NaN or an infinity gives NaN, and no other row does."""
    torch.manual_seed(0)
    weight, weight_scale, *_ = make(8, 64, 128, 0, torch.bfloat16, format)
    x = torch.randn(8, 64).bfloat16()
    x[2, 5], x[4, 6], x[6] = float("nan"), float("inf"), 0
    y = ops.linear(x.to(device), weight.to(device), None, None, None, None, weight_scale.to(device), 1.0).cpu()
    assert y[2].isnan().all() and not y[4].isfinite().any()
    assert y[[0, 1, 3, 5, 7]].isfinite().all() and not y[6].any()


def test_refuses():
    weight, scale, *_ = make(4, 16, 16, 0, torch.float32, "int8")
    x = torch.randn(4, 16)
    with pytest.raises(TypeError, match="weight must be .* of int8 or uint8"):
        ops.linear(x, torch.randn(16, 16), None, None, None, None, scale, 1.0)
    with pytest.raises(RuntimeError, match="weight_scale must be"):
        ops.linear(x, weight, None, None, None, None, scale[:8], 1.0)
    with pytest.raises(TypeError, match="weight must be .* of float32"):
        ops.linear(x, weight, None, None, None, None, None, 1.0)
    with pytest.raises(RuntimeError, match="a weight in 8 bits has no gradient"):
        ops.linear_backward(x, x, weight, None, None, None, None, scale, 1.0, x.new_empty(4, 0), x.new_empty(0),
                            True, True, False, False, False, False)  # fmt: skip
    with pytest.raises(ValueError, match="format must be one of int8, fp8"):
        quantise(nn.Sequential(nn.Linear(128, 128)), "int4")
    with pytest.raises(ValueError, match="no linear layer"):
        quantise(nn.Sequential(nn.Linear(8, 8)))


def llama(dtype=torch.float32):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, tie_word_embeddings=False,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(dtype).train()


def adapted(model, **options):
    torch.manual_seed(1)
    options = {"r": 8, "target_modules": "all-linear", "init_lora_weights": False, **options}
    return get_peft_model(model, LoraConfig(**options))


IDS = torch.arange(64).view(2, 32) * 7 % 256


def step(model):
    loss = model(input_ids=IDS, labels=IDS).loss
    loss.backward()
    return {"loss": loss.detach()} | {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def whole(model):
    """A copy of a model whose layers in eight bits are plain ones."""
    model = copy.deepcopy(model)
    for name, module in list(model.named_modules()):
        if isinstance(module, LigerLinear8bit):
            plain = nn.Linear(module.in_features, module.out_features, bias=False)
            plain.weight = nn.Parameter(module.dequantize().float(), requires_grad=False)
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, plain)
    return model


@pytest.mark.parametrize("format", LARGEST)
@pytest.mark.parametrize("patched", [False, True])
@pytest.mark.parametrize("options", [{}, {"use_dora": True}, {"lora_dropout": 0.5}], ids=str)
def test_adapters(format, patched, options):
    """Losses and gradients are those of the dequantised model, in whichever order base and adapters are made."""
    expected = None
    for first in ("base", "adapters"):
        model = llama()
        if first == "base":
            quantise(model, format)
        model = adapted(model, **options)
        if first == "adapters":
            quantise(model, format)
        linear = [m for m in model.modules() if isinstance(m, LigerLinear8bit)]
        assert len(linear) == 14 and not any(m.weight.requires_grad for m in linear)
        if patched:
            patch(model)
        if expected is None or "use_dora" in options:  # DoRA's magnitudes are those of the weight it is made on
            plain = whole(model)
            torch.manual_seed(2)
            expected = step(plain)
        torch.manual_seed(2)
        found = step(model)
        assert found.keys() == expected.keys() and len(found) >= 29
        for name, value in expected.items():
            # Sums of up to 256 terms in another order, in a few layers: 64 roundings of float32.
            assert (found[name] - value).norm() <= 64 * 2**-23 * value.norm().clamp_min(1e-6), name


def test_report_and_what_is_kept():
    model = llama()
    model.model.layers[0].mlp.down_proj.weight.data[3] *= 100
    result = quantise(model, "fp8", skip=["layers.1.mlp.up_proj"], inputs={"input_ids": IDS})
    rows = {row.name: row for row in result.layers}
    assert {name: row.count for name, row in rows.items()} == {
        "q_proj": 2, "k_proj": 2, "v_proj": 2, "o_proj": 2, "gate_proj": 2, "up_proj": 1, "down_proj": 2,
    }  # fmt: skip
    assert result.kept == {"model.layers.1.mlp.up_proj": "it is to be skipped", "lm_head": "the head"}
    assert type(model.lm_head) is nn.Linear and type(model.model.layers[1].mlp.up_proj) is nn.Linear
    # E4M3 has 4 bits of a number: rounding is off by 2⁻⁴ at most, and by half of √(1/3) of that for numbers that are
    # spread evenly.
    for row in result.layers:
        assert 0.01 < row.error <= row.worst < 0.04
    assert rows["q_proj"].before == 2 * 128 * 128 * 4 and rows["q_proj"].after == 2 * 128 * (128 + 4)
    assert "fp8: 13 linear layers" in str(result) and "kept: lm_head: the head" in str(result)
    trained = adapted(llama(), target_modules=["q_proj"], modules_to_save=["down_proj"])
    kept = quantise(trained).kept
    assert not [name for name in kept if "q_proj" in name or "up_proj" in name]
    copies = [m for n, m in trained.named_modules() if "down_proj" in n and isinstance(m, nn.Linear)]
    assert len(copies) == 4 and all(type(m) is nn.Linear for m in copies)


@pytest.mark.parametrize("format", LARGEST)
def test_module(format):
    """Copies, pickles, state dicts; a change of dtype leaves the scales as they are."""
    torch.manual_seed(0)
    plain = nn.Linear(64, 128)
    layer = LigerLinear8bit(plain, format)
    x = torch.randn(3, 64)
    y = layer(x)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(other(x), y)
    fresh = LigerLinear8bit(nn.Linear(64, 128), format)
    fresh.load_state_dict(layer.state_dict())
    assert torch.equal(fresh(x), y)
    scale = layer.weight_scale.clone()
    layer.to(torch.bfloat16)
    assert layer.weight_scale.dtype == torch.float32 and torch.equal(layer.weight_scale, scale)
    assert layer.bias.dtype == layer.compute_dtype == layer(x.bfloat16()).dtype == torch.bfloat16
    assert layer.weight.dtype == (torch.uint8 if format == "fp8" else torch.int8)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(layer(x), layer(x.bfloat16()))
    assert f"format={format}" in repr(layer)


def test_merging_and_saving(tmp_path):
    """An adapter that was trained on eight bits is merged into the original model."""
    model = adapted(llama())
    quantise(model)
    with pytest.raises(ValueError, match="takes no adapter in"):
        patch(model) and model.merge_adapter()
    model.save_pretrained(tmp_path)
    merged = PeftModel.from_pretrained(llama(), tmp_path).merge_and_unload()
    expected = adapted(llama())
    with torch.no_grad():
        # The products are added to a weight or to a result: roundings of float32 in two layers.
        assert torch.allclose(merged(IDS).logits, expected(IDS).logits, rtol=1e-3, atol=1e-4)


def test_layers_of_others():
    """Bytes with a scale per row are taken over; a scale per block is not kept, and the weight is rounded again."""
    torch.manual_seed(0)
    weight, x = torch.randn(256, 384), torch.randn(5, 384)
    plain = nn.Linear(384, 256)

    rows = copy.deepcopy(plain)
    bytes, scale = quantise_rows(weight, "fp8")
    rows.weight = nn.Parameter(bytes.view(torch.float8_e4m3fn), requires_grad=False)
    rows.register_buffer("weight_scale", scale[:, None])
    rows.__class__ = type("CompressedLinear", (nn.Linear,), {})
    model = nn.Sequential(rows)
    result = quantise(model, "int8")
    assert model[0].format == "fp8" and torch.equal(model[0].weight, bytes) and result.layers[0].error < 1e-6
    expected = F.linear(x.double(), numbers(bytes, "fp8") * scale.double()[:, None], plain.bias.double())
    close(model[0](x).detach(), expected, torch.float32, 4)

    blocks = FP8Linear(384, 256, block_size=(128, 128), has_bias=True)
    largest = weight.unflatten(0, (2, 128)).unflatten(2, (3, 128)).abs().amax((1, 3)) / 448
    spread = largest.repeat_interleave(128, 0).repeat_interleave(128, 1)
    blocks.weight = nn.Parameter((weight / spread).to(torch.float8_e4m3fn), requires_grad=False)
    blocks.weight_scale_inv = nn.Parameter(largest, requires_grad=False)
    blocks.bias = plain.bias
    stored = blocks.weight.double() * spread.double()
    model = nn.Sequential(blocks)
    result = quantise(model, "int8")
    expected, scale = quantise_rows(stored.float(), "int8")
    assert torch.equal(model[0].weight, expected) and torch.equal(model[0].weight_scale, scale)
    assert (
        1e-3 < result.layers[0].error < 0.01
    )  # half of 1 / 127 of a row's largest, spread evenly, is 0.7 % of the norm
    unknown = FP8Linear(384, 256, block_size=None)
    unknown.weight_scale_inv = None
    assert "a FP8Linear with a weight of" in quantise(nn.Sequential(unknown, plain)).kept["0"]


def test_switch():
    """patch(model, base=...) and a trainer's liger_kernel_config."""
    model = adapted(llama())
    report = patch(model, base="int8")
    assert sum(isinstance(m, LigerLinear8bit) for m in model.modules()) == 14
    assert "int8, error 0." in str(report) and "LigerLinear8bit" not in str(model.lm_head)
    layers = [m for m in model.modules() if isinstance(m, LigerLinear8bit)]
    again = patch(model, base="int8")  # a trainer's second train()
    assert layers == [m for m in model.modules() if isinstance(m, LigerLinear8bit)]
    assert sorted(map(str, again.replaced)) == sorted(map(str, report.replaced))
    with pytest.raises(ValueError, match="give the model adapters first"):
        _apply_liger_kernel_to_instance(model=llama(), base="int8")
    with pytest.raises(ValueError, match="format must be one of"):
        patch(adapted(llama()), base="int2")
    trained = adapted(llama())
    _apply_liger_kernel_to_instance(model=trained.get_base_model(), base="fp8")
    assert sum(isinstance(m, LigerLinear8bit) for m in trained.modules()) == 14
    step(trained)


def _over_ranks(rank, kind):
    model = adapted(llama(torch.bfloat16)).to(DEVICE)
    quantise(model)
    patch(model)
    return off_over_ranks(model, IDS, kind)


@pytest.mark.parametrize("kind", ["ddp"] + ["fsdp2"] * SHARDS_BYTES)
def test_over_ranks(kind):
    """Bytes and scales are broadcast, sharded and gathered; the mean of two equal gradients is exact."""
    for loss, gradients, count in on_ranks(_over_ranks, kind):
        assert loss == 0 and gradients == 0 and count == 28
