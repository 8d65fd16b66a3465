"""The functions that stand for those that mixers of hybrid models call: short convolutions and recurrences, within
packed documents.

MIXERS of families.py says which one stands for which function of a modeling module; mixers.py puts them where older
versions of transformers hold them. They take the keyword arguments that the model was given, find documents in them
(`starts_in`), and return NotImplemented for what the operators do not take: then the original runs.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from liger_kernel.operators.causal_conv1d import ACTIVATIONS, liger_causal_conv1d
from liger_kernel.operators.coverage import (
    CAUSAL_CONV1D_KERNELS,
    CHANNEL_DELTA_RULE_KERNELS,
    DELTA_GATES_KERNELS,
    DELTA_RULE_KERNELS,
    DENSE,
    kernels_cover,
)
from liger_kernel.operators.documents import document_starts
from liger_kernel.operators.gated_delta_rule import liger_gated_delta_rule
from liger_kernel.operators.mamba2 import liger_mamba2_scan

#: The keyword argument that says where documents begin: `starts` of liger_kernel.operators.documents.
STARTS = "liger_starts"


_SCAN_KERNELS = (*DELTA_RULE_KERNELS, *DELTA_GATES_KERNELS)


def starts_in(given: dict[str, Any], batch: int, tokens: int, continued: bool = False) -> Any:
    """`starts` [batch, tokens] of a call's keyword arguments; None where they name no documents, NotImplemented where
    what they name is of other rows, or of rows that are `continued`: those of a cache come before."""
    starts, lengths = given.get(STARTS), given.get("cu_seqlens")
    lengths = given.get("cu_seq_lens_q") if lengths is None else lengths
    index = given.get("seq_idx")
    if starts is None:
        if lengths is not None and batch != 1:
            return NotImplemented
        if lengths is None and index is not None and index.dim() != 2:
            return NotImplemented
        starts = document_starts(tokens, lengths, index)
    if starts is None:
        return None
    if continued or starts.shape[0] not in (1, batch) or starts.shape[1] != tokens:
        # Positions are no request: without this part, nothing reads them.
        return None if lengths is None and index is None else NotImplemented
    return starts.expand(batch, tokens)


def cover(kernels: tuple[str, ...], *tensors: Tensor | None) -> bool:
    """Whether there are these kernels for the first tensor, and tensors are as torch has them, of dtypes that kernels
    know."""
    given = [t for t in tensors if t is not None]
    return kernels_cover(given[0], kernels) and all(type(t) in DENSE and kernels_cover(t) for t in given)


def shared_bytes(device: torch.device) -> int:
    """The shared memory that a block may have on a GPU."""
    return _shared_bytes(device)


@functools.cache
def _shared_bytes(device):
    return getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0)


vars(shared_bytes)["_dynamo_marked_constant"] = True  # as in coverage.py


def widest(dtype: torch.dtype, of_channels: bool, shared: int) -> int:
    """The most columns of a key for which the delta rule's kernels find room in so many bytes of shared memory, with
    gates of channels or of heads: those of an H100 (227 KB), an A100 (163 KB), or others (99 KB)."""
    if shared >= 227 << 10 or (shared >= 163 << 10 and (of_channels or dtype is torch.bfloat16)):
        return 256
    if shared >= 163 << 10:
        return 128
    return (128 if dtype is torch.float32 else 64) if of_channels else (64 if dtype is torch.float16 else 128)


def _finds_room(width: int, of_channels: bool, *tensors: Tensor) -> bool:
    """Whether the delta rule runs with keys of this width on the device of the tensors, which get one dtype."""
    first = tensors[0]
    dtype = first.dtype if all(t.dtype is first.dtype for t in tensors) else torch.float32
    return not first.is_cuda or width <= widest(dtype, of_channels, shared_bytes(first.device))


def _before_last(starts: Tensor) -> Tensor:
    """The tokens before a row's last document. How many documents there are is known on the device alone: the state
    after a row is that of a second run, in which these tokens leave a state of 0."""
    return starts != starts[:, -1:]


def _of_one_dtype(*tensors: Tensor) -> list[Tensor]:
    """Tensors as they are, or float where their dtypes differ."""
    same = all(t.dtype == tensors[0].dtype for t in tensors)
    return [t if same else t.float() for t in tensors]


def liger_causal_conv1d_fn(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **kwargs: Any
) -> Any:
    """transformers' causal_conv1d_fn; NotImplemented for what liger_causal_conv1d does not take."""
    if not cover(CAUSAL_CONV1D_KERNELS, x, weight, bias) or activation not in ACTIVATIONS or weight.shape[-1] > 8:
        return NotImplemented
    starts = starts_in(kwargs, x.shape[0], x.shape[2])
    return starts if starts is NotImplemented else liger_causal_conv1d(x, weight, bias, activation, starts=starts)


def _delta_rule(
    kernels: tuple[str, ...],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    output_final_state: bool,
    normed: bool,
    given: dict[str, Any],
) -> Any:
    """The operator for gates of either kind, of which there are these kernels."""
    if not cover(kernels, query, key, value, g, beta, initial_state):
        return NotImplemented
    if not _finds_room(query.shape[-1], g.dim() == 4, query, key, value):
        return NotImplemented
    starts = starts_in(given, query.shape[0], query.shape[1], continued=initial_state is not None)
    if starts is NotImplemented:
        return NotImplemented
    of_query = query.dtype
    query, key, value = _of_one_dtype(query, key, value)
    eps = 1e-6 if normed else None
    state = None if initial_state is None else initial_state.float()
    whole = starts is None
    output, last = liger_gated_delta_rule(
        query, key, value, g, beta, state, starts=starts, eps=eps, final_state=output_final_state and whole
    )
    if output_final_state and not whole:
        beta = beta.masked_fill(_before_last(starts)[..., None], 0)
        last = liger_gated_delta_rule(query, key, value, g, beta, eps=eps, final_state=True)[1]
    return output.to(of_query), last


def liger_chunk_gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: Any,
) -> Any:
    """transformers' torch_chunk_gated_delta_rule; NotImplemented for what liger_gated_delta_rule does not take.

    With documents the state is that after each row's last one.
    """
    state = initial_state, output_final_state
    return _delta_rule(DELTA_RULE_KERNELS, query, key, value, g.float(), beta, *state, use_qk_l2norm_in_kernel, kwargs)


def liger_chunk_kimi_delta_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: Any,
) -> Any:
    """transformers' chunk_kimi_delta_attention, whose gates are of channels: as liger_chunk_gated_delta_rule."""
    state = initial_state, output_final_state
    return _delta_rule(CHANNEL_DELTA_RULE_KERNELS, query, key, value, g, beta, *state, use_qk_l2norm_in_kernel, kwargs)


def liger_mamba2_chunk_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    **kwargs: Any,
) -> Any:
    """transformers' mamba2_chunk_scan, but with a result of hidden_states' dtype; NotImplemented for what
    liger_mamba2_scan does not take. States are those of liger_chunk_gated_delta_rule, transposed."""
    if not cover(_SCAN_KERNELS, hidden_states, dt, A, B, C, D, dt_bias, initial_states):
        return NotImplemented
    if not _finds_room(B.shape[-1], False, hidden_states, B, C):
        return NotImplemented
    starts = starts_in(kwargs, hidden_states.shape[0], hidden_states.shape[1], continued=initial_states is not None)
    if starts is NotImplemented:
        return NotImplemented
    x, B, C = _of_one_dtype(hidden_states, B, C)
    state, whole = None if initial_states is None else initial_states.float(), starts is None
    of_dt: dict[str, Any] = {"dt_bias": dt_bias, "dt_softplus": dt_softplus, "dt_limit": tuple(dt_limit)}
    wanted = return_final_states and whole
    y, last = liger_mamba2_scan(x, dt, A, B, C, D, **of_dt, state=state, starts=starts, final_state=wanted)
    if return_final_states and not whole:
        x = x.masked_fill(_before_last(starts)[..., None, None], 0)
        last = liger_mamba2_scan(x, dt, A, B, C, **of_dt, final_state=True)[1]
    y = y.to(hidden_states.dtype)
    return (y, last) if return_final_states else y


def liger_mamba2_split_conv1d_scan_combined(
    zxbcdt: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    dt_bias: Tensor,
    A: Tensor,
    D: Tensor,
    chunk_size: int,
    **kwargs: Any,
) -> Any:
    """transformers' mamba2_split_conv1d_scan_combined: None, by which a mixer calls the convolution, the scan, the norm
    and the projection one by one, with all that adapters and hooks add to them."""
    return None if cover(_SCAN_KERNELS, zxbcdt, dt_bias, A, D) else NotImplemented
