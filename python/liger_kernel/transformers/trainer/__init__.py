"""Trainers of TRL on the losses without logits."""

__all__ = ["LigerORPOTrainer"]


def __getattr__(name):
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from liger_kernel.transformers.trainer import orpo_trainer

    return getattr(orpo_trainer, name)
