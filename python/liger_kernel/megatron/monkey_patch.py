"""Puts this library's norms, cross entropy and SwiGLU into Megatron-LM."""

import functools
import importlib
import logging
from typing import Any

from liger_kernel.megatron import cross_entropy as _cross_entropy
from liger_kernel.megatron.rms_norm import LigerMegatronRMSNorm
from liger_kernel.operators.activation import LigerFusedGateUpSiLUMulFunction
from liger_kernel.transformers.patching.report import Report

logger = logging.getLogger(__name__)


def apply_liger_kernel_to_megatron(rms_norm: bool = True, cross_entropy: bool = False, swiglu: bool = False) -> Report:
    """Patch Megatron-LM (megatron-core 0.14 to 0.19), before the model is built, and return a Report.

    Args:
        rms_norm: RMSNorm of local layers and of the block's end, where that is torch's; a choice of Transformer Engine
            or Apex stays.
        cross_entropy: the vocabulary-parallel cross entropy, fused and not, at any tensor-parallel size.
        swiglu: SwiGLU without a bias; with fp8 or offloaded inputs the original runs.

    What replaces an original has it as `__wrapped__`, and `__liger_patched__`; a second call changes nothing. Raises
    ImportError where Megatron-LM is not installed, or has not what is to be patched.
    """
    report = Report("megatron")
    if rms_norm:
        _patch_norms(report)
    if cross_entropy:
        _patch_cross_entropy(report)
    if swiglu:
        _patch_swiglu(report)
    return report


def _replace(report, switch, owner, name, make):
    """Put make(original) in the place of owner.name, marked, unless it is marked already."""
    original, where = getattr(owner, name), f"{owner.__name__}.{name}"
    if getattr(original, "__liger_patched__", False):
        report.note(switch, where, original.__name__)
        return
    new = make(original)
    new.__liger_patched__, new.__wrapped__ = True, original
    report.rebind(owner, name, new, switch, where, new.__name__)


def _require(module, name):
    """A module of Megatron-LM that has `name`."""
    path = f"{module}.{name}"
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"{path} cannot be imported: this patch requires megatron-core") from error
    if not hasattr(found, name):
        raise ImportError(f"megatron-core has no {path}: the symbol path may have changed")
    return found


def _patch_norms(report):
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.transformer import transformer_block
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    def of_provider(original):
        @functools.wraps(original)
        def layer_norm(self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False, **kwargs: Any):
            if rms_norm:
                return LigerMegatronRMSNorm
            more = {"has_residual": True} if has_residual else {}  # which older versions do not have
            return original(self, rms_norm=rms_norm, for_qk=for_qk, **more, **kwargs)

        return layer_norm

    def of_block(original):
        class Norm:
            """RMSNorm by this library, any other by Megatron-LM."""

            def __new__(cls, config, hidden_size, eps=1e-5, **kwargs):
                rms = config.normalization == "RMSNorm"
                return (LigerMegatronRMSNorm if rms else original)(
                    config=config, hidden_size=hidden_size, eps=eps, **kwargs
                )

        return Norm

    _replace(report, "rms_norm", LocalSpecProvider, "layer_norm", of_provider)
    block_norm = transformer_block.LayerNormImpl
    if block_norm is WrappedTorchNorm or getattr(block_norm, "__liger_patched__", False):
        _replace(report, "rms_norm", transformer_block, "LayerNormImpl", of_block)
    else:
        report.skip("rms_norm", "transformer_block.LayerNormImpl", f"it is {block_norm.__name__}")


#: What tells an argument that was not given from every value.
_NOT_GIVEN: Any = object()


def _patch_cross_entropy(report):
    fused = _require("megatron.core.fusions.fused_cross_entropy", "fused_vocab_parallel_cross_entropy")
    plain = _require("megatron.core.tensor_parallel.cross_entropy", "vocab_parallel_cross_entropy")
    make = _cross_entropy.LigerMegatronCrossEntropy
    loss = make()

    def of_fused(original):
        @functools.wraps(original)
        def fused_vocab_parallel_cross_entropy(vocab_parallel_logits, target, tp_group=None):
            return loss(vocab_parallel_logits, target, tp_group=tp_group)

        return fused_vocab_parallel_cross_entropy

    def of_plain(original):
        @functools.wraps(original)
        def vocab_parallel_cross_entropy(vocab_parallel_logits, target, label_smoothing=_NOT_GIVEN, tp_group=None):
            of_call = loss if label_smoothing is _NOT_GIVEN else make(label_smoothing=label_smoothing)
            return of_call(vocab_parallel_logits, target, tp_group=tp_group)

        return vocab_parallel_cross_entropy

    _replace(report, "cross_entropy", fused, "fused_vocab_parallel_cross_entropy", of_fused)
    _replace(report, "cross_entropy", plain, "vocab_parallel_cross_entropy", of_plain)


def _patch_swiglu(report):
    module = _require("megatron.core.fusions.fused_bias_swiglu", "SwiGLUFunction")

    def of_function(original):
        class SwiGLUFunction:
            """silu(gate) · up of [..., 2F] = [gate, up]."""

            logged: set[str] = set()

            @classmethod
            def apply(cls, input, fp8_input_store=False, cpu_offload_input=False):
                for reason, asked in (("fp8_input_store", fp8_input_store), ("cpu_offload_input", cpu_offload_input)):
                    if not asked:
                        continue
                    if reason not in cls.logged:
                        cls.logged.add(reason)
                        logger.info("SwiGLU is Megatron-LM's own for %s", reason)
                    return original.apply(input, fp8_input_store, cpu_offload_input)
                return LigerFusedGateUpSiLUMulFunction.apply(input, False)

        return SwiGLUFunction

    _replace(report, "swiglu", module, "SwiGLUFunction", of_function)
