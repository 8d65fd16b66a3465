"""The functions that stand for transformers' delta rules, with a gate for each head and for each channel, against
transformers' own; test_mixers.py has models that call them."""

import copy
import inspect

import pytest
import torch
import transformers
from cases.channel_delta_rule import reference as channel_delta_rule
from cases.gated_delta_rule import reference as delta_rule
from conftest import assert_close
from liger_kernel.transformers.patching import mixer_functions, mixers
from liger_kernel.transformers.patching.formulas import as_written
from liger_kernel.transformers.patching.mixer_functions import widest
from shrink import FIELDS, shrunk
from test_mixers import (
    DELTA,
    KIMI,
    LENGTHS,
    STARTS,
    assert_gradients,
    batch,
    ends,
    home_of,
    index,
    made,
    only_mixers,
    positions,
)
from tiny import randomised
from transformers.models.auto.configuration_auto import CONFIG_MAPPING


def rule_of(kind):
    """transformers' own function, and what stands for it in a patched model of the type."""
    home = home_of(made(kind))
    name = "chunk_kimi_delta_attention" if kind in KIMI else "torch_chunk_gated_delta_rule"
    plain = inspect.unwrap(as_written(getattr(home, name)))
    return plain, mixers.Held(getattr(mixer_functions, f"liger_{name.removeprefix('torch_')}"), plain)


def rule_inputs(kind, dtype=torch.float32, tokens=sum(LENGTHS), rows=1, heads=4, key_heads=4):
    torch.manual_seed(0)
    q, k = torch.randn(2, rows, tokens, key_heads, 16).to(dtype)
    v, beta = torch.randn(rows, tokens, heads, 24).to(dtype), torch.rand(rows, tokens, heads).to(dtype)
    g = -torch.rand(rows, tokens, heads, *((16,) if kind in KIMI else ()))
    # The gates of the one model have its dtype, all others' are float32.
    return q, k, v, g.to(dtype) if kind == "bailing_hybrid" else g, beta


@pytest.mark.parametrize("kind", DELTA + KIMI)
def test_in_16_bits(kind):
    """The recurrence and its gradients are as exact as transformers': to a tenth, which leaves 0.46 of one more
    rounding of 16 bits. The exact one runs token by token in float64."""
    inputs = rule_inputs(kind, torch.bfloat16, tokens=200)

    def results(rule, *tensors):
        tensors = [t.detach().requires_grad_() for t in tensors]
        output = rule(*tensors)
        output.backward(torch.linspace(-1, 1, output.numel()).view(output.shape).to(output.dtype))
        return [output, *(t.grad for t in tensors)]

    recurrence = channel_delta_rule if kind in KIMI else delta_rule
    exact = results(lambda *t: recurrence(*t, None, None), *(t.double() for t in inputs))
    plain, ours = (
        results(lambda *t, rule=rule: rule(*t, use_qk_l2norm_in_kernel=True)[0], *inputs) for rule in rule_of(kind)
    )
    for expected, theirs, own in zip(exact, plain, ours, strict=True):
        assert theirs.dtype == own.dtype
        assert (own - expected).norm() <= 1.1 * (theirs - expected).norm()


@pytest.mark.parametrize("kind", DELTA + KIMI)
def test_with_states(kind):
    """A state goes in and comes out, dtypes may differ, and key heads be fewer where transformers has it so."""
    plain, ours = rule_of(kind)
    state = torch.randn(2, 4, 16, 24, generator=torch.Generator().manual_seed(1))
    q, k, v, g, beta = rule_inputs(kind, rows=2)
    k = k / 4  # keys longer than 1 let the state grow
    for more in ({}, {"initial_state": state, "use_qk_l2norm_in_kernel": True}):
        more["output_final_state"] = True
        for result, expected in zip(ours(q, k, v, g, beta, **more), plain(q, k, v, g, beta, **more), strict=True):
            assert_close(result, expected)
    output, last = ours(q.bfloat16(), k, v, g.bfloat16(), beta)
    assert output.dtype == torch.bfloat16 and last is None
    if "repeat_interleave" in inspect.getsource(plain):
        q, k = q[:, :, :2], k[:, :, :2]
        assert_close(ours(q, k, v, g, beta)[0], plain(q, k, v, g, beta)[0])


@pytest.mark.parametrize("kind", DELTA[:1] + KIMI[:1])
def test_documents(kind):
    """Each has the bits that it has alone; the state is the last one's. With a state that comes before, they are none
    where only positions name them, and the original's where the caller does."""
    ours = rule_of(kind)[1].ours
    inputs, state = rule_inputs(kind), torch.zeros(1, 4, 16, 24)
    more = {"use_qk_l2norm_in_kernel": True, "output_final_state": True}
    alone = [ours(*part, **more) for part in zip(*(t.split(LENGTHS, 1) for t in inputs))]
    named = {"cu_seqlens": ends()}, {"seq_idx": index()}, {mixer_functions.STARTS: torch.tensor(STARTS).int()}
    for given in named:
        output, last = ours(*inputs, **more, **given)
        assert torch.equal(output, torch.cat([output for output, _ in alone], 1))
        assert_close(last, alone[-1][1])
    assert ours(*inputs, **more, **named[0], initial_state=state) is NotImplemented
    continued, whole = (ours(*inputs, **more, **given, initial_state=state) for given in (named[2], {}))
    assert torch.equal(continued[0], whole[0])
    assert ours(*(t.double() for t in inputs)) is NotImplemented


@pytest.mark.skipif(not KIMI or "glm5_next_text" not in CONFIG_MAPPING, reason="this transformers has no such model")
def test_glm5_next(monkeypatch):
    """Which has no causal language model: its layers that mix tokens by the rule, as the plain ones on each document
    alone."""
    monkeypatch.setitem(FIELDS, "glm5_next_text", {"qk_rope_head_dim": 0, "layer_types": ["linear_attention"] * 4})
    torch.manual_seed(0)
    plain = randomised(transformers.AutoModel.from_config(shrunk("glm5_next_text"))).train()
    model, ids = copy.deepcopy(plain), batch(1)["input_ids"]
    alone = torch.cat([plain(part).last_hidden_state for part in ids.split(LENGTHS, 1)], 1)
    upstream = torch.randn_like(alone)
    alone.backward(upstream)
    report = only_mixers(model)
    for name in ("chunk_kimi_delta_attention", "Glm5NextTextForgetGate"):
        assert f"{name} (4 modules)" in str(report)
    packed = model(ids, position_ids=positions()).last_hidden_state
    packed.backward(upstream)
    report.undo()
    assert_close(packed, alone)
    expected = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    assert_gradients({n: p.grad for n, p in model.named_parameters() if p.grad is not None}, expected)


@pytest.mark.parametrize(
    ("shared", "of_heads", "of_channels"),
    [
        (227, (256, 256, 256), (256, 256, 256)),
        (163, (256, 128, 128), (256, 256, 256)),
        (99, (128, 64, 128), (64, 64, 128)),
    ],
)
def test_how_wide_keys_may_be(shared, of_heads, of_channels):
    """As docs/hybrids.md says: what kernels that are emulated for sm_90, sm_80 and sm_89 could allocate."""
    for dtype, heads, channels in zip(
        (torch.bfloat16, torch.float16, torch.float32), of_heads, of_channels, strict=True
    ):
        assert widest(dtype, False, shared << 10) == heads
        assert widest(dtype, True, shared << 10) == channels


def test_keys_that_find_no_room_run_the_original(monkeypatch):
    """As on a GPU with less shared memory."""
    monkeypatch.setattr(mixer_functions, "widest", lambda *_: 16)
    monkeypatch.setattr(mixer_functions, "shared_bytes", lambda _: 0)

    class OnGpu(torch.Tensor):
        is_cuda = property(lambda self: True)

    x = torch.randn(2, 4).as_subclass(OnGpu)
    assert mixer_functions._finds_room(16, False, x) and not mixer_functions._finds_room(17, False, x)
    assert mixer_functions._finds_room(17, False, torch.randn(2))


def test_shared_memory_is_a_constant_for_the_compiler(monkeypatch):
    real = torch.cuda.get_device_properties

    class Properties:
        shared_memory_per_block_optin = 99 << 10

        def __init__(self, device):
            self.device = device

        def __getattr__(self, name):  # torch's compiler reads others of a GPU
            return getattr(real(self.device), name)

    mixer_functions._shared_bytes.cache_clear()

    def properties(device=None):
        torch._dynamo.graph_break()  # where the compiler looks inside
        return Properties(device)

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)

    def f(x):
        return x + mixer_functions.shared_bytes(x.device)

    x = torch.ones(2)
    try:
        assert torch.equal(torch.compile(f, fullgraph=True, backend="eager")(x), x + (99 << 10))
    finally:
        mixer_functions._shared_bytes.cache_clear()
