"""The functions that stand for those that mixers of hybrid models call: short convolutions and recurrences, within
packed documents.

MIXERS of families.py says which one stands for which function of a modeling module; mixers.py puts them where older
versions of transformers hold them. They take the keyword arguments that the model was given, find documents in them
(`starts_in`), and return NotImplemented for what the operators do not take: then the original runs.
"""

from typing import Any

from torch import Tensor

from liger_kernel.operators.causal_conv1d import ACTIVATIONS, liger_causal_conv1d
from liger_kernel.operators.coverage import CAUSAL_CONV1D_KERNELS, DELTA_RULE_KERNELS, DENSE, kernels_cover
from liger_kernel.operators.documents import document_starts
from liger_kernel.operators.gated_delta_rule import liger_gated_delta_rule

#: The keyword argument that says where documents begin: `starts` of liger_kernel.operators.documents.
STARTS = "liger_starts"


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


def _cover(kernels: tuple[str, ...], *tensors: Tensor | None) -> bool:
    """Whether there are these kernels for the first tensor, and tensors are as torch has them, of dtypes that kernels
    know."""
    given = [t for t in tensors if t is not None]
    return kernels_cover(given[0], kernels) and all(type(t) in DENSE and kernels_cover(t) for t in given)


def liger_causal_conv1d_fn(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **kwargs: Any
) -> Any:
    """transformers' causal_conv1d_fn; NotImplemented for what liger_causal_conv1d does not take."""
    if not _cover(CAUSAL_CONV1D_KERNELS, x, weight, bias) or activation not in ACTIVATIONS or weight.shape[-1] > 8:
        return NotImplemented
    starts = starts_in(kwargs, x.shape[0], x.shape[2])
    return starts if starts is NotImplemented else liger_causal_conv1d(x, weight, bias, activation, starts=starts)


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
    if not _cover(DELTA_RULE_KERNELS, query, key, value, g, beta, initial_state):
        return NotImplemented
    if query.is_cuda and query.shape[-1] > 256:
        return NotImplemented
    starts = starts_in(kwargs, query.shape[0], query.shape[1], continued=initial_state is not None)
    if starts is NotImplemented:
        return NotImplemented
    of_query = query.dtype
    if not of_query == key.dtype == value.dtype:
        query, key, value = query.float(), key.float(), value.float()
    g, eps = g.float(), 1e-6 if use_qk_l2norm_in_kernel else None
    state = None if initial_state is None else initial_state.float()
    whole = starts is None
    output, last = liger_gated_delta_rule(
        query, key, value, g, beta, state, starts=starts, eps=eps, final_state=output_final_state and whole
    )
    if output_final_state and not whole:
        # How many documents there are is known on the device alone. With beta 0 the earlier ones leave a state of 0.
        beta = beta.masked_fill((starts != starts[:, -1:])[..., None], 0)
        last = liger_gated_delta_rule(query, key, value, g, beta, eps=eps, final_state=True)[1]
    return output.to(of_query), last
