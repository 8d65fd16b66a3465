"""Cross entropy of several heads on shifted labels: multi-token prediction (Gloeckle et al. 2024, arXiv:2404.19737) and
Medusa (Cai et al. 2024, arXiv:2401.10774)."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from liger_kernel.operators.common import IGNORE_INDEX
from liger_kernel.operators.head import linear_log_prob


def shifted_labels(
    labels: Tensor, shift: int, sequence_ids: Tensor | None = None, ignore_index: int = IGNORE_INDEX
) -> Tensor:
    """The label `shift` places later, for each place of labels [..., L]; ignore_index where there is none.

    sequence_ids [..., L] number the documents of packed rows: a label of another document is none.
    """
    if not 0 <= shift:
        raise ValueError(f"shift must not be negative, got {shift}")
    shift = min(shift, labels.shape[-1])
    moved = lambda t, fill: torch.nn.functional.pad(t[..., shift:], (0, shift), value=fill)
    later = moved(labels, ignore_index)
    if sequence_ids is None or shift == 0:
        return later
    return later.masked_fill(moved(sequence_ids + 1, 0) != sequence_ids + 1, ignore_index)


def linear_multi_head_cross_entropy(
    hidden: Tensor | Sequence[Tensor], weight: Tensor | Sequence[Tensor], labels: Tensor,
    shifts: Sequence[int] | None = None, head_weights: Sequence[float] | None = None,
    sequence_ids: Tensor | None = None, bias: Tensor | Sequence[Tensor] | None = None,
    ignore_index: int = IGNORE_INDEX, num_items: Tensor | float | None = None, **options: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(Σ_d w_d loss_d, loss_d [D]), float: loss_d is the mean of −ln p of head d at the labels shifts[d] places later,
    without the logits. Only the first is differentiable.

    hidden [D, ..., L, H] or D of [..., L, H]; weight [V, H] and bias [V], which all heads share, or D of them; labels
    [..., L], one per token of the input. shifts: 1, 2, ... by default. head_weights w: 1 by default. sequence_ids
    [..., L]: documents of packed rows, which do not predict one another. num_items: the divisor of each head's sum in
    place of the number of its labels. options: temperature, softcap, logit_scale, max_bytes, batch_invariant of
    linear_log_prob.

    A shared head is one call on the tokens of all heads: its gradient is made once. Raises ValueError where the numbers
    of hidden states, heads, shifts and weights differ.
    """
    count = len(hidden)
    shifts = range(1, count + 1) if shifts is None else shifts
    factors = [1.0] * count if head_weights is None else list(head_weights)
    shared = isinstance(weight, Tensor)
    sizes = {count, len(shifts), len(factors), count if shared else len(weight)}
    if len(sizes) > 1 or (bias is not None and isinstance(bias, Tensor) != shared):
        raise ValueError("hidden, weight, bias, shifts and head_weights must be of as many heads")
    targets = torch.stack([shifted_labels(labels, shift, sequence_ids, ignore_index) for shift in shifts])
    options["ignore_index"] = ignore_index
    if shared:
        states = hidden if isinstance(hidden, Tensor) else torch.stack(list(hidden))
        logp = linear_log_prob(states, weight, targets, bias, **options)
    else:
        biases = [None] * count if bias is None else bias
        each = zip(hidden, weight, targets, biases, strict=True)
        logp = torch.stack([linear_log_prob(*inputs, **options) for inputs in each])
    if num_items is None:
        num_items = (targets != ignore_index).flatten(1).sum(1)
    divisor = torch.as_tensor(num_items, dtype=torch.float32, device=logp.device).clamp(min=1)
    losses = -logp.flatten(1).sum(1) / divisor
    total = sum((factor * loss for factor, loss in zip(factors, losses)), losses.new_zeros(()))
    return total, losses.detach()
