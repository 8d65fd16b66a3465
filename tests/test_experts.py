"""What fused_experts promises beside tests/test_ops.py: what it holds beside its inputs, where forward keeps gate and
up, and biases of experts that have many tokens."""

import pytest
import torch
from liger_kernel.operators.experts import Adapter, fused_experts
from test_eight_bit import DEVICES
from test_gated_mlp_memory import peaks_of_backward

TOKENS, K, HIDDEN, WIDTH, EXPERTS, RANK = 512, 2, 64, 512, 8, 8
PAIRS = TOKENS * K
PRODUCT = 2 * PAIRS * WIDTH  # bytes of gate, up or their product in 16 bits
ROWS = 2 * PAIRS * HIDDEN  # of the pairs' rows of x, y or a gradient of these
WEIGHT = 2 * EXPERTS * WIDTH * HIDDEN  # of gate, up or down, of all experts
#: What adapters make of pairs and their gradients, the pairs' places and weights.
SMALL = 2 * RANK * (2 * PAIRS + 3 * EXPERTS * (HIDDEN + WIDTH)) + 64 * PAIRS
assert SMALL < PRODUCT / 2


def inputs(device, of_experts):
    """What has a gradient, dy, and a call of fused_experts."""
    torch.manual_seed(0)
    on = dict(device=device, dtype=torch.bfloat16)
    gate_up, down = torch.randn(EXPERTS, 2 * WIDTH, HIDDEN, **on), torch.randn(EXPERTS, HIDDEN, WIDTH, **on)
    x, dy = (torch.randn(TOKENS, HIDDEN, **on) for _ in range(2))
    weights, index = torch.rand(TOKENS, K, device=device), torch.randint(EXPERTS, (TOKENS, K), device=device)
    sizes = (RANK, HIDDEN), (2 * WIDTH, RANK), (RANK, WIDTH), (HIDDEN, RANK)
    adapters = [torch.randn(EXPERTS, *size, **on) for size in sizes]
    biases = [torch.randn(EXPERTS, size, **on) for size in (2 * WIDTH, HIDDEN)]
    trained = {"weights": [gate_up, down], "biases": [gate_up, down, *biases], "adapters": adapters}[of_experts]
    of, options = [t.requires_grad_() for t in (x, weights, *trained)], {}
    if of_experts == "biases":
        options = dict(zip(("gate_up_bias", "down_bias"), biases))
    if of_experts == "adapters":
        options = dict(gate_up_adapter=Adapter(*adapters[:2], 1.0), down_adapter=Adapter(*adapters[2:], 1.0))
    return of, dy, lambda: fused_experts(x, gate_up, down, index, weights, recompute=False, **options)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("of_experts", ["weights", "biases", "adapters"])
def test_backward(device, of_experts):
    """The last backward pass of a graph writes the gradients of gate and up over these; an earlier pass leaves all as
    it was. Gradients of the second matrix are made first: what they alone read is not held beside those of the first,
    which are larger, and biases' are sums without copies of the rows."""
    adapted = of_experts == "adapters"
    of, dy, call = inputs(device, of_experts)
    kept, last = peaks_of_backward(call, of, dy, device)
    # With adapters the product's gradient is a sum of two terms: the most is held before gradients of gate and up.
    assert kept - last >= (1.9 - 0.9 * adapted) * PRODUCT
    before = 2 * ROWS + PRODUCT + WEIGHT  # the rows of x and dy, the product, the gradient of down
    after = ROWS + 3 * WEIGHT + 3 * ROWS // 2  # the rows of x, all gradients, and of x's first those of pairs
    if adapted:
        before, after = 3 * ROWS + 2 * PRODUCT, 3 * ROWS
    if of_experts == "biases" and device == "cpu":  # a sum has a copy of an expert's rows in float
        after += 3 / 2 * 4 * PRODUCT / EXPERTS
    assert last <= max(before, after) + SMALL


def test_gradients_of_gate_and_up_are_seen():
    """Whoever holds what the graph has saved sees that it has been written to."""
    held = []
    of, dy, call = inputs("cpu", "weights")
    with torch.autograd.graph.saved_tensors_hooks(lambda t: held.append((t, t._version)) or t, lambda t: t):
        y = call()
    y.backward(dy)
    assert [t.shape for t, version in held if t._version != version] == [(PAIRS, 2 * WIDTH)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("experts", [1, 40])  # on Hopper torch's grouped GEMM sums the first, this library's the second
def test_gradients_of_biases(device, experts):
    """Terms and sums are rounded once each, as in eager torch: errors of terms add up like random ones."""
    torch.manual_seed(0)
    on = dict(device=device, dtype=torch.bfloat16)
    gate_up, down = torch.randn(experts, 32, 16, **on) / 4, torch.randn(experts, 16, 16, **on) / 4
    biases = [torch.randn(experts, size, **on).requires_grad_() for size in (32, 16)]
    x, dy = torch.randn(2048, 16, **on), torch.randn(2048, 16, **on)
    weights, index = torch.rand(2048, 1, device=device), torch.randint(experts, (2048, 1), device=device)
    y = fused_experts(x, gate_up, down, index, weights, *biases)
    _, found = torch.autograd.grad(y, biases, dy)
    terms = dy.double() * weights.double()
    summed = lambda t: torch.zeros(experts, 16, device=device, dtype=t.dtype).index_add(0, index[:, 0], t)
    rounding = 2**-8  # half of a unit in the last place of bfloat16, over the number
    expected, terms_error = summed(terms), 3 * rounding * summed(terms**2).sqrt()
    assert ((found.double() - expected).abs() <= rounding * expected.abs() + terms_error).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("transposed", [False, True])
def test_adapters_in_a_flat_buffer(device, transposed):
    """Parameters that begin anywhere, as FSDP's do, are adapters like others, to the bit."""
    torch.manual_seed(0)
    on = dict(device=device, dtype=torch.bfloat16)
    experts, hidden, width, rank = 3, 16, 24, 8
    sizes = (2 * width, hidden), (hidden, width)
    gate_up, down = (torch.randn(experts, *(size[::-1] if transposed else size), **on) / 4 for size in sizes)
    sizes = (rank, hidden), (2 * width, rank), (rank, width), (hidden, rank)
    adapters = [torch.randn(experts, *size, **on) / 4 for size in sizes]
    x, weights = torch.randn(9, hidden, **on), torch.rand(9, 2, device=device)
    index = torch.randint(experts, (9, 2), device=device)

    def results(tensors):
        of = [t.requires_grad_() for t in (x.clone(), *tensors)]
        pairs = dict(gate_up_adapter=Adapter(*of[1:3], 0.7), down_adapter=Adapter(*of[3:], 2.0))
        y = fused_experts(of[0], gate_up, down, index, weights, transposed=transposed, **pairs)
        return [y, *torch.autograd.grad(y.float().square().sum(), of)]

    flat = torch.cat([torch.zeros(1, **on), *(t.flatten() for t in adapters)])
    ends = [1]
    for t in adapters:
        ends.append(ends[-1] + t.numel())
    views = [flat[a:b].view(t.shape).detach() for a, b, t in zip(ends, ends[1:], adapters)]
    assert all(t.data_ptr() % 16 for t in views)
    assert all(map(torch.equal, results(views), results([t.clone() for t in adapters])))
