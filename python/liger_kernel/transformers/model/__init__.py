"""Fused-loss forwards and losses; `model.<module>.lce_forward` is made from the family's row when it is asked for."""

import sys

from liger_kernel.transformers.model._forwards import forwards, module_of

for _name, _classes in forwards().items():
    globals()[_name] = sys.modules[f"{__name__}.{_name}"] = module_of(_name, _classes)
