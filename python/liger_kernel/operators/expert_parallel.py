"""Experts that the ranks of a process group hold in turn (expert parallelism), by collectives of equal sizes.

The tokens of all ranks are gathered, each rank runs its own experts on them, and the results go back to the ranks that
hold the tokens, which sum them in float. Nothing is counted: sizes are known on the host before the router has run.
"""

import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from liger_kernel.operators import packed_tokens
from liger_kernel.operators.experts import fused_experts

Experts = Callable[[Tensor, Tensor, Tensor], Tensor]
#: Its name before torch 2.13 is the second; a torch may have none of them.
all_gather: Any = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor", None)


class _Transfer:
    """One tensor's way between the ranks of a group, started by one node of autograd's graph and finished by the next,
    so that what is between the two runs beside the collective.

    "gather": [n, ...] of each rank to [ranks · n, ...]. "scatter": the sums over the ranks of such rows, to the rank
    that has the tokens; each is the other's backward. "exchange": [ranks · n, ...], n rows to each rank.
    """

    def __init__(self, group: "dist.ProcessGroup | None") -> None:
        self.group, self.ranks = group, dist.get_world_size(group)
        self.work: dist.Work | None = None

    def start(self, way: str, t: Tensor) -> Tensor:
        t = t.contiguous()
        if way == "gather":
            received = t.new_empty(self.ranks * t.shape[0], *t.shape[1:])
            collective = all_gather
        else:
            received, collective = torch.empty_like(t), dist.all_to_all_single
        self.work = collective(received, t, group=self.group, async_op=True) if t.numel() else None
        return received

    def finish(self, way: str, t: Tensor) -> Tensor:
        if self.work is not None:
            self.work.wait()
            self.work = None
        # One rounding: torch sums 16-bit numbers in float, in an order that the shape alone decides.
        return t.view(self.ranks, -1, *t.shape[1:]).sum(0, dtype=t.dtype) if way == "scatter" else t


_BACK = {"gather": "scatter", "scatter": "gather", "exchange": "exchange"}


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: Tensor, transfer: _Transfer, way: str) -> Tensor:
        ctx.transfer, ctx.way = transfer, way
        return transfer.start(way, t)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, None, None]:
        return ctx.transfer.finish(_BACK[ctx.way], d), None, None


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: Tensor, transfer: _Transfer, way: str) -> Tensor:
        ctx.transfer, ctx.way = transfer, way
        found = transfer.finish(way, t)
        return found.view_as(found) if found is t else found  # autograd wants another tensor

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, None, None]:
        return ctx.transfer.start(_BACK[ctx.way], d), None, None


class _Moving:
    """A tensor that _Start has sent."""

    def __init__(self, t: Tensor, way: str, group: "dist.ProcessGroup | None") -> None:
        self.way, self.transfer = way, _Transfer(group)
        self.received = _Start.apply(t, self.transfer, way)

    def finish(self) -> Tensor:
        return _Finish.apply(self.received, self.transfer, self.way)


def _sizes(tokens: int, group: "dist.ProcessGroup | None", device: torch.device) -> list[int]:
    """The number of tokens of each rank, read on the host: from a CPU's collective where the group has one."""
    on = "cpu" if "cpu" in str(dist.get_backend_config(group)) else device
    found = torch.empty(dist.get_world_size(group), dtype=torch.long, device=on)
    all_gather(found, torch.tensor([tokens], device=on), group=group)
    return found.tolist()


def padded_rows(t: Tensor, rows: int, value: int) -> Tensor:
    """A matrix with so many rows, the missing ones of `value`; t itself where none is missing."""
    missing = rows - t.shape[0]
    return nn.functional.pad(t, (0, 0, 0, missing), value=value) if missing else t


class _Layout:
    """How many rows each rank sends, in which parts."""

    def __init__(self, x: Tensor, group: "dist.ProcessGroup | None", rows: int | str | None) -> None:
        self.tokens, self.group, self.ranks = x.shape[0], group, dist.get_world_size(group)
        if rows == "largest":
            rows = max(_sizes(self.tokens, group, x.device))
        elif rows is None:
            rows = self.tokens
            if x.is_cpu and len(set(sizes := _sizes(self.tokens, group, x.device))) > 1:
                raise ValueError(f"expert parallelism: the ranks have {sizes} tokens; rows='largest' pads them")
        elif int(rows) < self.tokens:
            raise ValueError(f"expert parallelism: {self.tokens} tokens, and rows={rows} at most")
        self.rows, self.parts = int(rows), 1

    def cut(self, parts: int) -> "_Layout":
        self.parts = max(1, min(parts, self.rows))
        return self

    def padded(self, t: Tensor, value: int) -> Tensor:
        """A tensor [tokens, ...] with the rows of the largest rank."""
        return padded_rows(t, self.rows, value)

    def gather(self, x: Tensor) -> list[_Moving]:
        return [_Moving(part, "gather", self.group) for part in self.padded(x, 0).tensor_split(self.parts)]

    def parts_of(self, gathered: Tensor) -> list[Tensor]:
        """The rows that belong to each part, of a tensor [ranks · rows, ...]."""
        of_ranks = gathered.view(self.ranks, self.rows, *gathered.shape[1:])
        return [part.flatten(0, 1) for part in of_ranks.tensor_split(self.parts, 1)]


class GatheredTokens:
    """The tokens of all ranks of a group, on their way: what runs until experts need them runs beside the collective.

    Args:
        x: [tokens, H], this rank's tokens.
        group: a process group; None is that of all ranks.
        parts: the parts of the tokens that follow each other: the collectives of one run beside the experts of another.
        rows: the number that every rank's tokens are padded to: a number of tokens, "largest" for that of the rank
            with most of them, which the hosts tell each other at every call, or None: all ranks have equally many.

    Raises ValueError for more tokens than `rows`, and on a CPU, where ranks compare their sizes, for sizes that differ
    without it. GPUs don't compare them: that would make the host wait for the device. There ranks of different sizes
    without `rows` are an error of the caller's, which TORCH_DISTRIBUTED_DEBUG=DETAIL finds.
    """

    def __init__(
        self, x: Tensor, group: "dist.ProcessGroup | None" = None, parts: int = 1,
        rows: int | Literal["largest"] | None = None,
    ) -> None:  # fmt: skip
        self._layout = _Layout(x, group, rows).cut(parts)
        self._moving = self._layout.gather(x)

    def _take(self) -> tuple[_Layout, list[_Moving]]:
        moving, self._moving = self._moving, []
        if not moving:
            raise RuntimeError("expert parallelism: gathered tokens are used once")
        return self._layout, moving


PAIRS_OF_TWO_PARTS = 4096  # of an expert: grouped GEMMs of fewer rows than half of this are slower


def default_parts(rows: int, k: int, local_experts: int) -> int:
    """Two parts where an expert gets enough pairs of each, if all are chosen equally often."""
    return 2 if rows * k >= PAIRS_OF_TWO_PARTS * local_experts else 1


def expert_parallel(
    x: Tensor | GatheredTokens, index: Tensor, weights: Tensor, experts: Experts, local_experts: int,
    group: "dist.ProcessGroup | None" = None, parts: int | None = None, rows: int | Literal["largest"] | None = None,
    sent: float | None = None,
) -> Tensor:  # fmt: skip
    """y[t] = Σ_k weights[t, k] · E_e(x[t]) for e = index[t, k], of which rank r of the group holds the experts
    [r · local_experts, (r + 1) · local_experts); [tokens, H] in the dtype of what `experts` returns.

    x [tokens, H], or GatheredTokens of it, whose group, parts and rows then count; index [tokens, k] integers, of which
    those that are no expert of the group add nothing; weights [tokens, k], floating. `experts(x, index, weights)` are
    those of this rank for rows of all ranks, with local ids: local_experts stands for the experts of other ranks and
    must add nothing. Each rank's sum is rounded to y's dtype, and these are summed in float in the order of the ranks.

    x, weights and what `experts` reads are differentiable. A rank's parameters get the gradient of all ranks' tokens:
    of a mean over ranks, divide it by their number. All ranks must run forward and backward alike, also one without
    tokens. The collectives have equal sizes on all ranks, and the host never waits for the device unless rows is
    "largest"; a CUDA graph can capture them. The same call gives the same bits. torch's compiler does not follow it: in
    a compiled model, call torch.compiler.disable(expert_parallel).

    Args:
        parts: see GatheredTokens; None: two where experts stay efficient on halves, else one.
        rows: see GatheredTokens, which also says what is raised.
        sent: the part of its tokens that a rank sends to each rank at most, each token once and in one part, in place
            of all: for many ranks, of which a token meets few. None is dropped: more are a RuntimeError on a CPU, and
            on CUDA a device assertion. Not with GatheredTokens: ValueError.
    """
    if isinstance(x, GatheredTokens):
        if sent is not None:
            raise ValueError("expert parallelism: sent is for tokens that have not been gathered")
        layout, moving = x._take()
    elif dist.get_world_size(group) == 1:
        return experts(x, index, weights)
    else:
        layout, moving = _Layout(x, group, rows), None
        # By the rows, of which all ranks have equally many, not by this rank's tokens.
        layout.cut(parts or default_parts(layout.rows, index.shape[1], local_experts))
    if sent is not None:
        return _expert_parallel_packed(x, index, weights, experts, local_experts, layout, sent)
    group = layout.group
    # Collectives of a group follow each other: the small ones, which the first part waits for, come first.
    ids = _Transfer(group)
    of_ids = ids.start("gather", layout.padded(index, local_experts * layout.ranks))  # which is no expert's id
    of_pairs = _Moving(layout.padded(weights, 0), "gather", group)
    moving = layout.gather(x) if moving is None else moving
    local, of_local = _local(ids.finish("gather", of_ids), of_pairs.finish(), local_experts, group)
    back = [
        _Moving(experts(part.finish(), i, w), "scatter", group)
        for part, i, w in zip(moving, layout.parts_of(local), layout.parts_of(of_local), strict=True)
    ]
    y = [part.finish() for part in back]
    whole = y[0] if len(y) == 1 else torch.cat(y)
    return whole if layout.rows == layout.tokens else whole[: layout.tokens]


def _local(
    ids: Tensor, weights: Tensor, local_experts: int, group: "dist.ProcessGroup | None"
) -> tuple[Tensor, Tensor]:
    """Ids of this rank's experts, or local_experts. A weight of an expert elsewhere is 0 and gets no gradient here,
    whatever the experts make of it."""
    local = ids - dist.get_rank(group) * local_experts
    elsewhere = (local < 0) | (local >= local_experts)
    return local.masked_fill(elsewhere, local_experts), weights.masked_fill(elsewhere, 0)


def _expert_parallel_packed(
    x: Tensor, index: Tensor, weights: Tensor, experts: Experts, local_experts: int, layout: _Layout, sent: float
) -> Tensor:
    """expert_parallel of tokens that go once to each rank that has some of their experts."""
    group, most = layout.group, min(layout.rows, math.ceil(sent * layout.rows))
    at = packed_tokens.places(index, local_experts, layout.ranks, most)
    ids = _Transfer(group)
    of_ids = ids.start("exchange", packed_tokens.pack(index, at, local_experts * layout.ranks))
    of_pairs = _Moving(packed_tokens.Pack.apply(weights, at), "exchange", group)
    tokens = _Moving(packed_tokens.Pack.apply(x, at), "exchange", group)
    local, of_local = _local(ids.finish("exchange", of_ids), of_pairs.finish(), local_experts, group)
    back = _Moving(experts(tokens.finish(), local, of_local), "exchange", group)
    return packed_tokens.Unpack.apply(back.finish(), at)


def expert_parallel_fused_experts(
    x: Tensor | GatheredTokens, gate_up: Tensor, down: Tensor, index: Tensor, weights: Tensor,
    group: "dist.ProcessGroup | None" = None, parts: int | None = None, rows: int | Literal["largest"] | None = None,
    sent: float | None = None, capacity: float | None = None, **options: Any,
) -> Tensor:  # fmt: skip
    """expert_parallel of fused_experts, whose tensors hold this rank's experts: gate_up [E_local, 2 I, H] and down
    [E_local, H, I]; `options` are those of fused_experts.

    capacity bounds the operator's buffers: a rank's experts get at most capacity times the pairs that they would get
    if all ranks' experts were chosen equally often (most_rows of fused_experts); more are an error. None: no bound.
    """
    ranks = dist.get_world_size(x._layout.group if isinstance(x, GatheredTokens) else group)
    share = share_of(capacity, ranks, sent)

    def experts(x, index, weights):
        most = None if share is None else math.ceil(share * index.numel())
        return fused_experts(x, gate_up, down, index, weights, most_rows=most, **options)

    return expert_parallel(x, index, weights, experts, gate_up.shape[0], group, parts, rows, sent)


def share_of(capacity: float | None, ranks: int, sent: float | None) -> float | None:
    """The part of the pairs that reach a rank's experts that is theirs, at most; None: no bound. Without `sent`, all
    ranks' pairs reach each of them."""
    return None if capacity is None else min(1.0, capacity / (ranks * (1.0 if sent is None else sent)))


@dataclass(frozen=True)
class MoEConfig:
    """What configure() is told of a model's mixtures of experts; max_tokens are those of a rank."""

    max_tokens: int
    hidden_size: int
    num_experts: int
    top_k: int
    num_hosts: int = 1
    gpus_per_host: int = 1
    group: "dist.ProcessGroup | None" = None
    max_inflight: int = 1


#: process group -> the tokens that its ranks' are padded to, where configure() was told
_max_tokens: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def configure(
    *, process_groups: Any = None, bootstrap_group: Any = None, device: Any = None, flsce: Any = None,
    moe: MoEConfig | None = None,
) -> bool:  # fmt: skip
    """Lets the ranks of moe.group have different numbers of tokens, up to moe.max_tokens, to which moe_fused then pads
    them; returns True. Nothing else needs a set-up here: the other arguments are accepted without effect.

    Raises ValueError for experts that the ranks of the group cannot share equally.
    """
    if moe is not None and dist.is_initialized():
        ranks = dist.get_world_size(moe.group)
        if moe.num_experts % ranks:
            raise ValueError(f"configure: {ranks} ranks cannot share {moe.num_experts} experts equally")
        _max_tokens[moe.group or dist.group.WORLD] = moe.max_tokens
    return True


def moe_fused(
    X: Tensor, expert_indices: Tensor, expert_weights: Tensor, all_B: Tensor, all_C: Tensor, all_A: Tensor,
    num_experts: int, top_k: int, pg: "dist.ProcessGroup | None" = None,
) -> Tensor:  # fmt: skip
    """expert_parallel_fused_experts of SwiGLU experts, with gate and up as two tensors; like X.

    X [..., H], expert_indices and expert_weights [..., top_k]; this rank's experts all_B (gate) and all_C (up)
    [E_local, I, H] and all_A (down) [E_local, H, I]; num_experts of all ranks of the group pg. None is the group of all
    ranks, or this process alone where torch.distributed is not initialised.

    Raises ValueError where E_local times the ranks is not num_experts, or top_k not the last size of expert_indices.
    """
    ranks = dist.get_world_size(pg) if dist.is_initialized() else 1
    if all_B.shape[0] * ranks != num_experts:
        raise ValueError(f"moe_fused: {ranks} ranks of {all_B.shape[0]} experts, and num_experts={num_experts}")
    if expert_indices.shape[-1] != top_k:
        raise ValueError(f"moe_fused: expert_indices are {list(expert_indices.shape)}, and top_k={top_k}")
    x, index, weights = (t.reshape(-1, t.shape[-1]) for t in (X, expert_indices, expert_weights))
    gate_up = torch.cat((all_B, all_C), 1)
    if ranks == 1:
        return fused_experts(x, gate_up, all_A, index, weights).view(X.shape)
    rows = _max_tokens.get(pg or dist.group.WORLD)
    return expert_parallel_fused_experts(x, gate_up, all_A, index, weights, pg, rows=rows).view(X.shape)


class LigerExpertParallelFusedMoEFunction:
    """moe_fused under the API's name."""

    apply = staticmethod(moe_fused)


class LigerExpertParallelFusedMoe(nn.Module):
    """moe_fused over a process group. It has no parameters."""

    def __init__(self, process_group: "dist.ProcessGroup | None" = None) -> None:
        super().__init__()
        self.process_group = process_group

    def forward(
        self, hidden_states: Tensor, expert_indices: Tensor, expert_weights: Tensor, all_B: Tensor, all_C: Tensor,
        all_A: Tensor, num_experts: int,
    ) -> Tensor:  # fmt: skip
        """As moe_fused."""
        weights = all_B, all_C, all_A
        k = expert_indices.shape[-1]
        return moe_fused(hidden_states, expert_indices, expert_weights, *weights, num_experts, k, self.process_group)
