"""Tokens that a rank sends once to each rank that has some of their experts, in buffers of fixed sizes."""

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Places(NamedTuple):
    """Where the rows of tokens are in a buffer with equally many rows for each rank.

    of_tokens [tokens, ranks]: the row of a token for each rank, −1 for a rank that has none of its experts;
    of_rows [rows]: the token of each row, −1 for a row without one.
    """

    of_tokens: Tensor
    of_rows: Tensor


def places(index: Tensor, local_experts: int, ranks: int, most: int) -> Places:
    """The places of tokens, whose experts are index [tokens, k], for ranks that hold local_experts each: in the order
    of the tokens, with room for `most` tokens for each rank. More are a RuntimeError on a CPU, and on CUDA a device
    assertion."""
    tokens = index.shape[0]
    known = (index >= 0) & (index < ranks * local_experts)
    owner = torch.where(known, index.long().div(local_experts, rounding_mode="floor"), ranks)
    meets = torch.zeros(tokens, ranks + 1, dtype=torch.bool, device=index.device).scatter_(1, owner, True)[:, :ranks]
    number = meets.long().cumsum(0) - 1
    fits = number < most
    torch._assert_async((fits | ~meets).all(), "expert parallelism: more tokens than `sent` has room for")
    row = torch.where(meets & fits, number + most * torch.arange(ranks, device=index.device), -1)
    # One row more takes what has no place.
    of_rows = torch.full((ranks * most + 1,), -1, dtype=torch.long, device=index.device)
    token = torch.arange(tokens, device=index.device)[:, None].expand(tokens, ranks)
    of_rows.scatter_(0, torch.where(row < 0, ranks * most, row).flatten(), token.flatten())
    return Places(row, of_rows[:-1])


def pack(t: Tensor, at: Places, value: float = 0) -> Tensor:
    """The rows of a buffer from those of tokens [tokens, ...]; `value` in rows without a token."""
    if t.shape[0] == 0:
        return t.new_full((at.of_rows.shape[0], *t.shape[1:]), value)
    return t.index_select(0, at.of_rows.clamp(min=0)).masked_fill_((at.of_rows < 0)[:, None], value)


def unpack(rows: Tensor, at: Places) -> Tensor:
    """The sum of each token's rows, in float and in the order of the ranks, rounded once."""
    total = rows.new_zeros(at.of_tokens.shape[0], *rows.shape[1:], dtype=torch.promote_types(rows.dtype, torch.float32))
    if rows.shape[0] > 0:
        for of_rank in at.of_tokens.unbind(1):
            total += rows.index_select(0, of_rank.clamp(min=0)).masked_fill_((of_rank < 0)[:, None], 0)
    return total.to(rows.dtype)


class Pack(torch.autograd.Function):
    """pack, whose step back is unpack: no sum depends on the order of threads."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, at: Places) -> Tensor:
        ctx.at = at
        return pack(t, at)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, None]:
        return unpack(d, ctx.at), None


class Unpack(torch.autograd.Function):
    """unpack, whose step back is pack."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, at: Places) -> Tensor:
        ctx.at = at
        return unpack(rows, at)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, None]:
        return pack(d, ctx.at), None
