from liger_kernel.operators.attention import (
    LigerFusedNeighborhoodAttention,
    LigerFusedNeighborhoodAttentionConfig,
    LigerFusedNeighborhoodAttentionFunction,
    LigerFusedNeighborhoodAttentionLayer,
)
