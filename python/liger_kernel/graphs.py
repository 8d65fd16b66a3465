"""A training step, or the passes of a model, as CUDA graphs: for steps in which the GPU waits for the host."""

import functools
import inspect
import logging
import types
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from liger_kernel.utils import is_dtensor, world_size

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
        self.modules = [*model.modules()]
        self.replayed: int | None = None
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
        if self.reason is not None or not self._fits(batch) or self.graphs and self.replayed != _replayed(self.modules):
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
        # Also of steps before the capture, which run on its stream.
        of_stream = self.reason is None and torch.cuda.current_stream() == self.stream
        with _new_leaves(self.model, self.parameters) if of_stream else nullcontext():
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
            if self.calls == self.warmup * self.accumulation:  # on this stream, whose cached memory the passes reuse
                passes = lambda: self.loss(self.model, self.static).backward()
                self._fall_back(_what_waits(passes, self.model, self.parameters))
        torch.cuda.current_stream().wait_stream(self.stream)
        return result

    def _replay(self, batch, first, last):
        which = f"{'first' if first else 'more'}{'+step' if last else ''}"
        if which not in self.graphs:
            self.replayed = _replayed(self.modules)
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


@contextmanager
def _new_leaves(model, parameters, keep=True):
    """Puts new parameters in place of a model's, which have the same memory and gradients. Autograd remembers of the
    old ones on which stream their gradients are accumulated, which a capture may not wait for. Where they do not keep
    their gradients, each is freed as soon as it is there."""
    new = {id(p): torch.nn.Parameter(p.detach()) for p in parameters}
    for p in parameters:
        if keep:
            new[id(p)].grad = p.grad
        else:
            new[id(p)].register_post_accumulate_grad_hook(_drop)
    held = [(module._parameters, name, p) for module in model.modules() for name, p in module._parameters.items()]
    held = [(owner, name, p) for owner, name, p in held if id(p) in new]
    for owner, name, p in held:
        owner[name] = new[id(p)]
    try:
        yield list(new.values())
    finally:
        for owner, name, p in held:
            owner[name] = p
        if keep:
            for p in parameters:
                p.grad = new[id(p)].grad


def _drop(parameter):
    parameter.grad = None


class _Passes:
    """The forward and the backward of a model for inputs of one kind, each a graph. Both work in the same memory."""

    def __init__(self, model, forward, parameters, inputs, structure):
        self.static = [t.clone() if isinstance(t, torch.Tensor) else t for t in inputs]
        self.parameters, self.graphs = parameters, [torch.cuda.CUDAGraph() for _ in range(2)]
        self.state = _state_of(parameters)
        self.last: Callable = lambda: None  # gives what the backward of the last forward is waiting for
        args, kwargs = tree_unflatten(self.static, structure)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        # Weights that autocast has cast and keeps would not be cast again by the graph.
        kind = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
        autocast = torch.autocast("cuda", kind[1], enabled=kind[0], cache_enabled=False)
        with _new_leaves(model, parameters) as leaves:
            with autocast, torch.cuda.graph(self.graphs[0], stream=stream):
                outputs, self.structure = tree_flatten(forward(*args, **kwargs))
            made = [t for t in outputs if isinstance(t, torch.Tensor) and t.requires_grad]
            self.upstream = [torch.empty_like(t) for t in made]
            with torch.cuda.graph(self.graphs[1], pool=self.graphs[0].pool(), stream=stream):
                self.gradients = torch.autograd.grad(made, leaves, self.upstream, allow_unused=True)
        self.differentiable = [isinstance(t, torch.Tensor) and t.requires_grad for t in outputs]
        self.outputs = [t.detach() if isinstance(t, torch.Tensor) else t for t in outputs]

    def run(self, leaves):
        for static, given in zip(self.static, leaves):
            if isinstance(static, torch.Tensor):
                static.copy_(given, non_blocking=True)
        token = _Token()
        self.last = weakref.ref(token)
        results = iter(_Replay.apply(self, token, *self.parameters))
        outputs = [next(results) if isinstance(t, torch.Tensor) else t for t in self.outputs]
        return tree_unflatten(outputs, self.structure)

    def is_free(self):
        """Whether no backward is to come that needs what the last forward left."""
        token = self.last()
        return token is None or token.done


class _Token:
    """Lives as long as a backward can come."""

    done = False


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx, passes, token, *parameters):
        ctx.passes, ctx.token = passes, token
        for p, gradient in zip(passes.parameters, passes.gradients):
            if gradient is not None and p.grad is not None and p.grad.data_ptr() == gradient.data_ptr():
                p.grad = p.grad.clone()  # of the backward before, to which the next is added
        passes.graphs[0].replay()
        results = [t.clone() for t in passes.outputs if isinstance(t, torch.Tensor)]
        differentiable = [d for d, t in zip(passes.differentiable, passes.outputs) if isinstance(t, torch.Tensor)]
        ctx.mark_non_differentiable(*(t for t, d in zip(results, differentiable) if not d))
        ctx.differentiable = differentiable
        return tuple(results)

    @staticmethod
    def backward(ctx, *upstream):
        passes = ctx.passes
        for static, given in zip(passes.upstream, (g for g, d in zip(upstream, ctx.differentiable) if d)):
            static.copy_(given)
        passes.graphs[1].replay()
        ctx.token.done = True
        # Autograd makes them p.grad without a copy.
        return None, None, *(None if g is None else g.detach() for g in passes.gradients)


def _replayed(modules: Iterable[torch.nn.Module]) -> int | None:
    """Where in memory the ids lie that routers among some modules replay (liger_kernel.routing), or None. A graph reads
    them there, so that it holds for these alone."""
    told = (replay for module in modules if (replay := vars(module).get("liger_replay")) is not None)
    return next((replay.ids.data_ptr() for replay in told if hasattr(replay, "ids")), None)


def _state_of(parameters):
    return [p.data_ptr() for p in parameters]


class CapturedModel:
    """What capture_model returns.

    Attributes:
        reason: why the model runs without graphs, once that is known.
        graphs: of each kind of inputs that is captured.
    """

    def __init__(self, model: torch.nn.Module, warmup: int, shapes: int):
        self.model, self.forward, self.warmup, self.shapes = model, model.forward, warmup, shapes
        self.before = vars(model).get("forward")
        self.modules = [*model.modules()]
        self.takes_cache = "use_cache" in inspect.signature(model.forward).parameters
        # Models of transformers whose parts make their masks without positions say where they need no mask of ones.
        forwards = (getattr(type(module), "forward", None) for module in model.modules())
        asked = (getattr(forward, "liger_takes_none", None) for forward in forwards)
        self.takes_none = next((ask(model) for ask in asked if ask), False)
        self.graphs: dict[object, _Passes] = {}
        self.seen: Counter = Counter()
        self.reason: str | None = None

        @functools.wraps(type(model).forward)
        def forward(model, *args, **kwargs):
            if model is not self.model:  # a copy, as trainers make of a reference
                return type(model).forward(model, *args, **kwargs)
            return self(*args, **kwargs)

        model.forward = types.MethodType(forward, model)

    def remove(self) -> None:
        """Have the model run without graphs."""
        del self.model.forward
        if self.before is not None:
            self.model.forward = self.before
        self.graphs.clear()

    def __call__(self, *args, **kwargs):
        if self.reason is not None or not self.model.training or not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        if torch.compiler.is_compiling():
            return self.forward(*args, **kwargs)
        if self.takes_cache:
            kwargs.setdefault("use_cache", False)  # a cache is none of a training step's results
        given, shorter = (args, kwargs), self._without_ones(args, kwargs)
        for inputs in (given,) if shorter is None else (shorter, given):
            leaves, structure = tree_flatten(inputs)
            passes = self._passes(leaves, structure, only_captured=inputs is not (shorter or given))
            if passes is not None and passes.is_free():
                return passes.run(leaves)
        args, kwargs = shorter or given
        return self.forward(*args, **kwargs)

    def _without_ones(self, args, kwargs):
        """The inputs without a padding mask that masks nothing, with which attention would compute all scores: a graph
        holds the mask that it was captured with. None where it masks something, or transformers would look for packed
        sequences without it. The host waits for the answer."""
        mask = kwargs.get("attention_mask")
        if not self.takes_none or kwargs.get("position_ids") is not None or len(args) > 1:
            return None
        if not isinstance(mask, torch.Tensor) or mask.dim() != 2 or torch.cuda.is_current_stream_capturing():
            return None
        return (args, {**kwargs, "attention_mask": None}) if bool((mask == 1).all()) else None

    def _passes(self, leaves, structure, only_captured=False):
        tensors = [t for t in leaves if isinstance(t, torch.Tensor)]
        if not all(t.is_cuda for t in tensors):
            return self._fall_back("the inputs are not on a GPU")
        if not tensors or any(t.requires_grad for t in tensors) or torch.cuda.is_current_stream_capturing():
            return None
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        describe = lambda t: (t.shape, t.dtype, t.device) if isinstance(t, torch.Tensor) else t
        autocast = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
        where = _replayed(self.modules)
        key = str(structure), tuple(map(describe, leaves)), autocast, tuple(map(id, parameters)), where
        try:
            passes = self.graphs.get(key)
        except TypeError:  # an argument that cannot be compared
            return None
        if passes is not None and passes.state == _state_of(parameters):
            return passes
        if only_captured:
            return None
        self.graphs.pop(key, None)  # its parameters lie elsewhere now
        self.seen[key] += 1
        if self.seen[key] <= self.warmup or len(self.graphs) >= self.shapes:
            return None
        args, kwargs = tree_unflatten(leaves, structure)
        passes = lambda: self._run_both(args, kwargs)
        if reason := _obstacle(self.model, parameters) or _what_waits(passes, self.model, parameters):
            return self._fall_back(reason)
        self.graphs[key] = _Passes(self.model, self.forward, parameters, leaves, structure)
        return self.graphs[key]

    def _fall_back(self, reason):
        self.reason = reason
        log.warning("capture_model: the model runs without CUDA graphs: %s", reason)

    def _run_both(self, args, kwargs):
        outputs = [t for t in tree_leaves(self.forward(*args, **kwargs)) if isinstance(t, torch.Tensor)]
        made = [t for t in outputs if t.requires_grad]
        torch.autograd.backward(made, [torch.ones_like(t) for t in made])


def capture_model(model: torch.nn.Module, *, warmup: int = 3, shapes: int = 1) -> CapturedModel:
    """Has a model's forward and backward run as CUDA graphs in training, under any loop and any optimizer.

    ```python
    captured = capture_model(model)  # of transformers, before Trainer, Accelerate or DDP wraps it
    ```

    `TrainingArguments(use_liger_kernel=True, liger_kernel_config={"cuda_graphs": True})` does the same. The losses and
    gradients are those of the model without graphs, to the bit. The first `warmup` calls with inputs of one kind run
    without; inputs of more than `shapes` kinds do too, each of which takes the memory of a step: pack sequences, or pad
    them to one length. Where a second forward comes before the first one's backward, it runs without a graph.

    Hooks of modules and other Python code within the model run when it is captured, not at each step. A model that
    reads a number from the GPU cannot be captured, and neither can FSDP, ZeRO-3 and gradient checkpointing: `reason`
    then says why, and the log says so once. `capture_step` also takes in the optimizer, and is faster.
    """
    return CapturedModel(model, warmup, shapes)


def _obstacle(model, parameters):
    """Why the passes of a model cannot be captured, as far as that can be seen without running it."""
    if not all(p.is_cuda for p in parameters):
        return "the parameters are not on a GPU"
    if any(map(is_dtensor, parameters)):
        return "the parameters are sharded"
    if any(getattr(module, "gradient_checkpointing", False) is True for module in model.modules()):
        return "layers are checkpointed, which reads the state of the random number generator on the host"
    return None


@contextmanager
def _as_in_a_capture():
    """Tells code that asks whether there is a capture, as transformers' masks do, that there is one."""
    asked = torch.cuda.is_current_stream_capturing
    torch.cuda.is_current_stream_capturing = lambda: True
    try:
        yield
    finally:
        torch.cuda.is_current_stream_capturing = asked


def _what_waits(passes: Callable[[], object], model, parameters) -> str | None:
    """The reason why passes of a model cannot be captured, found without a capture, which leaves torch's allocator and
    generator in it where it fails, and without room for gradients beside those that there are."""
    state = torch.cuda.get_rng_state()
    leaves = _new_leaves(model, parameters, keep=False)
    with leaves, _as_in_a_capture(), warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            passes()
        finally:
            torch.cuda.set_sync_debug_mode("default")
            torch.cuda.set_rng_state(state)
    for warning in found:  # this library's losses count labels, but not in a capture
        if "synchronizing CUDA operation" in str(warning.message) and _HERE not in Path(warning.filename).parents:
            return f"the host reads what the GPU computes, at {warning.filename}:{warning.lineno}"
    return None


def _reason_not_to(model, optimizer, parameters, batch):
    if reason := _obstacle(model, parameters):
        return reason
    if world_size() > 1:
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
