from liger_kernel.research.attention import (
    LigerFusedNeighborhoodAttention,
    LigerFusedNeighborhoodAttentionConfig,
    LigerFusedNeighborhoodAttentionFunction,
    LigerFusedNeighborhoodAttentionLayer,
)
