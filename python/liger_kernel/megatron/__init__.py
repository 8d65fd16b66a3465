"""Megatron-LM's norms, SwiGLU and cross entropy on this library; docs/distributed.md."""

from liger_kernel.megatron.cross_entropy import LigerMegatronCrossEntropy
from liger_kernel.megatron.monkey_patch import apply_liger_kernel_to_megatron
from liger_kernel.megatron.rms_norm import LigerMegatronRMSNorm
from liger_kernel.megatron.swiglu import LigerMegatronSwiGLU

__all__ = ["LigerMegatronCrossEntropy", "LigerMegatronRMSNorm", "LigerMegatronSwiGLU", "apply_liger_kernel_to_megatron"]
