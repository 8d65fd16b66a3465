"""Model outputs with two more fields, `token_accuracy` and `predicted_tokens`.

`Liger<name>` derives from transformers' `<name>` and is made when it is first asked for; AttributeError if the
installed transformers has no such output.
"""

import importlib
from dataclasses import make_dataclass
from typing import Optional

import torch

_FIELDS = [
    ("token_accuracy", Optional[torch.FloatTensor], None),
    ("predicted_tokens", Optional[torch.LongTensor], None),
]
_HOMES = {
    "CausalLMOutputWithPast": "transformers.modeling_outputs",
    "MoeCausalLMOutputWithPast": "transformers.modeling_outputs",
}


def __getattr__(name):
    stem = name.removeprefix("Liger")
    if stem == name or stem not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        base = getattr(importlib.import_module(_HOMES[stem]), stem)
    except ImportError as error:
        raise AttributeError(f"the installed transformers has no {stem}") from error
    made = make_dataclass(name, _FIELDS, bases=(base,), namespace={"__module__": __name__, "__doc__": base.__doc__})
    return globals().setdefault(name, made)
