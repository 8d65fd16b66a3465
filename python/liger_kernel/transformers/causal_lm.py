"""The fused-loss forward of causal language models.

The model's own forward runs, on a view of the model in which calling `lm_head` gives a `Logits`: a promise of logits
that records what the forward does to them (a scale, a softcap, a slice). When the forward hands it to the model's loss
function, the loss is computed inside `lm_head.__call__`: the head is called with one private keyword, and the nn.Linear
at its bottom returns the loss instead of logits. So everything that wraps or hooks the head (FSDP, ZeRO-3, offloading,
PEFT) does its work, and everything else that the forward does (router losses, outputs of its own) happens as it stands
there. Whatever a `Logits` cannot record makes it compute the logits, which is slower and never wrong.
"""

import inspect
from dataclasses import dataclass

import torch
from torch import nn
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

from liger_kernel.transformers.families import CausalLM
from liger_kernel.transformers.graft import Edits, become, kernels_cover, result_changed_by, warn_once
from liger_kernel.transformers.model import loss_utils, output_classes

if torch.distributed.is_available():
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor
else:
    FSDPModule = DTensor = ()

# Modules that hand their arguments to one inner module and its result back: FSDP1, checkpoint_wrapper, torch.compile.
_TRANSPARENT = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")

# Keywords that transformers' loss understands, those that only ours does, and which of these change its value.
_SHARED = ("num_items_in_batch", "ignore_index", "shift_labels")
_OURS = ("return_token_accuracy", "return_predicted_tokens", *loss_utils.OPTIONS)
_WEIGHING = ("ce_weight", "label_smoothing", "lse_square_scale", "use_token_scaling")


class LinearWithLoss(nn.Linear):
    """A Linear that returns (loss, token_accuracy, predicted_tokens) of logits times `logit_scale` when it is called with `liger_loss`."""

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


def head_of(model, spec: CausalLM):
    """The head of a causal language model, which may be that of a model in it; None where there is none."""
    head = model
    for name in spec.head.split("."):
        head = getattr(head, name, None)
    return head


def original_forward(cls):
    """The forward that `cls` had before this package replaced it."""
    return getattr(cls.forward, "liger_original", cls.forward)


def is_fused(cls) -> bool:
    """Whether the forward of `cls` computes the loss inside the head."""
    return inspect.isfunction(getattr(cls.forward, "liger_original", None))


def has_own_loss(model) -> bool:
    """Whether the model's loss is neither transformers' loss of causal language models nor ours."""
    if getattr(model, "_loss_function", None) not in (None, loss_utils.causal_lm_loss):
        return True
    return LOSS_MAPPING.get(getattr(model, "loss_type", None), ForCausalLMLoss) is not ForCausalLMLoss


def hands_logits_over(forward) -> bool:
    """Whether a forward makes its loss from logits by the model's loss function, or by torch's cross entropy."""
    return bool({"loss_function", "CrossEntropyLoss"} & names_in(forward))


def names_in(forward) -> set[str]:
    """The attributes and globals that a forward's code names."""
    return set(getattr(getattr(inspect.unwrap(forward), "__code__", None), "co_names", ()))


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
    parameters.append(inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD))
    outputs = output_classes.extensions(original)
    takes_shifted = "loss_function" in names_in(original)

    def forward(self, *args, **kwargs):
        if len(args) > len(names):
            raise TypeError(f"forward takes at most {len(names)} positional arguments, got {len(args)}")
        kwargs.update(zip(names, args))
        for name in added:
            if kwargs.get(name) is None:
                kwargs.pop(name, None)
        skip_logits = kwargs.pop("skip_logits", None)
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
        if wanted and _can_fuse(self, spec):
            call = _Call(self, spec, options, kwargs)
            return _finished(call, original(_view(self, call), **kwargs), outputs)
        if labels is not None:
            _warn_of_lost(options)
        output = original(self if shift_labels is None else _view(self, _Shifted(self, spec, shift_labels)), **kwargs)
        if type(output) in outputs:
            output = _made(outputs[type(output)], output)
        if wanted and skip_logits and not isinstance(output, tuple):
            output.logits = None
        return output

    forward.__signature__ = signature.replace(parameters=parameters)
    forward.__doc__ = original.__doc__
    forward.__module__, forward.__qualname__ = original.__module__, original.__qualname__
    forward.liger_original = original
    return forward


def _can_fuse(model, spec):
    head = head_of(model, spec)
    if head is None:
        return False
    if has_own_loss(model):
        reason = "the model has a loss function of its own"
    elif not prepare_head(head, Edits()):
        reason = f"{spec.head} is {describe(head)}"
    elif reason := inner_obstacle(model, spec):
        pass
    else:
        return True
    if not torch.compiler.is_compiling():
        warn_once(f"the loss is computed from materialised logits: {reason}")
    return False


def inner_obstacle(model, spec):
    """Why the model in which the head is cannot hand a promise of logits to the one that holds it, or None."""
    *path, _ = spec.head.split(".")
    inner = model
    for name in path:
        inner = getattr(inner, name)
        if not is_fused(type(inner)):
            return f"{name} is an unpatched {type(inner).__name__}"
        if result_changed_by(inner):
            return f"something changes what {name} returns"
    return None


def describe(head) -> str:
    """What a head is, for messages."""
    weight, hook = getattr(head, "weight", None), isinstance(head, nn.Module) and result_changed_by(head)
    text = f"{type(head).__module__}.{type(head).__qualname__}"
    if weight is not None:
        text += f" with a weight of {type(weight).__name__}, {weight.dtype}"
    return text + (f", whose result {getattr(hook, '__qualname__', type(hook).__name__)} may change" if hook else "")


def _warn_of_lost(options):
    lost = [name for name in _WEIGHING if isinstance(options.get(name), torch.Tensor) or options.get(name)]
    if lost and not torch.compiler.is_compiling():
        warn_once(f"the loss from materialised logits does not know {', '.join(lost)}")


class _Call:
    """One call of a model whose loss is wanted without logits: what the call asked for, and what the head returned beside the loss."""

    def __init__(self, model, spec, options, kwargs):
        self.model, self.options = model, options
        self.place, _, self.rest = spec.head.partition(".")
        self.outer = None
        self.labels, self.shift_labels = kwargs.get("labels"), kwargs.get("shift_labels")
        self.token_accuracy = self.predicted_tokens = None
        self.shifted, self.count = _count_ahead(self.labels, self.shift_labels, kwargs.get("ignore_index", -100))

    def within(self, spec):
        """The same call, seen from the model inside the one that was called."""
        return _Inside(self, spec)

    def part(self, model):
        """What stands for the part of `model` that makes the logits."""
        inner = getattr(model, self.place)
        return _InnerModel(inner, self) if self.rest else _Head(inner, self)

    def loss(self, logits, labels, vocab_size=None, **kwargs):
        """The model's loss function, without logits where `logits` is a promise that can be kept so."""
        factors = logits.factors() if isinstance(logits, Logits) else None
        if factors is None:
            _warn_of_lost(self.options)
            return self.model.loss_function(computed(logits), labels, vocab_size, **kwargs)
        arguments = {name: kwargs[name] for name in _SHARED if name in kwargs}
        shift_labels = arguments.pop("shift_labels", None)
        if shift_labels is None:
            shift_labels = self.shift_labels
        if labels is self.labels and shift_labels is self.shift_labels and self.count is not None:
            shift_labels, arguments["valid_count"] = self.shifted, self.count()
        return self.reduced(logits, factors, labels=labels, shift_labels=shift_labels, **arguments)

    def reduced(self, logits, factors, **arguments):
        """The loss that the head computes of `logits` whose scale and cap are `factors`."""
        scale, cap = factors
        if cap is not None:
            arguments["final_logit_softcapping"] = cap
        liger_loss = {**arguments, **self.options, "logit_scale": scale}
        loss, self.token_accuracy, self.predicted_tokens = logits.liger_head(logits.liger_hidden, liger_loss=liger_loss)
        return loss


class _Inside:
    def __init__(self, call, spec):
        self.call, self.place = call, spec.head

    def part(self, model):
        return _Head(getattr(model, self.place), self.call)

    def loss(self, *args, **kwargs):
        raise RuntimeError("a model inside another computes a loss of its own")


class _Shifted:
    """A call with logits and shifted labels, which some forwards keep from the loss function, and some hand to a model inside."""

    def __init__(self, model, spec, shift_labels):
        place, _, rest = spec.head.partition(".")
        self.model, self.shift_labels, self.place = model, shift_labels, place if rest and not inner_obstacle(model, spec) else None

    def within(self, spec):
        return None

    def part(self, model):
        return _InnerModel(getattr(model, self.place), self)

    def loss(self, *args, **kwargs):
        return self.model.loss_function(*args, **{**kwargs, "shift_labels": self.shift_labels})


class _View:
    """A model as its own forward sees it: all of it, but for the loss function and, without logits, the head."""

    def __init__(self, model, call):
        self.__dict__.update(liger_model=model, liger_call=call)

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
    """A view that says it is of the model's class, which super() asks for and transformers' table of what it records; dynamo cannot trace that."""

    __class__ = property(lambda self: type(self.__dict__["liger_model"]))


def _view(model, call):
    return (_View if torch.compiler.is_compiling() else _EagerView)(model, call)


class _InnerModel:
    """The model inside a model, whose call hands over a promise of logits."""

    def __init__(self, model, call):
        self.liger_model, self.liger_call = model, call

    def __call__(self, *args, **kwargs):
        return self.liger_model(*args, liger_outer=self.liger_call, **kwargs)

    def __getattr__(self, name):
        return getattr(self.__dict__["liger_model"], name)


class _Head:
    """The head during a call without logits: calling it gives a promise."""

    def __init__(self, head, call):
        self.liger_head, self.liger_call = head, call

    def __call__(self, hidden_states):
        return Logits(self.liger_head, self.liger_call, hidden_states)

    def __getattr__(self, name):
        return getattr(self.__dict__["liger_head"], name)


class Logits:
    """A promise of `head(hidden)`, and of what has been done to it since; anything that it cannot record computes it.

    Recorded are products and quotients with a number, tanh, float(), and selections of rows.
    """

    def __init__(self, head, call, hidden, steps=()):
        self.liger_head, self.liger_call, self.liger_hidden, self.liger_steps = head, call, hidden, steps
        self.liger_value = None

    def step(self, name, number=None):
        return Logits(self.liger_head, self.liger_call, self.liger_hidden, (*self.liger_steps, (name, number)))

    def rows(self, hidden):
        return Logits(self.liger_head, self.liger_call, hidden, self.liger_steps)

    def factors(self):
        """(scale, cap) for which these logits are cap · tanh(scale · head(hidden) / cap), or scale · head(hidden) with cap None; else None."""
        if self.liger_value is not None:
            return None
        scale, cap = 1.0, None
        for name, number in self.liger_steps:
            if name == "tanh":
                if cap is not None:
                    return None
                cap = 1.0
            elif name != "float":
                factor = number if name == "mul" else 1 / number
                scale, cap = (scale * factor, None) if cap is None else (scale, cap * factor)
        if cap is None:
            return scale, None
        # One rounding from 1 is what a division and a product by the same number leave.
        whole = abs(scale * cap - 1) < 1e-12
        return (1.0 if whole else scale * cap, cap) if cap > 0 else None

    def compute(self):
        """The logits, as the model's own forward has them."""
        if self.liger_value is None:
            value = self.liger_head(self.liger_hidden)
            for name, number in self.liger_steps:
                value = _STEPS[name](value, number)
            self.liger_value = value
        return self.liger_value

    def float(self):
        return self.compute().float() if self.liger_value is not None else self.step("float")

    def contiguous(self):
        return self if self.liger_value is None else self.liger_value.contiguous()

    def __mul__(self, other):
        return self.step("mul", other) if self._takes(other) else self.compute() * other

    __rmul__ = __mul__

    def __truediv__(self, other):
        return self.step("div", other) if self._takes(other) and other != 0 else self.compute() / other

    def _takes(self, other):
        return self.liger_value is None and isinstance(other, (int, float))

    def __getitem__(self, index):
        hidden = self.liger_hidden
        if self.liger_value is None:
            if isinstance(index, torch.Tensor) and index.dtype == torch.bool and index.dim() < hidden.dim():
                return self.rows(hidden[index])
            if isinstance(index, tuple) and len(index) == 3 and index[0] is Ellipsis and index[2] == slice(None) and isinstance(index[1], slice):
                return self.rows(hidden[index])
        return self.compute()[index]

    def __getattr__(self, name):
        if name.startswith("liger_"):
            raise AttributeError(name)
        if name in ("device", "dtype") and self.liger_value is None:
            return torch.float32 if name == "dtype" and ("float", None) in self.liger_steps else getattr(self.liger_hidden, name)
        if name == "shape" and self.liger_value is None:
            return torch.Size((*self.liger_hidden.shape[:-1], head_linears(self.liger_head)[0].out_features))
        return getattr(self.compute(), name)

    def view(self, *shape):
        if self.liger_value is None and len(shape) == 2 and shape[0] == -1 and shape[1] == self.shape[-1]:
            return self.rows(self.liger_hidden.reshape(-1, self.liger_hidden.shape[-1]))
        return self.compute().view(*shape)

    def size(self, *dim):
        return self.shape[dim[0]] if dim else self.shape

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        first = args[0] if args else None
        if isinstance(first, Logits) and first.liger_value is None:
            if function is torch.tanh and not kwargs:
                return first.step("tanh")
            if function is nn.functional.cross_entropy and (loss := _cross_entropy(first, *args[1:], **(kwargs or {}))) is not None:
                return loss
        return function(*[computed(arg) for arg in args], **{name: computed(arg) for name, arg in (kwargs or {}).items()})


def _cross_entropy(logits, target, weight=None, size_average=None, ignore_index=-100, reduce=None, reduction="mean", label_smoothing=0.0):
    """torch's mean cross entropy of rows of logits that are not computed, or None where it is another."""
    usual = weight is None and size_average is None and reduce is None and reduction == "mean" and not label_smoothing
    factors = logits.factors()
    if factors is None or not usual or logits.liger_hidden.dim() != 2 or has_own_loss(logits.liger_call.model):
        return None
    return logits.liger_call.reduced(logits, factors, labels=None, shift_labels=target, ignore_index=ignore_index)


def computed(x):
    """`x`, but the logits of a promise."""
    return x.compute() if isinstance(x, Logits) else x


_STEPS = {
    "mul": lambda x, number: x * number,
    "div": lambda x, number: x / number,
    "tanh": lambda x, _: torch.tanh(x),
    "float": lambda x, _: x.float(),
}


def _forwarding(name):
    def method(self, *args):
        return getattr(self.compute(), name)(*[computed(arg) for arg in args])

    return method


_OPERATORS = "add radd sub rsub neg pow rpow matmul rmatmul rtruediv floordiv mod len iter eq ne lt le gt ge setitem bool float int"
for _name in _OPERATORS.split():
    setattr(Logits, f"__{_name}__", _forwarding(f"__{_name}__"))
Logits.__hash__ = object.__hash__


def _finished(call, output, outputs):
    """What a call without logits returns: the model's own output, without logits and with the accuracy and the predictions."""
    extras = {"token_accuracy": call.token_accuracy, "predicted_tokens": call.predicted_tokens}
    if isinstance(output, tuple):
        return (*[None if isinstance(part, Logits) else part for part in output], *[extra for extra in extras.values() if extra is not None])
    fields = {name: value for name, value in output.items() if name != "logits"}
    return _made(outputs[type(output)], {**fields, **extras}) if type(output) in outputs else _made(type(output), fields)


def _made(cls, values):
    """An output of a class, of its fields and of what a decorator of the forward has put beside them."""
    output = cls(**{name: value for name, value in values.items() if name in cls.__dataclass_fields__})
    for name, value in values.items():
        if name not in cls.__dataclass_fields__:
            output[name] = value
    return output


def _count_ahead(labels, shifted, ignore_index):
    """Shift the labels and start to copy the number of valid ones to the host: (shifted labels, a function that waits for it).

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
