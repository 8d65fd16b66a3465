"""A plugin of Axolotl: its DPO and GRPO on this library's operators."""

import functools
import logging
from typing import Any

logger = logging.getLogger(__name__)


@functools.cache
def _plugin() -> Any:
    from axolotl.integrations.base import BasePlugin

    class LigerTRLPlugin(BasePlugin):
        """Where `dpo_use_liger_kernel` or `trl.use_liger_loss` is true, TRL's fused head runs on linear_log_prob, and
        reference models have the trained model's layers: liger_kernel.trl.patch(), before a trainer is made.

        Axolotl 0.21 loads it by itself where this package is installed, by the entry point of the group
        axolotl.plugins; `plugins: [liger_kernel.axolotl.LigerTRLPlugin]` loads it in others. Up to Axolotl 0.19, TRL
        takes these losses from liger_kernel.chunked_loss, and there is nothing to replace.
        """

        def pre_model_load(self, cfg: Any) -> None:
            if cfg.dpo_use_liger_kernel or (cfg.trl and cfg.trl.use_liger_loss):
                from liger_kernel import trl

                logger.info("%s", trl.patch())

    return LigerTRLPlugin


def __getattr__(name: str) -> Any:
    if name == "LigerTRLPlugin":  # whose base class is Axolotl's
        return _plugin()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
