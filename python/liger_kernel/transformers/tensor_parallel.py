"""The loss of a head whose classes tensor parallelism has spread over ranks: no rank sees the logits of another's
classes."""

import torch
from torch import nn

from liger_kernel.operators.coverage import HEAD_KERNELS, has_replaced_forward, kernels_cover, result_changed_by
from liger_kernel.operators.head import vocab_parallel_linear_log_prob
from liger_kernel.transformers.model.loss_utils import shift

if torch.distributed.is_available():
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor, Replicate, Shard
else:
    FSDPModule = DTensor = ()

# Whose code around a head shards its input and gathers its logits: torch's parallelize_module, and transformers'
# tp_plan.
_STYLES = ("torch.distributed.tensor.", "transformers.distributed.", "transformers.integrations.tensor_parallel")


def is_vocab_parallel(head) -> bool:
    """Whether `head` is a Linear of which each rank of one dimension of a mesh holds its classes, in order."""
    if not isinstance(head, nn.Linear) or isinstance(head, FSDPModule) or not isinstance(head.weight, DTensor):
        return False
    if not has_replaced_forward(head) and not head._forward_hooks:
        return False  # a weight that FSDP2 gathers
    weight = head.weight
    classes, ranks = weight.shape[0], weight.device_mesh.size()
    return (
        weight.device_mesh.ndim == 1
        and weight.placements == (Shard(0),)
        and kernels_cover(weight.to_local(), HEAD_KERNELS)
        and -(-classes // ranks) * (ranks - 1) < classes  # every rank has some
        and result_changed_by(head, but=_STYLES) is None
    )


def vocab_parallel_loss(
    head,
    hidden,
    labels,
    shift_labels=None,
    num_items_in_batch=None,
    ignore_index=-100,
    final_logit_softcapping=None,
    logit_scale=1.0,
    valid_count=None,
):
    """Cross entropy under a head for which is_vocab_parallel: the mean, or the sum over `num_items_in_batch` if given.

    Args:
        head: the Linear, whose hooks before its forward bring `hidden` into the layout that the head takes.
        hidden: [..., width], as a call of the head takes it.
        labels, shift_labels, num_items_in_batch, ignore_index: as in LigerForCausalLMLoss; the same on all ranks.
        final_logit_softcapping, logit_scale: logits are `cap * tanh(scale * logits / cap)`.
        valid_count: accepted for the other heads' sake.
    """
    labels = (shift(labels, ignore_index) if shift_labels is None else shift_labels).to(hidden.device)
    arguments = (hidden,)
    for hook in head._forward_pre_hooks.values():
        changed = hook(head, arguments)
        arguments = arguments if changed is None else changed if isinstance(changed, tuple) else (changed,)
    (hidden,) = arguments
    mesh = head.weight.device_mesh
    if isinstance(hidden, DTensor):
        hidden = hidden.redistribute(mesh, [Replicate()]).to_local()
    first = mesh.get_local_rank() * -(-head.weight.shape[0] // mesh.size())
    bias = None if head.bias is None else head.bias.to_local()
    logp = vocab_parallel_linear_log_prob(
        hidden, head.weight.to_local(), labels, mesh.get_group(), first, bias,
        ignore_index=ignore_index, softcap=final_logit_softcapping, logit_scale=logit_scale,
    )  # fmt: skip
    divisor = (labels != ignore_index).sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
    return -logp.sum() / divisor
