"""What may stand for a class or a function of transformers: one answer, by the source that runs.

A formula says what is computed and where it rounds. sources.json lists the fingerprints of its sources, in
transformers' released versions, as tests/huggingface/collect_sources.py has found them. `apply_liger_kernel_to_*`,
`apply_liger_kernel_by_structure` and `use_as_hub_kernels` all ask `find`, so that they cannot disagree.
"""

import functools
import hashlib
import inspect
import io
import json
import pathlib
import textwrap
import tokenize
from dataclasses import dataclass
from typing import Any

from torch import nn

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
_MIXER = "patching.mixer_functions"
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
    "modernbert_mlp": Formula(("swiglu.LigerModernBertMLP",)),
    "gated_mlp_with_dropout": Formula(("swiglu.LigerSeedOssSwiGLUMLP",)),
    # without a gate, with any of the names of UNGATED
    "ungated_mlp": Formula(("mlp.LigerUngatedMLP",)),
    # gate and up clamped; gate · σ(alpha · gate) · (up + 1) of them
    "clamped_gated_mlp": Formula(("swiglu.LigerClampedSwiGLUMLP",)),
    "clamped_swish_mlp": Formula(("swiglu.LigerClampedSwishMLP",)),
    "clamped_experts": Formula(("experts.LigerClampedExperts",)),
    "clamped_swish_experts": Formula(("experts.LigerClampedSwishExperts",)),
    "experts": Formula(("swiglu.LigerExperts", "experts.LigerGEGLUExperts")),
    "transposed_experts": Formula(("experts.LigerTransposedExperts",)),
    "gpt_oss_experts": Formula(("experts.LigerGptOssExperts",)),
    # without a gate: up_proj, down_proj
    "ungated_experts": Formula(("experts.LigerUngatedExperts",)),
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
    "inkling2_router": Formula(("router.LigerInkling2Router",)),
    "muse_spark_router": Formula(("router.LigerMuseSparkRouter",)),
    "laguna_router": Formula(("router.LigerLagunaRouter",)),
    "lara_mini_router": Formula(("router.LigerLaraMiniRouter",)),
    # the residual stream, a norm, attention, a norm, an MLP: transformers/layers.py has the steps of each
    "decoder_layer": Formula(),
    "scaled_decoder_layer": Formula(),
    "sandwich_decoder_layer": Formula(),
    "glm4_decoder_layer": Formula(),
    "dropout_decoder_layer": Formula(),
    "feed_forward_decoder_layer": Formula(),
    "hybrid_decoder_layer": Formula(),
    "early_hybrid_decoder_layer": Formula(),
    "convolution_decoder_layer": Formula(),
    "early_convolution_decoder_layer": Formula(),
    "sandwich_convolution_decoder_layer": Formula(),
    # two gates around a short convolution: mixers.py has its steps
    "gated_convolution": Formula(),
    "load_balancing_loss": Formula(("router.liger_load_balancing_loss_func",)),
    "causal_conv1d": Formula((f"{_MIXER}.liger_causal_conv1d_fn",), "LigerCausalConv1d"),
    "chunk_gated_delta_rule": Formula((f"{_MIXER}.liger_chunk_gated_delta_rule",), "LigerChunkGatedDeltaRule"),
    "chunk_kimi_delta_attention": Formula(
        (f"{_MIXER}.liger_chunk_kimi_delta_attention",), "LigerChunkKimiDeltaAttention"
    ),
    # their gates: a projection of low rank, in float; one projection, rounded to the input's dtype
    "forget_gate": Formula(("forget_gate.LigerForgetGate",)),
    "bailing_forget_gate": Formula(("forget_gate.LigerBailingForgetGate",)),
    "mamba2_scan": Formula((f"{_MIXER}.liger_mamba2_chunk_scan",), "LigerMamba2ChunkScan"),
    "mamba2_parts": Formula((f"{_MIXER}.liger_mamba2_split_conv1d_scan_combined",), "LigerMamba2Parts"),
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
    """Fingerprint of a source -> the name of its formula."""
    return {key: name for name, entries in json.loads(_TABLE.read_text()).items() for key in entries}


def formula_name(original) -> str | None:
    """The name of the formula that a class of modules or a function computes, by its source; None for an unknown
    one."""
    if original is nn.LayerNorm:  # whose source differs from one version of torch to the next
        return "layer_norm"
    return sources().get(fingerprint(original) or "")


def find(original) -> Formula | None:
    """The formula of a class of modules or of a function, by its source; None for an unknown one."""
    name = formula_name(original)
    return None if name is None else FORMULAS[name]


def is_known(target: str, original) -> bool:
    """Whether `target`, as a Swap names it, stands for a class or a function, by its source."""
    formula = find(original)
    return formula is not None and target in formula.targets


# The source of a class or function, by which its formula is found.


def fingerprint(original) -> str | None:
    """A hash of the source of a function or of a class's forward, and of what it calls of its class and module.

    Comments, docstrings, decorators and the annotations of parameters do not count. None where there is no source.
    """
    owner: Any = original if isinstance(original, type) else None
    function = original if owner is None else owner.forward
    return _fingerprint(inspect.unwrap(as_written(function)), owner)


def as_written(original):
    """The function that this package, or a tag of `kernels`, has put something in the place of; others as they are."""
    original = getattr(original, "liger_original", original)
    return tagged_function(type(original)) or original if isinstance(original, nn.Module) else original


def tagged_function(module_class):
    """The function that a tag of `kernels` has made a class of modules of, or None."""
    cells = [cell.cell_contents for cell in getattr(module_class.forward, "__closure__", None) or ()]
    return next((content for content in cells if inspect.isfunction(content)), None)


@functools.cache
def _fingerprint(function, owner):
    found, texts, waiting = [], [], [function]
    while waiting:
        function = waiting.pop(0)
        if function in found:
            continue
        found.append(function)
        try:
            tokens = _tokens(inspect.getsource(function))
        except (OSError, TypeError, SyntaxError, tokenize.TokenError):
            return None
        # Without spaces and doubled braces: Python 3.12 divides strings that hold expressions into tokens.
        texts.append("".join("".join(tokens).split()).replace("{{", "{").replace("}}", "}"))
        for i, name in enumerate(tokens):
            called = None
            if i > 1 and tokens[i - 1] == "." and tokens[i - 2] == "self":
                called = getattr(owner, name, None)
            elif tokens[i - 1] != ".":
                called = function.__globals__.get(name)
            if inspect.isfunction(called) and (called := as_written(called)).__module__ == function.__module__:
                waiting.append(inspect.unwrap(called))
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]


_MARKS = {tokenize.INDENT: "[", tokenize.DEDENT: "]", tokenize.NEWLINE: ";"}
_SKIPPED = (tokenize.COMMENT, tokenize.NL, tokenize.ENDMARKER)


def _tokens(source: str) -> list[str]:
    """The tokens of a function from its name on, with marks for lines and blocks, without its annotations and its
    docstring."""
    lines = io.StringIO(textwrap.dedent(source)).readline
    tokens = [token for token in tokenize.generate_tokens(lines) if token.type not in _SKIPPED]
    texts = [_MARKS.get(token.type, token.string) for token in tokens]
    begins = [i + 1 for i, text in enumerate(texts) if text == "def" and texts[i - 1 : i] in ([], [";"])]
    if not begins:
        raise SyntaxError("a lambda's source is a part of a line")
    kept, depth, annotated, i = [], 0, False, begins[0]
    while depth or texts[i] != ":":
        depth += (texts[i] in ("(", "[", "{")) - (texts[i] in (")", "]", "}"))
        if depth == 1 and texts[i] in (",", "=") or depth == 0 and texts[i] == ")":
            annotated = False
        if depth == 1 and texts[i] == ":" or texts[i] == "->":
            annotated = True
        if not annotated:
            kept.append(texts[i])
        i += 1
    body = i + 3  # after the colon, the end of the line and the indentation
    if [token.type for token in tokens[body : body + 2]] == [tokenize.STRING, tokenize.NEWLINE]:
        body += 2
    return kept + texts[body:]
