"""Log-probabilities of given tokens under given logits, as policy losses need them."""

import torch

from liger_kernel._library import ops
from liger_kernel.ops.divergence import IGNORE_INDEX


@torch.no_grad()
def fused_selective_log_softmax(logits, input_ids, temperature=0.9, mask=None):
    """ln softmax(logits / temperature) at the last L of input_ids, as float [B, L], for contiguous logits [B, L + 1, V].

    A position's token is predicted by the logits at its place, the last place's logits predict nothing. 0 where mask [B, >= L] is 0,
    whose logits are not read. Without gradients; raises AssertionError where the logits are not contiguous.
    """
    assert logits.is_contiguous(), "logits must be contiguous"
    length = logits.shape[1] - 1
    ids = input_ids[:, input_ids.shape[1] - length:]
    if mask is not None:
        ids = ids.masked_fill(mask[:, mask.shape[1] - length:] == 0, IGNORE_INDEX)
    ids = torch.nn.functional.pad(ids, (0, 1), value=IGNORE_INDEX)
    return ops.selective_log_softmax(logits, ids, float(temperature), IGNORE_INDEX)[0][:, :-1].contiguous()
