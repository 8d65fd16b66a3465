"""Heads of causal language models that return the loss instead of logits."""

import torch
from torch import nn

from liger_kernel.operators.coverage import HEAD_KERNELS, is_dense, result_changed_by
from liger_kernel.transformers.model import loss_utils
from liger_kernel.transformers.patching.families import CausalLM
from liger_kernel.transformers.patching.place import Edits, replace_class
from liger_kernel.transformers.tensor_parallel import is_vocab_parallel

if torch.distributed.is_available():
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor
else:
    FSDPModule = DTensor = ()

# Modules that hand their arguments to one inner module and its result back: FSDP1, checkpoint_wrapper, torch.compile.
_TRANSPARENT = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")


class LinearWithLoss(nn.Linear):
    """A Linear that returns (loss, token_accuracy, predicted_tokens) when it is called with `liger_loss`.

    Of its keywords `logit_scale` multiplies the logits; the others are those of LigerForCausalLMLoss.
    """

    plain_logits = True  # without `liger_loss`, nn.Linear's

    def forward(self, input, *, liger_loss=None):
        if liger_loss is None:
            return super().forward(input)
        arguments, bias = dict(liger_loss), self.bias
        if (scale := arguments.pop("logit_scale", 1.0)) != 1.0:
            input, bias = input * scale, None if bias is None else bias * scale
        arguments = {"bias": bias, "hidden_size": input.shape[-1], **arguments}
        result = loss_utils.LigerForCausalLMLoss(hidden_states=input, lm_head_weight=self.weight, **arguments)
        loss, _, token_accuracy, predicted_tokens = loss_utils.unpack_cross_entropy_result(result)
        return loss, token_accuracy, predicted_tokens


def head_linears(head, fsdp: bool = False) -> list[nn.Linear] | None:
    """The Linears that may end a call of `head`, or None if the loss cannot be computed inside them.

    Args:
        head: the language-model head.
        fsdp: whether FSDP2 is known to gather the head's weight before the head runs.
    """
    if is_vocab_parallel(head):
        return [head]
    if result_changed_by(head):
        return None
    if isinstance(head, nn.Linear):
        return [head] if _is_plain(head, fsdp) else None
    for name in _TRANSPARENT:
        if isinstance(inner := getattr(head, name, None), nn.Module):
            return head_linears(inner, fsdp)
    if type(head).__name__ == "ModulesToSaveWrapper":
        parts = [head_linears(part, fsdp) for part in (head.original_module, *head.modules_to_save.values())]
        return None if None in parts else [linear for part in parts for linear in part or ()]
    return None


def _is_plain(linear, fsdp):
    if type(linear).forward not in (nn.Linear.forward, LinearWithLoss.forward):
        return False
    weight = linear.weight
    if isinstance(weight, DTensor):
        # More than one sharded dimension of the mesh: one of them is tensor parallelism, which FSDP2 does not gather.
        gathered = fsdp or isinstance(linear, FSDPModule)
        return gathered and sum(placement.is_shard() for placement in weight.placements) == 1
    return is_dense(weight, HEAD_KERNELS)


def prepare_head(head, edits: Edits, fsdp: bool = False) -> bool:
    """Make the Linears at the bottom of `head` able to return the loss; False if that is not possible.

    A head of tensor parallelism stays as it is: its loss is computed outside it.
    """
    linears = head_linears(head, fsdp)
    for linear in linears or ():
        if not isinstance(linear, LinearWithLoss) and not is_vocab_parallel(linear):
            replace_class(linear, LinearWithLoss, edits)
    return linears is not None


def head_of(model, spec: CausalLM):
    """The head of a causal language model, which may be that of a model in it; None where there is none."""
    head = model
    for name in spec.head.split("."):
        head = getattr(head, name, None)
    return head


def describe(head) -> str:
    """What a head is, for messages."""
    weight, hook = getattr(head, "weight", None), isinstance(head, nn.Module) and result_changed_by(head)
    text = f"{type(head).__module__}.{type(head).__qualname__}"
    if weight is not None:
        text += f" with a weight of {type(weight).__name__}, {weight.dtype}"
    return text + (f", whose result {getattr(hook, '__qualname__', type(hook).__name__)} may change" if hook else "")
