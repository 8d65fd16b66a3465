from liger_kernel.operators.activation import LigerSiLUMulFunction
from liger_kernel.operators.experts import LigerExperts, LigerFusedMoEFunction
from liger_kernel.operators.mlp import (
    LigerBlockSparseTop2MLP,
    LigerClampedSwiGLUMLP,
    LigerClampedSwishMLP,
    LigerFalconH1SwiGLUMLP,
    LigerGraniteSwiGLUMLP,
    LigerHunyuanV1SwiGLUMLP,
    LigerModernBertMLP,
    LigerPhi3SwiGLUMLP,
    LigerQwen3MoeSwiGLUMLP,
    LigerSeedOssSwiGLUMLP,
    LigerSwiGLUMLP,
)

LigerSwiGLUMLPForMuseGlimmer = LigerSwiGLUMLP

__all__ = [
    "LigerBlockSparseTop2MLP", "LigerClampedSwiGLUMLP", "LigerClampedSwishMLP", "LigerExperts",
    "LigerFalconH1SwiGLUMLP", "LigerGraniteSwiGLUMLP", "LigerHunyuanV1SwiGLUMLP", "LigerModernBertMLP",
    "LigerPhi3SwiGLUMLP", "LigerQwen3MoeSwiGLUMLP", "LigerSeedOssSwiGLUMLP", "LigerSwiGLUMLP",
    "LigerSwiGLUMLPForMuseGlimmer",
]  # fmt: skip
