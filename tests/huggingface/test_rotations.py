"""Attention whose norms of q and k and whose rotation are one operator."""

import copy
import importlib
import inspect
import pickle
import traceback

import pytest
import torch
import transformers
from conftest import Ran, assert_close, batch, can_be_made, make, run
from liger_kernel.operators.residual import is_rms_norm
from liger_kernel.operators.rope import liger_rotary_pos_emb
from liger_kernel.transformers.patching import rotations
from liger_kernel.transformers.patching.apply import patch
from liger_kernel.transformers.patching.place import waiting
from packaging.version import parse
from torch import nn

NEW = parse(transformers.__version__).release >= (5, 20)
#: With the norm before the transposition, of a part of a wider projection, and after the transposition.
FAMILIES = ["qwen3", "qwen3_moe", "qwen3_5", "qwen3_next", "gemma3_text", "qwen3_vl"]
#: Classes whose forward has the steps, in all versions from 4.57 on, and in new ones.
KNOWN = "Qwen3 Qwen3Moe Qwen3Next Qwen3VLText Qwen3VLMoeText Gemma3 Dots1 Apertus Lfm2 Doge".split()
KNOWN_NOW = "Qwen3_5 Qwen3_5Moe Lfm2Moe Laguna HYV3 T5Gemma2Self Step3p7 MiniMaxM3VL".split()
#: And some that have others: a norm of the whole projection, inside of an `if`, after the rotation.
OTHERS = "Llama Olmo2 Olmo3 Olmoe Glm4Moe HunYuanDenseV1 Gemma3nText Exaone4".split()


def attention_class(name):
    """The class nameAttention of the installed transformers."""
    home = name.lower().replace("moe", "_moe").replace("vl", "_vl").replace("text", "")
    homes = {"HYV3": "hy_v3", "T5Gemma2Self": "t5gemma2", "Step3p7": "step3p7", "MiniMaxM3VL": "minimax_m3_vl"}
    homes |= {"Qwen3Next": "qwen3_next", "HunYuanDenseV1": "hunyuan_v1_dense", "Gemma3nText": "gemma3n"}
    home = {**homes, "Olmoe": "olmoe", "Glm4Moe": "glm4_moe", "Qwen3_5Moe": "qwen3_5_moe"}.get(name, home)
    module = importlib.import_module(f"transformers.models.{home}.modeling_{home}")
    return getattr(module, f"{name}Attention")


def patched_model(family, dtype=torch.float32, **switches):
    torch.manual_seed(0)
    model = make(family).to(dtype)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name:  # away from ones, which would hide a weight that is left out
                p.add_(torch.rand_like(p) - 0.5)
    return model, patch(family, model, **{"rope": True, **switches})


def fused(report):
    return sum(entry.count or 1 for entry in report.replaced if entry.switch == "qk_norm")


@pytest.mark.parametrize("name", [*KNOWN, *(KNOWN_NOW if NEW else [])])
def test_forwards_that_have_the_steps(name):
    cls = attention_class(name)
    forward = rotations.rotating_forward(cls)
    assert forward.liger_rotates.rotation == "apply_rotary_pos_emb"
    assert inspect.signature(forward) == inspect.signature(cls.forward)


@pytest.mark.parametrize("name", OTHERS)
def test_forwards_that_have_others(name):
    assert rotations.rotating_forward(attention_class(name)) is None


class Between(nn.Module):
    """Attention that reads q between norm and rotation."""

    def forward(self, x, cos, sin):
        q = self.q_norm(self.q_proj(x).view(1, 2, 3, 4)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(1, 2, 3, 4)).transpose(1, 2)
        scale = q.square().mean()
        q, k = liger_rotary_pos_emb(q, k, cos, sin)
        return q * scale, k


class Twice(nn.Module):
    """Attention that rotates twice."""

    def forward(self, q, k, cos, sin):
        q = self.q_norm(q)
        k = self.k_norm(k)
        q, k = liger_rotary_pos_emb(q, k, cos, sin)
        q, k = liger_rotary_pos_emb(q, k, cos, sin)
        return q, k


class Keyword(nn.Module):
    """Attention whose rotation has another argument."""

    def forward(self, q, k, cos, sin):
        q = self.q_norm(q)
        k = self.k_norm(k)
        q, k = liger_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=2)
        return q, k


class Inside(nn.Module):
    """Attention that may leave a norm out."""

    def forward(self, q, k, cos, sin):
        if self.normalises:
            q = self.q_norm(q)
        k = self.k_norm(k)
        q, k = liger_rotary_pos_emb(q, k, cos, sin)
        return q, k


class More(nn.Module):
    """Attention that adds to a norm."""

    def forward(self, q, k, cos, sin):
        q = self.q_norm(q) + self.shift(q)
        k = self.k_norm(k)
        q, k = liger_rotary_pos_emb(q, k, cos, sin)
        return q, k


class Another(nn.Module):
    """Attention that normalises another tensor by the norm of k."""

    def forward(self, q, k, other, cos, sin):
        q = self.q_norm(q)
        other = self.k_norm(other)
        k = self.k_norm(k)
        q, k = liger_rotary_pos_emb(q, k, cos, sin)
        return q, k, other


@pytest.mark.parametrize("cls", [Between, Twice, Keyword, Inside, More, Another], ids=lambda cls: cls.__name__)
def test_what_is_not_moved(cls):
    assert rotations.rotating_forward(cls) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", [name for name in FAMILIES if can_be_made(name)])
def test_the_bits_of_two_operators(family, dtype):
    """Of loss and gradients. A norm over [batch, heads, seq] adds up its weight's gradient in another order of rows: a
    sum of some hundred terms, to 2^8 roundings of a float, and one of the dtype."""
    found = []
    for on in (False, True):
        model, report = patched_model(family, dtype, qk_norm=on)
        assert bool(fused(report)) is on
        with Ran() as ran:
            output, gradients = run(model, **batch())
        layers = fused(report)
        assert ran.counts["qk_norm_rope_forward"] == ran.counts["qk_norm_rope_backward"] == layers
        assert not on or not ran.counts["rope_forward"]
        found.append((output.loss, gradients))
    (loss, expected), (new_loss, gradients) = found
    assert torch.equal(loss, new_loss)
    for name, gradient in gradients.items():
        if not torch.equal(gradient, expected[name]):
            assert family == "gemma3_text" and name.endswith(("q_norm.weight", "k_norm.weight")), name
            assert_close(gradient.float(), expected[name].float(), 2.0**-16 + torch.finfo(dtype).eps)


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text"])
def test_as_transformers_computes_it(family):
    torch.manual_seed(0)
    model = make(family)
    expected, gradients = run(model, **batch())
    assert fused(patch(family, model)) == model.config.num_hidden_layers
    output, found = run(model, **batch())
    assert_close(output.loss, expected.loss)
    for name in gradients:
        assert_close(found[name], gradients[name], 2.0**-10)  # float sums over a layer's products, in another order


def layers_that_fuse(model, **inputs):
    with Ran() as ran:
        run(model, **(inputs or batch()))
    return ran.counts["qk_norm_rope_forward"]


def test_hooks_see_what_they_saw():
    model, _ = patched_model("qwen3")
    attention, seen = model.model.layers[0].self_attn, []
    expected = run(model, **batch())[0].loss
    handle = attention.q_norm.register_forward_hook(lambda module, args, y: seen.append(tuple(args[0].shape)))
    assert layers_that_fuse(model) == model.config.num_hidden_layers - 1
    assert torch.equal(run(model, **batch())[0].loss, expected)
    heads, dim = model.config.num_attention_heads, attention.head_dim
    assert set(seen) == {(*batch()["input_ids"].shape, heads, dim)}
    handle.remove()
    assert layers_that_fuse(model) == model.config.num_hidden_layers


def test_a_norm_that_somebody_wrapped():
    class Scaled(nn.Module):
        def __init__(self, norm):
            super().__init__()
            self.norm = norm

        def forward(self, x):
            return 2 * self.norm(x)

    model, _ = patched_model("qwen3")
    plain, _ = patched_model("qwen3", qk_norm=False)
    for each in (model, plain):
        attention = each.model.layers[1].self_attn
        attention.k_norm = Scaled(attention.k_norm)
    assert layers_that_fuse(model) == model.config.num_hidden_layers - 1
    assert torch.equal(run(model, **batch())[0].loss, run(plain, **batch())[0].loss)


@pytest.mark.parametrize(
    ("family", "fuses"), [("qwen3", False), ("gemma3_text", True)], ids=["rounded before", "rounded after"]
)
def test_float_weights(family, fuses):
    """A float weight makes the result of a norm that rounds before it a float, which the operator does not have."""
    losses = []
    for on in (False, True):
        model, _ = patched_model(family, torch.bfloat16, qk_norm=on)
        for layer in model.model.layers:
            layer.self_attn.q_norm.float(), layer.self_attn.k_norm.float()
        if not fuses:  # the attention function wants one dtype
            for layer in model.model.layers:
                layer.self_attn.v_proj.register_forward_hook(lambda module, args, y: y.float())
                layer.self_attn.o_proj.register_forward_pre_hook(lambda module, args: (args[0].bfloat16(),))
        assert bool(layers_that_fuse(model)) is (on and fuses)
        losses.append(run(model, **batch())[0].loss)
    assert torch.equal(*losses)


@pytest.mark.parametrize("off", ["rope", "rms_norm", "qk_norm"])
def test_switches(off):
    model, report = patched_model("qwen3", **{off: False})
    assert not fused(report) and not layers_that_fuse(model)


def test_the_report_and_undo():
    torch.manual_seed(0)
    model = make("qwen3")
    forward = type(model.model.layers[0].self_attn).forward
    report = patch("qwen3", model)
    layers = model.config.num_hidden_layers
    assert [(e.name, e.by, e.count) for e in report.replaced if e.switch == "qk_norm"] == [
        ("Qwen3Attention", "qk_norm_rope", layers)
    ]
    again = patch("qwen3", model)
    assert fused(again) == layers and layers_that_fuse(model) == layers
    report.undo()
    assert type(model.model.layers[0].self_attn).forward is forward and not layers_that_fuse(model)


def test_classes_are_patched_in_place():
    report = patch("qwen3")
    try:
        model = make("qwen3")
        assert fused(report) == 1 and layers_that_fuse(model) == model.config.num_hidden_layers
    finally:
        report.undo()
    assert not layers_that_fuse(make("qwen3"))


def test_a_rotation_of_somebody_else(monkeypatch):
    """Where a model of classes that are patched finds another rotation, its norms run as they are."""
    report = patch("qwen3")
    try:
        model = make("qwen3")
        expected = run(model, **batch())[0].loss
        home = importlib.import_module(type(model).__module__)
        ours = home.apply_rotary_pos_emb
        monkeypatch.setattr(home, "apply_rotary_pos_emb", lambda q, k, cos, sin: ours(q, k, cos, sin))
        assert not layers_that_fuse(model)
        assert torch.equal(run(model, **batch())[0].loss, expected)
    finally:
        monkeypatch.undo()
        report.undo()


def test_nothing_waits_after_an_error():
    model, _ = patched_model("qwen3")
    attention = model.model.layers[0].self_attn
    handle = attention.v_proj.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(**batch())
    handle.remove()
    assert waiting.norms is None
    assert layers_that_fuse(model) == model.config.num_hidden_layers


def test_copies_and_pickles():
    model, _ = patched_model("qwen3")
    expected = run(model, **batch())[0].loss
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert layers_that_fuse(other) == model.config.num_hidden_layers
        assert torch.equal(run(other, **batch())[0].loss, expected)


def test_checkpointing_and_a_cache():
    model, _ = patched_model("qwen3")
    plain, _ = patched_model("qwen3", qk_norm=False)
    ids = batch()["input_ids"][:1, :5]
    for each in (model, plain):
        each.eval()
    answers = [each.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0) for each in (model, plain)]
    assert torch.equal(*answers)
    for each in (model, plain):
        each.train().gradient_checkpointing_enable({"use_reentrant": False})
    (expected, others), (output, gradients) = run(plain, **batch()), run(model, **batch())
    assert torch.equal(output.loss, expected.loss)
    assert all(torch.equal(gradients[name], gradient) for name, gradient in others.items())
    assert layers_that_fuse(model) == 2 * model.config.num_hidden_layers


def test_compiled_in_one_graph():
    """By two operators: the module is not copied there."""
    model, _ = patched_model("qwen3")
    expected = model(**batch()).loss
    targets = set()

    def backend(graph, inputs):
        targets.update(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    torch._dynamo.reset()
    assert torch.equal(torch.compile(model, backend=backend, fullgraph=True)(**batch()).loss, expected)
    assert any("liger.rope" in target for target in targets) and not any("qk_norm_rope" in t for t in targets)


def test_an_error_names_the_line():
    model, _ = patched_model("qwen3")
    attention = model.model.layers[0].self_attn
    del attention.o_proj
    with pytest.raises(AttributeError) as raised:
        model(**batch())
    frame = next(f for f in traceback.extract_tb(raised.tb) if f.name == "forward" and "o_proj" in (f.line or ""))
    assert frame.filename == inspect.getsourcefile(type(attention).__mro__[-2]) or "modeling_qwen3" in frame.filename


def test_adapters_on_the_projections():
    peft = pytest.importorskip("peft")
    found = []
    for on in (False, True):
        model, _ = patched_model("qwen3", qk_norm=on)
        torch.manual_seed(1)
        adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
        assert bool(layers_that_fuse(adapted)) is on
        found.append(run(adapted, **batch()))
    (a, gradients), (b, others) = found
    assert torch.equal(a.loss, b.loss) and all(torch.equal(gradients[n], others[n]) for n in gradients)


def test_every_norm_is_one_that_the_operator_has():
    """All that a report counts has norms that the operator stands for."""
    model, report = patched_model("qwen3")
    attention = [m for m in model.modules() if hasattr(m, "q_norm")]
    assert fused(report) == len(attention)
    assert all(is_rms_norm(type(norm)) for m in attention for norm in (m.q_norm, m.k_norm))
