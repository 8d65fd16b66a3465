"""A training step as one CUDA graph, for steps in which the GPU waits for the host."""

import logging
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from unittest import mock

import torch

_HERE = Path(__file__).parent
log = logging.getLogger(__name__)

Batch = Mapping[str, torch.Tensor]


def _loss_of(model, batch: Batch) -> torch.Tensor:
    """The loss of a Hugging Face model."""
    return model(**batch).loss


class CapturedStep:
    """What capture_step returns: `step(batch)` takes one training step and returns its loss, a scalar on the device.

    Attributes:
        reason: why steps run without a graph, once that is known; None where they are captured.
        grad_norm: the norm of the last step's gradients, a scalar on the device, where `max_norm` is given.
    """

    def __init__(self, model, optimizer, batch, loss, max_norm, scheduler, accumulation, warmup):
        self.model, self.optimizer, self.scheduler = model, optimizer, scheduler
        self.loss, self.max_norm, self.accumulation, self.warmup = loss, max_norm, accumulation, warmup
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.grad_norm: torch.Tensor | None = None
        self.reason: str | None = None
        self.calls = 0
        self.graphs: dict[str, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        self._fall_back(_reason_not_to(model, optimizer, self.parameters, batch))
        if self.reason is None:
            self.static = {name: t.clone() if isinstance(t, torch.Tensor) else t for name, t in batch.items()}
            self.stream, self.pool = torch.cuda.Stream(), None
            _make_capturable(optimizer, self.parameters[0].device)

    def _fall_back(self, reason):
        if reason is not None:
            self.reason = reason
            log.warning("capture_step: steps run without a CUDA graph: %s", reason)

    def __call__(self, batch: Batch) -> torch.Tensor:
        last = (self.calls + 1) % self.accumulation == 0
        first = self.calls % self.accumulation == 0
        self.calls += 1
        if self.reason is not None or not self._fits(batch):
            result = self._run(batch, first, last)
        elif self.calls <= self.warmup * self.accumulation:
            result = self._warm_up(batch, first, last)
        else:
            result = self._replay(batch, first, last)
        if last and self.scheduler is not None:
            self.scheduler.step()
        return result

    def _run(self, batch, first, last):
        """A step, or one of the passes that its gradient is the sum of: what a graph holds."""
        if first:
            self._forget_gradients()
        loss = self.loss(self.model, batch) / self.accumulation
        loss.backward()
        if last:
            if self.max_norm is not None:
                clip = getattr(self.optimizer, "clip_grad_norm_", None)
                clip = clip or (lambda norm: torch.nn.utils.clip_grad_norm_(self.parameters, norm))
                self.grad_norm = clip(self.max_norm)
            self.optimizer.step()
        return loss.detach() * self.accumulation

    def _forget_gradients(self):
        for p in self.parameters:
            p.grad = None

    def _fits(self, batch) -> bool:
        """Whether a batch is like the one that is captured."""
        if batch.keys() != self.static.keys():
            return False
        pairs = [(t, self.static[name]) for name, t in batch.items()]
        return all(
            t.shape == s.shape and t.dtype == s.dtype if isinstance(s, torch.Tensor) else t == s for t, s in pairs
        )

    def _fill(self, batch):
        for name, t in batch.items():
            if isinstance(t, torch.Tensor):
                self.static[name].copy_(t, non_blocking=True)

    def _warm_up(self, batch, first, last):
        """Steps that count, on the stream on which the graph is made later; the last finds what waits for the GPU."""
        self._fill(batch)
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            result = self._run(self.static, first, last)
        torch.cuda.current_stream().wait_stream(self.stream)
        if self.calls == self.warmup * self.accumulation:
            self._fall_back(self._what_waits())
        return result

    def _what_waits(self):
        """The reason why the passes of this model cannot be captured, found without a capture, which leaves torch's
        allocator and generator in it where it fails. Code that asks whether there is one, as transformers' masks do,
        is told that there is."""
        state = torch.cuda.get_rng_state()
        capturing = mock.patch("torch.cuda.is_current_stream_capturing", return_value=True)
        with capturing, warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                torch.autograd.grad(self.loss(self.model, self.static), self.parameters, allow_unused=True)
            finally:
                torch.cuda.set_sync_debug_mode("default")
                torch.cuda.set_rng_state(state)
        for warning in found:  # this library's losses count labels, but not in a capture
            if "synchronizing CUDA operation" in str(warning.message) and _HERE not in Path(warning.filename).parents:
                return f"the host reads what the GPU computes, at {warning.filename}:{warning.lineno}"
        return None

    def _replay(self, batch, first, last):
        which = f"{'first' if first else 'more'}{'+step' if last else ''}"
        if which not in self.graphs:
            self.graphs[which] = self._capture(first, last)
        graph, loss = self.graphs[which]
        self._fill(batch)
        graph.replay()
        if first and not last:
            for p, gradient in zip(self.parameters, self.gradients):
                p.grad = gradient
        return loss.clone()

    def _capture(self, first, last):
        graph = torch.cuda.CUDAGraph()
        if first:
            self._forget_gradients()
        with torch.cuda.graph(graph, pool=self.pool, stream=self.stream):
            loss = self._run(self.static, first, last)
        self.pool = graph.pool()
        if first and not last:
            self.gradients = [p.grad for p in self.parameters]
        elif first:
            self._forget_gradients()  # their memory is the graph's
        return graph, loss


def capture_step(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    *,
    loss: Callable[[torch.nn.Module, Batch], torch.Tensor] | None = None,
    max_norm: float | None = None,
    scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
    accumulation: int = 1,
    warmup: int = 3,
) -> CapturedStep:
    """A training step whose forward, backward, clipping and update the GPU runs as one CUDA graph.

    ```python
    step = capture_step(model, optimizer, batch, max_norm=1.0, scheduler=scheduler)
    for batch in batches:
        loss = step(batch)  # on the device: reading it waits for the step
    ```

    The host launches one graph per step instead of thousands of kernels. That pays where the GPU waits for the host:
    small models, short sequences, few of them. The steps are those of the same loop without a graph, with a capturable
    optimizer, to the bit: the first `warmup` run without it, the next is captured. Batches of another shape run
    without it too.

    Args:
        batch: an example; the graph is for tensors of its shapes and dtypes.
        loss: what is differentiated, of the model and a batch; by default `model(**batch).loss`.
        max_norm: clips the gradients' norm. LigerAdamW then reads the scale on the device.
        scheduler: steps after each update. It writes to the learning rate on the device.
        accumulation: how many batches one update takes; their losses are averaged.

    The optimizer must be one that can be captured, such as LigerAdamW or torch's AdamW; it is set to
    `capturable`, with its learning rates as tensors on the device. Gradients are cleared by the step. A model that
    reads a number from the GPU, as experts chosen on the host do, cannot be captured, and neither can DDP and FSDP:
    steps then run as they are, `step.reason` says why, and the log says so once.
    """
    return CapturedStep(model, optimizer, batch, loss or _loss_of, max_norm, scheduler, accumulation, warmup)


def _reason_not_to(model, optimizer, parameters, batch):
    if not all(p.is_cuda for p in parameters):
        return "the parameters are not on a GPU"
    if (
        torch.distributed.is_available()
        and torch.distributed.is_initialized()
        and torch.distributed.get_world_size() > 1
    ):
        return "training is distributed"
    if not all("capturable" in group for group in optimizer.param_groups):
        return f"{type(optimizer).__name__} cannot be captured"
    if not all(t.is_cuda for t in batch.values() if isinstance(t, torch.Tensor)):
        return "the batch is not on the GPU"
    return None


def _make_capturable(optimizer, device):
    for group in optimizer.param_groups:
        group["capturable"] = True
        if not isinstance(group["lr"], torch.Tensor):
            group["lr"] = torch.tensor(float(group["lr"]), dtype=torch.float32, device=device)
    for state in optimizer.state.values():
        if isinstance(state.get("step"), torch.Tensor):
            state["step"] = state["step"].to(device=device, dtype=torch.float32)
