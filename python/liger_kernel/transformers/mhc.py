from liger_kernel.operators.connections import (
    LigerMHC,
    LigerMHCCoeffsFunction,
    LigerMHCPostResFunction,
    LigerMHCPreFunction,
)
