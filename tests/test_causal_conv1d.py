"""What short causal convolutions promise beside tests/test_ops.py: documents that are packed are convolved as if they
stood alone, and the layouts of projections are neither copied nor changed."""

import pytest
import torch
import torch.nn.functional as F
from liger_kernel.operators.documents import document_starts, starts_of_indices, starts_of_lengths, starts_of_positions
from liger_kernel.transformers import LigerShortConvolution
from liger_kernel.transformers.functional import liger_causal_conv1d

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
LENGTHS = (1, 2, 70, 1, 1, 3, 64, 9, 137)  # rows of whole packs, though documents are not


def convolved(x, weight, bias, dy, **documents):
    """y and dx."""
    x = x.detach().requires_grad_()
    y = liger_causal_conv1d(x, weight, bias, "silu", **documents)
    return y.detach(), torch.autograd.grad(y, x, dy)[0]


@pytest.mark.parametrize("layout", ["channels", "time"])
@pytest.mark.parametrize("width", [2, 3, 4, 7, 8])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_packed_equals_alone(dtype, width, layout, device):
    """To the bit, however the documents are given."""
    torch.manual_seed(0)
    tokens, channels = sum(LENGTHS), 24
    x, dy = (torch.randn(1, channels, tokens, device=device).to(dtype) for _ in range(2))
    if layout == "channels":
        x, dy = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (x, dy))
    weight, bias = torch.randn(channels, width, device=device).to(dtype), torch.randn(channels, device=device)
    alone = [convolved(a, weight, bias, b) for a, b in zip(x.split(LENGTHS, 2), dy.split(LENGTHS, 2))]
    expected = [torch.cat(parts, 2) for parts in zip(*alone)]
    ends = torch.tensor((0, *LENGTHS), dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32)
    index = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS)).to(device)[None]
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None].to(device)
    for documents in (
        dict(cu_seqlens=ends),
        dict(cu_seqlens=ends.long()),
        dict(seq_idx=index.int()),
        dict(starts=starts_of_positions(positions)),
    ):
        for ours, each in zip(convolved(x, weight, bias, dy, **documents), expected):
            assert torch.equal(ours, each)


def test_rows_of_a_batch(device):
    """Each row is what it is alone, with documents of its own."""
    torch.manual_seed(0)
    x, dy = (torch.randn(3, 200, 16, device=device).transpose(1, 2) for _ in range(2))
    weight, index = torch.randn(16, 4, device=device), torch.randint(2, (3, 200), device=device).cumsum(1)
    for ours, *rows in zip(
        convolved(x, weight, None, dy, seq_idx=index),
        *(convolved(x[i : i + 1], weight, None, dy[i : i + 1], seq_idx=index[i : i + 1]) for i in range(3)),
    ):
        assert torch.equal(ours, torch.cat(rows))


def test_nan_stays_in_its_document(device):
    for layout in ("channels", "time"):
        x = torch.randn(1, 30, 8, device=device).transpose(1, 2)
        x = x if layout == "channels" else x.contiguous()
        x[:, :, 12] = float("nan")
        seq_idx = torch.tensor([[0] * 10 + [1] * 10 + [2] * 10], device=device)
        y, dx = convolved(x, torch.randn(8, 4, device=device), None, torch.ones_like(x), seq_idx=seq_idx)
        assert y[:, :, 12:16].isnan().all() and not y[:, :, 16:].isnan().any() and not y[:, :, :12].isnan().any()
        assert not dx[:, :, :9].isnan().any() and not dx[:, :, 20:].isnan().any()


@pytest.mark.parametrize("silu", [True, False])
def test_tokens_of_no_document(silu, device):
    """Their results are 0, and neither they nor their gradients reach anything."""
    x = torch.randn(1, 12, 8, device=device).transpose(1, 2).requires_grad_()
    weight, bias = torch.randn(8, 3, device=device).requires_grad_(), torch.randn(8, device=device).requires_grad_()
    seq_idx = torch.tensor([[0] * 4 + [-1] * 3 + [1] * 5], device=device)
    activation = "silu" if silu else None
    y = liger_causal_conv1d(x, weight, bias, activation, seq_idx=seq_idx)
    assert not y[:, :, 4:7].any()
    parts = [liger_causal_conv1d(x[:, :, a:b], weight, bias, activation) for a, b in ((0, 4), (7, 12))]
    assert torch.equal(y[:, :, :4], parts[0]) and torch.equal(y[:, :, 7:], parts[1])
    ours = torch.autograd.grad(y.sum(), (x, weight, bias))
    plain = torch.autograd.grad(parts[0].sum() + parts[1].sum(), (x, weight, bias))
    for a, b in zip(ours, plain):
        # Sums of a dozen numbers of order one, in another order.
        torch.testing.assert_close(a, b, rtol=1e-5, atol=12 * torch.finfo(torch.float32).eps)


def test_layouts_of_projections(device):
    """A slice of a projection gives what its copy gives, in the layout of one; x stays as it is."""
    torch.manual_seed(0)
    for dtype in FLOATS:
        projection = torch.randn(2, 40, 96, device=device).to(dtype)
        weight = torch.randn(64, 4, device=device).to(dtype)
        for first in (16, 8, 3):  # at a multiple of 16 bytes, of 8 and of neither
            part = projection[..., first : first + 64].transpose(1, 2)
            y = liger_causal_conv1d(part, weight, None, "silu")
            assert y.transpose(1, 2).is_contiguous()
            assert torch.equal(
                y, liger_causal_conv1d(part.transpose(1, 2).contiguous().transpose(1, 2), weight, None, "silu")
            )
        y = liger_causal_conv1d(projection.transpose(1, 2).contiguous()[:, :64], weight, None, "silu")
        assert y.is_contiguous() and y.shape == (2, 64, 40)


@pytest.mark.parametrize("x_dtype", FLOATS)
@pytest.mark.parametrize("w_dtype", FLOATS)
def test_mixed_dtypes(x_dtype, w_dtype, device):
    """The result has x's dtype, and every gradient that of its tensor."""
    torch.manual_seed(0)
    shapes, dtypes = ((2, 16, 20), (16, 4), (16,)), (x_dtype, w_dtype, w_dtype)
    tensors = [torch.randn(s, device=device).to(d).requires_grad_() for s, d in zip(shapes, dtypes)]
    x, weight, bias = (t.detach().double() for t in tensors)
    y = liger_causal_conv1d(*tensors, "swish")
    expected = F.silu(F.conv1d(x, weight.unsqueeze(1), bias, padding=3, groups=16)[..., :20])
    tolerance = 2 * torch.finfo(x_dtype).eps  # one rounding, and what a float's sum of five terms is off by
    torch.testing.assert_close(y.double(), expected, rtol=tolerance, atol=tolerance)
    y.sum().backward()
    assert y.dtype == x_dtype and tuple(t.grad.dtype for t in tensors) == dtypes


def test_module():
    torch.manual_seed(0)
    module, x = LigerShortConvolution(8, 3, bias=True), torch.randn(1, 9, 8)
    torch.nn.init.normal_(module.bias)
    plain = torch.nn.Conv1d(8, 8, 3, groups=8, padding=2)
    plain.load_state_dict(module.state_dict())

    def expected(x):
        return F.silu(plain(x.transpose(1, 2))[..., : x.shape[1]]).transpose(1, 2)

    torch.testing.assert_close(module(x), expected(x))
    packed = torch.cat((expected(x[:, :4]), expected(x[:, 4:])), 1)
    torch.testing.assert_close(module(x, cu_seqlens=torch.tensor([0, 4, 9])), packed)
    torch.testing.assert_close(module(x, seq_idx=torch.tensor([[0] * 4 + [1] * 5])), packed)
    assert "channels=8, width=3, bias=True, activation=silu" in repr(module)


def test_second_derivative(device):
    x, weight = torch.randn(1, 8, 9, device=device).requires_grad_(), torch.randn(8, 4, device=device)
    (dx,) = torch.autograd.grad(liger_causal_conv1d(x, weight).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="causal_conv1d has no second derivative"):
        dx.sum().backward()


def test_starts(device):
    def lists(t):
        assert t.dtype == torch.int32 and t.device.type == torch.device(device).type
        return t.tolist()

    def given(*numbers, dtype=torch.int32):
        return torch.tensor(numbers, dtype=dtype, device=device)

    # An empty document, and tokens behind the last.
    for dtype in (torch.int32, torch.int64):
        assert lists(starts_of_lengths(given(0, 2, 2, 5, dtype=dtype), 7)) == [[0, 0, 2, 2, 2, 5, 5]]
    assert lists(starts_of_lengths(given(0, 3), 3)) == [[0, 0, 0]]
    assert lists(starts_of_indices(given([0, 0, 1, 1, 0], [3, -1, -1, 3, 3]))) == [[0, 0, 2, 2, 4], [0, -1, -1, 3, 3]]
    # TRL pads with positions 0: each such token is a document.
    assert lists(starts_of_positions(given([0, 1, 2, 0, 1, 0, 0], [5, 6, 7, 8, 9, 10, 11]))) == [
        [0, 0, 0, 3, 3, 5, 6],
        [0] * 7,
    ]
    assert lists(starts_of_positions(given([4]))) == [[0]] and starts_of_indices(given([], [])).shape == (2, 0)
    assert document_starts(5) is None
    ends, index, positions = given(0, 2, 5), given([0, 0, 0, 1, 1]), given([0, 1, 2, 3, 0])
    assert lists(document_starts(5, ends, index, positions)) == [[0, 0, 2, 2, 2]]
    assert lists(document_starts(5, None, index, positions)) == [[0, 0, 0, 3, 3]]
    assert lists(document_starts(5, None, None, positions)) == [[0, 0, 0, 0, 4]]


def test_starts_compile():
    """Whole graphs, of any number of tokens and documents."""
    torch._dynamo.reset()
    whole = lambda f: torch.compile(f, fullgraph=True, backend="aot_eager", dynamic=True)
    lengths, indices, positions = whole(starts_of_lengths), whole(starts_of_indices), whole(starts_of_positions)
    for n in (7, 11):
        ends, index = torch.tensor([0, 2, n - 1], dtype=torch.int32), torch.randint(-1, 3, (2, n))
        assert torch.equal(lengths(ends, n), starts_of_lengths(ends, n))
        assert torch.equal(indices(index), starts_of_indices(index))
        assert torch.equal(positions(index), starts_of_positions(index))
