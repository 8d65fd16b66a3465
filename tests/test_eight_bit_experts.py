"""Experts of a mixture whose frozen weights are in eight bits: the operator, modules, PEFT, quantise."""

import copy
import pickle

import pytest
import torch
from cases.fused_experts import SCALES, make, reference
from liger_kernel import patch, quantise
from liger_kernel._library import ops
from liger_kernel.operators.eight_bit import quantise_rows
from liger_kernel.operators.eight_bit_experts import EightBitMatrices, in_eight_bits
from liger_kernel.operators.experts import Adapter, fused_experts
from peft import LoraConfig, PeftModel, get_peft_model
from ranks import DEVICE, off_over_ranks, on_ranks
from torch import nn
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    NemotronHConfig,
    NemotronHForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

DEVICES = ["cpu"] + ["cuda"] * torch.cuda.is_available()
FORMATS = ["int8", "fp8"]
#: torch 2.11's FSDP2 takes no parameters of integers.
SHARDS_BYTES = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)
WEIGHTS = "gate_up_proj", "up_proj", "down_proj"
IDS = torch.arange(64).view(2, 32) * 7 % 256


def in_bytes(weight, format):
    numbers, scale = zip(*(quantise_rows(matrix, format) for matrix in weight))
    return torch.stack(numbers), torch.stack(scale)


def whole(numbers, scale):
    return (numbers.view(torch.float8_e4m3fn) if numbers.dtype == torch.uint8 else numbers).double() * scale.double()[
        ..., None
    ]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        dict(rank=8),
        dict(transposed=True, biases=True, recompute=False),
        dict(bounded=True, k=4, rank=8),
        dict(gated=False, activation="relu_squared", rank=8),
    ],
    ids=str,
)
def test_operator(device, format, dtype, options):
    """Results and gradients are those of the dequantised matrices."""
    torch.manual_seed(0)
    x, gate_up, down, weights, *rest, index = make((40, 24, 64), options)
    bytes = [in_bytes(w, format) for w in (gate_up, down)]
    x, *rest = (None if t is None else t.to(dtype) for t in (x, *rest))
    rounded = [whole(*each).to(dtype) for each in bytes]
    leaves = [None if t is None else t.detach().to(device).requires_grad_() for t in (x, weights, *rest)]
    adapters = {}
    if "rank" in options:
        adapters = dict(gate_up_adapter=Adapter(*leaves[4:6], SCALES[0]), down_adapter=Adapter(*leaves[6:], SCALES[1]))
    passed = {name: options[name] for name in ("transposed", "recompute", "gated", "activation") if name in options}
    (first, first_scale), (second, second_scale) = ([t.to(device) for t in each] for each in bytes)
    most = 40 * 3 if options.get("bounded") else None
    y = fused_experts(
        leaves[0], first, second, index.to(device), leaves[1], *leaves[2:4], **passed, **adapters, most_rows=most,
        gate_up_weight_scale=first_scale, down_weight_scale=second_scale,
    )  # fmt: skip
    dy = torch.randn(y.shape).to(dtype)
    y.backward(dy.to(device))

    exact = [None if t is None else t.detach().double().requires_grad_() for t in (x, weights, *rest)]
    expected = reference(exact[0], *(w.double() for w in rounded), *exact[1:], index, **passed)
    expected.backward(dy.double())
    # Chains of three products: some roundings of the dtype of each term, relative to the norm.
    bound = 8 * {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-8}[dtype]
    for found, right in [(y, expected), *((a.grad, b.grad) for a, b in zip(leaves, exact) if a is not None)]:
        assert (found.detach().double().cpu() - right.detach()).norm() <= bound * right.detach().norm()


def test_refuses():
    x, gate_up, down, weights, *_, index = make((4, 8, 6), {})
    (first, first_scale), (second, second_scale) = (in_bytes(w, "int8") for w in (gate_up, down))
    scales = dict(gate_up_weight_scale=first_scale, down_weight_scale=second_scale)
    with pytest.raises(TypeError, match="gate_up must be .* of int8 or uint8"):
        fused_experts(x, gate_up, second, index, weights, **scales)
    with pytest.raises(RuntimeError, match="down_weight_scale must be"):
        fused_experts(x, first, second, index, weights, **{**scales, "down_weight_scale": second_scale[:, :4]})
    with pytest.raises(TypeError, match="gate_up must be .* of float32"):
        fused_experts(x, first, second, index, weights)
    _, order, place, ends, kept = ops.fused_experts_forward(
        x, first, second, weights, *[None] * 6, first_scale, second_scale, index, False
    )
    with pytest.raises(RuntimeError, match="a weight in 8 bits has no gradient"):
        wanted = [True, True] + [False] * 8
        ops.fused_experts_backward(
            x, x, first, second, weights, *[None] * 6, first_scale, second_scale, order, place, ends, kept, *wanted
        )


def qwen3_moe(dtype=torch.float32, layers=2):
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, moe_intermediate_size=32, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=8, num_experts_per_tok=2,
        decoder_sparse_step=1,
    )  # fmt: skip
    return Qwen3MoeForCausalLM(config).to(dtype).train()


def gpt_oss(dtype=torch.float32):
    torch.manual_seed(0)
    config = GptOssConfig(
        vocab_size=256, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_local_experts=4, num_experts_per_tok=2,
        layer_types=["full_attention"] * 2, attn_implementation="eager",
    )  # fmt: skip
    model = GptOssForCausalLM(config).to(dtype).train()
    with torch.no_grad():  # which transformers leaves as they are
        for module in model.modules():
            for name in ("gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias", "sinks"):
                if name in module._parameters:
                    module._parameters[name].normal_(std=0.1)
    return model


def nemotron_h(dtype=torch.float32):
    torch.manual_seed(0)
    config = NemotronHConfig(
        vocab_size=256, hidden_size=64, moe_intermediate_size=32, moe_shared_expert_intermediate_size=32,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, n_routed_experts=8, num_experts_per_tok=2,
        hybrid_override_pattern="*E*E",
    )  # fmt: skip
    return NemotronHForCausalLM(config).to(dtype).train()


def weights_of(experts):
    return [name for name in WEIGHTS if name in experts._parameters]


def adapted(model, experts=True):
    torch.manual_seed(1)
    names = {f"experts.{name}" for module in model.modules() for name in weights_of(module)}
    options = {"target_parameters": sorted(names)} if experts else {}
    return get_peft_model(
        model, LoraConfig(r=8, target_modules=["q_proj", "v_proj"], init_lora_weights=False, **options)
    )


def step(model):
    loss = model(input_ids=IDS, labels=IDS).loss
    loss.backward()
    return {"loss": loss.detach()} | {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def held(model):
    return [module for module in model.modules() if in_eight_bits(module, "down_proj") is not None]


def plain(make, format):
    """A model of which each weight of experts has been rounded to eight bits, as quantise skips the linear layers."""
    model = make()
    with torch.no_grad():
        for module in model.modules():
            for name in weights_of(module):
                weight = module._parameters[name]
                weight.copy_(whole(*in_bytes(weight, format)))
    return model


SHARED = "shared_experts.up_proj", "shared_experts.down_proj"
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate", "router", *SHARED)


@pytest.mark.parametrize("patched", ["", "before", "after"])
@pytest.mark.parametrize(
    "make, format, experts",
    [
        (qwen3_moe, "int8", True),
        (qwen3_moe, "fp8", False),
        (gpt_oss, "fp8", True),
        (gpt_oss, "int8", False),
        (nemotron_h, "int8", True),
    ],
)
def test_adapters(patched, make, format, experts):
    """Losses and gradients are those of the dequantised model, whichever of base, adapters and patch comes first, and
    with PEFT's own forward."""
    expected = step(adapted(plain(make, format), experts))
    for first in ("base", "adapters"):
        model = make()
        if patched == "before" and first == "base":
            patch(model)
        if first == "base":
            quantise(model, format, skip=LINEAR)
        model = adapted(model, experts)
        if patched == "before" and first == "adapters":
            patch(model)
        if first == "adapters":
            quantise(model, format, skip=LINEAR)
        if patched == "after":
            report = patch(model)
            assert any(part.name.endswith("Experts") for part in report.replaced), report
        assert len(held(model)) == 2
        for _ in range(2):  # and what a pass leaves behind
            model.zero_grad()
            found = step(model)
        assert found.keys() == expected.keys() and len(found) >= 9 + 8 * experts
        for name, value in expected.items():
            # Sums of up to 256 terms in another order, in a few layers: 64 roundings of float32.
            assert (found[name] - value).norm() <= 64 * 2**-23 * value.norm().clamp_min(1e-6), name
        numbers = [in_eight_bits(module, name)[0] for module in held(model) for name in weights_of(module)]
        assert all(t.dtype == (torch.int8 if format == "int8" else torch.uint8) for t in numbers)


def test_report_and_what_is_kept():
    model = qwen3_moe(torch.bfloat16)
    result = quantise(model, skip=["layers.1.mlp.experts.down_proj"])
    rows = {row.name: row for row in result.layers}
    assert rows["experts.gate_up_proj"].count == 2 and rows["experts.down_proj"].count == 1
    assert result.kept["model.layers.1.mlp.experts.down_proj"] == "it is to be skipped"
    # half of 1 / 127 of a row's largest, spread evenly, is 0.5 to 0.8 % of the norm for rows of 32 to 64 numbers
    for name in ("experts.gate_up_proj", "experts.down_proj"):
        assert 0.003 < rows[name].error <= rows[name].worst < 0.01
    assert rows["experts.gate_up_proj"].before == 2 * 8 * 64 * 64 * 2
    assert rows["experts.gate_up_proj"].after == 2 * 8 * 64 * (64 + 4)
    assert ", 3 weights of experts" in str(result)
    experts = model.model.layers[1].mlp.experts
    assert type(experts.down_proj) is nn.Parameter and experts.gate_up_proj.dtype == torch.bfloat16
    assert type(experts).__name__ == "Qwen3MoeExperts" and model(IDS).logits.isfinite().all()
    again = quantise(model, skip=LINEAR)  # the rest
    assert [(row.name, row.count) for row in again.layers] == [("experts.down_proj", 1)]
    assert len(held(model)) == 2 and model(IDS).logits.isfinite().all()
    trained = adapted(qwen3_moe())
    for module in trained.modules():
        if "gate_up_proj" in module._parameters:
            module.gate_up_proj.requires_grad_(True)
    kept = quantise(trained).kept
    assert [reason for name, reason in kept.items() if name.endswith("gate_up_proj")] == ["it is trained"] * 2


@pytest.mark.parametrize("patched", [False, True])
def test_module(patched, tmp_path):
    """Copies, pickles, state dicts; a change of dtype leaves the scales as they are; what is written raises."""
    model = qwen3_moe()
    if patched:
        patch(model)
    quantise(model, skip=LINEAR)
    y = model(IDS).logits
    torch.save(model, tmp_path / "model.pt")
    for other in (
        copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(tmp_path / "model.pt", weights_only=False)
    ):  # fmt: skip
        assert torch.equal(other(IDS).logits, y)
    fresh = qwen3_moe()
    if patched:
        patch(fresh)
    quantise(fresh, skip=LINEAR)
    with torch.no_grad():
        for module in held(fresh):
            in_eight_bits(module, "down_proj")[0].zero_()
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(fresh(IDS).logits, y)
    experts = held(model)[0]
    scale = in_eight_bits(experts, "down_proj")[1].clone()
    weight = experts.down_proj
    assert isinstance(weight, EightBitMatrices) and weight.shape == (8, 64, 32) and "int8" in repr(weight)
    assert torch.equal(weight[3], weight.dequantize()[3]) and torch.equal(weight * 1, weight.dequantize())
    assert torch.equal(weight.dequantize().double(), whole(*in_eight_bits(experts, "down_proj")).float().double())
    assert torch.equal(copy.deepcopy(weight).dequantize(), weight.dequantize())
    with pytest.raises(RuntimeError, match="weights in eight bits cannot be changed"):
        weight.add_(1)
    model.to(torch.bfloat16)
    assert experts.down_proj.dtype == torch.bfloat16 and torch.equal(in_eight_bits(experts, "down_proj")[1], scale)
    assert in_eight_bits(experts, "down_proj")[0].dtype == torch.int8
    assert model(IDS).logits.dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        assert fresh(IDS).logits.isfinite().all()


def test_merging_and_saving(tmp_path):
    model = adapted(qwen3_moe())
    quantise(model, skip=LINEAR)
    for safe in (False, True):
        with pytest.raises(RuntimeError, match="weights in eight bits cannot be changed"):
            model.merge_adapter(safe_merge=safe)
    model.unmerge_adapter()
    patch(model)
    with pytest.raises(ValueError, match="takes no adapter in"):
        model.merge_adapter()
    model.save_pretrained(tmp_path)
    merged = PeftModel.from_pretrained(qwen3_moe(), tmp_path).merge_and_unload()
    expected = adapted(qwen3_moe())
    with torch.no_grad():
        # The products are added to a weight or to a result: roundings of float32 in two layers.
        assert torch.allclose(merged(IDS).logits, expected(IDS).logits, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("adapters", [False, True])
def test_compiled(adapters):
    model = adapted(qwen3_moe(layers=1), adapters)
    quantise(model, skip=LINEAR)
    patch(model)
    expected = step(model)
    model.zero_grad()
    compiled = torch.compile(model, backend="eager")
    loss = compiled(input_ids=IDS, labels=IDS).loss
    loss.backward()
    assert (loss - expected["loss"]).abs() <= 2**-20
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            right = expected[name]
            assert (parameter.grad - right).norm() <= 64 * 2**-23 * right.norm().clamp_min(1e-6), name


def _over_ranks(rank, kind):
    model = adapted(qwen3_moe(torch.bfloat16)).to(DEVICE)
    quantise(model)
    patch(model)
    return off_over_ranks(model, IDS, kind)


@pytest.mark.parametrize("kind", ["ddp"] + ["fsdp2"] * SHARDS_BYTES)
def test_over_ranks(kind):
    """Bytes and scales are broadcast, sharded and gathered; the mean of two equal gradients is exact."""
    for of_loss, of_grads, count in on_ranks(_over_ranks, kind):
        assert of_loss == 0 and of_grads == 0 and count == 16
