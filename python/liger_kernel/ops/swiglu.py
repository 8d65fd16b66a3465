"""SwiGLU: silu(a) · b (Shazeer 2020, arXiv:2002.05202)."""

import torch

from liger_kernel._library import ops
from liger_kernel.ops.activations import SILU
from liger_kernel.ops.utils import first_derivative_only, placed_as, promoted


class LigerSiLUMulFunction:
    @staticmethod
    def apply(a, b, gate_multiplier=1.0, down_multiplier=1.0):
        """silu(gate_multiplier · a) · b · down_multiplier for a, b of one shape, in the dtype that torch's product has;
        neither is changed. A plain tensor beside a DTensor is placed as that."""
        c = ops.gated(*promoted(placed_as(a, b), placed_as(b, a)), SILU, float(gate_multiplier))
        return c if down_multiplier == 1 else c * float(down_multiplier)


class _InPlaceGateUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y):
        ctx.save_for_backward(y)
        ctx.done = False
        return ops.gated_packed_forward(y, SILU, 1.0)

    @staticmethod
    @first_derivative_only
    def backward(ctx, dc):
        if ctx.done:
            raise RuntimeError("backward ran twice, and in_place=True has put the gradient where the input was")
        ctx.done = True
        (y,) = ctx.saved_tensors
        ops.gated_packed_backward_(dc, y, SILU, 1.0)
        return y


class LigerFusedGateUpSiLUMulFunction:
    @staticmethod
    def apply(y, in_place=False):
        """silu(gate) · up for y [..., 2F] = [gate, up]; the result is [..., F]. Raises ValueError where 2F is odd.

        in_place=True lets backward write the gradient over y; a second backward then raises RuntimeError.
        """
        return _InPlaceGateUp.apply(y.contiguous()) if in_place else ops.gated_packed(y, SILU, 1.0)


def swiglu_forward(a, b, gate_multiplier=1.0):
    """(a, b, c) with a and b as rows, without autograd."""
    a, b = a.reshape(-1, a.shape[-1]), b.reshape(-1, b.shape[-1])
    return a, b, ops.gated_forward(a, b, SILU, float(gate_multiplier))


def swiglu_backward(a, b, dc, gate_multiplier=1.0):
    """(da, db), in fresh memory, in dc's shape."""
    da, db = ops.gated_backward(dc.reshape(a.shape), a, b, SILU, float(gate_multiplier))
    return da.reshape(dc.shape), db.reshape(dc.shape)


def swiglu_fused_gate_up_forward(y):
    """(y as rows, c), without autograd; raises ValueError for an odd width."""
    y = y.reshape(-1, y.shape[-1])
    return y, ops.gated_packed_forward(y, SILU, 1.0)


def swiglu_fused_gate_up_backward(y, dc, in_place=False):
    """dy as rows; with in_place=True it is written over y."""
    dc = dc.reshape(-1, dc.shape[-1])
    if not in_place:
        return ops.gated_packed_backward(dc, y, SILU, 1.0)
    ops.gated_packed_backward_(dc, y, SILU, 1.0)
    return y
