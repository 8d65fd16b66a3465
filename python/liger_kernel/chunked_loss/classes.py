"""The classes of a loss, made of its row in losses.py: a torch.autograd.Function and a torch.nn.Module."""

import dataclasses
import functools
import types
from collections.abc import Callable

import torch

from liger_kernel.signatures import required, takes

#: What a base calls an argument that the API's other signatures call otherwise.
BASE_NAMES = {"lin_weight": "weight", "true_labels": "target"}


def breaks_graph(function):
    """Decorator: torch.compile breaks its graph here, instead of tracing a Function whose forward makes gradients."""

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        if torch.compiler.is_compiling():
            torch._dynamo.graph_break()
        return function(*args, **kwargs)

    return wrapper


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loss:
    """A loss on hidden states: what its two classes do not share with those of other losses.

    Parameters are {name: default} in the order of the API, REQUIRED for those without a default.
    """

    name: str = ""  # of the classes: LigerFusedLinear<name>Function and LigerFusedLinear<name>Loss
    base: type  # the Function whose forward and backward do the work
    hooks: dict[str, Callable] = dataclasses.field(default_factory=dict)  # static methods that the base asks for
    arguments: dict  # parameters of the Function's forward
    call: dict  # parameters of the module's forward; the other arguments are the module's options
    first: tuple[str, ...] = ()  # the options that the module's constructor has first, if not in the arguments' order
    module_defaults: dict = dataclasses.field(default_factory=dict)  # where they are not the Function's
    check: Callable = lambda module: None  # raises where the options of a new module do not go together
    module_base: type = torch.nn.Module
    attributes: dict = dataclasses.field(default_factory=dict)  # of the module's class
    doc: str  # of the module: what it returns and raises
    formula: str = ""  # of the Function: what it computes,
    paper: str = ""  # and who proposed that

    def function(self, module):
        """The Function, as a class of the Python module of this name."""
        cls = f"LigerFusedLinear{self.name}Function"
        # The base by its name: torch.compile cannot trace super().
        forward = takes(required("cls", "ctx") | self.arguments, renamed=BASE_NAMES)(self.base.forward)
        _name(forward, module, f"{cls}.forward")
        members = {name: staticmethod(hook) for name, hook in self.hooks.items()}
        members |= dict(forward=classmethod(breaks_graph(forward)))
        doc = f"{self.formula} ({self.paper})." if self.paper else f"{self.formula}."
        return _class(cls, module, self.base, doc, members)

    def module(self, function, name=None, module=None):
        """The Function as a class of torch modules, beside it or in a Python module: the options are attributes."""
        called, check = {BASE_NAMES.get(name, name): name for name in self.call}, self.check
        arguments = {BASE_NAMES.get(name, name): default for name, default in self.arguments.items()}
        options = {n: arguments[n] for n in (*self.first, *arguments) if n not in called} | self.module_defaults
        sources = [(called.get(name), name) for name in arguments]

        @takes(required("self") | options)
        def __init__(self, **values):
            torch.nn.Module.__init__(self)
            for option, value in values.items():
                setattr(self, option, value)
            check(self)

        @takes(required("self") | self.call)
        def forward(self, **given):
            return self.function.apply(*[given[name] if name else getattr(self, option) for name, option in sources])

        name, module = name or f"LigerFusedLinear{self.name}Loss", module or function.__module__
        for method in (__init__, forward):
            _name(method, module, f"{name}.{method.__name__}")
        members = dict(function=function, __init__=__init__, forward=forward) | self.attributes
        return _class(name, module, self.module_base, self.doc, members)


def _name(function, module, qualname):
    function.__module__, function.__qualname__ = module, qualname


def _class(name, module, base, doc, members):
    """What a class statement in this Python module makes: pickle and copies find it by these names."""
    members |= dict(__module__=module, __doc__=doc)
    return types.new_class(name, (base,), exec_body=lambda body: body.update(members))
