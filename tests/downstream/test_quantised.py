"""Models that bitsandbytes or GPTQ have quantised, trained with LoRA, patched and not; and quantised heads."""

import os

os.environ |= {"GPTQMODEL_CPU_WORKERS": "2"}

from types import SimpleNamespace

import peft
import pytest
import torch
from bitsandbytes import functional
from bitsandbytes.functional import has_avx512bf16
from bitsandbytes.nn import Int8Params, Linear4bit, Linear8bitLt, Params4bit
from conftest import COMMON, words
from liger_kernel import quantise
from liger_kernel.ops.sliced_log_prob import quantised_linear_log_prob
from liger_kernel.transformers.patching.apply import patch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    Phi3Config,
    Phi3ForCausalLM,
    Trainer,
    TrainingArguments,
)
from watched import assert_same, logits_of, watched

FOUR_BITS = dict(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32)
KINDS = {
    "nf4": dict(FOUR_BITS, bnb_4bit_quant_type="nf4"),
    "nf4, statistics quantised too": dict(FOUR_BITS, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True),
    "fp4": dict(FOUR_BITS, bnb_4bit_quant_type="fp4"),
    "int8": dict(load_in_8bit=True),
}
LAYERS = ("rms_norm", "rope")
HEAD = "fused_linear_cross_entropy"
LINEARS = ["q_proj", "v_proj", "gate_proj", "gate_up_proj", "down_proj"]


@pytest.fixture
def width():
    return 128  # of whole blocks


def rows():
    ids = [[4 + sum(map(ord, word)) % 56 for word in words(i, 12).split()] for i in range(12)]
    return [dict(input_ids=row, labels=row) for row in ids]


def train(folder, load, liger):
    """LoRA on a quantised model by transformers' Trainer."""

    def body(run):
        torch.manual_seed(3)
        model = peft.prepare_model_for_kbit_training(load(), use_gradient_checkpointing=False)
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=LINEARS, task_type="CAUSAL_LM"))
        own = dict(max_steps=3, learning_rate=0.3, use_liger_kernel=liger)
        arguments = TrainingArguments(str(folder), **COMMON | own)
        Trainer(model, arguments, train_dataset=rows()).train()

    return watched(body, liger)


def check(folder, load, quantised_head, mlp="gated"):
    """What assert_same says. Quantised weights stay quantised, and a head of them makes its logits by dequantising.
    `mlp` is what runs in an MLP."""
    off, on = (train(folder, load, liger) for liger in (False, True))
    ran = (*LAYERS, mlp, *(() if quantised_head else (HEAD,)))
    said = assert_same(off, on, logits_of(load().train()), ran)
    fused = any(HEAD in name for name in on.operators)
    kept = any("lm_head is " in report and "kept" in report for report in on.replaced)
    assert fused != quantised_head and kept == quantised_head
    return said


@pytest.mark.parametrize("head", ("plain head", "quantised head"))
@pytest.mark.parametrize("kind", KINDS)
def test_bitsandbytes(kind, head, home, tmp_path, record_property):
    skip = dict(llm_int8_skip_modules=["none"]) if head == "quantised head" else {}
    config = BitsAndBytesConfig(**KINDS[kind], **skip)

    def load():
        model = AutoModelForCausalLM.from_pretrained(home, quantization_config=config, dtype=torch.float32)
        assert type(model.model.layers[0].mlp.up_proj.weight).__name__ in ("Params4bit", "Int8Params")
        assert (type(model.lm_head.weight) is torch.nn.Parameter) == (not skip)
        return model

    record_property("setup", f"{kind}, LoRA, {head}")
    record_property("result", check(tmp_path / "out", load, bool(skip), "gated" if kind == "int8" else "gated_mlp"))


def test_gate_and_up_in_one_layer(model, tmp_path, record_property):
    """Phi 3 with weights in nf4, of which the product of gate and up is multiplied by the last layer's."""
    torch.manual_seed(0)
    names = "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads".split()
    same = {name: getattr(model.config, name) for name in names}
    config = Phi3Config(**same, initializer_range=0.2, pad_token_id=0, eos_token_id=2)
    Phi3ForCausalLM(config).save_pretrained(tmp_path / "phi3")
    quantised = BitsAndBytesConfig(**KINDS["nf4"])

    def load():
        return AutoModelForCausalLM.from_pretrained(
            tmp_path / "phi3", quantization_config=quantised, dtype=torch.float32
        )

    record_property("setup", "nf4, LoRA, gate and up in one layer")
    record_property("result", check(tmp_path / "out", load, False, "gated_linear"))


@pytest.fixture
def gptq(home, monkeypatch):
    """The folder of a model that gptqmodel has quantised to 4 bits, in groups of 32."""
    folder = home.parent / "gptq"

    def quantise(run):
        from gptqmodel import GPTQModel, QuantizeConfig

        model = GPTQModel.load(str(home), QuantizeConfig(bits=4, group_size=32))
        model.quantize([words(i, 24) for i in range(128)], batch_size=4)
        model.save(str(folder))

    monkeypatch.chdir(home.parent)  # where it writes its logs
    run = watched(quantise, False)  # in a child: it starts threads, and what has threads must not fork
    assert run.error is None, run.error
    return folder


def test_gptq(gptq, tmp_path, record_property):
    def load():
        model = AutoModelForCausalLM.from_pretrained(gptq, dtype=torch.float32, device_map="cpu")
        assert not isinstance(model.model.layers[0].mlp.up_proj, torch.nn.Linear)
        return model

    record_property("setup", "GPTQ, 4 bits, groups of 32, LoRA")
    record_property("result", check(tmp_path / "out", load, False))


def test_4_bit_head():
    """nf4 and fp4, with statistics that are quantised themselves and without."""
    g = torch.Generator().manual_seed(1)
    hidden, weight, bias = (torch.randn(*shape, generator=g) for shape in ((21, 64), (90, 64), (90,)))
    ids = torch.randint(0, 90, (21,), generator=g)
    ids[3] = -100
    kept = ids != -100
    for kind in ("nf4", "fp4"):
        for nested in (False, True):
            packed, state = functional.quantize_4bit(weight, blocksize=64, compress_statistics=nested, quant_type=kind)
            dense = functional.dequantize_4bit(packed, state)
            q = SimpleNamespace(quant_state=state, data=packed)
            found = quantised_linear_log_prob(hidden.requires_grad_(), q, ids, bias, entropy=True, classes_at_once=40)
            leaf = hidden.detach().double().requires_grad_()
            p = torch.log_softmax(leaf @ dense.double().T + bias.double(), -1)
            exact = (
                torch.where(kept, p.gather(-1, ids.clamp(min=0)[:, None])[:, 0], 0),
                torch.where(kept, -(p.exp() * p).sum(-1), 0),
            )
            gradients = (
                torch.autograd.grad(out[0].sum() + 2 * out[1].sum(), x)[0]
                for out, x in ((found, hidden), (exact, leaf))
            )
            for a, b in zip((*found, next(gradients)), (*exact, next(gradients))):
                torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("twice", [False, True])
def test_weights_that_evaluation_has_packed(twice, model):
    """On CPUs with bfloat16 bitsandbytes packs a weight when it first runs in evaluation: training goes on with what
    the packed weight stands for, also where a backward is still to come. The last test of this file: it starts threads,
    and what has threads must not fork."""
    config = peft.LoraConfig(r=4, target_modules=[*LINEARS, "k_proj", "up_proj", "o_proj"], init_lora_weights=False)
    torch.manual_seed(0)
    model = model.to(torch.bfloat16)
    for name, module in list(model.named_modules()):
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            quantised = Linear4bit(
                module.in_features, module.out_features, bias=False, compute_dtype=torch.bfloat16,
                compress_statistics=twice, quant_type="nf4",
            )  # fmt: skip
            quantised.weight = Params4bit(
                module.weight.data, requires_grad=False, quant_type="nf4", compress_statistics=twice
            ).to("cpu")
            model.set_submodule(name, quantised)
    patch("llama", model)
    model = peft.get_peft_model(model, config).to(torch.bfloat16).train()
    ids = torch.arange(4, 24).view(2, 10)

    def gradients(between=lambda: None):
        model.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        between()
        loss.backward()
        return [loss.detach().float(), *(p.grad.float() for p in model.parameters() if p.grad is not None)]

    def evaluate():
        with torch.no_grad(), model.disable_adapter():  # as for a reference: every layer of bitsandbytes is called
            model.eval()(input_ids=ids)
        model.train()

    expected = gradients()
    assert len(expected) > 20
    first = gradients(between=evaluate)
    weights = [m.weight for m in model.modules() if isinstance(m, Linear4bit)]
    packs = [getattr(w.quant_state, "packing_format_for_cpu", False) for w in weights]
    assert all(packs) == any(packs) == has_avx512bf16()
    # Packed scales are rounded to bfloat16, by at most 2^-9 of each weight; the 14 weights are read in forward, and
    # again in backward for the gradients of two operands.
    for found in (first, gradients(), gradients()):
        for a, b in zip(found, expected):
            assert (a - b).norm() <= 3 * 14 * 2.0**-9 * b.norm().clamp(min=1e-3)


@pytest.mark.parametrize("has_run", [False, True])
def test_int8_layers_keep_their_bytes(has_run):
    """quantise takes over bitsandbytes' int8: weight = bytes · SCB / 127."""
    torch.manual_seed(0)
    plain, layer = nn.Linear(256, 128), Linear8bitLt(256, 128, has_fp16_weights=False)
    layer.weight = Int8Params(plain.weight.data.clone(), requires_grad=False)
    layer.bias = nn.Parameter(plain.bias.data.clone())
    model, x = nn.Sequential(layer).to("cpu"), torch.randn(5, 256)
    bytes, most = layer.weight.CB.clone(), layer.weight.SCB.clone()
    if has_run:
        model(x)
    quantise(model, "fp8")
    assert model[0].format == "int8" and torch.equal(model[0].weight, bytes)
    expected = x.double() @ (bytes.double() * most.double()[:, None] / 127).T + plain.bias.double()
    torch.testing.assert_close(model[0](x).double(), expected, rtol=1e-5, atol=1e-5)
