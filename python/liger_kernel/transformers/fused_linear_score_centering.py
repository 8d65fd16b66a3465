from liger_kernel.operators.score_centering import (
    ISCorrection,
    LigerFusedLinearScoreCenteringLoss,
    fused_linear_score_centering,
)

__all__ = ["ISCorrection", "LigerFusedLinearScoreCenteringLoss", "fused_linear_score_centering"]
