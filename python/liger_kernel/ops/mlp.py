"""SwiGLU MLP that keeps its input alone for backward; formula in liger/ops.h."""

from liger_kernel._library import ops
from liger_kernel.ops.activations import SILU


class LigerMLPFunction:
    @staticmethod
    def apply(input, gate_weight, up_weight, down_weight, gate_multiplier=1.0, down_multiplier=1.0):
        """(silu(gate_multiplier · input gate_weightᵀ) · input up_weightᵀ) down_weightᵀ · down_multiplier.

        input [..., D]; gate_weight and up_weight [I, D], down_weight [D, I], in input's dtype or under autocast; any
        strides. backward makes gate and up again. Raises TypeError where dtypes differ.
        """
        return ops.fused_mlp(
            input,
            gate_weight,
            up_weight,
            down_weight,
            None,
            None,
            None,
            SILU,
            float(gate_multiplier),
            float(down_multiplier),
            0,
        )
