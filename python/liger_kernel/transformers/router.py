from liger_kernel.operators.router import (
    LigerBeamRouter,
    LigerDeepseekV2Router,
    LigerDeepseekV3Router,
    LigerErnieRouter,
    LigerFlintRouter,
    LigerGraniteRouter,
    LigerHYV3Router,
    LigerJambaRouter,
    LigerMiniMaxM2Router,
    LigerMiniMaxM3Router,
    LigerMistralLarge4Router,
    LigerMixtralRouter,
    LigerNormalisedRouter,
    LigerPrivacyFilterRouter,
    LigerRouter,
    LigerSoftmaxRouter,
    liger_load_balancing_loss_func,
)

__all__ = [
    "LigerBeamRouter", "LigerDeepseekV2Router", "LigerDeepseekV3Router", "LigerErnieRouter", "LigerFlintRouter",
    "LigerGraniteRouter", "LigerHYV3Router", "LigerJambaRouter", "LigerMiniMaxM2Router", "LigerMiniMaxM3Router",
    "LigerMistralLarge4Router", "LigerMixtralRouter", "LigerNormalisedRouter", "LigerPrivacyFilterRouter",
    "LigerRouter", "LigerSoftmaxRouter", "liger_load_balancing_loss_func",
]  # fmt: skip
