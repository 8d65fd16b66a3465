"""The supported model families, as data: one row each.

A row names what the family's Hugging Face module calls its parts and what replaces them. Supporting another family of
the same kinds of parts takes one row here and one row in the list of tiny configurations of the tests.
"""

import difflib
import importlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

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


@dataclass(frozen=True)
class CausalLM:
    """Where a model's head is: an attribute, or a dotted one of the causal language model that it holds.

    Nothing else needs to be said: the model's own forward runs, and its scales, softcaps and router losses with it.
    """

    head: str = "lm_head"


@dataclass(frozen=True)
class Family:
    """One model family.

    Args:
        name: the suffix of `apply_liger_kernel_to_<name>`.
        swaps: attribute of the modeling module, or the full name of a class elsewhere -> what replaces it; of several
            the first that fits a module.
        loss: class of the modeling module -> where its head is.
        package: the family's package in transformers, the name itself by default.
        model_types: values of `config.model_type` that mean this family; the name itself if empty.
        parameters: the parameters of the function, in order; by default the switches that swaps and loss use,
        and `model`.
        off: switches that are off unless asked for.
        also: modules that define parts which the family's module imports.
        optional: keys of swaps and loss that not every transformers has.
        without: switches that have no effect -> why.
        holds: families of the language models that the model may hold: patched with it, before a model exists too.
        composite: whether the models that a model holds are patched by their own type's function.
        modeling: the full name of the modeling module, where that is not one of transformers'.
        by_source: whether the swaps are all that sources tell (by_source.py); it then says nothing of `swaps`.
        router: of such a row, whether it has the switch of that name.
    """

    name: str
    swaps: Mapping[str, Swap | tuple[Swap, ...]] = field(default_factory=dict)
    loss: dict[str, CausalLM] = field(default_factory=dict)
    package: str = ""
    model_types: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()
    off: tuple[str, ...] = ("cross_entropy",)
    also: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    without: dict[str, str] = field(default_factory=dict)
    holds: tuple[str, ...] = ()
    composite: bool = False
    modeling: str = ""
    by_source: bool = False
    router: bool = False

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
        used = {swap.switch for _, swap in self.pairs()}
        if self.loss:
            used |= {"cross_entropy", "fused_linear_cross_entropy"}
        names = [name for name in self.parameters if name in SWITCHES] or [name for name in SWITCHES if name in used]
        if self.router or "router" in used:
            names.append("router")
        return {name: name not in self.off for name in (*names, "layers", "masks", "attention", "lora")}


SWITCHES = {
    "rope": "rotary position embedding",
    "cross_entropy": "cross entropy on materialised logits; excludes fused_linear_cross_entropy",
    "fused_linear_cross_entropy": "the loss computed inside the language-model head, without materialised logits",
    "layer_norm": "LayerNorm",
    "rms_norm": "RMSNorm",
    "swiglu": "the SwiGLU feed-forward block",
    "geglu": "the GeGLU feed-forward block",
    "relu_squared": "the squared ReLU",
    "xielu": "xIELU",
    "router": "the routers of experts, and their load-balancing loss",
    "layers": "steps of a layer as one operator: q, k and v; a gated MLP; the residual sum and the norm after it",
    "masks": "attention masks without a search for packed sequences where no position_ids are given",
    "attention": "attention with sinks, on flash attention where a model has eager attention for it",
    "lora": "linear layers with LoRA adapters of PEFT, and gated MLPs of them",
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
    *("swiglu.LigerExperts", *(f"experts.Liger{kind}Experts" for kind in _EXPERTS)),
)
SWIGLU = Swap("swiglu", _MLPS, ("silu", "swish"))
GPT_OSS_EXPERTS = Swap("swiglu", "experts.LigerGptOssExperts")
GEGLU = Swap("geglu", ("geglu.LigerGEGLUMLP", "experts.LigerGEGLUExperts"), ("gelu_pytorch_tanh", "gelu_new"))
EXACT_GEGLU = Swap("geglu", "geglu.LigerGEGLUMLP", ("gelu",))
RELU_SQUARED = {
    "transformers.activations.ReLUSquaredActivation": Swap(
        "relu_squared", "relu_squared.LigerReLUSquared", deferred=True
    )
}
XIELU = {"transformers.activations.XIELUActivation": Swap("xielu", "xielu.LigerXIELU", deferred=True)}

_ROUTERS = (
    *("Softmax", "Normalised", "Mixtral", "Jamba", "Granite", "PrivacyFilter", "DeepseekV2"),
    *("DeepseekV3", "Beam", "MistralLarge4", "HYV3", "MiniMaxM2", "MiniMaxM3", "Ernie", "Flint"),
)
ROUTER = Swap("router", tuple(f"router.Liger{kind}Router" for kind in _ROUTERS))
ROUTER_LOSS = {"load_balancing_loss_func": Swap("router", "router.liger_load_balancing_loss_func")}

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
_EITHER_ROPE = ("apply_rotary_pos_emb", "apply_multimodal_rotary_pos_emb")

_LOSSES = ("cross_entropy", "fused_linear_cross_entropy")
_L = ("rope", *_LOSSES, "rms_norm", "swiglu", "model")
_LN = (*_L[:-1], "layer_norm", "model")
_GLU = (*_L[:-1], "geglu", "model")
_GE = ("rope", *_LOSSES, "rms_norm", "geglu", "model")
_GEL = ("rope", *_LOSSES, "layer_norm", "rms_norm", "geglu", "model")
_IV = (*_LOSSES, "rms_norm", "layer_norm", "model", "kwargs")
_NO_ROPE, _NO_SWIGLU = ("rope", "cross_entropy"), ("cross_entropy", "swiglu")


def _heads(*names):
    return {name: CausalLM() for name in names}


def _dense(name, prefix, mlp=SWIGLU, parameters=_L, **fields):
    """A causal language model of norms, gated MLPs and a rotary embedding under the usual names."""
    swaps = {f"{prefix}RMSNorm": RMS_NORM, f"{prefix}MLP": mlp, **fields.pop("swaps", {}), **ROPE}
    return Family(name, swaps, _heads(f"{prefix}ForCausalLM"), parameters=parameters, **fields)


def _mixture(name, prefix, **fields):
    """One whose experts are modules in a list, and one module of them all since transformers 5."""
    experts, router = f"{prefix}Experts", f"{prefix}TopKRouter"
    swaps = {experts: SWIGLU, router: ROUTER, **ROUTER_LOSS, **fields.pop("swaps", {})}
    return _dense(name, prefix, swaps=swaps, optional=(experts, router), **fields)


def _known(name, head, parameters=_L, off=("cross_entropy",), **fields):
    """A family whose parts are all that sources tell (by_source.py)."""
    heads = {f"{part}": CausalLM() for part in head.split()}
    return Family(name, loss=heads, parameters=parameters, off=off, by_source=True, **fields)


_GEMMA3 = {"Gemma3RMSNorm": RMS_NORM, "Gemma3MLP": GEGLU, **ROPE}
_GEMMA4 = {"Gemma4RMSNorm": RMS_NORM, "Gemma4TextMLP": GEGLU, "Gemma4TextExperts": GEGLU}
_GEMMA4_WITHOUT = {"rope": "its rotary embedding takes one tensor at a time"}
_QWEN2 = ("transformers.models.qwen2.modeling_qwen2",)

# fmt: off
FAMILIES = {row.name: row for row in (
    _dense("llama", "Llama"),
    _dense("mistral", "Mistral"),
    _dense("ministral", "Ministral"),
    _dense("qwen2", "Qwen2"),
    _dense("qwen3", "Qwen3"),
    _dense("smollm3", "SmolLM3"),
    _dense("granite", "Granite", off=("fused_linear_cross_entropy",)),
    _dense("phi3", "Phi3"),
    _dense("glm4", "Glm4", off=_NO_ROPE),
    _dense("olmo2", "Olmo2"),
    _dense("olmo3", "Olmo3"),
    _dense("exaone4", "Exaone4"),
    _dense("falcon_h1", "FalconH1", swaps={"FalconH1RMSNormGated": GATED_RMS_NORM}),
    _dense("hunyuan_v1_dense", "HunYuanDenseV1"),
    _dense("hunyuan_v1_moe", "HunYuanMoEV1", swaps={"HunYuanMoEV1Experts": SWIGLU}, optional=("HunYuanMoEV1Experts",)),
    _dense("gemma", "Gemma", mlp=GEGLU, parameters=_GE),
    _dense("gemma2", "Gemma2", mlp=GEGLU, parameters=_GE),
    Family("gemma3_text", _GEMMA3, _heads("Gemma3ForCausalLM"), "gemma3", parameters=_GE),
    Family("gemma3", {**_GEMMA3, **LAYER_NORM}, _heads("Gemma3ForConditionalGeneration"), parameters=_GEL),
    Family("gemma4_text", _GEMMA4, _heads("Gemma4ForCausalLM", "Gemma4TextForCausalLM"), "gemma4", parameters=_GE,
           off=_NO_ROPE, optional=("Gemma4TextForCausalLM",), without=_GEMMA4_WITHOUT),
    Family("gemma4", {**_GEMMA4, **LAYER_NORM}, _heads("Gemma4ForConditionalGeneration"), parameters=_GEL,
           off=("layer_norm", *_NO_ROPE), without=_GEMMA4_WITHOUT),
    Family("paligemma", LAYER_NORM, _heads("PaliGemmaForConditionalGeneration"), parameters=_GEL,
           holds=("gemma", "gemma2"), composite=True),
    _mixture("qwen3_moe", "Qwen3Moe"),
    _mixture("qwen3_next", "Qwen3Next", off=_NO_ROPE, swaps={"Qwen3NextRMSNormGated": GATED_RMS_NORM}),
    Family("mixtral",
           {"MixtralRMSNorm": RMS_NORM, "MixtralBlockSparseTop2MLP": SWIGLU, "MixtralExperts": SWIGLU,
            "MixtralTopKRouter": ROUTER, **ROUTER_LOSS, **ROPE},
           _heads("MixtralForCausalLM"), parameters=_L,
           optional=("MixtralBlockSparseTop2MLP", "MixtralExperts", "MixtralTopKRouter")),
    Family("gpt_oss",
           {"GptOssRMSNorm": RMS_NORM, "GptOssExperts": GPT_OSS_EXPERTS, "GptOssTopKRouter": ROUTER,
            **ROUTER_LOSS, **ROPE},
           _heads("GptOssForCausalLM"), parameters=_L, off=_NO_SWIGLU, optional=("GptOssTopKRouter",)),
    Family("deepseek_v4",
           {"DeepseekV4RMSNorm": RMS_NORM, "DeepseekV4MLP": SWIGLU, "DeepseekV4Experts": SWIGLU},
           _heads("DeepseekV4ForCausalLM"), parameters=_L, off=("rope", *_NO_SWIGLU),
           without={"rope": "its rotary embedding takes one tensor at a time"}),
    Family("nemotron", RELU_SQUARED, _heads("NemotronForCausalLM"),
           parameters=("relu_squared", *_LOSSES, "model", "kwargs")),
    Family("llama4", {"Llama4TextRMSNorm": RMS_NORM, "Llama4TextMLP": SWIGLU, **LLAMA4_ROPE, **LAYER_NORM},
           {"Llama4ForCausalLM": CausalLM(), "Llama4ForConditionalGeneration": CausalLM("language_model.lm_head")},
           model_types=("llama4_text", "llama4"), parameters=(*_L, "layer_norm")),
    Family("mllama", {"MllamaTextRMSNorm": RMS_NORM, "MllamaTextMLP": SWIGLU, **ROPE, **LAYER_NORM},
           _heads("MllamaForCausalLM", "MllamaForConditionalGeneration"), model_types=("mllama", "mllama_text_model"),
           parameters=("rope", *_LOSSES, "layer_norm", "rms_norm", "swiglu", "model")),
    Family("llava", {}, _heads("LlavaForConditionalGeneration"), parameters=(*_LOSSES, "model", "kwargs"),
           composite=True),
    Family("internvl", {"InternVLVisionRMSNorm": replace(RMS_NORM, deferred=True), **LAYER_NORM},
           _heads("InternVLForConditionalGeneration"), parameters=_IV, composite=True),
    Family("smolvlm", {"SmolVLMRMSNorm": RMS_NORM, **LAYER_NORM}, _heads("SmolVLMForConditionalGeneration"),
           parameters=_IV, composite=True, optional=("SmolVLMRMSNorm",)),
    Family("qwen2_vl", {"Qwen2RMSNorm": RMS_NORM, "Qwen2VLRMSNorm": RMS_NORM, "Qwen2MLP": SWIGLU, **ROPE,
                        **SECTIONED_ROPE, **VISION_ROPE, **LAYER_NORM}, _heads("Qwen2VLForConditionalGeneration"),
           model_types=("qwen2_vl", "qwen2_vl_text"),
           parameters=("rope", *_LOSSES, "rms_norm", "layer_norm", "swiglu", "model"), also=_QWEN2,
           optional=("Qwen2RMSNorm", "Qwen2VLRMSNorm", *_EITHER_ROPE)),
    Family("qwen2_5_vl", {"Qwen2RMSNorm": RMS_NORM, "Qwen2_5_VLRMSNorm": RMS_NORM, "Qwen2MLP": SWIGLU,
                          "Qwen2_5_VLMLP": SWIGLU, **ROPE, **SECTIONED_ROPE, **VISION_ROPE},
           _heads("Qwen2_5_VLForConditionalGeneration"), model_types=("qwen2_5_vl", "qwen2_5_vl_text"), parameters=_L,
           also=_QWEN2, optional=("Qwen2RMSNorm", "Qwen2_5_VLRMSNorm", *_EITHER_ROPE)),
    Family("qwen3_vl", {"Qwen3VLTextRMSNorm": RMS_NORM, "Qwen3VLTextMLP": SWIGLU, **ROPE, **VISION_ROPE},
           _heads("Qwen3VLForConditionalGeneration"), model_types=("qwen3_vl", "qwen3_vl_text"), parameters=_L,
           off=_NO_SWIGLU),
    Family("qwen3_vl_moe", {"Qwen3VLMoeTextRMSNorm": RMS_NORM, "Qwen3VLMoeTextMLP": SWIGLU,
                            "Qwen3VLMoeTextExperts": SWIGLU, "Qwen3VLMoeTextTopKRouter": ROUTER,
                            **ROUTER_LOSS, **ROPE, **VISION_ROPE},
           _heads("Qwen3VLMoeForConditionalGeneration"), model_types=("qwen3_vl_moe", "qwen3_vl_moe_text"),
           parameters=_L, optional=("Qwen3VLMoeTextTopKRouter",)),
    Family("qwen3_5", {"Qwen3_5RMSNorm": RMS_NORM, "Qwen3_5RMSNormGated": GATED_RMS_NORM, "Qwen3_5MLP": SWIGLU,
                       **ROPE, **VISION_ROPE},
           _heads("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"), model_types=("qwen3_5", "qwen3_5_text"),
           parameters=_L),
    Family("qwen3_5_moe", {"Qwen3_5MoeRMSNorm": RMS_NORM, "Qwen3_5MoeRMSNormGated": GATED_RMS_NORM,
                           "Qwen3_5MoeMLP": SWIGLU, "Qwen3_5MoeExperts": SWIGLU,
                           "Qwen3_5MoeTopKRouter": ROUTER, **ROUTER_LOSS, **ROPE, **VISION_ROPE},
           _heads("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"),
           model_types=("qwen3_5_moe", "qwen3_5_moe_text"), parameters=_L,
           optional=("Qwen3_5MoeTopKRouter",)),
    Family("glm4v", {"Glm4vRMSNorm": RMS_NORM, "Glm4vTextMLP": SWIGLU, "Glm4VisionMlp": SWIGLU, **ROPE,
                     **SECTIONED_ROPE, **VISION_ROPE}, _heads("Glm4vForConditionalGeneration"),
           model_types=("glm4v", "glm4v_text"), parameters=_L, off=_NO_ROPE, optional=_EITHER_ROPE),
    # Glm4vMoeisionMlp is how transformers spells the class of its vision MLP.
    Family("glm4v_moe", {"Glm4vMoeRMSNorm": RMS_NORM, "Glm4vMoeTextRMSNorm": RMS_NORM, "Glm4vMoeTextMLP": SWIGLU,
                         "Glm4vMoeisionMlp": SWIGLU, "Glm4vMoeTextNaiveMoe": SWIGLU, "Glm4vMoeTextExperts": SWIGLU,
                         "Glm4vMoeTextTopkRouter": ROUTER, **ROUTER_LOSS, **ROPE, **SECTIONED_ROPE, **VISION_ROPE},
           _heads("Glm4vMoeForConditionalGeneration"),
           model_types=("glm4v_moe", "glm4v_moe_text"), parameters=_L, off=_NO_ROPE,
           optional=("Glm4vMoeTextNaiveMoe", "Glm4vMoeTextExperts", "Glm4vMoeTextTopkRouter", *ROUTER_LOSS,
                     *_EITHER_ROPE)),
    _known("deepseek_v2", "DeepseekV2ForCausalLM", off=_NO_ROPE, router=True),
    _known("deepseek_v3", "DeepseekV3ForCausalLM", off=_NO_ROPE, router=True),
    _known("deepseek_v32", "DeepseekV32ForCausalLM", _LN, router=True),
    _known("kimi_linear", "KimiLinearForCausalLM", router=True),
    _known("glm", "GlmForCausalLM"),
    _known("glm4_moe", "Glm4MoeForCausalLM", router=True),
    _known("glm4_moe_lite", "Glm4MoeLiteForCausalLM", router=True),
    _known("glm_moe_dsa", "GlmMoeDsaForCausalLM", _LN, router=True),
    _known("mistral3", "Mistral3ForConditionalGeneration", _GLU, holds=("mistral", "pixtral")),
    _known("ministral3", "Ministral3ForCausalLM"),
    _known("mistral4", "Mistral4ForCausalLM"),
    _known("granitemoe", "GraniteMoeForCausalLM", router=True),
    _known("granitemoeshared", "GraniteMoeSharedForCausalLM", router=True),
    _known("granitemoehybrid", "GraniteMoeHybridForCausalLM", router=True),
    _known("nemotron_h", "NemotronHForCausalLM", (*_L[:-2], "relu_squared", "model"), router=True),
    _known("minimax_m2", "MiniMaxM2ForCausalLM", router=True),
    _known("qwen2_moe", "Qwen2MoeForCausalLM", router=True),
    _known("qwen2_audio", "Qwen2AudioForConditionalGeneration", _LN, holds=("qwen2",)),
    _known("lfm2", "Lfm2ForCausalLM"),
    _known("lfm2_moe", "Lfm2MoeForCausalLM"),
    _known("ernie4_5", "Ernie4_5ForCausalLM"),
    _known("ernie4_5_moe", "Ernie4_5_MoeForCausalLM", router=True),
    _known("seed_oss", "SeedOssForCausalLM"),
    _known("apertus", "ApertusForCausalLM", (*_L[:-2], "xielu", "model")),
    _known("arcee", "ArceeForCausalLM", (*_L[:-2], "relu_squared", "model")),
    _known("cohere", "CohereForCausalLM", _LN),
    _known("cohere2", "Cohere2ForCausalLM", _LN),
    _known("olmoe", "OlmoeForCausalLM", router=True),
    _known("phimoe", "PhimoeForCausalLM", _LN),
    _known("gemma3n_text", "Gemma3nForCausalLM", (*_LOSSES, "rms_norm", "model"), package="gemma3n"),
    _known("muse_glimmer", "MuseGlimmerForConditionalGeneration",
           ("rope", *_LOSSES, "layer_norm", "rms_norm", "swiglu", "model")),
    _known("kimi_k25", "Kimi_K25ForConditionalGeneration", _LN, holds=("deepseek_v3",)),
    _known("glm46v", "Glm46VForConditionalGeneration", (*_LOSSES, "rms_norm", "swiglu", "layer_norm", "model"),
           holds=("glm4v",)),
    _known("phi4_multimodal", "Phi4MultimodalForCausalLM", _LN),
    _known("qwen2_5_omni_thinker", "Qwen2_5OmniThinkerForConditionalGeneration", _LN, package="qwen2_5_omni"),
    _known("qwen3_omni_moe_thinker", "Qwen3OmniMoeThinkerForConditionalGeneration", _LN, package="qwen3_omni_moe",
           router=True),
    Family("pixtral", {"PixtralRMSNorm": RMS_NORM, "PixtralMLP": SWIGLU, **ROPE},
           parameters=("rope", "rms_norm", "swiglu", "model")),
)}
# fmt: on

# What the columns of `table` stand for, and the switch of each.
_COLUMNS = {
    "loss": "fused_linear_cross_entropy",
    "RMSNorm": "rms_norm",
    "LayerNorm": "layer_norm",
    "MLP": "swiglu",
    "rope": "rope",
    "router": "router",
}


def table() -> str:
    """What is replaced in each family, as a table in Markdown: `on` by default, `off` unless asked for."""
    lines = ["| family | model types | " + " | ".join(_COLUMNS) + " |", "|" + "---|" * (len(_COLUMNS) + 2)]
    for row in FAMILIES.values():
        made = {swap.switch for name in (row.name, *row.holds) for _, swap in FAMILIES[name].pairs()}
        made |= set(row.switches) if row.by_source else set()
        made |= {"fused_linear_cross_entropy"} if row.loss else set()
        cells = []
        for switch in _COLUMNS.values():
            names = ("swiglu", "geglu", "relu_squared", "xielu") if switch == "swiglu" else (switch,)
            found = next((name for name in names if name in row.switches and name in made), None)
            label = {"geglu": " (GeGLU)", "relu_squared": " (ReLU²)", "xielu": " (xIELU)"}.get(found or "", "")
            experts = {swap.switch for part, swap in row.pairs() if part.endswith(("Experts", "NaiveMoe"))}
            if found in experts:
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
