"""Which module's rows differ first between two forward passes over the same tokens."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

_call = nn.Module.__call__


class Rows(NamedTuple):
    """What a module returned in a call: a number for each token, made of all bits of its row."""

    name: str
    kind: str
    hashes: Tensor


class Difference(NamedTuple):
    """The first module whose rows differ, its class, and which of the compared tokens differ."""

    name: str
    kind: str
    tokens: list[int]

    def __str__(self) -> str:
        return f"{self.name} ({self.kind}) differs in {len(self.tokens)} tokens, first in {self.tokens[0]}"


class Audit:
    """Keeps, of each forward pass of a model, a hash of every row that its modules return, in the order of the calls.
    A module that a fused operator computes is not called: what it is part of is named."""

    def __init__(self, model: nn.Module):
        self._model = model
        self._names = {module: name or "the model" for name, module in model.named_modules()}
        self.runs: list[list[Rows]] = []
        self._tokens: int | None = None

    def start(self) -> None:
        # No hook: operators that compute several modules in one do not run where one of these has hooks.
        audit, before = self, nn.Module.__call__
        self._before = before

        def call(module, *args, **kwargs):
            if (name := audit._names.get(module)) is None or torch.compiler.is_compiling():
                return before(module, *args, **kwargs)
            if module is audit._model:
                audit.runs.append([])
                audit._tokens = _tokens_in(args, kwargs)
            result = before(module, *args, **kwargs)
            if audit.runs and torch._C._current_graph_task_id() == -1:
                audit._keep(name, module, result)
            return result

        self._put = call
        nn.Module.__call__ = call  # type: ignore[method-assign, assignment]

    def stop(self) -> None:
        if nn.Module.__call__ is self._put:
            nn.Module.__call__ = self._before  # type: ignore[method-assign]

    def _keep(self, name: str, module: nn.Module, result: Any) -> None:
        for number, tensor in enumerate(_tensors(result)):
            if (
                self._tokens
                and tensor.numel()
                and tensor.numel() % self._tokens == 0
                and _has_rows(tensor, self._tokens)
            ):
                label = name if number == 0 else f"{name}, result {number}"
                self.runs[-1].append(Rows(label, type(module).__name__, _hashes(tensor.detach(), self._tokens)))

    def first_difference(self, tokens: Any, other_tokens: Any, runs: tuple[int, int] = (-2, -1)) -> Difference | None:
        """The first module whose rows are not the same in two runs, or None.

        Args:
            tokens, other_tokens: which tokens are compared, in the order of input_ids.flatten(), of one run and of the
                other: slices, lists or tensors of indices.
            runs: the runs' numbers, by default the last two.

        Raises ValueError where the runs have not called the same modules.
        """
        one, other = (self.runs[number] for number in runs)
        if [rows.name for rows in one] != [rows.name for rows in other]:
            raise ValueError("the two runs have not called the same modules in the same order")
        for a, b in zip(one, other):
            differs = a.hashes[tokens] != b.hashes[other_tokens]
            if differs.any():
                return Difference(a.name, a.kind, differs.nonzero().flatten().tolist())
        return None


def _tokens_in(args, kwargs):
    given = [kwargs.get("input_ids"), kwargs.get("inputs_embeds"), *args[:1]]
    found = next((t for t in given if isinstance(t, Tensor)), None)
    return None if found is None else found.shape[0] * (found.shape[1] if found.dim() > 1 else 1)


def _tensors(result):
    if isinstance(result, Tensor):
        return [result]
    if isinstance(result, dict):
        result = tuple(result.values())
    return [t for t in result if isinstance(t, Tensor)] if isinstance(result, (tuple, list)) else []


def _has_rows(tensor, tokens):
    """Whether the first dimensions of a tensor are those of the tokens."""
    size = 1
    for n in tensor.shape:
        size *= n
        if size == tokens:
            return True
    return False


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _hashes(tensor, tokens):
    """Sums of integers, modulo 2^64, which have no order."""
    rows = tensor.reshape(tokens, -1)
    bits = rows.contiguous().view(_INTEGERS[rows.element_size()]).to(torch.int64)
    places = torch.arange(1, bits.shape[1] + 1, device=bits.device)
    return ((bits + 0x5BD1E995) * (places * 0x9E3779B97F4A7C1 | 1)).sum(1)
