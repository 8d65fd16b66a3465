"""RMSNorm with a scale and a shift for each sample or token."""

from liger_kernel.ops import LigerModulatedRMSNormFunction
from liger_kernel.transformers.rms_norm import LigerRMSNorm


class LigerModulatedRMSNorm(LigerRMSNorm):
    """rms_norm(x) · (1 + scale) + shift; options as LigerRMSNorm, shapes as LigerModulatedRMSNormFunction."""

    def __init__(
        self,
        hidden_size,
        eps=1e-6,
        offset=0.0,
        casting_mode="llama",
        init_fn="ones",
        in_place=True,
        elementwise_affine=True,
    ):
        super().__init__(
            hidden_size, eps, offset, casting_mode, init_fn, in_place, elementwise_affine=elementwise_affine
        )

    def forward(self, hidden_states, scale, shift=None):
        return LigerModulatedRMSNormFunction.apply(
            hidden_states,
            self.weight,
            scale,
            shift,
            self.variance_epsilon,
            self.offset,
            self.casting_mode,
            self.in_place,
        )
