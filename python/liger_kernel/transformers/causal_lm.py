"""The fused-loss forward of causal and masked language models.

The model's own forward runs, on a view of the model in which calling `lm_head` gives a `Logits`: a promise of logits
that records what the forward does to them (a scale, a softcap, a slice). When the forward hands it to the model's loss
function, the loss is computed inside `lm_head.__call__`: the head is called with one private keyword, and the nn.Linear
at its bottom returns the loss instead of logits. So everything that wraps or hooks the head (FSDP, ZeRO-3, offloading,
PEFT) does its work, and everything else that the forward does (router losses, outputs of its own) happens as it stands
there. Whatever a `Logits` cannot record makes it compute the logits, which is slower and never wrong.

Who stands for whom in a call without logits:

    model.forward(self = _View of the model)
      self.lm_head        -> _Part of the head, whose call gives Logits
      self.loss_function  -> _Call.loss, which takes the Logits to the head's own call
    and where the head belongs to a model inside, as of an image-text model, or to a module, as in BERT's `cls`:
      self.model          -> _Part of that model, whose forward gets a _View of it with its head as above
"""

import functools
import inspect
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel
from transformers.loss.loss_utils import LOSS_MAPPING

from liger_kernel.operators.coverage import is_transformed, result_changed_by
from liger_kernel.transformers.head import describe, head_of, prepare_head
from liger_kernel.transformers.logits import Logits, computed, traceable
from liger_kernel.transformers.lora import casting_once, follow
from liger_kernel.transformers.model import loss_utils, output_classes
from liger_kernel.transformers.patching.families import CausalLM
from liger_kernel.transformers.patching.place import Edits, names_in, replace_class
from liger_kernel.transformers.tensor_parallel import is_vocab_parallel, vocab_parallel_loss
from liger_kernel.utils import warn_once

# What forwards that make a loss from logits name; the last is DistilBERT's, a torch.nn.CrossEntropyLoss.
_LOSS_NAMES = {"loss_function", "CrossEntropyLoss", "mlm_loss_fct"}
# Keywords that transformers' loss understands, those that only ours does, and which of these change its value.
_SHARED = ("num_items_in_batch", "ignore_index", "shift_labels")
_OURS = ("return_token_accuracy", "return_predicted_tokens", *loss_utils.OPTIONS)
_WEIGHING = ("ce_weight", "label_smoothing", "lse_square_scale", "use_token_scaling")


def original_forward(cls):
    """The forward that `cls` had before this package replaced it."""
    forward = getattr(cls.forward, "liger_original", cls.forward)
    return getattr(forward, "liger_counts", forward)  # of masks.py, which a fused loss is put over


def same_code(one, other) -> bool:
    """Whether a forward is another, or a copy of it that calls other functions (with_globals)."""
    codes = [getattr(inspect.unwrap(forward), "__code__", forward) for forward in (one, other)]
    return codes[0] is codes[1]


def is_fused(model) -> bool:
    """Whether the forward of a model, or of a class of models, computes the loss inside the head."""
    return inspect.isfunction(getattr(model.forward, "liger_original", None))


def uses_standard_loss(module):
    """Whether a module computes its loss from its logits by one of transformers' losses of language models."""
    known = loss_utils.ours_for(LOSS_MAPPING.get(getattr(module, "loss_type", None))) is not None
    return known and "loss_function" in names_in(original_forward(type(module)))


def own_loss(model):
    """The model's loss function if it is neither one of transformers' losses of language models nor ours, or None.

    What the attribute gives now decides: of the model, of its class, a method or a property. So do the functions that
    transformers' losses call, where somebody has replaced them.
    """
    return loss_utils.replaced_function() if loss_utils.ours_of(model) else model.loss_function


def own_class_loss(cls):
    """The loss function of a class of models that is not PreTrainedModel's, which asks each model, or None."""
    function = inspect.getattr_static(cls, "loss_function", None)
    return None if function is PreTrainedModel.__dict__["loss_function"] else function


def names_of_loss(function) -> str:
    """What a loss function is, for messages."""
    function = getattr(function, "fget", function)
    return f"it computes its loss with {getattr(function, '__qualname__', type(function).__name__)}"


def hands_logits_over(forward) -> bool:
    """Whether a forward names its parameters and makes its loss from logits by the model's loss function, or by torch's
    cross entropy."""
    named = all(p.kind is not p.VAR_POSITIONAL for p in inspect.signature(forward).parameters.values())
    return named and bool(_LOSS_NAMES & names_in(forward))


def no_logits_of(forward, spec: CausalLM) -> str | None:
    """Why a forward makes no loss from the logits of its head, or None."""
    if not hands_logits_over(forward):
        return "its forward makes no loss from logits"
    name = spec.head.partition(".")[0]
    return None if name in names_in(forward) else f"its forward has no {name}"


@dataclass(frozen=True)
class FusedLoss:
    """The part that gives a language model the fused-loss forward."""

    spec: CausalLM

    def __call__(self, base):
        return base.__name__, (base,), {"forward": fused_forward(original_forward(base), self.spec)}


@dataclass(frozen=True)
class PassesLogits:
    """The part that gives a module between a model and its head, such as BertOnlyMLMHead, a forward that passes a
    promise of logits on."""

    spec: CausalLM

    def __call__(self, base):
        original, spec = original_forward(base), self.spec

        @functools.wraps(original)
        def forward(self, *args, liger_outer=None, **kwargs):
            seen = self if liger_outer is None else _view(self, liger_outer.within(spec))
            return original(seen, *args, **kwargs)

        forward.liger_original = original
        return base.__name__, (base,), {"forward": forward}


def prepare_path(model, spec: CausalLM, edits: Edits) -> None:
    """Make the modules between a model and its head, where these are no models, pass a promise of logits on."""
    place, _, rest = spec.head.partition(".")
    inner = getattr(model, place)
    if not rest:
        return
    own = original_forward(type(inner))
    if not (isinstance(inner, PreTrainedModel) or is_fused(inner)) and rest.partition(".")[0] in names_in(own):
        replace_class(inner, PassesLogits(CausalLM(rest)), edits)
    prepare_path(inner, CausalLM(rest), edits)


def fused_forward(original, spec: CausalLM, order: tuple[str, ...] = ()):
    """The forward that stands for `original` and computes the loss inside the head where it can.

    Its signature is that of `original` with `skip_logits=None` added: trainers drop the columns they do not see there.
    `skip_logits` True asks for the loss without logits, False for logits; None means without logits when training with
    labels. Without `labels` and `shift_labels` there is no loss, and logits come in any case: Trainer's label smoothing
    takes the labels away and keeps `skip_logits`.

    Args:
        original: the model's own forward.
        spec: where the model's head is.
        order: the first parameters, also such as `original` takes among its keywords.
    """
    signature, kind = inspect.signature(original), inspect.Parameter.POSITIONAL_OR_KEYWORD
    known = {p.name: p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD}
    known["skip_logits"] = inspect.Parameter("skip_logits", kind, default=None)
    first, *rest = known
    added = [name for name in order if name not in known]
    names = [*order, *(name for name in rest if name not in order)]
    parameters = [known.get(name) or inspect.Parameter(name, kind, default=None) for name in (first, *names)]
    # Trainer adds num_items_in_batch for a forward that takes any keyword, which the original would refuse.
    if any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values()):
        parameters.append(inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD))
    outputs = output_classes.extensions(original)
    takes_shifted, traced = "loss_function" in names_in(original), traceable(original)

    @casting_once
    def forward(self, *args, **kwargs):
        if len(args) > len(names):
            raise TypeError(f"forward takes at most {len(names)} positional arguments, got {len(args)}")
        kwargs.update(zip(names, args))
        for name in added:
            if kwargs.get(name) is None:
                kwargs.pop(name, None)
        skip_logits = kwargs.pop("skip_logits", None)
        follow(self)
        if "liger_outer" in kwargs:
            outer = kwargs.pop("liger_outer").within(spec)
            return original(self if outer is None else _view(self, outer), **kwargs)
        labels, shift_labels = kwargs.get("labels"), kwargs.get("shift_labels") if takes_shifted else None
        if labels is None:
            labels = shift_labels
        options = {name: kwargs.pop(name) for name in _OURS if name in kwargs}
        if labels is not None:
            kwargs["labels"] = labels
        wanted = labels is not None and (self.training if skip_logits is None else skip_logits)
        if wanted and _can_fuse(self, spec, options):
            call, run = _Call(self, spec, options, kwargs), traced if torch.compiler.is_compiling() else original
            return _finished(call, run(_view(self, call), **kwargs), outputs)
        if labels is not None:
            _warn_of_lost(options)
        output = original(self if shift_labels is None else _view(self, _Shifted(self, spec, shift_labels)), **kwargs)
        if type(output) in outputs:
            output = _made(outputs[type(output)], output)
        if wanted and skip_logits and not isinstance(output, tuple):
            output.logits = None
        return output

    forward.__doc__ = original.__doc__
    forward.__module__, forward.__qualname__ = original.__module__, original.__qualname__
    vars(forward).update(__signature__=signature.replace(parameters=parameters), liger_original=original)
    return forward


def _can_fuse(model, spec, options):
    head = head_of(model, spec)
    if head is None or is_transformed():
        return False
    if function := own_loss(model):
        reason = names_of_loss(function)
    elif not prepare_head(head, Edits()):
        reason = f"{spec.head} is {describe(head)}"
    elif (reason := inner_obstacle(model, spec)) or (reason := _not_vocab_parallel(head, options)):
        pass
    else:
        return True
    if not torch.compiler.is_compiling():
        warn_once(f"the loss is computed from materialised logits: {reason}")
    return False


def _not_vocab_parallel(head, options):
    """Why the loss of a head that is spread over ranks cannot be computed with these options, or None."""
    given = [name for name, value in options.items() if isinstance(value, torch.Tensor) or value]
    return f"a head spread over ranks knows no {', '.join(given)}" if given and is_vocab_parallel(head) else None


def inner_obstacle(model, spec):
    """Why the model in which the head is cannot hand a promise of logits to the one that holds it, or None."""
    *path, _ = spec.head.split(".")
    inner = model
    for name in path:
        inner = getattr(inner, name)
        if not is_fused(inner):
            return f"{name} is an unpatched {type(inner).__name__}"
        if result_changed_by(inner):
            return f"something changes what {name} returns"
    return None


def _warn_of_lost(options):
    lost = [name for name in _WEIGHING if isinstance(options.get(name), torch.Tensor) or options.get(name)]
    if lost and not torch.compiler.is_compiling():
        warn_once(f"the loss from materialised logits does not know {', '.join(lost)}")


class _Call:
    """One call of a model without logits: what was asked for, and what the head returned besides the loss."""

    def __init__(self, model, spec, options, kwargs):
        self.model, self.options = model, options
        self.place, _, self.rest = spec.head.partition(".")
        self.outer = None
        self.masked = loss_utils.ours_of(model) is loss_utils.masked_lm_loss  # whose labels are not shifted
        self.labels = kwargs.get("labels")
        self.shift_labels = self.labels if self.masked else kwargs.get("shift_labels")
        self.token_accuracy = self.predicted_tokens = None
        self.ignore_index = kwargs.get("ignore_index", -100)
        self.shifted, self.count = _count_ahead(self.labels, self.shift_labels, self.ignore_index)

    def within(self, spec):
        """The same call, seen from the model inside the one that was called."""
        return _Inside(self, spec)

    def own_loss(self):
        """The model's own loss function, or None."""
        return own_loss(self.model)

    def part(self, model):
        """What stands for the part of `model` that makes the logits."""
        inner = getattr(model, self.place)
        return _inner_model(inner, self) if self.rest else _promising_head(inner, self)

    def loss(self, logits, labels, vocab_size=None, **kwargs):
        """The model's loss function, without logits where `logits` is a promise that can be kept so."""
        factors = logits.factors() if isinstance(logits, Logits) else None
        if factors is None:
            _warn_of_lost(self.options)
            return self.model.loss_function(computed(logits), labels, vocab_size, **kwargs)
        arguments = {name: kwargs[name] for name in _SHARED if name in kwargs}
        shift_labels = arguments.pop("shift_labels", None)
        if self.masked:
            shift_labels = labels
        elif shift_labels is None:
            shift_labels = self.shift_labels
        if labels is self.labels and shift_labels is self.shift_labels and self.count is not None:
            shift_labels, arguments["valid_count"] = self.shifted, self.count()
        return self.reduced(logits, factors, labels=labels, shift_labels=shift_labels, **arguments)

    def counted(self, target, ignore_index):
        """The number of valid targets as an argument of `reduced`, where they are the labels that were counted ahead,
        flattened."""
        if self.count is None or not self.masked or ignore_index != self.ignore_index:
            return {}
        same = (target.data_ptr(), target.numel()) == (self.labels.data_ptr(), self.labels.numel())
        return {"valid_count": self.count()} if same else {}

    def reduced(self, logits, factors, **arguments):
        """The loss that the head computes of `logits` whose scale and cap are `factors`."""
        scale, cap = factors
        if cap is not None:
            arguments["final_logit_softcapping"] = cap
        arguments["logit_scale"] = scale
        if is_vocab_parallel(logits.liger_head):
            return vocab_parallel_loss(logits.liger_head, logits.liger_hidden, **arguments)
        liger_loss = {**arguments, **self.options}
        loss, self.token_accuracy, self.predicted_tokens = logits.liger_head(logits.liger_hidden, liger_loss=liger_loss)
        return loss


class _Inside:
    def __init__(self, call, spec):
        self.call = call
        self.place, _, self.rest = spec.head.partition(".")

    def within(self, spec):
        return _Inside(self.call, spec)

    def part(self, model):
        inner = getattr(model, self.place)
        return _inner_model(inner, self) if self.rest else _promising_head(inner, self.call)

    def loss(self, *args, **kwargs):
        raise RuntimeError("a model inside another computes a loss of its own")


class _Shifted:
    """A call with logits and shifted labels, which some forwards keep from the loss or hand to a model inside."""

    def __init__(self, model, spec, shift_labels):
        place, _, rest = spec.head.partition(".")
        self.model, self.shift_labels, self.place = (
            model,
            shift_labels,
            place if rest and not inner_obstacle(model, spec) else None,
        )

    def within(self, spec):
        return None

    def part(self, model):
        return _inner_model(getattr(model, self.place), self)

    def loss(self, *args, **kwargs):
        return self.model.loss_function(*args, **{**kwargs, "shift_labels": self.shift_labels})


class _View:
    """A model as its own forward sees it: all of it, but for the loss function and, without logits, the head."""

    def __init__(self, model, call):
        for name, value in (("liger_model", model), ("liger_call", call)):
            object.__setattr__(self, name, value)  # which torch 2.11's compiler follows, and a write to __dict__ not

    def __getattr__(self, name):
        model, call = self.__dict__["liger_model"], self.__dict__["liger_call"]
        if name == call.place:
            return call.part(model)
        return call.loss if name == "loss_function" else getattr(model, name)

    def __setattr__(self, name, value):
        setattr(self.__dict__["liger_model"], name, value)

    def __call__(self, *args, **kwargs):
        return self.__dict__["liger_model"](*args, **kwargs)


class _EagerView(_View):
    """A view that says it is of the model's class: super() asks for that, and transformers' recording of hidden states.

    Dynamo cannot trace it.
    """

    __class__ = property(lambda self: type(self.__dict__["liger_model"]))


def _view(model, call):
    return (_View if torch.compiler.is_compiling() else _EagerView)(model, call)


class _Part:
    """The head, or the model that has it, as a view shows it: everything but its call."""

    def __init__(self, module, called):
        self.liger_module, self.liger_called = module, called

    def __call__(self, *args, **kwargs):
        return self.liger_called(*args, **kwargs)

    def __getattr__(self, name):
        return getattr(self.__dict__["liger_module"], name)


def _promising_head(head, call):
    """A head whose call gives a promise of logits."""
    return _Part(head, functools.partial(Logits, head, call))


def _inner_model(model, call):
    """The model inside a model, whose call hands over a promise of logits."""
    return _Part(model, functools.partial(model, liger_outer=call))


def _finished(call, output, outputs):
    """What a call without logits returns: the model's output, with the accuracy and the predictions instead."""
    extras = {"token_accuracy": call.token_accuracy, "predicted_tokens": call.predicted_tokens}
    if isinstance(output, tuple):
        return (
            *[None if isinstance(part, Logits) else part for part in output],
            *[extra for extra in extras.values() if extra is not None],
        )
    if output.get("loss") is None:  # BertForPreTraining wants two labels for one
        fields = {name: computed(value) for name, value in output.items()}
    else:
        fields = {name: value for name, value in output.items() if name != "logits" and not isinstance(value, Logits)}
    return (
        _made(outputs[type(output)], {**fields, **extras}) if type(output) in outputs else _made(type(output), fields)
    )


def _made(cls, values):
    """An output of a class, of its fields and of what a decorator of the forward has added."""
    output = cls(**{name: value for name, value in values.items() if name in cls.__dataclass_fields__})
    for name, value in values.items():
        if name not in cls.__dataclass_fields__:
            output[name] = value
    return output


def _count_ahead(labels, shifted, ignore_index):
    """Shift the labels and start to copy the number of valid ones to the host: (the labels, a function that waits).

    cuBLAS needs that number on the host; asked for here, it has arrived by the time the head runs.
    """
    given = labels if shifted is None else shifted
    if torch.compiler.is_compiling() or not given.is_cuda or torch.cuda.is_current_stream_capturing():
        return None, None
    if shifted is None:
        shifted = loss_utils.shift(labels, ignore_index)
    count = torch.empty((), dtype=torch.int64, pin_memory=True)
    count.copy_((shifted != ignore_index).sum(), non_blocking=True)
    copied = torch.cuda.Event()
    copied.record(torch.cuda.current_stream(shifted.device))

    def wait():
        copied.synchronize()
        return int(count)

    return shifted, wait
