"""Every model type of the installed transformers with a language-model head, tiny, plain and patched by source.

    python tests/huggingface/every_type.py [--write] [TYPE ...]

prints for each type that has no row, or for those that are named, what is replaced, and how far loss and gradients are
from those of the plain model; with --write it writes their rows of the table in docs/families.md. The configurations
are the defaults, with their sizes made small.
"""

import argparse
import collections
import copy
import pathlib
import re
import sys
import textwrap
import typing
import warnings

import torch
import transformers
from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN, _apply_liger_kernel_to_instance
from liger_kernel.transformers.patch import TABLES, UNKNOWN
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "families.md"
BEGIN, END = "<!-- made by tests/huggingface/every_type.py -->", "<!-- end -->"
MAPPINGS = ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
            "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES")  # fmt: skip
# Sums in float32 in another order: see conftest.py. Twice as many layers as there, and one number for a whole gradient.
LOSS_TOLERANCE, GRADIENT_TOLERANCE = 2.0**-18, 2.0**-12
LAYERS, WIDTH, HEADS, VOCABULARY = 4, 64, 4, 128
# Fields of configurations -> their tiny values; the first pattern that fits counts.
SIZES = (
    (r"(.*_)?vocab_size(_\w+)?|vocab_size_or_config_json_file", VOCABULARY),
    (r"qk_head_dim", 2 * WIDTH // HEADS),
    (r"first_k_dense_replace|num_dense_layers|moe_layer_start_index|num_nextn_predict_layers", 1),
    (r"num_kv_shared_layers|zero_expert_num", 0),
    (r"rotary_dim|(ssm_|mamba_d_)?state(_size)?|mamba_d_state|(mamba_)?chunk_size", 8),
    (r"(mamba_)?n_?groups", 2),
    (r"hidden_size_per_layer_input|laurel_rank|adapter_rank|hc_lowrank|mamba_headdim", 16),
    (r"(num_|n_)?(encoder_|decoder_|hidden_|text_|vision_)?(layers?|blocks)|num_\w*_layers|depth|n_layers?", LAYERS),
    (r".*(num_key_value_heads|num_kv_heads|n_kv_heads|kv_heads|num_query_groups|multi_query_group_num).*", 2),
    (r".*(attention_heads|n_heads?|num_heads|num_attn_heads)", HEADS),
    (r"(\w*_)?(qk_rope_|qk_nope_|v_)?head_(dim|size)|d_kv|qk_(nope|rope)_head_dim|kv_channels", WIDTH // HEADS),
    (r"q_lora_rank|kv_lora_rank|\w*_lora_rank", 32),
    (r"(\w*_)?(hidden_size|d_model|n_embd|embed_dim|embedding_size|hidden_dim|model_dim|embed_size|input_dim)|dim|width"
     r"|embedding_dim|projection_dim|out_hidden_size|output_dim|word_embed_proj_dim|d_embed", WIDTH),
    (r"(\w*_)?(intermediate_size|ffn_dim|d_ff|n_inner|mlp_dim|inner_dim|ffn_hidden_size|dim_ff|dff)(_\w+)?", 96),
    (r"(n_routed_experts|num_experts|num_local_experts|moe_num_experts|n_experts)", 4),
    (r"(num_experts_per_tok|moe_k|moe_topk|num_experts_per_token|top_k_experts|moe_top_k|num_selected_experts)", 2),
    (r"n_group|topk_group|num_expert_groups", 1),
    (r"n_shared_experts|num_shared_experts|moe_num_shared_experts", 1),
    (r"max_position_embeddings|n_positions|max_seq_len|max_source_positions|max_target_positions", 128),
    (r"sliding_window|window_size|attention_window", 8),
    (r"(bos|sep|cls|decoder_start)_token_id", 1), (r"eos_token_id", 2), (r"pad_token_id", 0),
    (r".*(dropout|dropout_prob|pdrop|layerdrop|dropout_rate|drop_path_rate|_drop|drop)", 0.0),
)  # fmt: skip
# What the tiny sizes need besides, by type; a dotted name is a field of a configuration in it.
_SECTIONS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
_TWO_ROPES = {name: {"rope_type": "default", "rope_theta": 1e4} for name in ("full_attention", "sliding_attention")}
_MIXED = ["sliding_attention", "full_attention"] * 2
FIELDS: dict[str, dict[str, typing.Any]] = {
    **dict.fromkeys(("glm46v", "glmga", "paddleocr_vl", "qwen2_5_omni_thinker", "glm_ocr"),
                    {"text_config.rope_parameters": _SECTIONS}),
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "cohere_compass_text": {"rope_parameters": _TWO_ROPES, "layer_types": _MIXED},
    "cohere_compass": {"text_config.rope_parameters": _TWO_ROPES, "text_config.layer_types": _MIXED},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "gemma3n_text": {"intermediate_size": 96, "activation_sparsity_pattern": [0.0] * LAYERS, "layer_types": _MIXED},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 2},
    "nemotron_h": {"mamba_num_heads": 8, "n_groups": 2},
    "zamba2": {"attention_hidden_size": 128, "attention_head_dim": 32, "n_mamba_heads": 8, "hybrid_layer_ids": [1, 3]},
    "zamba": {"attention_hidden_size": 128, "attention_head_dim": 32},
    "codegen": {"rotary_dim": 8}, "gptj": {"rotary_dim": 8},
    "mistral4": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "llama_4_scaling_beta": 0.1,
                                     "original_max_position_embeddings": 64, "partial_rotary_factor": 0.5}},
    "step3p7": {"text_config.sliding_window": 8},
    "qwen4_exp_text": {"layer_types": ["full_attention"] * 4},
    "hunyuan_vl": {"text_config.head_dim": 16}, "zaya": {"num_experts_per_tok": 1},
    "gemma4_unified_text": {"layer_types": _MIXED}, "gemma4_unified": {"text_config.layer_types": _MIXED},
}  # fmt: skip


def types() -> dict[str, str]:
    """Model type -> the class of its language model."""
    found: dict[str, str] = {}
    for name in MAPPINGS:
        for kind, cls in getattr(modeling_auto, name, {}).items():
            found.setdefault(kind, cls if isinstance(cls, str) else cls[0])
    return dict(sorted(found.items()))


def without_row() -> dict[str, str]:
    return {kind: cls for kind, cls in types().items() if kind not in MODEL_TYPE_TO_APPLY_LIGER_FN}


def _tiny(config_class, own):
    """The fields of a configuration, as small as SIZES has them; `own` ones win."""
    default = config_class()
    made = {}
    for name, value in vars(default).items():
        if name.startswith("_") or name in ("model_type",):
            continue
        for pattern, size in SIZES:
            if re.fullmatch(pattern, name) and isinstance(value, (int, float)) and not isinstance(value, bool):
                made[name] = size
                break
        if name in ("layer_types", "mlp_layer_types", "layers_block_type") and isinstance(value, list):
            made[name] = (list(dict.fromkeys(value)) * LAYERS)[:LAYERS]
    for name, inner in (getattr(config_class, "sub_configs", None) or {}).items():
        value = getattr(default, name, None)
        inner = type(value) if isinstance(value, transformers.PretrainedConfig) else inner
        nested = {key.partition(".")[2]: field for key, field in own.items() if key.startswith(f"{name}.")}
        if inner in CONFIG_MAPPING.values() or isinstance(value, transformers.PretrainedConfig):
            made[name] = _tiny(inner, nested)
            made[name]["model_type"] = inner.model_type
    if "kv_lora_rank" in made and "num_key_value_heads" in made:  # multi-head latent attention
        made["num_key_value_heads"] = HEADS
    return made | {name: field for name, field in own.items() if "." not in name}


def model_of(kind):
    """A tiny random model of a type; whatever its constructor raises where the sizes do not fit."""
    torch.manual_seed(0)
    config_class = CONFIG_MAPPING[kind]
    config = config_class(**_tiny(config_class, FIELDS.get(kind, {})))
    for each in (config, getattr(config, "text_config", None)):
        if each is not None:
            each.use_cache = False
    model = getattr(transformers, types()[kind])(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 and parameter.is_floating_point():
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model.float().train()


def inputs():
    ids = torch.randint(4, VOCABULARY - 8, (2, 12), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, :3] = -100
    return {"input_ids": ids, "labels": labels}


def step(model):
    """(loss, gradients by name) of one step, with the same random numbers each time."""
    model.zero_grad()
    torch.manual_seed(1)
    output = model(**inputs())
    loss = output.loss if hasattr(output, "loss") else output[0]
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), gradients, getattr(output, "logits", None)


class Result(typing.NamedTuple):
    report: typing.Any
    loss: float  # the largest relative differences of loss and gradients
    gradient: float
    fused: bool


def compare(kind) -> Result:
    """One step of a plain and of a patched model of a type."""
    plain = model_of(kind)
    model = copy.deepcopy(plain)
    loss, gradients, _ = step(plain)
    report = _apply_liger_kernel_to_instance(model)
    ours, our_gradients, logits = step(model)
    assert gradients.keys() == our_gradients.keys()
    norms = {name: g.norm() for name, g in gradients.items()}
    # A gradient of rounding errors, as that of a key's bias, is no measure: of one parameter to a usual one's.
    floor = 1e-3 * torch.stack([n / g.numel() ** 0.5 for n, g in zip(norms.values(), gradients.values())]).median()
    worst = max(
        ((our_gradients[name] - g).norm() / (norms[name] + floor * g.numel() ** 0.5)).item()
        for name, g in gradients.items()
    )
    return Result(report, ((ours - loss).abs() / loss.abs()).item(), worst, logits is None)


COLUMNS = {"RMSNorm": ("rms_norm",), "LayerNorm": ("layer_norm",), "MLP, experts": ("swiglu", "geglu", "relu_squared"),
           "rope": ("rope",), "loss": ("fused_linear_cross_entropy",)}  # fmt: skip
SHORT = {UNKNOWN: "unknown source", TABLES: "unknown tables"}


def line(kind, report) -> str:
    """The row of a type in the table of docs/families.md."""
    done = {entry.switch for entry in report.replaced}
    kept = collections.defaultdict(list)
    for skip in report.skipped:
        kept[SHORT.get(skip.reason, skip.reason)].append(f"`{skip.name}`")
    why = "; ".join(f"{', '.join(dict.fromkeys(names))}: {reason}" for reason, names in kept.items())
    cells = ["yes" if done & set(switches) else "" for switches in COLUMNS.values()]
    return f"| {kind} | {' | '.join(cells)} | {why} |"


def documented() -> dict[str, str]:
    """Type -> its row in the table of docs/families.md."""
    text = PAGE.read_text().split(BEGIN)[1].split(END)[0]
    return {row.split("|")[1].strip(): row for row in text.splitlines() if re.match(r"\| [a-z]", row)}


def documented_version() -> str:
    return re.search(r"transformers ([\d.]+), \d+ types", PAGE.read_text()).group(1)


def write(results):
    """Put the rows of these types into the page, beside those that it has of other types without a row."""
    before, after = PAGE.read_text().split(BEGIN)[0], PAGE.read_text().split(END)[1]
    there, made = documented(), {kind: line(kind, result.report) for kind, result in results.items()}
    lines = {kind: row for kind in without_row() if (row := made.get(kind, there.get(kind)))}
    others = [kind for kind in without_row() if kind not in lines]
    rows = [f"| type | {' | '.join(COLUMNS)} | kept |", "|" + "---|" * (len(COLUMNS) + 2), *lines.values()]
    head = f"transformers {transformers.__version__}, {len(lines)} types:"
    tail = textwrap.fill(
        f"{len(others)} more types were not tried, because their small models could not be made or take more than "
        f"text: {', '.join(others)}.", 120, break_on_hyphens=False,
    )  # fmt: skip
    PAGE.write_text("\n".join([before + BEGIN, "", head, "", *rows, "", tail, "", END + after]))


def main():
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the table of docs/families.md")
    parser.add_argument("types", nargs="*")
    arguments = parser.parse_args()
    results, failed, wrong = {}, [], 0
    for kind in arguments.types or without_row():
        try:
            result = results[kind] = compare(kind)
        except Exception as error:  # a constructor that wants other sizes, a forward that wants other inputs
            failed.append(kind)
            print(f"{kind}: not run: {type(error).__name__}: {str(error).partition(chr(10))[0][:110]}", flush=True)
            continue
        bad = result.loss > LOSS_TOLERANCE or result.gradient > GRADIENT_TOLERANCE
        wrong += bad
        print(f"{kind}: {'WRONG: ' * bad}loss {result.loss:.0e}, gradient {result.gradient:.0e}, "
              f"{'no ' * result.fused}logits. {result.report.line()}", flush=True)  # fmt: skip
    print(f"{len(results)} run, {wrong} wrong, {len(failed)} not run")
    if arguments.write:
        write(results)
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
