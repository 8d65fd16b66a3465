"""What gated_mlp and gated_linear hold beside their inputs and results, with adapters on a base in eight bits or 16."""

import pytest
import torch
from liger_kernel._library import ops
from test_eight_bit import DEVICES, LARGEST, make, rounds

TOKENS, INTO, INNER, RANK = 1024, 128, 512, 8
WIDE = 2 * TOKENS * INNER  # bytes of gate, up or their product in 16 bits
NARROW = 2 * TOKENS * INTO  # of x, y and their gradients
#: What the adapters of gate and up make of tokens, all adapters' gradients, scales, and a quarter more for copies of
#: adapters; less than the transposed weights of gate and up, which must not be beside the rest.
SMALL = 5 / 4 * (2 * (2 * RANK * TOKENS + 3 * RANK * (INTO + INNER)) + 8 * (TOKENS + INNER))
assert SMALL < 2 * INTO * INNER


def peak(call, device):
    """The most bytes that a call holds above those that were there before, and its result."""
    if device == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        result = call()
        return torch.cuda.max_memory_allocated() - before, result
    activities = [torch.profiler.ProfilerActivity.CPU]
    # oneDNN's GEMMs have scratch memory.
    mkldnn = torch.backends.mkldnn.flags(enabled=False)
    with mkldnn, torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        result = call()
    held = most = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most, result


def peaks_of_backward(call, of, dy, device):
    """The most bytes that a backward pass holds which leaves its graph as it is, and those of the last pass. All give
    the same bits."""
    grads = lambda y, keep: torch.autograd.grad(y, of, dy, retain_graph=keep)
    y = call()
    first = peak(lambda: grads(y, True), device)[1]  # with what a GPU's GEMMs hold from then on
    kept, second = peak(lambda: grads(y, True), device)
    last, third = peak(lambda: grads(y, False), device)
    for one, two, three in zip(first, second, third):
        assert torch.equal(one, two) and torch.equal(one, three)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        grads(y, False)
    return kept, last


def inputs(format, device, dtype=torch.bfloat16):
    """x, dy, and a call of gated_mlp with x."""
    torch.manual_seed(0)
    layers = [make(0, INTO, INNER, RANK, dtype, format or "int8", bias=False) for _ in range(2)]
    layers.append(make(0, INNER, INTO, RANK, dtype, format or "int8", bias=False))
    if format is None:
        layers = [((weight * scale[:, None]).to(dtype), None, *rest) for weight, scale, *rest in layers]
    on = lambda t: None if t is None else t.to(device)
    flat = [on(t) for weight, _, *rest in layers for t in (weight, *rest)]
    adapters = [t.requires_grad_() for i in range(0, 12, 4) for t in flat[i + 2 : i + 4]]
    x = torch.randn(TOKENS, INTO).to(device, dtype).requires_grad_()
    dy = torch.randn(TOKENS, INTO).to(device, dtype)
    scales = [on(scale) for _, scale, *_ in layers]
    return [x, *adapters], dy, lambda: ops.gated_mlp(x, *flat, *scales, 1.0, 1.0, 1.0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("format", [None, *LARGEST])
def test_backward(device, format):
    """The last backward pass of a graph writes the gradients of gate and up over these, those in eight bits over the
    product's, and the transposed weights over what has been read; an earlier pass leaves all as it was."""
    of, dy, call = inputs(format, device)
    kept, last = peaks_of_backward(call, of, dy, device)
    assert kept - last >= 1.9 * WIDE
    if format is None or rounds(device, torch.bfloat16, format):
        # The product, which its gradient overwrites. With it first dy in eight bits and the transposed last weight, or
        # in 16 bits nothing, and then dx.
        assert last <= WIDE + max(NARROW, (NARROW // 2 + INTO * INNER) * (format is not None)) + SMALL


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("format", LARGEST)
def test_forward(device, format):
    """Beside gate and up, which backward reads, a quarter of their product is held in 16 bits, and all in eight."""
    if not rounds(device, torch.bfloat16, format):
        pytest.skip("the weights are dequantised")
    _, _, call = inputs(format, device)
    call()
    most, _ = peak(call, device)
    assert 2 * WIDE < most <= (2 + 1 / 4 + 1 / 2) * WIDE + NARROW + NARROW // 2 + SMALL


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("adapted", [False, True])
def test_gated_linear(device, adapted):
    """Forward keeps its input alone. In backward the product has the memory of its gradient."""
    torch.manual_seed(0)
    on = dict(device=device, dtype=torch.bfloat16)
    x, dy = torch.randn(TOKENS, 2 * INNER, **on).requires_grad_(), torch.randn(TOKENS, INTO, **on)
    weight, a, b = torch.randn(INTO, INNER, **on), torch.randn(RANK, INNER, **on), torch.randn(INTO, RANK, **on)
    of = [x, *(t.requires_grad_() for t in ((a, b) if adapted else (weight,)))]
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = ops.gated_linear(x, weight, None, *((a, b) if adapted else (None, None)), None, 1.0)
    assert sum(t.numel() for t in saved) - x.numel() - weight.numel() <= RANK * (TOKENS + 2 * (INTO + INNER))
    call = lambda: torch.autograd.grad(y, of, dy, retain_graph=True)
    call()
    most, _ = peak(call, device)
    assert 3 * WIDE <= most <= 3 * WIDE + 2 * INTO * INNER + SMALL  # gradients of gate and up, and the product


def test_gradients_of_gate_and_up_are_seen():
    """Whoever holds what the graph has saved sees that it has been written to."""
    held = []
    of, dy, call = inputs(None, "cpu")
    with torch.autograd.graph.saved_tensors_hooks(lambda t: held.append((t, t._version)) or t, lambda t: t):
        y = call()
    y.backward(dy)
    written = [t for t, version in held if t._version != version]
    assert [t.shape for t in written] == [(TOKENS, INNER)] * 2
