"""LigerORPOTrainer, and the helper that others import from here, which needs no TRL."""

from liger_kernel.chunked_loss import LigerFusedLinearORPOLoss
from liger_kernel.transformers.fsdp import _FSDPForwardRedirection


def __getattr__(name):
    if name != "LigerORPOTrainer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from liger_kernel.transformers.trainer.orpo import LigerORPOTrainer

    return LigerORPOTrainer
