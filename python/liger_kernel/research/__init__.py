"""Operators that hardly any model is trained with: hyper-connections, attention residuals, multi-token and neighborhood
attention, GroupNorm, PolyNorm, DyT, sparsemax, and products with weights of two bits.

Their public names are in liger_kernel.ops and liger_kernel.transformers, which import them when they are asked for one.
Nothing else in this package imports them.
"""

import torch

from liger_kernel._library import RESEARCH, ops

if not RESEARCH:
    raise ImportError("this libliger has no research operators: it was built with LIGER_RESEARCH=OFF")

if torch.distributed.is_available():
    from liger_kernel import _dtensor

    _dtensor.register(
        ops,
        {
            "group_norm_forward": ("nww", "nrr"),
            "group_norm_backward": ("nnwwrr", "123"),
            "poly_norm_forward": ("xww", "xr"),
            "poly_norm_backward": ("xxwwr", "123"),
            "dyt_forward": ("xwww", "x"),
            "dyt_backward": ("xxwww", "1234"),
        },
    )
