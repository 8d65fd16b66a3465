"""Model outputs with two more fields, `token_accuracy` and `predicted_tokens`.

`Liger<name>` derives from transformers' `<name>` and is made when it is first asked for; AttributeError if the
installed transformers has no such output.
"""

import importlib
import inspect
from dataclasses import fields, is_dataclass, make_dataclass
from typing import Optional

import torch

_FIELDS = [
    ("token_accuracy", Optional[torch.FloatTensor], None),
    ("predicted_tokens", Optional[torch.LongTensor], None),
]
_FAMILIES = {
    "Gemma3": "gemma3", "Gemma4": "gemma4", "Glm4vMoe": "glm4v_moe", "InternVL": "internvl", "Llava": "llava",
    "MuseGlimmer": "muse_glimmer", "PaliGemma": "paligemma", "Qwen2VL": "qwen2_vl", "Qwen2_5_VL": "qwen2_5_vl",
    "Qwen3VL": "qwen3_vl", "Qwen3VLMoe": "qwen3_vl_moe", "Qwen3_5": "qwen3_5", "Qwen3_5Moe": "qwen3_5_moe",
}  # fmt: skip
_HOMES = {
    "CausalLMOutputWithPast": "transformers.modeling_outputs",
    "MoeCausalLMOutputWithPast": "transformers.modeling_outputs",
    **{
        f"{stem}CausalLMOutputWithPast": f"transformers.models.{name}.modeling_{name}"
        for stem, name in _FAMILIES.items()
    },
}
_made: dict[type, type] = {}


def extension(base):
    """The output class that adds the two fields to `base`; pickle finds it here by its name."""
    if base not in _made:
        name = f"Liger{base.__name__}"
        _made[base] = make_dataclass(
            name, _FIELDS, bases=(base,), namespace={"__module__": __name__, "__doc__": base.__doc__}
        )
        globals()[name] = _made[base]
    return _made[base]


def extensions(forward) -> dict:
    """The outputs that the module of `forward` names and that have a loss and logits -> their extensions."""
    from transformers.utils import ModelOutput

    named = getattr(inspect.unwrap(forward), "__globals__", {}).values()
    classes = [cls for cls in named if isinstance(cls, type) and issubclass(cls, ModelOutput) and is_dataclass(cls)]
    return {
        cls: extension(cls)
        for cls in classes
        if {"loss", "logits"} <= {field.name for field in fields(cls)} and cls not in _made.values()
    }


def __getattr__(name):
    stem = name.removeprefix("Liger")
    if stem == name or stem not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        base = getattr(importlib.import_module(_HOMES[stem]), stem)
    except (ImportError, AttributeError) as error:
        raise AttributeError(f"the installed transformers has no {stem}") from error
    return extension(base)
