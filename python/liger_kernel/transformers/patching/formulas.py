"""What may stand for a class or a function of transformers: one answer, by the source that runs.

A part is a formula and where it rounds. sources.json lists the fingerprints of the sources that compute it, in
transformers' released versions, as tests/huggingface/collect_sources.py has found them. `apply_liger_kernel_to_*`,
`apply_liger_kernel_by_structure` and `use_as_hub_kernels` all ask `find`, so that they cannot disagree.
"""

import functools
import json
import pathlib
from dataclasses import dataclass

from torch import nn

from liger_kernel.operators.coverage import has_replaced_forward, kinds_in
from liger_kernel.transformers.patching.part import part_of
from liger_kernel.transformers.patching.place import kept_forwards
from liger_kernel.transformers.patching.source import fingerprint

_TABLE = pathlib.Path(__file__).with_name("sources.json")


@dataclass(frozen=True)
class Formula:
    """What computes as some sources do.

    Args:
        targets: classes or functions of this package that compute it, as Swap names them; of those for several
        activations the module's decides.
        layer: the layer of liger_kernel.hub that computes it, if there is one.
        tables: of a rotary function, how its tables must be laid out: "halves", which are equal, or equal "pairs" of
            columns; None where it reads half of their columns itself.
        makes: of a class that makes such tables, how they are laid out.
    """

    targets: tuple[str, ...] = ()
    layer: str | None = None
    tables: str | None = None
    makes: str | None = None


_RMS = "rms_norm.LigerRMSNorm"
_GATED_RMS = "gated_rms_norm.LigerRMSNormGated"
FORMULAS = {
    # rounds before the weight
    "rms_norm": Formula((_RMS, f"{_RMS}ForGlm4"), "LigerRMSNorm"),
    # multiplies by the weight, or by 1 + weight, in float
    "float_rms_norm": Formula((f"{_RMS}ForOlmo2", f"{_RMS}ForGemma4"), "LigerFloatRMSNorm"),
    "offset_rms_norm": Formula(
        tuple(f"{_RMS}For{name}" for name in ("Gemma", "Gemma2", "Gemma3", "Qwen3Next")), "LigerZeroCenteredRMSNorm"
    ),
    "weightless_rms_norm": Formula((f"{_RMS}WithoutWeight",)),
    # the gate last, or first, of a norm that rounds before the weight; all of it in float
    "gated_rms_norm": Formula((_GATED_RMS,)),
    "gate_first_rms_norm": Formula((f"{_GATED_RMS}ForMamba2",)),
    "float_gated_rms_norm": Formula((f"{_GATED_RMS}ForKimiLinear",)),
    # torch.nn.LayerNorm; one that computes in float and gives the input's dtype
    "layer_norm": Formula(("layer_norm.LigerLayerNorm",)),
    "float_layer_norm": Formula(("layer_norm.LigerLayerNormForCohere",)),
    # the projections are gate_proj, up_proj, down_proj; gate_up_proj, down_proj; w1, w3, w2
    "gated_mlp": Formula(
        (
            *(f"swiglu.Liger{name}" for name in ("SwiGLUMLP", "Qwen3MoeSwiGLUMLP", "HunyuanV1SwiGLUMLP")),
            "geglu.LigerGEGLUMLP",
            "geglu.LigerGEGLUMLPForGemma4",
        ),
        "LigerGatedMLP",
    ),
    "packed_gated_mlp": Formula(("swiglu.LigerPhi3SwiGLUMLP",)),
    "granite_gated_mlp": Formula(("swiglu.LigerGraniteSwiGLUMLP",)),
    "top2_gated_mlp": Formula(("swiglu.LigerBlockSparseTop2MLP",)),
    "scaled_gated_mlp": Formula(("swiglu.LigerFalconH1SwiGLUMLP",)),
    "gated_mlp_with_dropout": Formula(("swiglu.LigerSeedOssSwiGLUMLP",)),
    # gate and up clamped; gate · σ(alpha · gate) · (up + 1) of them
    "clamped_gated_mlp": Formula(("swiglu.LigerClampedSwiGLUMLP",)),
    "clamped_swish_mlp": Formula(("swiglu.LigerClampedSwishMLP",)),
    "clamped_experts": Formula(("experts.LigerClampedExperts",)),
    "clamped_swish_experts": Formula(("experts.LigerClampedSwishExperts",)),
    "experts": Formula(("swiglu.LigerExperts", "experts.LigerGEGLUExperts")),
    "transposed_experts": Formula(("experts.LigerTransposedExperts",)),
    "gpt_oss_experts": Formula(("experts.LigerGptOssExperts",)),
    # what gives logits, weights and indices of experts
    "softmax_router": Formula(("router.LigerSoftmaxRouter",)),
    "normalised_router": Formula(("router.LigerNormalisedRouter",)),
    "mixtral_router": Formula(("router.LigerMixtralRouter",)),
    "jamba_router": Formula(("router.LigerJambaRouter",)),
    "granite_router": Formula(("router.LigerGraniteRouter",)),
    "privacy_filter_router": Formula(("router.LigerPrivacyFilterRouter",)),
    "deepseek_v2_router": Formula(("router.LigerDeepseekV2Router",)),
    "deepseek_v3_router": Formula(("router.LigerDeepseekV3Router",)),
    "beam_router": Formula(("router.LigerBeamRouter",)),
    "mistral_large4_router": Formula(("router.LigerMistralLarge4Router",)),
    "hy_v3_router": Formula(("router.LigerHYV3Router",)),
    "minimax_m2_router": Formula(("router.LigerMiniMaxM2Router",)),
    "minimax_m3_router": Formula(("router.LigerMiniMaxM3Router",)),
    "ernie_router": Formula(("router.LigerErnieRouter",)),
    "flint_router": Formula(("router.LigerFlintRouter",)),
    # the residual stream, a norm, attention, a norm, an MLP: transformers/layers.py has the steps of each
    "decoder_layer": Formula(),
    "scaled_decoder_layer": Formula(),
    "sandwich_decoder_layer": Formula(),
    "glm4_decoder_layer": Formula(),
    "dropout_decoder_layer": Formula(),
    "feed_forward_decoder_layer": Formula(),
    "hybrid_decoder_layer": Formula(),
    "early_hybrid_decoder_layer": Formula(),
    "load_balancing_loss": Formula(("router.liger_load_balancing_loss_func",)),
    "relu_squared": Formula(("relu_squared.LigerReLUSquared",)),
    "xielu": Formula(("xielu.LigerXIELU",)),
    # tables as wide as a head; the same with a result of q's dtype; half as wide; of a part of a head; for neighbouring
    # columns, which have one table column, or two that are equal, or are put in halves
    "rope": Formula(("rope.liger_rotary_pos_emb",), "LigerRotaryEmbedding", "halves"),
    "float_rope": Formula(("rope.liger_rotary_pos_emb",), "LigerFloatRotaryEmbedding", "halves"),
    "half_table_rope": Formula(("rope.liger_half_table_rotary_pos_emb",), "LigerHalfTableRotaryEmbedding"),
    "partial_rope": Formula(("rope.liger_rotary_pos_emb",), tables="halves"),
    "interleaved_rope": Formula(("rope.liger_interleaved_rotary_pos_emb",)),
    "paired_table_rope": Formula(("rope.liger_paired_table_rotary_pos_emb",), tables="pairs"),
    "deinterleaving_rope": Formula(("rope.liger_deinterleaving_rotary_pos_emb",), tables="halves"),
    "vision_rope": Formula(("rope.liger_rotary_pos_emb_vision",), tables="halves"),
    "sectioned_rope": Formula(("qwen2vl_mrope.liger_multimodal_rotary_pos_emb",), tables="halves"),
    "complex_rope": Formula(("llama4_rope.liger_complex_rotary_pos_emb",)),
    "llama4_rope": Formula(("llama4_rope.liger_llama4_text_rotary_pos_emb",)),
    "llama4_vision_rope": Formula(("llama4_rope.liger_llama4_vision_rotary_pos_emb",)),
    # what makes the tables
    "tables_of_halves": Formula(makes="halves"),
    "tables_of_pairs": Formula(makes="pairs"),
}


@functools.cache
def sources() -> dict[str, str]:
    """Fingerprint of a source -> the name of the part that computes the same."""
    return {key: name for name, entries in json.loads(_TABLE.read_text()).items() for key in entries}


def formula_name(original) -> str | None:
    """The name of the part that computes what a class of modules or a function does, by its source; None for an unknown
    one."""
    if original is nn.LayerNorm:  # whose source differs from one version of torch to the next
        return "layer_norm"
    return sources().get(fingerprint(original) or "")


def find(original) -> Formula | None:
    """The part of that name."""
    name = formula_name(original)
    return None if name is None else FORMULAS[name]


def is_known(target: str, original) -> bool:
    """Whether `target`, as a Swap names it, stands for a class or a function, by its source."""
    part = find(original)
    return part is not None and target in part.targets


@functools.cache
def kinds_of(names: tuple[str, ...]) -> frozenset:
    """The classes and functions that compute activations which transformers' ACT2FN has under these names."""
    from transformers.activations import ACT2FN

    functions = {"silu": nn.functional.silu, "gelu": nn.functional.gelu}
    return frozenset((*(type(ACT2FN[name]) for name in names), *(functions[n] for n in names if n in functions)))


def unfit(module, part, activations):
    """Why `part` cannot compute what a module does, by how the module was made, or None."""
    if activations and (others := kinds_in(module) - kinds_of(activations)):
        names = ", ".join(sorted(getattr(kind, "__name__", str(kind)) for kind in others))
        return f"its activation is {names}, not {activations[0]}"
    return None if (keep := part_of(part).keep) is None else keep(module, False)


def obstacle(module, cls, part, activations):
    """Why a module must keep its forward instead of that of the class `part`, or None."""
    if type(module).forward is not cls.forward:
        return f"{type(module).__name__} defines its own forward"
    if has_replaced_forward(module) and not kept_forwards(module):
        return "its forward was replaced on the instance"
    return unfit(module, part, activations)
