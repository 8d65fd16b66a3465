from liger_kernel.compat.mhc import (
    mhc_mm_norm_bwd,
    mhc_mm_norm_fwd,
    mhc_post_res_bwd,
    mhc_post_res_fwd,
    mhc_pre_bwd,
    mhc_pre_fwd,
    mhc_sinkhorn_bwd,
    mhc_split_sinkhorn_fwd,
)
from liger_kernel.research.connections import LigerMHCCoeffsFunction, LigerMHCPostResFunction, LigerMHCPreFunction
