"""Fused-loss forwards and losses; `model.<module>.lce_forward` is made from the family's row when it is asked for."""

import sys

from liger_kernel.compat import model_forwards

for _name, _classes in model_forwards.forwards().items():
    globals()[_name] = sys.modules[f"{__name__}.{_name}"] = model_forwards.module_of(_name, _classes)
