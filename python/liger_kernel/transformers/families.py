"""The supported model families, as data: one row each.

A row names what the family's Hugging Face module calls its parts and what replaces them. Supporting another family of
the same kinds of parts takes one row here and one row in the list of tiny configurations of the tests.
"""

import importlib
from dataclasses import dataclass, field

from liger_kernel.transformers.graft import warn_once


@dataclass(frozen=True)
class Swap:
    """A replacement: the switch that turns it on, where it is in this package, and the activations it can stand for."""

    switch: str
    target: str
    activations: tuple[str, ...] = ()

    def load(self):
        """The class or function that replaces."""
        module, _, name = self.target.rpartition(".")
        return getattr(importlib.import_module(f"liger_kernel.transformers.{module}"), name)


@dataclass(frozen=True)
class CausalLM:
    """How a model gets its logits: `head(base(...))`, soft-capped by the number that the config calls `softcap`."""

    base: str = "model"
    head: str = "lm_head"
    softcap: str | None = None
    output: str = "LigerCausalLMOutputWithPast"


@dataclass(frozen=True)
class Family:
    """One model family.

    Args:
        name: the suffix of `apply_liger_kernel_to_<name>` and the name of the family's package in transformers.
        swaps: attribute of the modeling module -> what replaces it.
        loss: class of the modeling module -> how it gets its logits.
        model_types: values of `config.model_type` that mean this family; the name itself if empty.
        off: switches that are off unless asked for.
    """

    name: str
    swaps: dict[str, Swap]
    loss: dict[str, CausalLM] = field(default_factory=dict)
    model_types: tuple[str, ...] = ()
    off: tuple[str, ...] = ("cross_entropy",)

    @property
    def module(self) -> str:
        return f"transformers.models.{self.name}.modeling_{self.name}"

    def namespace(self):
        """The modeling module, or its stand-in in the attribute of its package; ImportError if there is none."""
        importlib.import_module(self.module)
        package, _, name = self.module.rpartition(".")
        return getattr(importlib.import_module(package), name)

    @property
    def switches(self) -> dict[str, bool]:
        """The boolean keywords of the family's function, in the order of its signature, with their defaults."""
        used = {swap.switch for swap in self.swaps.values()}
        if self.loss:
            used |= {"cross_entropy", "fused_linear_cross_entropy"}
        return {switch: switch not in self.off for switch in SWITCHES if switch in used}


SWITCHES = {
    "rope": "rotary position embedding",
    "cross_entropy": "cross entropy on materialised logits; excludes fused_linear_cross_entropy",
    "fused_linear_cross_entropy": "the loss computed inside the language-model head, without materialised logits",
    "layer_norm": "LayerNorm",
    "rms_norm": "RMSNorm",
    "swiglu": "the SwiGLU feed-forward block",
    "geglu": "the GeGLU feed-forward block",
}

LLAMA = Swap("rms_norm", "rms_norm.LigerRMSNorm")
GEMMA = Swap("rms_norm", "rms_norm.LigerRMSNormForGemma")
GEMMA2 = Swap("rms_norm", "rms_norm.LigerRMSNormForGemma2")
SWIGLU = Swap("swiglu", "swiglu.LigerSwiGLUMLP", ("silu", "swish"))
GEGLU = Swap("geglu", "geglu.LigerGEGLUMLP", ("gelu_pytorch_tanh", "gelu_new"))
ROPE = {"apply_rotary_pos_emb": Swap("rope", "rope.liger_rotary_pos_emb")}

# fmt: off
FAMILIES = {row.name: row for row in (
    Family("llama", {"LlamaRMSNorm": LLAMA, "LlamaMLP": SWIGLU, **ROPE}, {"LlamaForCausalLM": CausalLM()}),
    Family("mistral", {"MistralRMSNorm": LLAMA, "MistralMLP": SWIGLU, **ROPE}, {"MistralForCausalLM": CausalLM()}),
    Family("qwen2", {"Qwen2RMSNorm": LLAMA, "Qwen2MLP": SWIGLU, **ROPE}, {"Qwen2ForCausalLM": CausalLM()}),
    Family("qwen3", {"Qwen3RMSNorm": LLAMA, "Qwen3MLP": SWIGLU, **ROPE}, {"Qwen3ForCausalLM": CausalLM()}),
    Family("gemma", {"GemmaRMSNorm": GEMMA, "GemmaMLP": GEGLU, **ROPE}, {"GemmaForCausalLM": CausalLM()}),
    Family("gemma2", {"Gemma2RMSNorm": GEMMA2, "Gemma2MLP": GEGLU, **ROPE},
           {"Gemma2ForCausalLM": CausalLM(softcap="final_logit_softcapping")}),
)}
# fmt: on

MODEL_TYPES = {model_type: row for row in FAMILIES.values() for model_type in row.model_types or (row.name,)}


def unsupported(subject: str) -> str:
    """What is said of a model, a type or a family without a row."""
    return f"no Liger kernels for {subject}, which stays as it is; there are some for {', '.join(MODEL_TYPES)}"


def missing(module: str, name: str) -> AttributeError:
    """The error for a name that a module of this package lacks; of a patch the reason is logged too, because an import hides it."""
    text, family = f"module {module!r} has no attribute {name!r}", name.removeprefix("apply_liger_kernel_to_")
    if family != name:
        reason = unsupported(f"the family {family!r}")
        warn_once(reason)
        text += f": {reason}"
    return AttributeError(text)
