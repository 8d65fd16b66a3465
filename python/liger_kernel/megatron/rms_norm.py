"""Megatron-LM's RMSNorm."""

from typing import Any

import torch
from torch import Tensor, nn

from liger_kernel.operators.norm import LigerRMSNormFunction


class LigerMegatronRMSNorm(nn.Module):
    """y = x / rms(x) · (weight + offset) over the last dimensions, `hidden_size`, in float and rounded once, as
    torch.nn.RMSNorm rounds, which Megatron-LM's local layers have.

    config: of which `normalization`, `sequence_parallel` and `layernorm_zero_centered_gamma` are read, where it has
    them. With zero_centered_gamma, here or in config, the weight starts at 0 and the offset is 1.
    persist_layer_norm and normalization are accepted and not used. Raises ValueError for a config of another norm.
    """

    def __init__(
        self, config: Any, hidden_size: int | tuple[int, ...], eps: float = 1e-5, persist_layer_norm: bool = False,
        zero_centered_gamma: bool = False, normalization: str = "RMSNorm",
    ) -> None:  # fmt: skip
        super().__init__()
        if (asked := getattr(config, "normalization", "RMSNorm")) != "RMSNorm":
            raise ValueError(f"LigerMegatronRMSNorm is for normalization RMSNorm, got {asked!r}")
        self.config, self.eps = config, eps
        self.hidden_size = torch.Size((hidden_size,) if isinstance(hidden_size, int) else hidden_size)
        self.zero_centered_gamma = zero_centered_gamma or getattr(config, "layernorm_zero_centered_gamma", False)
        self._offset = 1.0 if self.zero_centered_gamma else 0.0
        self.weight = nn.Parameter(torch.empty(self.hidden_size))
        self.weight.sequence_parallel = bool(getattr(config, "sequence_parallel", False))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, 1.0 - self._offset)

    def forward(self, x: Tensor) -> Tensor:
        rows, weight = x, self.weight
        if len(self.hidden_size) > 1:
            rows, weight = x.flatten(-len(self.hidden_size)), weight.flatten()
        return LigerRMSNormFunction.apply(rows, weight, self.eps, self._offset, "gemma", False).view(x.shape)

    def extra_repr(self) -> str:
        return f"{tuple(self.hidden_size)}, eps={self.eps}, zero_centered_gamma={self.zero_centered_gamma}"
