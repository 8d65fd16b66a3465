"""Every field of config.json, in C++ and in transformers: compare_configs.py <run_config>.

For each of the five families each field of its config class, and each that transformers 4.57 knew, is set to another
value, and is left out; fields that change nothing are set for one family only, unless LIGER_TESTS=all. Then the C++
loss and the norm of its gradients are those of transformers, or the C++ error names the field. What a checkpoint holds
beside the model's weights is loaded, ignored or refused as transformers does.
"""

import dataclasses
import json
import pathlib
import shutil
import subprocess
import sys
import tempfile

import torch
import transformers
from safetensors.torch import load_file, save_file

sys.path.append(str(pathlib.Path(__file__).parents[1]))
from tiers import ALL  # noqa: E402

READ, HARMLESS, REFUSED = range(3)
# Of PretrainedConfig and of four of the families' configs in transformers 4.57.6, whose classes are other ones.
FIELDS_OF_4_57 = """
    output_hidden_states output_attentions return_dict torchscript dtype torch_dtype pruned_heads tie_word_embeddings
    chunk_size_feed_forward is_encoder_decoder is_decoder cross_attention_hidden_size add_cross_attention
    tie_encoder_decoder architectures finetuning_task id2label label2id num_labels task_specific_params problem_type
    tokenizer_class prefix bos_token_id pad_token_id eos_token_id sep_token_id decoder_start_token_id max_length
    min_length do_sample early_stopping num_beams temperature top_k top_p typical_p repetition_penalty length_penalty
    no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids num_return_sequences output_scores
    return_dict_in_generate forced_bos_token_id forced_eos_token_id remove_invalid_values
    exponential_decay_length_penalty suppress_tokens begin_suppress_tokens num_beam_groups diversity_penalty
    name_or_path _name_or_path _commit_hash attn_implementation transformers_version gradient_checkpointing
    tf_legacy_loss use_bfloat16 vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads
    num_key_value_heads hidden_act max_position_embeddings initializer_range rms_norm_eps use_cache pretraining_tp
    rope_theta rope_scaling attention_bias attention_dropout mlp_bias head_dim sliding_window use_sliding_window
    max_window_layers layer_types
""".split()
# What the code of transformers asks for, though no config of these families has it.
ASKED_FOR = """
    is_causal partial_rotary_factor original_max_position_embeddings per_layer_config tie_last_hidden_states
    full_attention_interval experts_implementation quantization_config compression_config fusion_config
    transformers_weights
""".split()

VOCABULARY, LAYERS, PAD = 61, 2, 5
# 32 heads of 2, or where head_dim says so 4, so that any default number of key and value heads divides them.
BASE = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": LAYERS,
    "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 4, "max_position_embeddings": 64,
    "initializer_range": 0.3, "rms_norm_eps": 1e-3, "hidden_act": "silu", "tie_word_embeddings": False,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None, "dtype": "float32", "use_cache": True,
    "attention_dropout": 0.0, "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
}  # fmt: skip
WINDOW = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0}
FAMILIES = {
    "Llama": {"attention_bias": False, "mlp_bias": False},
    "Mistral": {"sliding_window": 5},
    "Qwen2": WINDOW,
    "Qwen3": WINDOW | {"attention_bias": False},
    "Qwen3_5Text": {
        "attention_bias": False, "head_dim": 8, "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 6,
        "linear_conv_kernel_dim": 3,
    },
}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "rope_theta": 100.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "beta_fast": 4.0}
FULL = ["full_attention"] * LAYERS
SLIDING = ["sliding_attention"] * LAYERS
# Other values of a field, and what goes with them. A field that is not here gets one of its type.
OTHERS = {
    "vocab_size": [{"vocab_size": 70}], "hidden_size": [{"hidden_size": 96}],
    "intermediate_size": [{"intermediate_size": 40}],
    "num_hidden_layers": [{"num_hidden_layers": 3}, {"num_hidden_layers": 1, "layer_types": FULL}],
    "num_attention_heads": [{"num_attention_heads": 16}, {"num_attention_heads": 24}],
    "num_key_value_heads": [{"num_key_value_heads": 8}, {"num_key_value_heads": 32}],
    "head_dim": [{"head_dim": 8}, {"head_dim": 3}],
    "hidden_act": [{"hidden_act": act} for act in ("gelu", "gelu_pytorch_tanh", "relu2", "swish", "tanh", "gelu_new")],
    "max_position_embeddings": [
        {"max_position_embeddings": 32}, {"max_position_embeddings": 32, "rope_parameters": LLAMA3},
        {"max_position_embeddings": 32, "rope_parameters": YARN},
    ],
    "original_max_position_embeddings": [
        {"original_max_position_embeddings": 16}, {"original_max_position_embeddings": 16, "rope_parameters": YARN},
        {
            "original_max_position_embeddings": 16,
            "rope_parameters": LLAMA3 | {"original_max_position_embeddings": 32},
        },
    ],
    "rope_parameters": [
        {"rope_parameters": value} for value in (
            LLAMA3, YARN, {"rope_type": "linear", "factor": 3.0}, {"type": "linear", "factor": 3.0, "rope_theta": 50.0},
            {"rope_type": "dynamic", "factor": 3.0}, {"rope_type": "default", "rope_theta": 50.0, "factor": 3.0}, None,
            YARN | {"beta_fast": 0, "truncate": False}, YARN | {"attention_factor": 0.5},
            {"rope_type": "default", "partial_rotary_factor": 0.5},
            {"rope_type": "linear", "factor": 3.0, "partial_rotary_factor": 0.5},
        )
    ] + [{"layer_types": FULL, "sliding_window": None, "rope_parameters": {"full_attention": YARN}}],
    "rope_scaling": [
        {"rope_scaling": {"rope_type": "linear", "factor": 3.0}},
        {"rope_scaling": {"rope_type": "linear", "factor": 3.0}, "rope_theta": 50.0, "rope_parameters": None},
        {"rope_scaling": {}, "rope_theta": 50.0},
    ],
    "rope_theta": [{"rope_theta": 50.0}, {"rope_theta": 50.0, "rope_parameters": None}],
    "partial_rotary_factor": [
        {"partial_rotary_factor": 0.5, "rope_parameters": YARN},
        {"partial_rotary_factor": 0.5, "rope_parameters": YARN | {"partial_rotary_factor": 1.0}},
    ],
    "initializer_range": [{"initializer_range": 0.2}],
    "tie_word_embeddings": [{"tie_word_embeddings": True}],
    "use_sliding_window": [
        {"use_sliding_window": False}, {"use_sliding_window": False, "layer_types": SLIDING},
        {"use_sliding_window": True, "sliding_window": 7},
    ],
    "sliding_window": [{"sliding_window": 7}, {"sliding_window": None}, {"sliding_window": 100}],
    "max_window_layers": [{"max_window_layers": value} for value in (1, LAYERS, 28)],
    "layer_types": [
        {"layer_types": value}
        for value in (
            FULL, SLIDING, ["full_attention", "sliding_attention"], ["chunked_attention"] * LAYERS,
            ["full_attention", "linear_attention"], ["linear_attention"],
        )
    ],
    "full_attention_interval": [
        {"full_attention_interval": value, "layer_types": None} for value in (1, 2, 0)
    ],
    "linear_num_key_heads": [{"linear_num_key_heads": 4}, {"linear_num_key_heads": 3}],
    "linear_num_value_heads": [{"linear_num_value_heads": 6}, {"linear_num_value_heads": 3}],
    "bos_token_id": [{"bos_token_id": 7}, {"bos_token_id": None}],
    "eos_token_id": [{"eos_token_id": 7}, {"eos_token_id": [7, 8]}, {"eos_token_id": None}],
    "pad_token_id": [
        {"pad_token_id": PAD}, {"pad_token_id": PAD, "tie_word_embeddings": True}, {"pad_token_id": PAD - VOCABULARY},
        {"pad_token_id": VOCABULARY},
    ],
    "dtype": [{"dtype": "bfloat16"}, {"dtype": "float64"}],
    "torch_dtype": [{"dtype": None, "torch_dtype": "bfloat16"}, {"torch_dtype": "bfloat16"}],
    "attention_dropout": [{"attention_dropout": 0.5}, {"attention_dropout": 0}],
    "per_layer_config": [{"per_layer_config": {"1": {"rms_norm_eps": 0.5}}}],
    "pruned_heads": [{"pruned_heads": {"0": [1]}}, {"pruned_heads": {}}],
    "quantization_config": [{"quantization_config": {"quant_method": "fp8"}}],
    "transformers_weights": [{"transformers_weights": "other.safetensors"}],
    "architectures": [{"architectures": ["GemmaForCausalLM"]}],
    "id2label": [{"id2label": {"0": "a"}}], "label2id": [{"label2id": {"a": 0}}],
    "attn_implementation": [{"attn_implementation": "eager"}],
    "experts_implementation": [{"experts_implementation": "eager"}],
    "output_attentions": [{"output_attentions": True, "attn_implementation": "eager"}],
    "problem_type": [{"problem_type": "regression"}],
}  # fmt: skip


# Not compared: the forward of transformers 5.23 fails with it.
FAILS_THERE = {"return_dict"}


class Configs:
    def __init__(self, binary, folder):
        self.folder = folder
        torch.manual_seed(0)
        self.ids = torch.randint(0, VOCABULARY, (2, 24))
        self.ids[:, ::4] = PAD
        self.labels = torch.where(torch.rand(self.ids.shape) < 0.3, -100, self.ids)
        save_file({"ids": self.ids, "labels": self.labels}, folder / "inputs.safetensors")
        command = [binary, folder / "inputs.safetensors"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.fields = json.loads(self.process.stdout.readline())

    def ours(self, folder):
        self.process.stdin.write(f"{folder}\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def theirs(self, folder):
        """A checkpoint in training, as its files say it."""
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto").train()
        # Without a cache: that of a model whose attention is all linear does not know its length.
        loss = model(self.ids, labels=self.labels, return_dict=True, use_cache=False).loss
        loss.backward()
        gradients = [parameter.grad.double().square().sum() for parameter in model.parameters()]
        return {"loss": loss.item(), "norm": sum(gradients).sqrt().item(), "dtype": model.dtype}

    def agree(self, what, folder, names):
        """The same numbers, or an error that has one of the names; returns the error."""
        ours = self.ours(folder)
        if "error" in ours:
            assert any(name in ours["error"] for name in names), f"{what}: the error names no field: {ours['error']}"
            return ours["error"]
        theirs = self.theirs(folder)
        # float: sums of some 1e5 roundings, most of which cancel; fewer do where a recurrence hands them on. bfloat16
        # rounds each of them once more.
        bound = (2.0**-13 if "Qwen3_5" in what else 2.0**-16) if theirs["dtype"] == torch.float32 else 2.0**-5
        for key in ("loss", "norm"):
            assert abs(ours[key] - theirs[key]) <= bound * theirs[key], f"{what}: {ours}, transformers {theirs}"
        return None

    def field(self, family, name, changes, left_out=()):
        """A checkpoint whose config.json has the changes; returns the error, if there is one."""
        what = f"{family}: {changes or ''}{' without ' if left_out else ''}{', '.join(left_out)}"
        model_type = getattr(transformers, f"{family}Config").model_type
        config = {"model_type": model_type, **BASE, **FAMILIES[family], **changes}
        config = {key: value for key, value in config.items() if key not in left_out}
        folder = self.folder / "checkpoint"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        error = self.ours(folder)["error"]
        if "model.safetensors" not in error.split("config.json")[0]:
            assert any(field in error for field in (name, *changes)), f"{what}: the error does not name it: {error}"
            return error
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:  # norms and biases, which start at constants
                    parameter.add_(torch.randn_like(parameter) * 0.3)
        save_file(weights_of(model), folder / "model.safetensors", {"format": "pt"})
        return self.agree(what, folder, [name])


def weights_of(model):
    """Without the head where it is tied, in memory of their own."""
    weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        weights.pop("lm_head.weight")
    return weights


def others(name, config):
    if name in OTHERS:
        return OTHERS[name]
    value = getattr(config, name, None)
    if isinstance(value, bool):
        value = not value
    elif isinstance(value, (int, float)):
        value = value * 2 + 1
    else:
        value = {"bad_words_ids": [[3]], "suppress_tokens": [3], "begin_suppress_tokens": [3]}.get(name, True)
    return [{name: value}]


def test_fields(configs, family):
    config_class = getattr(transformers, f"{family}Config")
    names = {field.name for field in dataclasses.fields(config_class)}
    names |= set(transformers.GenerationConfig._get_default_generation_params()) | set(FIELDS_OF_4_57) | set(ASKED_FOR)
    missing = names - configs.fields.keys()
    assert not missing, f"{family}: the table has no {missing}"
    assert configs.field(family, "", {}) is None
    compared = refused = 0
    if not ALL and family != "Llama":  # one table for all families says what is harmless
        names = {name for name in names if configs.fields[name]["use"] != HARMLESS}
    for name in sorted(names):
        use, allowed = (configs.fields[name][key] for key in ("use", "allowed"))
        for changes in [] if name in FAILS_THERE else others(name, config_class()):
            error = configs.field(family, name, changes)
            is_allowed = use != REFUSED or changes[name] in allowed
            assert use == READ or (error is None) == is_allowed, f"{family}: {changes}: {error}"
            refused, compared = refused + bool(error), compared + (not error)
        if name in BASE | FAMILIES[family]:
            configs.field(family, name, {}, [name])
    for left_out in (["rope_parameters"], ["pad_token_id", "bos_token_id", "eos_token_id"], ["dtype", "use_cache"]):
        configs.field(family, left_out[0], {}, left_out)
    print(f"{family}: {len(names)} fields, {compared} configs agree, {refused} are refused by name", flush=True)


def test_scaled_angles(configs):
    """A number that a kind of scaling needs is missing; transformers raises KeyError."""
    for rope in (LLAMA3, YARN, {"rope_type": "linear", "factor": 3.0}):
        for name in rope.keys() & {"factor", "low_freq_factor", "high_freq_factor"}:
            changes = {"rope_parameters": {key: value for key, value in rope.items() if key != name}}
            assert configs.field("Llama", name, changes), f"{changes} is not refused"


def test_weights(configs):
    """Heads where config.json says tied, weights that no part of the model takes, and files that hold them."""
    tied = {"tie_word_embeddings": True}
    folder = configs.folder / "checkpoint"
    single = folder / "model.safetensors"

    def check(what, change, names=()):
        assert configs.field("Llama", "", tied) is None
        weights = load_file(single)
        change(weights)
        save_file(weights, single, {"format": "pt"})
        error = configs.agree(what, folder, names)
        assert bool(error) == bool(names), f"{what}: {error}"

    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    check("a head that is the embedding", lambda w: w.update({head: w[embedding].clone()}))
    check("a head of its own", lambda w: w.update({head: torch.randn_like(w[embedding]) * 0.3}))
    check(
        "a head that differs in one element",
        lambda w: w.update({head: w[embedding] + 2 * torch.eye(*w[embedding].shape)}),
    )
    check("a head instead of the embedding", lambda w: w.update({head: w.pop(embedding)}))
    check("neither", lambda w: w.pop(embedding), [embedding])
    for name in ("model.layers.1.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq"):
        check(name, lambda w, name=name: w.update({name: torch.ones(2)}))
    for name in ("extra", "lm_head.bias", "model.layers.0.self_attn.q_proj.bias", "model.layers.9.mlp.up_proj.weight",
                 "lm_head.weight_scale"):  # fmt: skip
        check(name, lambda w, name=name: w.update({name: torch.ones(2)}), [name])

    # The second file holds a head, which the index forgets.
    assert configs.field("Llama", "", tied) is None
    weights = load_file(single)
    norm = weights.pop("model.norm.weight")
    other = {head: torch.randn_like(weights[embedding]) * 0.3, "model.norm.weight": norm}
    save_file(weights, folder / "a.safetensors", {"format": "pt"})
    save_file(other, folder / "b.safetensors", {"format": "pt"})
    index = {name: "a.safetensors" for name in weights} | {"model.norm.weight": "b.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    both = configs.theirs(folder)
    assert configs.agree("a file beside an index", folder, []) is None
    single.unlink()
    assert configs.agree("a head that the index forgets", folder, []) is None
    assert abs(configs.theirs(folder)["loss"] - both["loss"]) > 0.1, "the head changes nothing"
    save_file(other | {"extra": torch.ones(2)}, folder / "b.safetensors", {"format": "pt"})
    assert configs.agree("a weight that the index forgets", folder, ["extra"])
    print("heads, and weights that are not used: as transformers", flush=True)


if __name__ == "__main__":
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        configs = Configs(sys.argv[1], pathlib.Path(name))
        for family in FAMILIES:
            test_fields(configs, family)
        test_scaled_angles(configs)
        test_weights(configs)
