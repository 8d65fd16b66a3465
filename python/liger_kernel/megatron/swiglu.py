"""Megatron-LM's SwiGLU."""

import logging
from collections.abc import Callable

from torch import Tensor, nn

from liger_kernel.operators.activation import LigerFusedGateUpSiLUMulFunction

logger = logging.getLogger(__name__)


class LigerMegatronSwiGLU(nn.Module):
    """silu(gate) · up for input [..., 2F] = [gate, up] of two or three dimensions; the result is [..., F].

    fallback_impl: called with the same arguments where a bias, fp8_input_store or cpu_offload_input is given, which
    this class does not compute; without it they raise RuntimeError. in_place=True lets backward write the gradient over
    the input, so that a second backward raises RuntimeError. Raises ValueError for another number of dimensions and
    for an odd width.
    """

    def __init__(self, fallback_impl: Callable[..., Tensor] | None = None, in_place: bool = False) -> None:
        super().__init__()
        self.fallback_impl, self.in_place = fallback_impl, in_place
        self._logged: set[str] = set()

    def forward(
        self, input: Tensor, bias: Tensor | None = None, fp8_input_store: bool = False, cpu_offload_input: bool = False
    ) -> Tensor:
        asked = {"a bias": bias is not None, "fp8_input_store": fp8_input_store, "cpu_offload_input": cpu_offload_input}
        for reason in (name for name, given in asked.items() if given):
            return self._fallback(reason, input, bias, fp8_input_store, cpu_offload_input)
        if input.ndim not in (2, 3):
            raise ValueError(f"the input must be 2D or 3D, got {list(input.shape)}")
        if input.shape[-1] % 2:
            raise ValueError(f"the input's width must be even, got {input.shape[-1]}")
        return LigerFusedGateUpSiLUMulFunction.apply(input, self.in_place)

    def _fallback(self, reason, *arguments):
        if self.fallback_impl is None:
            raise RuntimeError(
                f"LigerMegatronSwiGLU does not compute {reason}: give it a fallback_impl, or patch Megatron-LM by "
                "apply_liger_kernel_to_megatron, which keeps the original for it"
            )
        if reason not in self._logged:
            self._logged.add(reason)
            logger.info("LigerMegatronSwiGLU: falling back to %s for %s", self.fallback_impl, reason)
        return self.fallback_impl(*arguments)
