"""Rows in eight bits that norms write for the linear layers that read them (liger/core/torch/eight_bit.h)."""

import pytest
import torch
from liger_kernel import patch, quantise
from liger_kernel._library import ops
from liger_kernel.transformers.patching import layers
from test_eight_bit import DEVICES, IDS, LARGEST, adapted, llama, make, rounds
from transformers import LlamaForCausalLM

NUMBERS = {"fp8": 0, "int8": 1}


def allocations(call, within=()):
    """How many tensors a call makes, or operators of these names in it."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        result = call()

    def is_within(event):
        return not within or event is not None and (event.name in within or is_within(event.cpu_parent))

    return result, sum(event.name == "aten::empty" and is_within(event) for event in profile.events())


def norm(x, weight, format=None, residual=None):
    options = () if format is None else (NUMBERS[format],)
    if residual is None:
        return ops.rms_norm(x, weight, 1e-6, 0.0, 0, *options)
    return ops.fused_add_rms_norm(x, residual, weight, 1e-6, 0.0, 0, *options)[0]


def readers(cols, dtype, format, device):
    """Calls of operators that read rows of so many columns, by name."""
    on = lambda t: None if t is None else t.to(device)
    inner = [tuple(map(on, make(0, cols, 16, 8, dtype, format))) for _ in range(3)]
    down = tuple(map(on, make(0, 16, 32, 8, dtype, format)))
    flat = lambda of: [t for weight, _, *rest in of for t in (weight, *rest)] + [layer[1] for layer in of]
    weight, scale, *rest = inner[0]
    return {
        "linear": lambda y: ops.linear(y, weight, *rest, None, scale, 1.0),
        "qkv": lambda y: torch.cat(ops.qkv(y, *flat(inner), 1.0, 1.0, 1.0)),
        "gated_mlp": lambda y: ops.gated_mlp(y, *flat([*inner[:2], down]), 1.0, 1.0, 1.0),
    }


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("format", LARGEST)
@pytest.mark.parametrize("residual", [False, True], ids=["norm", "sum"])
@pytest.mark.parametrize(
    "cols, dtype, names",
    [
        (96, torch.bfloat16, ("linear", "qkv", "gated_mlp")),
        (2064, torch.float16, ("linear",)),
        pytest.param(20496, torch.bfloat16, ("linear",), marks=pytest.mark.full),
    ],
    ids=["of a warp", "of a block", "of a cluster"],
)
def test_bits(device, format, residual, cols, dtype, names):
    """The norm's result is the same, and so is what layers make of it, which round nothing then."""
    torch.manual_seed(0)
    x, r = (torch.randn(2, 5, cols, dtype=dtype, device=device) for _ in range(2))
    x[0, 1], r[0, 1], x[1, 2, 3] = 0, 0, float("nan")
    weight = torch.rand(cols, dtype=dtype, device=device)
    given = (r,) if residual else ()
    calls = readers(cols, dtype, format, device)
    for name in names:
        read = calls[name]
        plain = norm(x, weight, None, *given)
        y = norm(x, weight, format, *given)
        assert torch.equal(y.nan_to_num(), plain.nan_to_num())
        expected, usual = allocations(lambda: read(plain))
        found, fewer = allocations(lambda: read(y))
        again, as_usual = allocations(lambda: read(y))
        assert fewer == usual - 2 * rounds(device, dtype, format) and as_usual == usual, name
        for result in (found, again):
            assert torch.equal(result.nan_to_num(), expected.nan_to_num()), name
            assert torch.equal(result.isnan(), expected.isnan()) and result.isnan().any(), name


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_another_tensor(device):
    """Rows are those of the very tensor that the norm gave, as it gave it, in the layer's format."""
    torch.manual_seed(0)
    x, weight = torch.randn(5, 96).bfloat16().to(device), torch.rand(96).bfloat16().to(device)
    changed = {
        "in place": lambda y: y.mul_(2),
        "in place, of a view": lambda y: (y[1:].mul_(2), y)[1],
        "other numbers": lambda y: (setattr(y, "data", y.data * 2), y)[1],
        "an alias": lambda y: y.detach().data.mul_(2),
        "a view": lambda y: y.view(5, 96),
        "a part": lambda y: y[:3],
        "a copy": lambda y: y.clone(),
        "transposed": lambda y: y[:, :80].t_().t_(),
    }  # fmt: skip
    for name, change in changed.items():
        y = change(norm(x, weight, "int8"))
        read = readers(y.shape[1], torch.bfloat16, "int8", device)["linear"]
        expected, usual = allocations(lambda: read(y.clone()))
        found, count = allocations(lambda: read(y))
        assert torch.equal(found, expected) and count == usual, name
    read = readers(96, torch.bfloat16, "fp8", device)["linear"]
    assert torch.equal(read(norm(x, weight, "int8")), read(norm(x, weight)))
    with torch.inference_mode():
        assert torch.equal(read(norm(x, weight, "fp8")), read(norm(x, weight)))
    for format in (2, -2):
        with pytest.raises(ValueError, match="eight_bit is -1"):
            ops.rms_norm(x, weight, 1e-6, 0.0, 0, format)


def doubled(module, args, result=None):
    return (2 * args[0],) if result is None else 2 * result


def doubled_unseen(module, args):
    args[0].data.mul_(2)  # which no version counts


HOOKS = {
    "none": lambda layer: None,
    "after the norm": lambda layer: layer.input_layernorm.register_forward_hook(doubled),
    "after the sum": lambda layer: layer.post_attention_layernorm.register_forward_hook(doubled),
    "before the mlp": lambda layer: layer.mlp.register_forward_pre_hook(doubled),
    "in the mlp's input": lambda layer: layer.mlp.register_forward_pre_hook(doubled_unseen),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "format, checkpointing, hook",
    [("int8", False, hook) for hook in HOOKS] + [("fp8", False, "none"), ("int8", True, "none")],
)
def test_model(device, format, checkpointing, hook, monkeypatch):
    """A step has the same bits, and rounds the inputs of attention and of the MLP where they are made. Hooks see what
    they have changed computed with."""
    config = llama().config
    config.num_hidden_layers = 1
    model = adapted(LlamaForCausalLM(config).bfloat16()).to(device).train()
    quantise(model, format)
    patch(model)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    HOOKS[hook](model.get_base_model().model.layers[0])
    ids = IDS.to(device)

    def run():
        model.zero_grad()
        with torch.autocast(device, torch.bfloat16):  # PEFT's adapters are in float32
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        return {"loss": loss.detach()} | {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    found, fewer = allocations(run, ("liger::qkv", "liger::gated_mlp"))
    monkeypatch.setattr(layers, "read_in", lambda module: -1)
    expected, usual = allocations(run, ("liger::qkv", "liger::gated_mlp"))
    assert found.keys() == expected.keys() and len(found) == 15
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
    readers = 2 if hook == "none" else 1
    assert fewer == usual - 2 * readers * (1 + checkpointing) * rounds(device, torch.bfloat16, format)


def test_compiled():
    """A compiled step rounds rows where it reads them."""
    found = []
    for compiled in (False, True):
        model = adapted(llama().bfloat16())
        quantise(model)
        patch(model)
        run = torch.compile(model, backend="aot_eager") if compiled else model
        with torch.autocast("cpu", torch.bfloat16):
            loss = run(input_ids=IDS, labels=IDS).loss
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
    assert len(found[0]) == len(found[1]) == 29
    for one, other in zip(*found):
        # Operators round where compiled code joins two of them: numbers of bfloat16 through two layers.
        assert (one - other).norm() <= 16 * 2**-8 * one.norm()


@pytest.mark.skipif("cuda" not in DEVICES, reason="needs a GPU")
@pytest.mark.parametrize("format", LARGEST)
def test_in_a_cuda_graph(format):
    """Rows that a captured norm writes are read in the graph, and where it is left."""
    torch.manual_seed(0)
    x, weight = torch.randn(64, 96, device="cuda").bfloat16(), torch.rand(96, device="cuda").bfloat16()
    read = readers(96, torch.bfloat16, format, "cuda")["linear"]
    read(norm(x, weight, format))
    graph, static = torch.cuda.CUDAGraph(), x.clone()
    with torch.cuda.graph(graph):
        inside, left = read(norm(static, weight, format)), norm(static, weight, format)
    for scale in (1, -3):
        static.copy_(x).mul_(scale)
        graph.replay()
        expected = read(norm(static, weight))
        assert torch.equal(inside, expected) and torch.equal(read(left), expected)
