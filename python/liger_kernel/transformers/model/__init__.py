"""Fused-loss forwards and losses; `model.<module>.lce_forward` is made from the family's row when it is asked for."""

import importlib
import re
import sys
import types

from liger_kernel.transformers.model import _forwards

# What callers import from any of these modules -> where it is.
_SHARED = {
    "lce_maybe_trainable_lm_head|_liger_for_causal_lm_loss": "liger_kernel.transformers.head",
    "LigerForCausalLMLoss|unpack_cross_entropy_result": f"{__name__}.loss_utils",
    r"Liger\w*CausalLMOutputWithPast": f"{__name__}.output_classes",
    "PEFT_AVAILABLE": "liger_kernel.utils",
}


def _forwards_module(name, classes):
    """The module `model.<name>`; `classes`: name of a forward -> (family, class)."""
    module = types.ModuleType(f"{__name__}.{name}", f"The fused-loss forward of {name}.")

    def __getattr__(attribute):
        # Before any import: inspect.getmodule asks all modules for __file__, also while transformers is being imported.
        home = next((home for names, home in _SHARED.items() if re.fullmatch(names, attribute)), None)
        if home is not None:
            return getattr(importlib.import_module(home), attribute)
        if attribute not in classes:
            raise AttributeError(f"module {module.__name__!r} has no attribute {attribute!r}")
        causal_lm = importlib.import_module("liger_kernel.transformers.causal_lm")
        return causal_lm.forward_of(*classes[attribute], _forwards.parameters(name, attribute))

    module.__getattr__ = __getattr__  # type: ignore[method-assign]
    return module


for _name, _classes in _forwards.forwards().items():
    globals()[_name] = sys.modules[f"{__name__}.{_name}"] = _forwards_module(_name, _classes)
