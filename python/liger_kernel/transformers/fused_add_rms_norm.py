"""RMSNorm of the sum of a residual stream and a block's output."""

from liger_kernel.ops import LigerFusedAddRMSNormFunction
from liger_kernel.transformers.rms_norm import LigerRMSNorm


class LigerFusedAddRMSNorm(LigerRMSNorm):
    """(rms_norm(s), s) for s = hidden_states + residual; options as LigerRMSNorm."""

    def __init__(self, hidden_size, eps=1e-6, offset=0.0, casting_mode="llama", init_fn="ones", in_place=False):
        super().__init__(hidden_size, eps, offset, casting_mode, init_fn, in_place)

    def forward(self, hidden_states, residual):
        return LigerFusedAddRMSNormFunction.apply(
            hidden_states, residual, self.weight, self.variance_epsilon, self.offset, self.casting_mode, self.in_place
        )
