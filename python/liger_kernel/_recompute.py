"""Results that backward recomputes instead of keeping; liger_kernel.memory.recompute."""

import threading
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

_MODIFIED = (
    "a tensor that backward needs was modified in place after it was saved: it is at version {}, and {} was expected"
)


class _Kept:
    """A tensor as it was when it was saved."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor):
        self.tensor, self.version = tensor, tensor._version

    def take(self) -> Tensor:
        if self.tensor._version != self.version:  # hooks switch off autograd's own check
            raise RuntimeError(_MODIFIED.format(self.tensor._version, self.version))
        return self.tensor


class _Recipe:
    """How the results of an operator are made from its arguments. They are made once in each backward pass, for all who
    read them, and forgotten when the last has."""

    __slots__ = ("op", "arguments", "readers", "left", "made")

    def __init__(self, op, arguments):
        self.op, self.arguments = op, arguments
        self.readers = self.left = 0
        self.made: tuple[Tensor, ...] | None = None

    def take(self, index: int) -> Tensor:
        if self.made is None:
            given = [a.take() if isinstance(a, (_Kept, _Result)) else a for a in self.arguments]
            with torch.no_grad():
                results = self.op(*given)
            self.made, self.left = results if isinstance(results, tuple) else (results,), self.readers
        made, self.left = self.made[index], self.left - 1
        if self.left <= 0:
            self.made = None
        return made


class _Result:
    """One reader of a result of a recipe."""

    __slots__ = ("recipe", "index")

    def __init__(self, recipe: _Recipe, index: int):
        self.recipe, self.index = recipe, index
        recipe.readers += 1

    def take(self) -> Tensor:
        return self.recipe.take(self.index)


class _Entry:
    """What is known of a storage. Its weak reference keeps another from getting the same address."""

    __slots__ = ("storage", "version", "numel", "offset", "recipe", "index")

    def __init__(self, result: Tensor, recipe: _Recipe, index: int):
        self.storage = StorageWeakRef(result.untyped_storage())
        self.version, self.numel, self.offset = result._version, result.numel(), result.storage_offset()
        self.recipe, self.index = recipe, index


class Recording:
    """Where operators note how they made a result while a model runs forward, and hooks look for it when autograd
    saves one."""

    def __init__(self):
        self.entries: dict[int, _Entry] = {}
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, lambda saved: saved())

    def find(self, t: Tensor) -> _Result | None:
        """The result of a recipe that t is, or a view of all of it."""
        entry = self.entries.get(t.untyped_storage()._cdata)
        if entry is None or t._version != entry.version or t.numel() != entry.numel:
            return None
        same = t.storage_offset() == entry.offset and t.is_contiguous()
        return _Result(entry.recipe, entry.index) if same else None

    def pack(self, t: Tensor) -> Any:
        if not _is_plain(t):
            return lambda: t
        if (result := self.find(t)) is None:
            return _Kept(t).take
        shape = t.shape
        return lambda: result.take().view(shape)

    def note(self, op, arguments, results, needs_recipes):
        every = results if isinstance(results, tuple) else (results,)
        tensors = [t for t in (*arguments, *every) if isinstance(t, Tensor)]
        if not all(t.requires_grad and t.is_contiguous() for t in every) or not all(map(_is_plain, tensors)):
            return
        if needs_recipes and not all(
            t.untyped_storage()._cdata in self.entries for t in arguments if isinstance(t, Tensor) and t.requires_grad
        ):
            return
        given = [self.find(a) or _Kept(a) if isinstance(a, Tensor) else a for a in arguments]
        recipe = _Recipe(op, given)
        for index, result in enumerate(every):
            self.entries[result.untyped_storage()._cdata] = _Entry(result, recipe, index)

    def __enter__(self):
        self.hooks.__enter__()

    def __exit__(self, *exception):
        self.hooks.__exit__(*exception)
        self.entries.clear()


def _is_plain(t: Tensor) -> bool:
    return type(t) in (Tensor, torch.nn.Parameter) and not t.is_meta


_local = threading.local()
_recordings = 0  # of all threads: what every call of an operator looks at
_counting = threading.Lock()  # without a global interpreter lock, an increment can be lost


def run(op, *arguments, needs_recipes: bool = False):
    """op(*arguments). While a model records, backward recomputes the results instead of keeping them. needs_recipes:
    the operator keeps none of its arguments, which is worth it only where they are recomputed too."""
    if not _recordings or torch.compiler.is_compiling():
        return op(*arguments)
    results = op(*arguments)
    if (recording := getattr(_local, "recording", None)) is not None:
        recording.note(op, arguments, results, needs_recipes)
    return results


def note(op, arguments: tuple[Any, ...], result: Tensor) -> None:
    """While a model records, backward recomputes a result as op(*arguments)."""
    if _recordings and (recording := getattr(_local, "recording", None)) is not None:
        recording.note(op, arguments, result, False)


def start() -> bool:
    """Begins to record; False where that has begun already, where nothing is recorded for backward, and where hooks for
    saved tensors are forbidden."""
    if getattr(_local, "recording", None) is not None or not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    if not torch._C._autograd._saved_tensors_hooks_is_enabled():
        return False
    recording = Recording()
    recording.__enter__()
    _local.recording = recording
    _count(1)
    return True


def stop() -> None:
    """Ends what start began."""
    recording, _local.recording = _local.recording, None
    _count(-1)
    recording.__exit__(None, None, None)


def _count(change: int) -> None:
    global _recordings
    with _counting:
        _recordings += change


class Recomputed:
    """What liger_kernel.memory.recompute returns; `remove()` takes it back."""

    def __init__(self, model: torch.nn.Module):
        self._handles = [
            model.register_forward_pre_hook(self._begin),
            model.register_forward_hook(self._end, always_call=True),
        ]

    def _begin(self, *_):
        _calls().append((self, start()))

    def _end(self, *_):
        calls = _calls()
        if calls and calls[-1][0] is self and calls.pop()[1]:  # not where another hook has raised before _begin
            stop()

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


def _calls() -> list[tuple[Recomputed, bool]]:
    """The calls of models that this thread is in, and whether each began to record. Replicas of a model share hooks."""
    if not hasattr(_local, "calls"):
        _local.calls = []
    return _local.calls
