"""Rows have the same bits whatever the other rows are: those of this library's operators, and while
liger_kernel.batch_invariant is on, those of torch's products and pointwise functions on CPUs. All are compared by
equality, with the same rows in a batch of others."""

import os

import pytest
import torch
import torch.nn.functional as F
from cases import all_cases, as_tuple
from liger_kernel._invariance import products
from liger_kernel._library import ops

ROWS = 70
#: (first row, end) of what is compared: one row at an odd place, a few, the last one.
PARTS = ((0, 1), (3, 4), (ROWS - 1, ROWS), (5, 12), (2, 66))


def _by_row(names, rows, inner=()):
    """case -> (what its shape has between rows and columns, {input: its dimension of rows})."""
    return {name: (inner, dict.fromkeys(rows, 0)) for name in names.split()}


#: The operators on rows. A row of experts and of linear layers has more than one product.
OPERATORS = {
    **_by_row("activate softmax xielu rms_norm rms_norm_float_weight layer_norm gated_packed", (0,)),
    **_by_row("gated fused_add_rms_norm gated_rms_norm gated_rms_norm_float_weight selective_log_softmax", (0, 1)),
    **_by_row("modulated_rms_norm modulated_rms_norm_float", (0, 2, 3)),
    **_by_row("delta_gates", (0, 3)),
    **_by_row("channel_gates channel_gates_float_A", (0,)),
    **_by_row("route", (0, 2)),
    **_by_row("class_logits", (0, 3), (101,)),
}
PRODUCTS = {
    **_by_row("linear_log_prob", (0, 3), (101,)),
    **_by_row("fused_experts fused_experts_clamped fused_experts_ungated", (0, 3, 10), (24,)),
    **_by_row("linear", (0, 5), (24,)),
    **_by_row("qkv activated_linear gated_linear gated_mlp", (0,), (24,)),
}


@pytest.fixture
def switched_on(device):
    products.enter()
    yield device
    products.leave()


def differences(name, inner, by_row, width, dtype, device):
    case = all_cases()[name]
    for options in case.options:
        keywords = {key: value for key, value in options.items() if key != "frozen"}
        groups = options.get("groups", 1)
        if width % groups:
            continue
        shape = (ROWS, width, *inner)
        inputs = case.inputs(shape, options, dtype, device)

        def run(tensors, case=case, keywords=keywords):
            with torch.no_grad():
                return [t for t in as_tuple(case.op(*tensors, **keywords)) if t is not None]

        whole = run(inputs)
        for begin, end in PARTS:
            part = [
                t if t is None or i not in by_row or t.shape[:1] != (ROWS,) else t[begin:end].clone()
                for i, t in enumerate(inputs)
            ]
            for number, (result, of_part) in enumerate(zip(whole, run(part))):
                if result.shape[:1] == (ROWS,) and not torch.equal(result[begin:end], of_part):
                    yield options, number, (begin, end), int((result[begin:end] != of_part).sum())


WIDE = {"rms_norm", "layer_norm", "softmax", "selective_log_softmax", "fused_add_rms_norm"}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPERATORS)
def test_rows_of_operators(name, dtype, device):
    """Whose rows begin at multiples of 16 bytes, as those of models do. Nothing is switched on."""
    inner, by_row = OPERATORS[name]
    wide = name in WIDE and dtype == torch.bfloat16  # a cluster's row: beyond 8192 columns of 16 bits
    for width in (64, 1000, *((8200,) if wide else ())):
        if dtype in all_cases()[name].dtypes and not (name == "route" and width > 1024):
            found = [*differences(name, inner, by_row, width, dtype, device)]
            assert not found, (width, found[:3])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", PRODUCTS)
def test_rows_of_products(name, dtype, switched_on):
    """Also those of an odd width, which begin anywhere, and of adapters of rank 3 and 4."""
    inner, by_row = PRODUCTS[name]
    for width in (37, 64) if switched_on == "cpu" else (64,):
        found = [*differences(name, inner, by_row, width, dtype, switched_on)]
        assert not found, (width, found[:3])


@pytest.mark.parametrize("bias", [None, "vector", "matrix"])
@pytest.mark.parametrize("sizes", [(64, 128), (64, 4), (37, 7), (100, 33), (1024, 16)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_torch_s_products(dtype, sizes, bias, switched_on):
    """Of a layout by rows or by columns, in any number and place; the values are those of the product in float64."""
    depth, columns = sizes
    torch.manual_seed(0)
    x, w = (torch.randn(n, depth, device=switched_on).to(dtype) for n in (1100, columns))
    b = {None: None, "vector": torch.randn(columns), "matrix": torch.randn(1100, columns)}[bias]
    b = None if b is None else b.to(switched_on, dtype)

    def product(rows, part):
        if bias == "matrix":
            return torch.addmm(b[part], rows, w.t())
        return F.linear(rows, w, b)

    whole = product(x, slice(None))
    for begin, end in ((0, 1), (3, 4), (77, 80), (512, 527), (600, 1100), (1, 1025)):
        part = slice(begin, end)
        assert torch.equal(product(x[part], part), whole[part]), part
        assert torch.equal(product(x[part].clone(), part), whole[part]), part
        assert torch.equal(product(x[part].t().contiguous().t(), part), whole[part]), part
        batched = torch.bmm(x[part].expand(2, -1, -1), w.t().expand(2, -1, -1))
        assert torch.equal(batched, torch.bmm(x.expand(2, -1, -1), w.t().expand(2, -1, -1))[:, part]), part
    exact = x.double() @ w.double().t() + (0 if b is None else b.double())
    # Sums of `depth` terms of order one, rounded once more to the dtype.
    size = depth**0.5 * (torch.finfo(dtype).eps + depth * 2.0**-24)
    assert (whole.double() - exact).abs().max() <= 8 * size


POINTWISE = {
    "sigmoid": torch.sigmoid,
    "sigmoid_": lambda x: x.clone().sigmoid_(),
    "silu": F.silu,
    "silu_": lambda x: F.silu(x.clone(), inplace=True),
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "softplus": F.softplus,
    "rsqrt": lambda x: torch.rsqrt(x.abs() + 1),
    "mish": F.mish,
    "elu": F.elu,
    "relu_squared": lambda x: F.relu(x).square(),
    "tanh": torch.tanh,
    "exp": torch.exp,
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", POINTWISE)
def test_torch_s_pointwise_functions(name, dtype, switched_on):
    function = POINTWISE[name]
    for width in (1, 12, 64, 100):
        torch.manual_seed(0)
        x = (torch.randn(2000, width, device=switched_on) * 2).to(dtype)
        whole = function(x)
        for begin, end in ((0, 1), (3, 4), (1, 10), (100, 999), (0, 1001), (7, 1900)):
            assert torch.equal(function(x[begin:end]), whole[begin:end]), (width, begin, end)
        assert torch.equal(function(x.t()).t(), whole)


def test_values_and_gradients_stay_right(switched_on):
    """Against float64; a second use of a gradient adds up as without the switch."""
    torch.manual_seed(0)
    x, w = (torch.randn(n, 48, device=switched_on, dtype=torch.float64) for n in (33, 20))
    for function in (*POINTWISE.values(), lambda t: F.linear(t, w.to(t.dtype))):
        exact = x.clone().requires_grad_()
        function(exact).square().sum().backward()
        given = x.float().requires_grad_()
        y = function(given)
        y.square().sum().backward()
        # A few roundings of 2^-24, of sums of 48 terms of order one.
        assert (y.double() - function(x)).abs().max() <= 2.0**-18
        assert (given.grad.double() - exact.grad).abs().max() <= 2.0**-18 * exact.grad.abs().max()


def test_backward_and_compilers_see_usual_products(switched_on):
    """Products of a backward pass are whole, and a traced product is one product."""
    x, w = (torch.randn(n, 8, device=switched_on, requires_grad=True) for n in (5, 3))
    dx, dw = torch.autograd.grad(F.linear(x, w), (x, w), torch.ones(5, 3, device=switched_on))
    ones = torch.ones(5, 3, device=switched_on)
    products.leave()
    try:
        expected = ones @ w.detach(), ones.t() @ x.detach()
    finally:
        products.enter()
    assert torch.equal(dx, expected[0]) and torch.equal(dw, expected[1])
    assert F.linear(x.to("meta"), w.to("meta")).shape == (5, 3)
    graph = torch.fx.experimental.proxy_tensor.make_fx(lambda x, w: torch.mm(x, w.t()))(x.detach(), w.detach()).graph
    assert [node.target for node in graph.nodes if "mm" in str(node.target)] == [torch.ops.aten.mm.default]


def test_empty_and_wrong_products(switched_on):
    empty, w = torch.empty(0, 8, device=switched_on), torch.randn(3, 8, device=switched_on)
    assert F.linear(empty, w).shape == (0, 3)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        torch.mm(w, w)
    out = torch.empty(0, device=switched_on)
    assert torch.equal(torch.mm(w, w.t(), out=out), torch.mm(w, w.t())) and out.shape == (3, 3)


def test_arguments():
    with pytest.raises(ValueError, match="expected 3 numbers each, got 2 and 3"):
        ops.set_batch_invariant([1, 2], [1, 2, 3])
    with pytest.raises(ValueError, match="cannot be negative"):
        ops.set_batch_invariant([1, 2, -3], [1, 2, 3])


def test_switching_twice():
    """It is on until everybody has left, and then nothing of torch is changed."""
    x, w = torch.randn(3, 64), torch.randn(48, 64)
    plain = F.linear(x, w)
    fills = torch.utils.deterministic.fill_uninitialized_memory
    products.enter(), products.enter()
    inside = F.linear(x, w)
    products.leave()
    assert torch.equal(F.linear(x, w), inside) and torch.are_deterministic_algorithms_enabled()
    products.leave()
    assert torch.equal(F.linear(x, w), plain) and not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory == fills


def test_settings_of_cublas(monkeypatch):
    """Split-K and sums in 16 bits are off meanwhile, and the settings and the environment come back."""
    preferred = ["default"]  # a build without CUDA has one library
    monkeypatch.setattr(
        torch.backends.cuda,
        "preferred_blas_library",
        lambda name=None: preferred[-1] if name is None else preferred.append(name),
    )
    names = [f"allow_{kind}_reduced_precision_reduction" for kind in ("bf16", "fp16")]
    settings = lambda: [
        *(getattr(torch.backends.cuda.matmul, name) for name in names),
        *(torch._C._get_cublas_allow_bf16_reduced_precision_reduction(),),
        preferred[-1],
        os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
    ]
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=0: (9, 0))
    monkeypatch.setattr(torch.version, "hip", None)
    before = settings()
    assert products.ways()[1].least == 128
    products.enter()
    try:
        assert settings()[:3] == [False, False, (False, False)] and settings()[3] == "cublaslt"
        assert settings()[4] == ":4096:8"
    finally:
        products.leave()
    assert settings() == before
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=0: (8, 9))
    assert products.ways()[1] is products.ON_GPU
