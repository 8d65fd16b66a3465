"""A step in a CUDA graph is the step without one."""

import copy
import logging

import pytest
import torch
from liger_kernel.graphs import _obstacle, _what_waits, capture_model, capture_step
from liger_kernel.optim import LigerAdamW
from torch import nn

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="captures a CUDA graph")


class Model(nn.Module):
    def __init__(self, dropout=0.0, waits=None):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(dropout), nn.Linear(64, 16))
        self.unused = nn.Parameter(torch.zeros(3))
        self.waits = waits

    def forward(self, x, y):
        if self.waits and not torch.cuda.is_current_stream_capturing() and x.max().item() > 1e30:
            return x  # not in a capture, as masks of transformers
        if self.waits == "always" and x.sum().item() > 1e30:
            return x
        return (self.layers(x) - y).square().mean()


def loss_of(model, batch):
    return model(batch["x"], batch["y"])


def batches(count, device, rows=8):
    g = torch.Generator().manual_seed(0)
    return [{name: torch.randn(rows, 16, generator=g).to(device) for name in "xy"} for _ in range(count)]


def run(model, made, count, accumulation=1, max_norm=None, schedule=True, rows=(8,), captured=True, **options):
    """(losses, parameters) after as many batches."""
    torch.manual_seed(5)
    device = next(model.parameters()).device
    optimizer = made(model)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 10) if schedule else None
    data = [batches(count, device, n) for n in rows]
    data = [data[i % len(rows)][i] for i in range(count)]
    losses = []
    if captured:
        arguments = dict(loss=loss_of, max_norm=max_norm, scheduler=scheduler, accumulation=accumulation)
        step = capture_step(model, optimizer, data[0], **arguments, **options)
        losses = [step(batch) for batch in data]
    else:
        for i, batch in enumerate(data):
            loss = loss_of(model, batch) / accumulation
            loss.backward()
            losses.append(loss.detach() * accumulation)
            if (i + 1) % accumulation == 0:
                if max_norm is not None:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
                optimizer.step()
                optimizer.zero_grad()
                scheduler and scheduler.step()
        step = None
    return torch.stack(losses), list(model.parameters()), step


def torch_adamw(model, made=torch.optim.AdamW, **options):
    """The learning rate is a tensor, as capture_step has it: schedules of numbers are not in float32."""
    parameters = list(model.parameters())
    rate = torch.tensor(1e-2, device=parameters[0].device)
    return made(parameters, lr=rate, capturable=True, **options)


def our_adamw(model):
    return torch_adamw(model, LigerAdamW)


@cuda
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("made", [torch_adamw, our_adamw])
def test_the_same_steps(made, accumulation):
    torch.manual_seed(1)
    model = Model().cuda()
    plain = copy.deepcopy(model)
    losses, found, step = run(model, made, 18, accumulation)
    expected_losses, expected, _ = run(plain, made, 18, accumulation, captured=False)
    assert step.reason is None and set(step.graphs) == (
        {"first+step"} if accumulation == 1 else {"first", "more", "more+step"}
    )
    assert torch.equal(losses, expected_losses)
    assert all(torch.equal(p, q) for p, q in zip(found, expected))


@cuda
def test_clipping_and_its_norm():
    torch.manual_seed(1)
    model = Model().cuda()
    plain = copy.deepcopy(model)
    losses, found, step = run(model, torch_adamw, 9, max_norm=0.01)
    expected_losses, expected, _ = run(plain, torch_adamw, 9, max_norm=0.01, captured=False)
    assert torch.equal(losses, expected_losses) and all(torch.equal(p, q) for p, q in zip(found, expected))
    assert step.grad_norm > 0.01


@cuda
def test_a_loss_that_is_still_held():
    """It holds where autograd accumulates gradients: on the stream of the steps before."""
    model = Model().cuda()
    (batch,) = batches(1, "cuda")
    held = [loss_of(model, batch) for _ in range(2)]
    step = capture_step(model, torch_adamw(model), batch, loss=loss_of)
    losses = [step(batch).item() for _ in range(8)]
    assert step.graphs and losses[-1] < losses[0] and held[0].requires_grad


@cuda
def test_dropout_draws_new_masks():
    model = Model(dropout=0.5).cuda()
    for p in model.parameters():
        p.requires_grad_(True)
    optimizer = LigerAdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    (batch,) = batches(1, "cuda")
    step = capture_step(model, optimizer, batch, loss=loss_of)
    assert len({step(batch).item() for _ in range(8)}) == 8


@cuda
def test_other_shapes_run_without_the_graph():
    torch.manual_seed(1)
    model = Model().cuda()
    plain = copy.deepcopy(model)
    losses, found, step = run(model, torch_adamw, 12, rows=(8, 8, 5))
    expected_losses, expected, _ = run(plain, torch_adamw, 12, rows=(8, 8, 5), captured=False)
    assert step.graphs
    torch.testing.assert_close(losses, expected_losses)
    torch.testing.assert_close(found, expected)


@cuda
def test_a_model_that_waits_unless_it_is_captured():
    model = Model(waits="outside").cuda()
    _, _, step = run(model, torch_adamw, 6)
    assert step.reason is None and step.graphs


@cuda
def test_a_model_that_waits(caplog):
    torch.manual_seed(1)
    model = Model(waits="always").cuda()
    plain = copy.deepcopy(model)
    with caplog.at_level(logging.WARNING):
        losses, found, step = run(model, torch_adamw, 6)
    expected_losses, expected, _ = run(plain, torch_adamw, 6, captured=False)
    assert "the host reads what the GPU computes, at" in step.reason and __file__ in step.reason
    assert step.reason in caplog.text and not step.graphs
    assert torch.equal(losses, expected_losses) and all(torch.equal(p, q) for p, q in zip(found, expected))


@cuda
def test_looking_for_what_waits_keeps_no_gradients():
    """Room for two of 16 weights, and a few activations, beside what there is."""
    model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024, bias=False) for _ in range(16)]).cuda()
    x = torch.randn(8, 1024, device="cuda")
    passes = lambda: model(x).sum().backward()
    passes()  # cuBLAS makes room for itself
    gradients = [p.grad.clone() for p in model.parameters()]
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    assert _what_waits(passes, model, [*model.parameters()]) is None
    assert torch.cuda.max_memory_allocated() - before < 3 * 1024 * 1024 * 4
    assert all(torch.equal(p.grad, gradient) for p, gradient in zip(model.parameters(), gradients))


@cuda
def test_a_capture_reserves_the_memory_of_one_step():
    """torch's allocator keeps freed memory for the stream that had it: passes on another one would take as much again.
    Its segments may add 40 %."""
    model = Model().cuda()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    *_, step = run(model, torch_adamw, 4, rows=(1 << 18,), warmup=2)
    assert step.graphs
    most = torch.cuda.max_memory_allocated() - allocated
    assert most > 1 << 28 and torch.cuda.max_memory_reserved() - reserved < 1.4 * most


def test_without_a_gpu(caplog):
    torch.manual_seed(1)
    model = Model()
    plain = copy.deepcopy(model)
    made = lambda model: torch.optim.SGD(model.parameters(), lr=0.1)
    with caplog.at_level(logging.WARNING):
        losses, found, step = run(model, made, 6, accumulation=2, max_norm=0.5)
    expected_losses, expected, _ = run(plain, made, 6, accumulation=2, max_norm=0.5, captured=False)
    assert step.reason == "the parameters are not on a GPU" and step.reason in caplog.text
    assert torch.equal(losses, expected_losses) and all(torch.equal(p, q) for p, q in zip(found, expected))


def test_checkpointed_layers_are_not_captured():
    model = Model()
    model.layers.gradient_checkpointing = True
    assert _obstacle(model, []).startswith("layers are checkpointed")


class ReturnsLoss(Model):
    """A model that returns its loss and its result, as those of transformers do."""

    def forward(self, x, y, scale=1.0):
        if self.waits:
            x.sum().item()
        made = self.layers(x)
        return {"loss": (made - y).square().mean() * scale, "made": made, "kind": "regression"}


def loop(model, data, accumulation=1, autocast=False, **options):
    """(losses, parameters) of AdamW in a loop as people write it."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for i, batch in enumerate(data):
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            outputs = model(**batch, **options)
        assert outputs["kind"] == "regression" and outputs["made"].shape == batch["y"].shape
        (outputs["loss"] / accumulation).backward()
        losses.append(outputs["loss"].detach())
        if (i + 1) % accumulation == 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    return torch.stack(losses), list(model.parameters())


def pair(**options):
    torch.manual_seed(1)
    model = ReturnsLoss(**options).cuda()
    return model, copy.deepcopy(model)


@cuda
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_a_captured_model_is_the_model(accumulation, autocast):
    model, plain = pair()
    captured = capture_model(model)
    data = batches(12, "cuda")
    found, expected = loop(model, data, accumulation, autocast), loop(plain, data, accumulation, autocast)
    assert captured.reason is None and len(captured.graphs) == 1
    assert torch.equal(found[0], expected[0]) and all(torch.equal(p, q) for p, q in zip(found[1], expected[1]))
    captured.remove()
    assert "forward" not in vars(model)


@cuda
def test_two_forwards_before_a_backward():
    """The second runs without the graph, whose memory holds what the first one's backward reads."""
    model, plain = pair()
    captured = capture_model(model, warmup=1)
    first, second = batches(2, "cuda")
    for _ in range(3):
        for m in (model, plain):
            m.zero_grad()
            losses = [m(**batch)["loss"] for batch in (first, second)]
            (losses[0] + 2 * losses[1]).backward()
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.layers.parameters(), plain.layers.parameters()))
    assert captured.graphs


@cuda
def test_the_gradient_of_another_result():
    """Any result may be differentiated: here the one beside the loss."""
    model, plain = pair()
    capture_model(model, warmup=1)
    for batch in batches(4, "cuda"):
        for m in (model, plain):
            m.zero_grad()
            m(**batch)["made"].abs().sum().backward()
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.layers.parameters(), plain.layers.parameters()))


@cuda
def test_what_runs_without_graphs():
    model, plain = pair()
    captured = capture_model(model, warmup=1)
    (batch,), (longer,) = batches(1, "cuda"), batches(1, "cuda", rows=5)
    for _ in range(3):
        model(**batch)["loss"].backward()
    assert len(captured.graphs) == 1
    for inputs, options in ((longer, {}), (batch, {"scale": 3.0})):
        for _ in range(3):
            assert torch.equal(model(**inputs, **options)["loss"], plain(**inputs, **options)["loss"])
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for p in twin.parameters():
            p.zero_()
        assert torch.equal(model(**batch)["loss"], plain(**batch)["loss"])
    assert twin(**batch)["loss"] == batch["y"].square().mean()
    model.eval()
    assert torch.equal(model(**batch)["loss"], plain(**batch)["loss"])
    assert len(captured.graphs) == 1


@cuda
def test_parameters_that_move_are_captured_again():
    model, plain = pair()
    captured = capture_model(model, warmup=1)
    (batch,) = batches(1, "cuda")
    for step in range(6):
        if step == 3:
            for m in (model, plain):
                for p in m.parameters():
                    p.data = p.data * 2
        for m in (model, plain):
            m.zero_grad()
            m(**batch)["loss"].backward()
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.layers.parameters(), plain.layers.parameters()))
    assert captured.graphs


@cuda
def test_a_captured_model_draws_new_masks():
    model, _ = pair(dropout=0.5)
    captured = capture_model(model)
    (batch,) = batches(1, "cuda")
    losses = set()
    for _ in range(8):
        loss = model(**batch)["loss"]
        loss.backward()
        losses.add(loss.item())
    assert len(losses) == 8 and captured.graphs


@cuda
def test_a_model_that_waits_is_not_captured(caplog):
    model, plain = pair(waits="always")
    with caplog.at_level(logging.WARNING):
        captured = capture_model(model)
        found, expected = loop(model, batches(6, "cuda")), loop(plain, batches(6, "cuda"))
    assert "the host reads what the GPU computes, at" in captured.reason and captured.reason in caplog.text
    assert torch.equal(found[0], expected[0]) and not captured.graphs


def test_a_model_on_a_cpu_is_not_captured(caplog):
    torch.manual_seed(1)
    model = ReturnsLoss()
    plain = copy.deepcopy(model)
    with caplog.at_level(logging.WARNING):
        captured = capture_model(model)
        found, expected = loop(model, batches(6, "cpu")), loop(plain, batches(6, "cpu"))
    assert captured.reason == "the inputs are not on a GPU" and captured.reason in caplog.text
    assert torch.equal(found[0], expected[0])
