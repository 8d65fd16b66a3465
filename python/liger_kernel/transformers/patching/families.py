"""The supported model families, as data: one row each.

A row of the table names a family's heads and switches. What is replaced in it, its sources tell (by_source.py).
"""

import difflib
import importlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from liger_kernel.utils import warn_once


@dataclass(frozen=True)
class Swap:
    """A replacement: the switch that turns it on, what may replace, the activations it can stand for.

    Args:
        switch: the keyword that turns it on.
        targets: classes or functions of this package; the first that stands for the source of what is replaced
        is taken.
        activations: names in transformers' ACT2FN; any if empty.
        deferred: replaced in a finished model, because rebinding the name would not reach it.
    """

    switch: str
    targets: tuple[str, ...] | str
    activations: tuple[str, ...] = ()
    deferred: bool = False

    def __post_init__(self):
        if isinstance(self.targets, str):
            object.__setattr__(self, "targets", (self.targets,))

    def load(self, target: str | None = None):
        """The class or function that replaces, the first one by default."""
        module, _, name = (target or self.targets[0]).rpartition(".")
        return getattr(importlib.import_module(f"liger_kernel.transformers.{module}"), name)

    def called(self, part: Any) -> str:
        """A report's word for what replaces: as elsewhere under `layers` the operator."""
        return part.liger_operator if self.switch == "layers" else part.__name__


@dataclass(frozen=True)
class CausalLM:
    """Where a model's head is: an attribute, or a dotted one of the causal language model that it holds.

    Nothing else needs to be said: the model's own forward runs, and its scales, softcaps and router losses with it.
    """

    head: str = "lm_head"


@dataclass(frozen=True)
class Family:
    """One model family: a row of the table, which is by source, or one that names what is replaced.

    Args:
        name: the suffix of `apply_liger_kernel_to_<name>`.
        swaps: attribute of the modeling module, or the full name of a class elsewhere -> what replaces it; of several
            the first that fits a module.
        loss: class of the modeling module -> where its head is.
        package: the family's package in transformers, the name itself by default.
        model_types: values of `config.model_type` that mean this family; the name itself if empty.
        parameters: the parameters of the function, in order; by default the switches that swaps and loss use,
        and `model`.
        also: modules that define parts which the family's module imports.
        off: switches that are off unless asked for, beside those of OFF.
        without: switches that have no effect -> why.
        keeps: a pattern of the names of classes and functions that stay as they are.
        tables: how the tables of its rotary embeddings are laid out, whatever the source of the classes that make
            them (formulas.py).
        holds: families of the language models that the model may hold: patched with it, before a model exists too.
        composite: whether the models that a model holds are patched by their own type's function.
        whole: whether all that a model holds is replaced by this row, and not only what its modeling module names.
        modeling: the full name of the modeling module, where that is not one of transformers'.
        by_source: whether the swaps are all that sources tell (by_source.py); it then says nothing of `swaps`.
        router: of such a row, whether it has the switch of that name.
        experts: of such a row, whether it has a mixture of experts.
    """

    name: str
    swaps: Mapping[str, Swap | tuple[Swap, ...]] = field(default_factory=dict)
    loss: dict[str, CausalLM] = field(default_factory=dict)
    package: str = ""
    model_types: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    off: tuple[str, ...] = ()
    without: dict[str, str] = field(default_factory=dict)
    keeps: str = ""
    tables: str = "halves"
    holds: tuple[str, ...] = ()
    composite: bool = False
    whole: bool = False
    modeling: str = ""
    by_source: bool = False
    router: bool = False
    experts: bool = False

    @property
    def module(self) -> str:
        package = self.package or self.name
        return self.modeling or f"transformers.models.{package}.modeling_{package}"

    @property
    def modules(self) -> tuple[str, ...]:
        """The modules in which the family's classes are defined."""
        return (self.module, *self.also)

    def pairs(self):
        """(name, swap) of all swaps."""
        for name, swaps in self.swaps.items():
            for swap in (swaps,) if isinstance(swaps, Swap) else swaps:
                yield name, swap

    def namespace(self):
        """The modeling module, or its stand-in in the attribute of its package; ImportError if there is none."""
        try:
            importlib.import_module(self.module)
        except ModuleNotFoundError as error:
            if error.name and self.module.startswith(error.name):
                import transformers

                raise ImportError(
                    f"transformers {transformers.__version__} has no {self.name}: there is no {self.module}"
                ) from error
            raise
        package, _, name = self.module.rpartition(".")
        return getattr(importlib.import_module(package), name) if package else importlib.import_module(name)

    @property
    def switches(self) -> dict[str, bool]:
        """The boolean keywords of the family's function, in the order of its signature, with their defaults."""
        used = {swap.switch for _, swap in self.pairs()} - {"layers"}  # which every family has, behind these
        if self.loss:
            used |= {"cross_entropy", "fused_linear_cross_entropy"}
        names = [name for name in self.parameters if name in SWITCHES] or [name for name in SWITCHES if name in used]
        if self.router or "router" in used:
            names.append("router")
        names += ["layers", "qk_norm", "masks", "attention", "mixers", "lora"]
        return {name: name not in {*self.off, *OFF} for name in names}


SWITCHES = {
    "rope": "rotary position embedding",
    "cross_entropy": "cross entropy on materialised logits; excludes fused_linear_cross_entropy",
    "fused_linear_cross_entropy": "the loss computed inside the language-model head, without materialised logits",
    "layer_norm": "LayerNorm",
    "rms_norm": "RMSNorm",
    "swiglu": "the SwiGLU feed-forward block",
    "geglu": "the GeGLU feed-forward block",
    "relu_squared": "the squared ReLU, and experts that have it without a gate",
    "xielu": "xIELU",
    "router": "the routers of experts, and their load-balancing loss",
    "layers": "steps of a layer as one operator: q, k and v; a gated MLP; the activation of one without a gate and its "
    "last layer; the residual sum and the norm after it",
    "qk_norm": "RMSNorm of each head of q and k, and their rotation, as one operator, where these are replaced",
    "masks": "attention masks without a search for packed sequences where no position_ids are given",
    "attention": "attention with sinks, on flash attention where a model has eager attention for it",
    "mixers": "short convolutions and recurrences of linear attention and state-space models, within packed documents",
    "lora": "linear layers with LoRA adapters of PEFT, and gated MLPs of them",
}

#: Switches that are off by default in all families.
OFF = frozenset({"cross_entropy"})

# Switch -> what it replaces, for reports of a model that has none.
PARTS = {
    "rope": "rotary embedding",
    "rms_norm": "RMSNorm",
    "layer_norm": "LayerNorm",
    **dict.fromkeys(("swiglu", "geglu", "relu_squared", "xielu"), "MLP"),
    "router": "router",
}

# What stands for a name of a row is found by its source (formulas.py), among these. Of a row that is not in FAMILIES an
# unknown source is tried against them, in this order.
_RMS_NORMS = ("", "ForOlmo2", "ForGemma", "WithoutWeight")
RMS_NORM = Swap("rms_norm", tuple(f"rms_norm.LigerRMSNorm{kind}" for kind in _RMS_NORMS))
GATED_RMS_NORM = Swap(
    "rms_norm", tuple(f"gated_rms_norm.LigerRMSNormGated{kind}" for kind in ("", "ForMamba2", "ForKimiLinear"))
)
LAYER_NORM = {
    "torch.nn.LayerNorm": Swap(
        "layer_norm", ("layer_norm.LigerLayerNorm", "layer_norm.LigerLayerNormForCohere"), deferred=True
    )
}
_KINDS = (
    *("SwiGLU", "Phi3SwiGLU", "BlockSparseTop2", "FalconH1SwiGLU", "SeedOssSwiGLU", "GraniteSwiGLU"),
    *("ClampedSwiGLU", "ClampedSwish"),
)
_EXPERTS = ("Transposed", "Clamped", "ClampedSwish")
_MLPS = (
    *(f"swiglu.Liger{kind}MLP" for kind in _KINDS),
    *("swiglu.LigerModernBertMLP", "swiglu.LigerExperts", *(f"experts.Liger{kind}Experts" for kind in _EXPERTS)),
)
SWIGLU = Swap("swiglu", _MLPS, ("silu", "swish"))
GPT_OSS_EXPERTS = Swap("swiglu", "experts.LigerGptOssExperts")
_GEGLU_MLPS = "geglu.LigerGEGLUMLP", "swiglu.LigerModernBertMLP"
GEGLU = Swap("geglu", (*_GEGLU_MLPS, "experts.LigerGEGLUExperts"), ("gelu_pytorch_tanh", "gelu_new"))
EXACT_GEGLU = Swap("geglu", _GEGLU_MLPS, ("gelu",))
RELU_SQUARED = {
    "transformers.activations.ReLUSquaredActivation": Swap(
        "relu_squared", "relu_squared.LigerReLUSquared", deferred=True
    )
}
UNGATED_MLP = Swap(
    "layers", "mlp.LigerUngatedMLP", ("gelu", "gelu_pytorch_tanh", "gelu_new", "gelu_fast", "silu", "relu2")
)
# Its activation may be one of these modules, which is then replaced, too.
UNGATED_EXPERTS = Swap("relu_squared", "experts.LigerUngatedExperts", ("relu2",))
XIELU = {"transformers.activations.XIELUActivation": Swap("xielu", "xielu.LigerXIELU", deferred=True)}

_ROUTERS = (
    *("Softmax", "Normalised", "Mixtral", "Jamba", "Granite", "PrivacyFilter", "DeepseekV2"),
    *("DeepseekV3", "Beam", "MistralLarge4", "HYV3", "MiniMaxM2", "MiniMaxM3", "Ernie", "Flint"),
    *("Inkling2", "MuseSpark", "Laguna", "LaraMini"),
)
ROUTER = Swap("router", tuple(f"router.Liger{kind}Router" for kind in _ROUTERS))
ROUTER_LOSS = {"load_balancing_loss_func": Swap("router", "router.liger_load_balancing_loss_func")}

# Functions that mixers call: name in the modeling module -> what replaces it.
MIXERS = {
    name: Swap("mixers", f"patching.mixer_functions.{function}")
    for name, function in {
        "causal_conv1d_fn": "liger_causal_conv1d_fn",
        "torch_chunk_gated_delta_rule": "liger_chunk_gated_delta_rule",
        "chunk_kimi_delta_attention": "liger_chunk_kimi_delta_attention",
        "mamba2_chunk_scan": "liger_mamba2_chunk_scan",
        "mamba2_split_conv1d_scan_combined": "liger_mamba2_split_conv1d_scan_combined",
    }.items()
}

# What makes the gates of Kimi delta attention.
FORGET_GATE = Swap("mixers", tuple(f"forget_gate.Liger{kind}ForgetGate" for kind in ("", "Bailing")))

_ROPES = ("", "half_table_", "interleaved_", "paired_table_", "deinterleaving_")
ROPE = {"apply_rotary_pos_emb": Swap("rope", tuple(f"rope.liger_{kind}rotary_pos_emb" for kind in _ROPES))}
VISION_ROPE = {"apply_rotary_pos_emb_vision": Swap("rope", "rope.liger_rotary_pos_emb_vision")}
# Sections of three positions a token: in the rotation itself before transformers 5.17, in its tables since.
SECTIONED_ROPE = {"apply_multimodal_rotary_pos_emb": Swap("rope", "qwen2vl_mrope.liger_multimodal_rotary_pos_emb")}
LLAMA4_ROPE = {
    "apply_rotary_emb": Swap(
        "rope", tuple(f"llama4_rope.liger_{kind}_rotary_pos_emb" for kind in ("llama4_text", "complex"))
    ),
    "vision_apply_rotary_emb": Swap("rope", "llama4_rope.liger_llama4_vision_rotary_pos_emb"),
}

_LOSSES = ("cross_entropy", "fused_linear_cross_entropy")
_L = ("rope", *_LOSSES, "rms_norm", "swiglu", "model")
_LN = (*_L[:-1], "layer_norm", "model")
_GLU = (*_L[:-1], "geglu", "model")
_GE = ("rope", *_LOSSES, "rms_norm", "geglu", "model")
_GEL = ("rope", *_LOSSES, "layer_norm", "rms_norm", "geglu", "model")
_IV = (*_LOSSES, "rms_norm", "layer_norm", "model", "kwargs")
_ONE_TENSOR = {"rope": "its rotary embedding takes one tensor at a time"}


def _row(name, heads, parameters=_L, **fields):
    """A row of the table: the classes of the family's models with a head, between spaces, and its parameters."""
    loss = {head: CausalLM() for head in heads.split()}
    return Family(name, **{"loss": loss, "parameters": parameters, "tables": "", **fields}, by_source=True)


def _mixture(name, heads, parameters=_L, **fields):
    """One with experts and routers."""
    return _row(name, heads, parameters, experts=True, router=True, **fields)


# fmt: off
FAMILIES = {row.name: row for row in (
    _row("llama", "LlamaForCausalLM"),
    _row("mistral", "MistralForCausalLM"),
    _row("ministral", "MinistralForCausalLM"),
    _row("qwen2", "Qwen2ForCausalLM"),
    _row("qwen3", "Qwen3ForCausalLM"),
    _row("smollm3", "SmolLM3ForCausalLM"),
    _row("granite", "GraniteForCausalLM"),
    _row("phi3", "Phi3ForCausalLM"),
    _row("glm4", "Glm4ForCausalLM"),
    _row("olmo2", "Olmo2ForCausalLM"),
    _row("olmo3", "Olmo3ForCausalLM"),
    _row("exaone4", "Exaone4ForCausalLM"),
    _row("falcon_h1", "FalconH1ForCausalLM"),
    _row("hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM"),
    _row("hunyuan_v1_moe", "HunYuanMoEV1ForCausalLM", experts=True),
    _row("gemma", "GemmaForCausalLM", _GE),
    _row("gemma2", "Gemma2ForCausalLM", _GE),
    _row("gemma3_text", "Gemma3ForCausalLM", _GE, package="gemma3"),
    _row("gemma3", "Gemma3ForConditionalGeneration", _GEL),
    _row("gemma4_text", "Gemma4ForCausalLM Gemma4TextForCausalLM", _GE, package="gemma4", off=("rope",), experts=True,
         without=_ONE_TENSOR),
    _row("gemma4", "Gemma4ForConditionalGeneration", _GEL, off=("rope", "layer_norm"), experts=True,
         without=_ONE_TENSOR),
    _row("paligemma", "PaliGemmaForConditionalGeneration", _GEL, holds=("gemma", "gemma2"), composite=True),
    _mixture("qwen3_moe", "Qwen3MoeForCausalLM"),
    _mixture("qwen3_next", "Qwen3NextForCausalLM"),
    _mixture("mixtral", "MixtralForCausalLM"),
    _mixture("gpt_oss", "GptOssForCausalLM", keeps="GptOssMLP"),
    _row("deepseek_v4", "DeepseekV4ForCausalLM", off=("rope",), experts=True, without=_ONE_TENSOR,
         keeps="DeepseekV4UnweightedRMSNorm"),
    _row("nemotron", "NemotronForCausalLM", ("relu_squared", *_LOSSES, "model", "kwargs")),
    _row("llama4", "", (*_L, "layer_norm"), model_types=("llama4_text", "llama4"),
         keeps=r"Llama4(TextExperts|Vision\w*MLP2?)",
         loss={"Llama4ForCausalLM": CausalLM(), "Llama4ForConditionalGeneration": CausalLM("language_model.lm_head")}),
    _row("mllama", "MllamaForCausalLM MllamaForConditionalGeneration",
         ("rope", *_LOSSES, "layer_norm", "rms_norm", "swiglu", "model"), model_types=("mllama", "mllama_text_model")),
    _row("llava", "LlavaForConditionalGeneration", (*_LOSSES, "model", "kwargs"), composite=True),
    _row("internvl", "InternVLForConditionalGeneration", _IV, composite=True),
    _row("smolvlm", "SmolVLMForConditionalGeneration", _IV, composite=True),
    _row("qwen2_vl", "Qwen2VLForConditionalGeneration",
         ("rope", *_LOSSES, "rms_norm", "layer_norm", "swiglu", "model"), model_types=("qwen2_vl", "qwen2_vl_text"),
         keeps="VisionMlp", tables="halves"),
    _row("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", model_types=("qwen2_5_vl", "qwen2_5_vl_text"),
         tables="halves"),
    _row("qwen3_vl", "Qwen3VLForConditionalGeneration", model_types=("qwen3_vl", "qwen3_vl_text"),
         tables="halves"),
    _mixture("qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration", model_types=("qwen3_vl_moe", "qwen3_vl_moe_text"),
             tables="halves"),
    _row("qwen3_5", "Qwen3_5ForCausalLM Qwen3_5ForConditionalGeneration", model_types=("qwen3_5", "qwen3_5_text"),
         tables="halves"),
    _mixture("qwen3_5_moe", "Qwen3_5MoeForCausalLM Qwen3_5MoeForConditionalGeneration",
             model_types=("qwen3_5_moe", "qwen3_5_moe_text"), tables="halves"),
    _row("glm4v", "Glm4vForConditionalGeneration", model_types=("glm4v", "glm4v_text"), tables="halves"),
    _mixture("glm4v_moe", "Glm4vMoeForConditionalGeneration", model_types=("glm4v_moe", "glm4v_moe_text"),
             tables="halves"),
    _mixture("deepseek_v2", "DeepseekV2ForCausalLM"),
    _mixture("deepseek_v3", "DeepseekV3ForCausalLM"),
    _mixture("deepseek_v32", "DeepseekV32ForCausalLM", _LN),
    _mixture("kimi_linear", "KimiLinearForCausalLM"),
    _row("glm", "GlmForCausalLM"),
    _mixture("glm4_moe", "Glm4MoeForCausalLM"),
    _mixture("glm4_moe_lite", "Glm4MoeLiteForCausalLM"),
    _mixture("glm_moe_dsa", "GlmMoeDsaForCausalLM", _LN),
    _row("mistral3", "Mistral3ForConditionalGeneration", _GLU, holds=("mistral", "pixtral"), whole=True),
    _row("ministral3", "Ministral3ForCausalLM"),
    _row("mistral4", "Mistral4ForCausalLM", experts=True),
    _mixture("granitemoe", "GraniteMoeForCausalLM"),
    _mixture("granitemoeshared", "GraniteMoeSharedForCausalLM"),
    _mixture("granitemoehybrid", "GraniteMoeHybridForCausalLM"),
    _row("nemotron_h", "NemotronHForCausalLM", (*_L[:-2], "relu_squared", "model"), experts=True, router=True),
    _mixture("minimax_m2", "MiniMaxM2ForCausalLM"),
    _mixture("qwen2_moe", "Qwen2MoeForCausalLM"),
    _row("qwen2_audio", "Qwen2AudioForConditionalGeneration", _LN, holds=("qwen2",), whole=True),
    _row("lfm2", "Lfm2ForCausalLM"),
    _row("lfm2_moe", "Lfm2MoeForCausalLM", experts=True),
    _row("ernie4_5", "Ernie4_5ForCausalLM"),
    _mixture("ernie4_5_moe", "Ernie4_5_MoeForCausalLM"),
    _row("seed_oss", "SeedOssForCausalLM"),
    _row("apertus", "ApertusForCausalLM", (*_L[:-2], "xielu", "model"), keeps="ApertusMLP"),
    _row("arcee", "ArceeForCausalLM", (*_L[:-2], "relu_squared", "model")),
    _row("cohere", "CohereForCausalLM", _LN),
    _row("cohere2", "Cohere2ForCausalLM", _LN),
    _mixture("olmoe", "OlmoeForCausalLM"),
    _row("phimoe", "PhimoeForCausalLM", _LN, experts=True),
    _row("gemma3n_text", "Gemma3nForCausalLM", (*_LOSSES, "rms_norm", "model"), package="gemma3n"),
    _row("muse_glimmer", "MuseGlimmerForConditionalGeneration",
         ("rope", *_LOSSES, "layer_norm", "rms_norm", "swiglu", "model")),
    _row("kimi_k25", "Kimi_K25ForConditionalGeneration", _LN, holds=("deepseek_v3",), whole=True,
         experts=True),
    _row("glm46v", "Glm46VForConditionalGeneration", (*_LOSSES, "rms_norm", "swiglu", "layer_norm", "model"),
         holds=("glm4v",), whole=True),
    _row("phi4_multimodal", "Phi4MultimodalForCausalLM", _LN),
    _row("qwen2_5_omni_thinker", "Qwen2_5OmniThinkerForConditionalGeneration", _LN, package="qwen2_5_omni"),
    _mixture("qwen3_omni_moe_thinker", "Qwen3OmniMoeThinkerForConditionalGeneration", _LN, package="qwen3_omni_moe"),
    _row("pixtral", "", ("rope", "rms_norm", "swiglu", "model"), tables="halves"),
)}
# fmt: on

# What the columns of `table` stand for, and the switch of each.
_COLUMNS = {
    "loss": "fused_linear_cross_entropy",
    **{PARTS[switch]: switch for switch in ("rms_norm", "layer_norm", "swiglu")},
    "rope": "rope",
    "router": "router",
}


def table() -> str:
    """What is replaced in each family, as a table in Markdown: `on` by default, `off` unless asked for."""
    lines = ["| family | model types | " + " | ".join(_COLUMNS) + " |", "|" + "---|" * (len(_COLUMNS) + 2)]
    for row in FAMILIES.values():
        cells = []
        for switch in _COLUMNS.values():
            names = ("swiglu", "geglu", "relu_squared", "xielu") if switch == "swiglu" else (switch,)
            found = next((name for name in names if name in row.switches and name not in row.without), None)
            label = {"geglu": " (GeGLU)", "relu_squared": " (ReLU²)", "xielu": " (xIELU)"}.get(found or "", "")
            if row.experts and switch == "swiglu":
                label += ", experts"
            held = row.composite and not row.holds and switch in ("rms_norm", "swiglu", "rope")
            cells.append(
                ("on" if row.switches[found] else "off") + label if found else "as the model in it" if held else ""
            )
        lines.append(f"| {row.name} | {', '.join(row.model_types or (row.name,))} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


MODEL_TYPES = {model_type: row for row in FAMILIES.values() for model_type in row.model_types or (row.name,)}


def nearest(name: object, known: Iterable[str]) -> str:
    """The names that one may have been meant to be, for the end of a message."""
    found = difflib.get_close_matches(str(name), known, 3)
    return f": did you mean {' or '.join(found)}?" if found else ""


def unsupported(subject: str, name: object) -> str:
    """What is said of a model, a type or a family without a row."""
    return (
        f"no Liger kernels for {subject}, which stays as it is{nearest(name, MODEL_TYPES) or '.'} liger_kernel."
        "transformers.monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN and docs/families.md list those that there are"
    )


def missing(module: str, name: str) -> AttributeError:
    """The error for a name that a module of this package lacks; of a patch the reason is logged too, because an import
    hides it."""
    text, family = f"module {module!r} has no attribute {name!r}", name.removeprefix("apply_liger_kernel_to_")
    if family != name:
        reason = unsupported(f"the family {family!r}", family)
        warn_once(reason)
        text += f": {reason}"
    return AttributeError(text)
