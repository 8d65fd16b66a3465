"""The operators on DTensors, two ranks: results and gradients are those of plain torch on whole tensors, and nothing is
communicated where each rank can work on its own rows."""

import pathlib
import re

import pytest
import torch
from cases import all_cases, as_tuple, rounded
from liger_kernel.ops import LigerRMSNormFunction, LigerSiLUMulFunction
from liger_kernel.ops.experimental.mm_int8int2 import matmul
from liger_kernel.transformers.functional import liger_layer_norm
from ranks import DEVICE, each_on_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

#: case -> [(shape, options, positions of the arguments that are sharded, along which dimensions)].
#: The other arguments are whole. Some sizes are odd.
SHARDED = {
    "rms_norm": [((4, 5, 16), {}, (0,), (0, 1))],
    "fused_add_rms_norm": [((4, 5, 16), {}, (0, 1), (0, 1))],
    "modulated_rms_norm": [((4, 5, 16), {}, (0, 2, 3), (0,)), ((4, 5, 16), dict(each="all"), (0,), (0, 1))],
    "gated_rms_norm": [((4, 5, 16), dict(groups=2), (0, 1), (0, 1))],
    "layer_norm": [((4, 5, 16), {}, (0,), (0, 1))],
    "poly_norm": [((4, 5, 16), {}, (0,), (0, 1))],
    "dyt": [((4, 5, 16), {}, (0,), (0, 1))],
    "group_norm": [((5, 4, 6), dict(groups=2), (0,), (0,))],
    "gated_delta_rule": [((4, 6, 1, 2, 8, 4), {}, (0, 1, 2, 3, 4), (0,))],
    "channel_delta_rule": [((4, 6, 1, 2, 8, 4), {}, (0, 1, 2, 3, 4), (0,))],
    "channel_gates": [((4, 5, 16), {}, (0,), (0,))],
    "delta_gates": [((4, 5, 16), {}, (0, 3), (0,))],
    "causal_conv1d": [((4, 6, 7), dict(documents="grow"), (0, 3), (0,))],
    "activate": [((4, 5, 16), None, (0,), (0, 1, 2))],
    "gated": [((4, 5, 16), None, (0, 1), (0, 1, 2))],
    "gated_packed": [((5, 14), {}, (0,), (0,))],
    "softmax": [((4, 5, 16), {}, (0,), (0, 1))],
    "sparsemax": [((4, 5, 16), {}, (0,), (0, 1))],
    "route": [
        ((4, 5, 16), None, (0,), (0, 1)),
        ((4, 5, 16), dict(top_k=3, normalise=True, given=torch.int16), (0, 2), (0, 1)),
    ],
    "expert_load": [((4, 5, 16), None, (0,), (0, 1))],
    "activated_linear": [((7, 6, 5), dict(biases=True), (0,), (0,))],
    "gated_linear": [((7, 6, 5), dict(biases=True), (0,), (0,))],
    "gated_mlp": [((7, 6, 5), dict(biases=True, recompute=r), (0,), (0,)) for r in (False, True)],
    "embedding": [((12, 6, 4), {}, (1,), (0,))],
    "rope": [((2, 4, 6, 8), {}, (0, 1), (0, 1, 2))],
    "rope_packed": [((2, 4, 6, 8), {}, (0,), (0, 1))],
    "qk_norm_rope": [((2, 4, 6, 8), {}, (0, 1), (0, 1, 2))],
    "selective_log_softmax": [((4, 5, 16), {}, (0, 1), (0, 1))],
    "linear_log_prob": [((7, 6, 19), dict(entropy=True), (0, 3), (0,)), ((7, 6, 19), dict(max_bytes=1), (0, 3), (0,))],
    "cross_entropy": [((9, 13), dict(reduction=r), (0, 1), (0,)) for r in ("none", "sum")],
    "fused_linear_cross_entropy": [((7, 6, 19), dict(reduction=r), (0, 3), (0,)) for r in ("none", "sum")],
    "kl_div": [((9, 13), dict(reduction=r), (0, 1), (0,)) for r in ("none", "sum")],
    "fused_experts": [((7, 6, 5), {}, (0, 3, 6), (0,))],
}
#: Sums of all rows that are no sum of the ranks', and rows in parts: right, by communication.
GATHERED = {
    "modulated_rms_norm": [((4, 5, 16), dict(each="token"), (0, 2, 3), (0,)), ((4, 5, 16), {}, (0,), (1,))],
    "rms_norm": [((4, 6), {}, (0,), (1,))],
    "cross_entropy": [((9, 13), dict(reduction="mean"), (0, 1), (0,))],
    "fused_linear_cross_entropy": [((7, 6, 19), dict(reduction="mean"), (0, 3), (0,))],
}


def compare(table, name, number, dim):
    """The number of communications of a forward and backward pass on shards, whose results are compared with whole
    ones."""
    shape, options, positions, _ = table[name][number]
    case, mesh = all_cases()[name], init_device_mesh(DEVICE, (2,))
    options = case.options[0] if options is None else options
    inputs = case.inputs(shape, options)
    exact = rounded(inputs)
    expected = as_tuple(case.reference(*exact, **options))
    shards = [
        t
        if t is None
        else distribute_tensor(
            t.detach().to(DEVICE), mesh, [Shard(dim) if i in positions else Replicate()], src_data_rank=None
        ).requires_grad_(t.requires_grad)
        for i, t in enumerate(inputs)
    ]
    with CommDebugMode() as forward:
        found = as_tuple(case.op(*shards, **options))
        with torch.no_grad():
            alone = as_tuple(case.op(*shards, **options))
    for a, b in zip(alone, found, strict=True):
        assert a.placements == b.placements and torch.equal(a.to_local(), b.to_local())
    trained = [i for i, o in enumerate(expected) if o.requires_grad]  # counts have no derivative
    upstream = [torch.randn(expected[i].shape, dtype=torch.float64) for i in trained]
    torch.autograd.backward([expected[i] for i in trained], upstream)
    split = [
        distribute_tensor(
            g.float().to(DEVICE),
            mesh,
            [Replicate() if p.is_partial() else p for p in found[i].placements],
            src_data_rank=None,
        )
        for g, i in zip(upstream, trained)
    ]
    leaves = [i for i, t in enumerate(exact) if t is not None and t.requires_grad]
    # Not Tensor.backward: where two leaves share a gradient it is cloned, for which torch 2.11 gathers odd shards.
    with CommDebugMode() as backward:
        gradients = torch.autograd.grad([found[i] for i in trained], [shards[i] for i in leaves], split)
    for got, want in [
        *zip(found, expected, strict=True),
        *zip(gradients, (exact[i].grad for i in leaves), strict=True),
    ]:
        assert want.abs().max() > 1e-3
        torch.testing.assert_close(got.full_tensor().double().cpu(), want.double(), rtol=1e-4, atol=1e-5)
    return forward.get_total_counts() + backward.get_total_counts()


def on_shards(rank, *case):
    assert compare(SHARDED, *case) == 0


def on_gathered(rank, *case):
    assert compare(GATHERED, *case) > 0


def cases_of(function, table, name):
    return [(function, name, number, dim) for number, (*_, dims) in enumerate(table[name]) for dim in dims]


@pytest.fixture(scope="module")
def found():
    tables = ((on_shards, SHARDED), (on_gathered, GATHERED))
    cases = [case for function, table in tables for name in table for case in cases_of(function, table, name)]
    return each_on_ranks([*cases, (mixed,), (page,)])


@pytest.mark.parametrize("name", SHARDED)
def test_shards_of_rows(found, name):
    for case in cases_of(on_shards, SHARDED, name):
        assert not found[case], f"{case}: {found[case]}"


@pytest.mark.parametrize("name", GATHERED)
def test_what_has_to_be_gathered(found, name):
    for case in cases_of(on_gathered, GATHERED, name):
        assert not found[case], f"{case}: {found[case]}"


def mixed(rank):
    """DTensors beside plain tensors, an operator without a rule, a gradient that comes back in another placement."""
    mesh = init_device_mesh(DEVICE, (2,))
    x, w, b = (torch.randn(shape, device=DEVICE) for shape in ((4, 8), (8,), (4, 8)))
    rows, columns = (distribute_tensor(x, mesh, [Shard(d)], src_data_rank=None) for d in (0, 1))
    y = LigerRMSNormFunction.apply(rows, w, 1e-6)
    torch.testing.assert_close(y, torch.nn.functional.rms_norm(x, (8,), w, 1e-6))
    c = LigerSiLUMulFunction.apply(b, columns)
    assert c.placements == (Shard(1),)
    torch.testing.assert_close(c.full_tensor(), torch.nn.functional.silu(b) * x)
    with pytest.raises(TypeError, match="weight is a plain tensor beside DTensors"):
        liger_layer_norm(rows, w, w, 1e-6)
    with pytest.raises((RuntimeError, NotImplementedError), match="int2_matmul"):
        matmul(
            rows.to(torch.int8),
            distribute_tensor(torch.zeros(2, 4, dtype=torch.uint8, device=DEVICE), mesh, [Replicate()]),
        )
    weight = distribute_tensor(w, mesh, [Replicate()], src_data_rank=None).requires_grad_()
    leaf, whole = rows.detach().requires_grad_(), x.double().requires_grad_()
    LigerRMSNormFunction.apply(leaf, weight, 1e-6).redistribute(mesh, [Shard(1)]).cos().redistribute(
        mesh, [Replicate()]
    ).sum().backward()
    exact = w.double().requires_grad_()
    torch.nn.functional.rms_norm(whole, (8,), exact, 1e-6).cos().sum().backward()
    torch.testing.assert_close(leaf.grad.full_tensor().double(), whole.grad, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(weight.grad.full_tensor().double(), exact.grad, rtol=1e-5, atol=1e-5)


def test_mixed(found):
    assert not found[(mixed,)], found[(mixed,)]


def page(rank):
    text = (pathlib.Path(__file__).resolve().parent.parent / "docs" / "distributed.md").read_text()
    (code,) = (code for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "placements" in code)
    names = {}
    exec(code, names)
    assert names["y"].placements == (Shard(1),) and names["weight"].grad.placements == (Partial(),)


def test_the_example_of_the_documentation(found):
    assert not found[(page,)], found[(page,)]
