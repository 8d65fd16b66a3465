"""Logits that are not computed unless somebody needs their values."""

import functools
import inspect
import types

import torch
from torch import nn

from liger_kernel.transformers.head import head_linears
from liger_kernel.transformers.patching.place import names_in, with_globals


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
        """(scale, cap) if these are cap · tanh(scale · head(hidden) / cap), or scale · head(hidden) for cap None."""
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

    def tanh(self):
        return self.liger_value.tanh() if self.liger_value is not None else self.step("tanh")

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
            if (
                isinstance(index, tuple)
                and len(index) == 3
                and index[0] is Ellipsis
                and index[2] == slice(None)
                and isinstance(index[1], slice)
            ):
                return self.rows(hidden[index])
        return self.compute()[index]

    def __getattr__(self, name):
        if name.startswith("liger_"):
            raise AttributeError(name)
        if name in ("device", "dtype") and self.liger_value is None:
            return (
                torch.float32
                if name == "dtype" and ("float", None) in self.liger_steps
                else getattr(self.liger_hidden, name)
            )
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
            if (
                function is nn.functional.cross_entropy
                and (loss := _cross_entropy(first, *args[1:], **(kwargs or {}))) is not None
            ):
                return loss
        return function(
            *[computed(arg) for arg in args], **{name: computed(arg) for name, arg in (kwargs or {}).items()}
        )


def _cross_entropy(
    logits,
    target,
    weight=None,
    size_average=None,
    ignore_index=-100,
    reduce=None,
    reduction="mean",
    label_smoothing=0.0,
):
    """torch's mean cross entropy of rows of logits that are not computed, or None where it is another."""
    usual = weight is None and size_average is None and reduce is None and reduction == "mean" and not label_smoothing
    factors = logits.factors()
    if factors is None or not usual or logits.liger_hidden.dim() != 2 or logits.liger_call.own_loss():
        return None
    call = logits.liger_call
    arguments = {"labels": None, "shift_labels": target, "ignore_index": ignore_index}
    loss = call.reduced(logits, factors, **arguments, **call.counted(target, ignore_index))
    return loss if torch.is_autocast_enabled(loss.device.type) else loss.to(logits.dtype)  # as torch's has it


_LOSS_OPTIONS = ("weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")


def _cross_entropy_loss(*args, **options):
    """What stands for torch.nn.CrossEntropyLoss."""
    return functools.partial(nn.functional.cross_entropy, **dict(zip(_LOSS_OPTIONS, args)), **options)


def _with(module, **names):
    copy = types.ModuleType(module.__name__, module.__doc__)
    vars(copy).update(vars(module), **names)
    return copy


_nn = _with(nn, CrossEntropyLoss=_cross_entropy_loss, functional=_with(nn.functional, tanh=torch.tanh))


def traceable(forward):
    """A copy of a forward that torch's compiler traces with a promise of logits, or the forward where that one does.

    The compiler has special rules for torch.nn.CrossEntropyLoss and torch.nn.functional.tanh, which take tensors alone.
    The copy calls functions for which the compiler asks `__torch_function__`.
    """
    names = names_in(forward)
    if not names & {"CrossEntropyLoss", "tanh"}:
        return forward
    found = inspect.unwrap(forward).__globals__
    known = {"CrossEntropyLoss": (nn.CrossEntropyLoss, _cross_entropy_loss), "nn": (nn, _nn)}
    changed = {name: ours for name, (torchs, ours) in known.items() if name in names and found.get(name) is torchs}
    return changed and with_globals(forward, changed) or forward


def computed(x):
    """`x`, but the logits of a promise, also in a list or a tuple of tensors."""
    if type(x) in (list, tuple):
        return type(x)([computed(part) for part in x])
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


_OPERATORS = (
    "neg pos abs invert add radd sub rsub pow rpow matmul rmatmul rtruediv floordiv mod "
    "len iter contains setitem eq ne lt le gt ge bool float int"
)
for _name in _OPERATORS.split():
    setattr(Logits, f"__{_name}__", _forwarding(f"__{_name}__"))
