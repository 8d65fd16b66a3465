"""What has one router take given experts, or keeps those that it took, whichever forward it runs."""

import functools
import inspect
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint as checkpoints

from liger_kernel.operators.router import Replayable

_TOPK = (torch.topk, Tensor.topk)
_MASKED = (torch.masked_fill, Tensor.masked_fill)
_CHECKPOINT = inspect.unwrap(checkpoints.checkpoint).__code__


class Replay:
    """The ids that a router replays, [tokens, k]. `name` is the router's."""

    def __init__(self, name: str, ids: Tensor):
        self.name, self.ids = name, ids
        self.unbound = False  # whether a checkpoint runs the router again that does not bring the ids back

    def take(self, scores: Tensor) -> Tensor:
        """The ids of the tokens of scores [..., experts]: [..., k]. Raises ValueError for another number of tokens."""
        ids, tokens = self.ids, scores.numel() // scores.shape[-1]
        if ids.shape[0] != tokens:
            raise ValueError(f"{self.name} routes {tokens} tokens, and the ids to replay are those of {ids.shape[0]}")
        if not torch.compiler.is_compiling():
            self.unbound |= _is_checkpointed()
        return ids.to(scores.device).view(*scores.shape[:-1], ids.shape[1])


class Left:
    """In place of a Replay whose context was left, where a checkpoint may run the router again without its ids: raises
    RuntimeError there. The router's next forward pass outside of backward takes it away."""

    def __init__(self, router: nn.Module, name: str):
        self.router, self.name = router, name

    def take(self, scores: Tensor) -> None:
        if torch.compiler.is_compiling():
            return
        if torch._C._current_graph_task_id() != -1:
            raise RuntimeError(
                f"{self.name} runs again in backward, and the ids that it replayed are gone: the layer is checkpointed "
                "by a function that liger_kernel.routing does not know. Call backward inside of replay(...)."
            )
        put(self.router, "liger_replay", None)


class Record:
    """The ids that a router chose in its last forward pass, [tokens, k], as int16 where those are enough."""

    def __init__(self, name: str):
        self.name = name
        self.ids: Tensor | None = None

    def keep(self, index: Tensor, experts: int) -> None:
        self.ids = index.detach().flatten(0, -2).to(torch.int16 if experts <= 1 << 15 else torch.int32)


class Within:
    """A function that a checkpoint runs, perhaps again in backward: each time with the routers as they were told at
    first."""

    def __init__(self, function: Callable, told: list[tuple[nn.Module, Any]]):
        self.function, self.told = function, told

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        before = [put(router, "liger_replay", replay) for router, replay in self.told]
        try:
            return self.function(*args, **kwargs)
        finally:
            for (router, _), replay in zip(self.told, before):
                put(router, "liger_replay", replay)


def _is_checkpointed() -> bool:
    """Whether the innermost checkpoint that runs the caller, if any, is none that runs Within."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is Within.__call__.__code__:
            return False
        if frame.f_code is _CHECKPOINT:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def put(router: nn.Module, name: str, value: Any) -> Any:
    """Sets a router's liger_replay or liger_record, None: to nothing. A router of another package gets a forward that
    looks there. Returns what it was."""
    own = vars(router)
    before = own.pop(name, None)
    if value is not None:
        own[name] = value
    if not isinstance(router, Replayable):
        told, ours = _is_told(router), hasattr(own.get("forward"), "liger_looks")
        if told and not ours:
            if "forward" in own:  # accelerate's, say
                own["liger_forward"] = own["forward"]
            # Nothing is compiled where nobody has imported it.
            looking = _looking(type(router), "torch._dynamo" in sys.modules)  # type: ignore[arg-type]
            own["forward"] = types.MethodType(looking, router)
        elif ours and not told:
            del own["forward"]
            if "liger_forward" in own:
                own["forward"] = own.pop("liger_forward")
    return before


def _is_told(router: nn.Module) -> bool:
    return any(getattr(router, name, None) is not None for name in ("liger_replay", "liger_record"))


@functools.cache
def _looking(cls: Any, compiling: bool) -> Callable:
    """What routers of another package's class run. It is one function, so that code which was compiled around it stays
    valid. A compiler breaks its graph here, because it cannot trace a mode."""

    @functools.wraps(cls.forward)
    def forward(router, *args, **kwargs):
        own = vars(router).get("liger_forward") or functools.partial(cls.forward, router)
        return told(router, own, *args, **kwargs)

    vars(forward)["liger_looks"] = True
    return sys.modules["torch._dynamo"].disable(forward) if compiling else forward


def told(router: nn.Module, forward: Callable, *args: Any, **kwargs: Any) -> Any:
    """forward(*args, **kwargs), the one of another package, of a router: with the choice that it is told, if any."""
    if not _is_told(router):
        return forward(*args, **kwargs)
    with Choice(router) as choice:
        result = forward(*args, **kwargs)
    if not choice.made:
        raise RuntimeError(
            f"{choice.name} ({type(router).__name__}) has not chosen {choice.k} of {choice.experts} experts by "
            "torch.topk: its choice can be neither replayed nor recorded"
        )
    return result


def as_told(original: Callable) -> Callable:
    """The forward of a class of routers, which looks whether it is told what to choose."""

    @functools.wraps(original)
    def call(self, *args, **kwargs):
        return told(self, original, self, *args, **kwargs)

    return call


def size(router: nn.Module, *names: str) -> int | None:
    """The first number among some attributes of a router, of its experts, or of its configuration."""
    for of in (router, getattr(router, "experts", None), getattr(router, "config", None)):
        for name in names:
            if isinstance(value := getattr(of, name, None), int):
                return value
    return None


def top_k(router: nn.Module) -> int | None:
    """How many experts a router chooses for a token."""
    return size(router, "top_k", "num_experts_per_tok", "top_k_experts", "moe_top_k")


def experts(router: nn.Module) -> int | None:
    """Among how many experts a router chooses, with those that compute nothing."""
    return size(router, "num_router_classes", "n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")


class Choice(TorchFunctionMode):
    """Answers the top k over experts in a router's forward by the ids that it is told, and the values there.

    Weights are then made from the scores of these experts, whether the forward gathers them, takes the values, or
    normalises before or after. The groups that a router picks first are no top k over all experts, and scores that it
    has masked outside of these groups are gathered from those before.
    """

    def __init__(self, router: nn.Module):
        super().__init__()
        own = vars(router)
        self.replay, self.record = own.get("liger_replay"), own.get("liger_record")
        self.name = (self.replay or self.record).name
        self.k, self.experts = top_k(router), experts(router)
        self.masked: tuple[Any, Any] = (None, None)  # a result and what it was made of
        self.made = False

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func in _MASKED:
            self.masked = result, args[0]
        elif func in _TOPK and self._is_choice(*args, **(kwargs or {})):
            return self._made(args[0] if args else kwargs["input"], result)
        return result

    def _is_choice(self, input, k, dim=-1, *args, **kwargs):
        return k == self.k and dim in (-1, input.dim() - 1) and input.shape[-1] == self.experts

    def _made(self, scores, live):
        self.made = True
        values, index = live
        given = None if self.replay is None else self.replay.take(scores)
        if given is not None:
            given = given.long()
            index = torch.where(valid(given, scores.shape[-1]), given, index)
            scores = self.masked[1] if scores is self.masked[0] else scores
            values = scores.gather(-1, index)
        if self.record is not None:
            self.record.keep(index, scores.shape[-1])
        return torch.return_types.topk((values, index))


def valid(ids: Tensor, experts: int) -> Tensor:
    """Which rows of ids [..., k] are different experts: [..., 1]."""
    ordered = ids.sort(-1).values
    inside = (ordered[..., :1] >= 0) & (ordered[..., -1:] < experts)
    return inside & (ordered[..., 1:] != ordered[..., :-1]).all(-1, keepdim=True)
