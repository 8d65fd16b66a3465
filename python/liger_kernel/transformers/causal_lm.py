"""The fused-loss forward of causal language models.

The loss is computed inside `lm_head.__call__`: the forward calls the base model, then the head with one private
keyword, and the nn.Linear at its bottom returns the loss instead of logits. So everything that wraps or hooks the head
(FSDP, ZeRO-3, offloading, PEFT) does its work. Wherever this does not apply, the model's own forward runs.
"""

import inspect
from dataclasses import dataclass

import torch
from torch import nn

from liger_kernel.transformers.families import CausalLM
from liger_kernel.transformers.graft import Edits, become, kernels_cover, result_changed_by, warn_once
from liger_kernel.transformers.model import loss_utils, output_classes

try:
    from transformers.modeling_utils import slice_logits_to_keep
except ImportError:

    def slice_logits_to_keep(hidden_states, logits_to_keep):
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        return hidden_states[:, kept, :]


if torch.distributed.is_available():
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor
else:
    FSDPModule = DTensor = ()

# Modules that hand their arguments to one inner module and its result back: FSDP1, checkpoint_wrapper, torch.compile.
_TRANSPARENT = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")

# Keywords of a model call that every loss understands, those that only ours does, and which of these change its value.
_SHARED = ("labels", "shift_labels", "num_items_in_batch", "ignore_index")
_OURS = ("return_token_accuracy", "return_predicted_tokens", *loss_utils.OPTIONS)
_WEIGHING = ("ce_weight", "label_smoothing", "lse_square_scale", "use_token_scaling")


class LinearWithLoss(nn.Linear):
    """A Linear that returns (loss, token_accuracy, predicted_tokens) when it is called with `liger_loss`."""

    def forward(self, input, *, liger_loss=None):
        if liger_loss is None:
            return super().forward(input)
        arguments = {"bias": self.bias, "hidden_size": input.shape[-1], **liger_loss}
        result = loss_utils.LigerForCausalLMLoss(hidden_states=input, lm_head_weight=self.weight, **arguments)
        loss, _, token_accuracy, predicted_tokens = loss_utils.unpack_cross_entropy_result(result)
        return loss, token_accuracy, predicted_tokens


def head_linears(head, fsdp: bool = False) -> list[nn.Linear] | None:
    """The Linears that may end a call of `head`, or None if the loss cannot be computed inside them.

    Args:
        head: the language-model head.
        fsdp: whether FSDP2 is known to gather the head's weight before the head runs.
    """
    if result_changed_by(head):
        return None
    if isinstance(head, nn.Linear):
        return [head] if _is_plain(head, fsdp) else None
    for name in _TRANSPARENT:
        if isinstance(inner := getattr(head, name, None), nn.Module):
            return head_linears(inner, fsdp)
    if type(head).__name__ == "ModulesToSaveWrapper":
        parts = [head_linears(part, fsdp) for part in (head.original_module, *head.modules_to_save.values())]
        return None if None in parts else sum(parts, [])
    return None


def _is_plain(linear, fsdp):
    if type(linear).forward not in (nn.Linear.forward, LinearWithLoss.forward):
        return False
    weight = linear.weight
    if isinstance(weight, DTensor):
        # More than one sharded dimension of the mesh: one of them is tensor parallelism, which FSDP2 does not gather.
        gathered = fsdp or isinstance(linear, FSDPModule)
        return gathered and sum(placement.is_shard() for placement in weight.placements) == 1
    return type(weight) in (torch.Tensor, nn.Parameter) and kernels_cover(weight)


def prepare_head(head, edits: Edits, fsdp: bool = False) -> bool:
    """Make the Linears at the bottom of `head` able to return the loss; False if that is not possible."""
    linears = head_linears(head, fsdp)
    for linear in linears or ():
        if not isinstance(linear, LinearWithLoss):
            become(linear, LinearWithLoss, edits)
    return linears is not None


def preparing_head(post_init, spec: CausalLM):
    """The `post_init` of a model class that also prepares the head, which torch.compile could not do while tracing."""

    def prepare(self):
        post_init(self)
        prepare_head(getattr(self, spec.head, None), Edits())

    return prepare


def original_forward(cls):
    """The forward that `cls` had before this package replaced it."""
    return getattr(cls.forward, "liger_original", cls.forward)


def is_fused(cls) -> bool:
    """Whether the forward of `cls` computes the loss inside the head."""
    return inspect.isfunction(getattr(cls.forward, "liger_original", None))


def has_own_loss(model) -> bool:
    """Whether somebody has given the model a loss function that is neither transformers' nor ours."""
    return getattr(model, "_loss_function", None) not in (None, loss_utils.causal_lm_loss)


@dataclass(frozen=True)
class FusedLoss:
    """The part that gives a causal language model the fused-loss forward."""

    spec: CausalLM

    def __call__(self, base):
        return base.__name__, (base,), {"forward": fused_forward(original_forward(base), self.spec)}


def fused_forward(original, spec: CausalLM, order: tuple[str, ...] = ()):
    """The forward that stands for `original` and computes the loss inside the head where it can.

    Its signature is that of `original` with `skip_logits=None` added: trainers drop the columns they do not see there.
    `skip_logits` True asks for the loss without logits, False for logits; None means without logits when training with
    labels. Without `labels` and `shift_labels` there is no loss, and logits come in any case: Trainer's label smoothing
    takes the labels away and keeps `skip_logits`.

    Args:
        original: the model's own forward.
        spec: how the model gets its logits.
        order: the first parameters, also such as `original` takes among its keywords.
    """
    signature, kind = inspect.signature(original), inspect.Parameter.POSITIONAL_OR_KEYWORD
    known = {p.name: p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD}
    known["skip_logits"] = inspect.Parameter("skip_logits", kind, default=None)
    first, *rest = known
    added = [name for name in order if name not in known]
    names = [*order, *(name for name in rest if name not in order)]
    parameters = [known.get(name) or inspect.Parameter(name, kind, default=None) for name in (first, *names)]
    parameters.append(inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD))

    def forward(self, *args, **kwargs):
        if len(args) > len(names):
            raise TypeError(f"forward takes at most {len(names)} positional arguments, got {len(args)}")
        kwargs.update(zip(names, args))
        for name in added:
            if kwargs.get(name) is None:
                kwargs.pop(name, None)
        skip_logits = kwargs.pop("skip_logits", None)
        labels = kwargs.get("labels")
        if labels is None:
            labels = kwargs.get("shift_labels")
        wanted = labels is not None and (self.training if skip_logits is None else skip_logits)
        if wanted and _can_fuse(self, spec):
            return _fused(self, spec, kwargs)
        output = _with_logits(self, original, spec, labels, kwargs)
        if wanted and skip_logits and not isinstance(output, tuple):
            output.logits = None
        return output

    forward.__signature__ = signature.replace(parameters=parameters)
    forward.__doc__ = original.__doc__
    forward.__module__, forward.__qualname__ = original.__module__, original.__qualname__
    forward.liger_original = original
    return forward


def _can_fuse(model, spec):
    head = getattr(model, spec.head, None)
    if head is None:
        return False
    if has_own_loss(model):
        reason = "the model has a loss function of its own"
    elif not prepare_head(head, Edits()):
        reason = f"{spec.head} is {describe(head)}"
    else:
        return True
    if not torch.compiler.is_compiling():
        warn_once(f"the loss is computed from materialised logits: {reason}")
    return False


def describe(head) -> str:
    """What a head is, for messages."""
    weight, hook = getattr(head, "weight", None), isinstance(head, nn.Module) and result_changed_by(head)
    text = f"{type(head).__module__}.{type(head).__qualname__}"
    if weight is not None:
        text += f" with a weight of {type(weight).__name__}, {weight.dtype}"
    return text + (f", whose result {getattr(hook, '__qualname__', type(hook).__name__)} may change" if hook else "")


def _with_logits(model, original, spec, labels, kwargs):
    dropped = {name: kwargs.pop(name) for name in _OURS if name in kwargs}
    lost = [name for name in _WEIGHING if isinstance(dropped.get(name), torch.Tensor) or dropped.get(name)]
    if lost and labels is not None and not torch.compiler.is_compiling():
        warn_once(f"the loss from materialised logits does not know {', '.join(lost)}")
    if labels is not None:
        kwargs["labels"] = labels
    output = original(model, **kwargs)
    liger = getattr(output_classes, spec.output)
    return liger(**output) if type(output) is liger.__base__ else output


def _fused(model, spec, kwargs):
    loss_arguments = {name: kwargs.pop(name) for name in (*_SHARED, *_OURS) if name in kwargs}
    loss_arguments.setdefault("labels", None)
    if spec.softcap is not None:
        loss_arguments["final_logit_softcapping"] = getattr(model.config, spec.softcap)
    logits_to_keep = kwargs.pop("logits_to_keep", 0)
    return_dict = kwargs.pop("return_dict", None)
    if return_dict is None:
        return_dict = getattr(model.config, "return_dict", True)

    count = _count_ahead(loss_arguments)
    outputs = getattr(model, spec.base)(**kwargs)
    hidden = slice_logits_to_keep(outputs[0], logits_to_keep)
    if count is not None:
        loss_arguments["valid_count"] = count()
    loss, token_accuracy, predicted_tokens = getattr(model, spec.head)(hidden, liger_loss=loss_arguments)

    if not return_dict:
        extras = [extra for extra in (token_accuracy, predicted_tokens) if extra is not None]
        return (loss, None, *outputs[1:], *extras)
    liger = getattr(output_classes, spec.output)
    rest = {name: value for name, value in outputs.items() if name in liger.__dataclass_fields__}
    return liger(loss=loss, token_accuracy=token_accuracy, predicted_tokens=predicted_tokens, **rest)


def _count_ahead(loss_arguments):
    """Shift the labels and start to copy the number of valid ones to the host; the result waits for it and returns it.

    cuBLAS needs that number on the host; asked for here, it has arrived by the time the head runs.
    """
    labels, shifted = loss_arguments["labels"], loss_arguments.get("shift_labels")
    given = labels if shifted is None else shifted
    if torch.compiler.is_compiling() or not given.is_cuda or torch.cuda.is_current_stream_capturing():
        return None
    ignore_index = loss_arguments.get("ignore_index", -100)
    if shifted is None:
        shifted = loss_arguments["shift_labels"] = loss_utils.shift(labels, ignore_index)
    count = torch.empty((), dtype=torch.int64, pin_memory=True)
    count.copy_((shifted != ignore_index).sum(), non_blocking=True)
    copied = torch.cuda.Event()
    copied.record(torch.cuda.current_stream(shifted.device))

    def wait():
        copied.synchronize()
        return int(count)

    return wait
