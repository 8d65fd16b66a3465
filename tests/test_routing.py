"""Router replay without transformers: this library's own router, how layers are found, and the formats of ids."""

import base64

import numpy
import pytest
import torch
from liger_kernel import routing
from liger_kernel._routing.routers import routers_of
from liger_kernel.graphs import _replayed
from liger_kernel.transformers import LigerRouter
from torch import nn

EXPERTS, TOP_K, WIDTH = 12, 3, 16


class Layer(nn.Module):
    def __init__(self, routed):
        super().__init__()
        self.mlp = LigerRouter(WIDTH, EXPERTS, TOP_K, normalise=True) if routed else nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        if isinstance(self.mlp, nn.Linear):
            return x + self.mlp(x)
        logits, weights, index = self.mlp(x)
        return x + torch.zeros_like(logits).scatter(-1, index, weights).repeat_interleave(2, -1)[..., :WIDTH]


class Model(nn.Module):
    """Of layers that have a router, or not."""

    def __init__(self, *routed, stack="layers"):
        super().__init__()
        torch.manual_seed(0)
        setattr(self, stack, nn.ModuleList(map(Layer, routed)))

    def forward(self, x):
        for layer in next(self.children()):
            x = layer(x)
        return x


def ids_of(rows, layers, dtype=torch.long, seed=0):
    made = torch.rand(rows, layers, EXPERTS, generator=torch.Generator().manual_seed(seed))
    return made.argsort(-1)[..., :TOP_K].to(dtype)


DTYPES = (torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64)


@pytest.mark.parametrize("dtype", DTYPES)
def test_columns_of_layers(dtype, device):
    """Layers without a router have a column, or none; the router has the ids of its own layer, from either device."""
    model, x = Model(False, True, True, False).to(device), torch.randn(2, 5, WIDTH, device=device)
    ids = ids_of(10, 4, dtype)
    for given in (ids, ids[:, 1:3], ids.to(device).view(2, 5, 4, TOP_K)):
        with routing.replay(model, given), routing.record(model) as recorded:
            y = model(x)
        assert torch.equal(recorded.ids[:, 1:3].cpu().long(), ids[:, 1:3].long())
        assert (recorded.ids[:, [0, 3]] == -1).all() and recorded.ids.shape == (10, 4, TOP_K)
        layer = model.layers[1].mlp
        logits = nn.functional.linear(model.layers[0](x), layer.weight)
        with routing.replay(model, given):
            weights = layer(model.layers[0](x))[1]
        exact = logits.double().gather(-1, ids[:, 1].long().view(2, 5, -1).to(device)).softmax(-1)
        # A dozen roundings of 2^-24.
        torch.testing.assert_close(weights.double(), exact, rtol=2.0**-20, atol=2.0**-24)
        assert y.shape == x.shape


def test_gradient_at_given_experts(device):
    """Against autograd in float64, where the softmax over all experts is gathered at the ids and normalised."""
    router = LigerRouter(WIDTH, EXPERTS, TOP_K, normalise=True).to(device)
    model = nn.Module()
    model.layers = nn.ModuleList([nn.ModuleDict({"gate": router})])
    x, ids = torch.randn(9, WIDTH, device=device), ids_of(9, 1)
    upstream = torch.randn(9, TOP_K, device=device)
    with routing.replay(model, ids):
        router(x)[1].backward(upstream)
    weight = router.weight.detach().double().requires_grad_()
    scores = (x.double() @ weight.T).softmax(-1).gather(-1, ids[:, 0].to(device))
    (scores / scores.sum(-1, keepdim=True)).backward(upstream.double())
    # Sums of 9 terms of order one in float.
    torch.testing.assert_close(router.weight.grad.double(), weight.grad, rtol=2.0**-18, atol=2.0**-20)
    assert router.weight.grad.abs().sum() > 0


def test_nested(device):
    """The inner context counts, and what it leaves is as it was."""
    model, x = Model(True).to(device), torch.randn(4, WIDTH, device=device)
    outer, inner = ids_of(4, 1), ids_of(4, 1, seed=1)
    live = model(x)
    with routing.record(model) as recorded, routing.replay(model, outer):
        first = model(x)
        with routing.replay(model, inner):
            model(x)
            assert torch.equal(recorded.ids.long().cpu(), inner)
        assert torch.equal(model(x), first) and torch.equal(recorded.ids.long().cpu(), outer)
    assert torch.equal(model(x), live)
    assert not {"liger_replay", "liger_record"} & vars(model.layers[0].mlp).keys()


def test_what_a_graph_would_read(device):
    """A CUDA graph holds for the ids of one storage, whatever is written there."""
    model = Model(False, True).to(device)
    modules, ids = [*model.modules()], ids_of(4, 2).to(device)
    assert _replayed(modules) is None
    places = []
    for given in (ids, ids, ids.clone()):
        with routing.replay(model, given):
            places.append(_replayed(modules))
    assert places[0] == places[1] == ids[:, 1].data_ptr() != places[2]
    assert _replayed(modules) is None


def test_which_layers():
    assert [router.layer for router in routers_of(Model(False, True, True)).each] == [1, 2]
    both = Model(True)
    both.vision_tower = Model(True, True)
    assert [router.name for router in routers_of(both).each] == ["layers.0.mlp"]
    both.talker = Model(True)
    with pytest.raises(ValueError, match=r"routers in layers, talker\.layers: replay the part"):
        routers_of(both)
    with pytest.raises(ValueError, match="no routers"):
        routers_of(Model(False))
    twice = Model(True)
    twice.layers[0].attention = LigerRouter(WIDTH, EXPERTS, TOP_K)
    with pytest.raises(ValueError, match=r"layer 0 has two routers, layers\.0\.mlp and layers\.0\.attention"):
        routers_of(twice)


def test_a_choice_by_other_means_is_refused():
    class PairRouter(nn.Module):
        top_k, num_experts = 2, 4

        def forward(self, x):
            return x.argmax(-1)

    model = Model(True)
    model.layers[0].mlp = PairRouter()
    with pytest.raises(ValueError, match=r"layers\.0\.mlp \(PairRouter\) cannot be replayed: it calls no torch\.topk"):
        routing.replay(model, torch.zeros(4, 1, 2, dtype=torch.long)).__enter__()


def test_requests():
    """vLLM's arrays lack the last token's row; packed, and padded on either side."""
    first, second = (ids_of(rows, 2, torch.uint8, rows) for rows in (3, 2))
    requests = [first.numpy(), second.numpy()]
    packed = routing.from_requests(requests, (4, 2))
    assert packed.dtype == torch.int16 and packed.shape == (6, 2, TOP_K)
    missing = torch.full((1, 2, TOP_K), -1)
    assert torch.equal(packed.long(), torch.cat([first, missing, second]).long())
    right = routing.from_requests(requests, (4, 2), padded=5)
    left = routing.from_requests(requests, (4, 2), padded=5, side="left")
    assert right.shape == left.shape == (2, 5, 2, TOP_K)
    assert torch.equal(right[1, :2].long(), second.long()) and (right[1, 2:] == -1).all()
    assert torch.equal(left[0, 1:4].long(), first.long()) and (left[0, [0, 4]] == -1).all()
    assert torch.equal(routing.from_requests([None, first], (2, 3))[:2].long(), missing.expand(2, -1, -1))
    assert routing.from_requests([numpy.zeros((1, 2, 3), "uint16")], (1,)).dtype == torch.int32
    for arguments, text in (
        (([first], (2,)), "request 0 has 3 rows for 2 tokens"),
        (([first, first[:, :1]], (3, 3)), "of the same layers and k"),
        (([first], (3, 3)), "1 requests and 2 lengths"),
        (([first], (3,), 2), "sequence 0 has 3 tokens"),
        (([first], (3,), 5, "up"), "side must be"),
        (([None], (3,)), "of the same layers and k"),
    ):
        with pytest.raises(ValueError, match=text):
            routing.from_requests(*arguments)


def test_sglang():
    ids = ids_of(4, 2, torch.int32)
    text = base64.b64encode(ids.numpy().tobytes()).decode()
    assert torch.equal(routing.from_sglang(text, 2, TOP_K), ids)
    with pytest.raises(ValueError, match="24 ids are no whole tokens of 5 layers"):
        routing.from_sglang(text, 5, TOP_K)


def test_verl():
    """Nested and padded; rows of zeros choose by their own scores."""
    parts = [ids_of(rows, 2, torch.int16, rows) for rows in (3, 2)]
    nested = torch.nested.nested_tensor(parts, layout=torch.jagged)
    assert torch.equal(routing.from_verl(nested), torch.cat(parts))
    padded, mask = torch.zeros(2, 4, 2, TOP_K, dtype=torch.int16), torch.zeros(2, 4)
    padded[0, 1:], padded[1, :2] = parts[0], parts[1]
    mask[0, 1:], mask[1, :2] = 1, 1
    assert torch.equal(routing.from_verl(padded, mask), torch.cat(parts))
    assert routing.from_verl(padded) is padded
    model, x = Model(True, True), torch.randn(8, WIDTH)
    with routing.record(model) as live:
        model(x)
    with routing.replay(model, torch.zeros_like(padded)), routing.record(model) as used:
        model(x)
    assert torch.equal(used.ids, live.ids)
