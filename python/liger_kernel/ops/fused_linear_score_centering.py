from liger_kernel.operators.score_centering import (
    DUAL_CLIP,
    ISCorrection,
    LigerFusedLinearScoreCenteringFunction,
    fused_linear_score_centering,
)

__all__ = ["DUAL_CLIP", "ISCorrection", "LigerFusedLinearScoreCenteringFunction", "fused_linear_score_centering"]
