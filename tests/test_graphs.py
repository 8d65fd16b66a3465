"""A step in a CUDA graph is the step without one."""

import copy
import logging

import pytest
import torch
from liger_kernel.graphs import capture_step
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
