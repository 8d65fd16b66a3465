from liger_kernel.research.connections import (
    LigerMHC,
    LigerMHCCoeffsFunction,
    LigerMHCPostResFunction,
    LigerMHCPreFunction,
    liger_mhc_coeffs,
    liger_mhc_post_res,
    liger_mhc_pre,
)
