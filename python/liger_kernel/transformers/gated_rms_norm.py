from liger_kernel.operators.gated_norm import (
    LigerRMSNormGated,
    LigerRMSNormGatedForKimiLinear,
    LigerRMSNormGatedForMamba2,
)  # fmt: skip

__all__ = ["LigerRMSNormGated", "LigerRMSNormGatedForKimiLinear", "LigerRMSNormGatedForMamba2"]
