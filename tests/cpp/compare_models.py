"""C++ models against transformers, both ways: compare_models.py <run_model>. Logits, losses, gradients and greedy
tokens agree, and a checkpoint that C++ wrote is the same model to transformers. So do models with PEFT's adapters."""

import copy
import json
import pathlib
import subprocess
import sys
import tempfile

import peft
import torch
import transformers
from safetensors.torch import load_file, save_file

COMMON = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-3,
    "initializer_range": 0.3, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
}
PARTIAL = {"partial_rotary_factor": 0.5}
HYBRID = {
    "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 12, "linear_conv_kernel_dim": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4} | PARTIAL,
}  # fmt: skip
MODELS = {
    "llama": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama tied, head_dim": ("Llama", {"tie_word_embeddings": True, "head_dim": 16, "num_key_value_heads": 4}),
    "llama3 rope": ("Llama", {"rope_parameters": LLAMA3}),
    "yarn": ("Llama", {"rope_parameters": YARN}),
    "yarn with mscale": ("Llama", {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}}),
    "linear rope": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}}),
    "mistral": ("Mistral", {"sliding_window": 5}),
    "mistral without a window": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3_5": ("Qwen3_5", HYBRID),
    "qwen3_5 tied, yarn": ("Qwen3_5", HYBRID | {"tie_word_embeddings": True, "rope_parameters": YARN | PARTIAL}),
    "bfloat16": ("Llama", {"dtype": torch.bfloat16}),
    "hybrid in bfloat16": ("Qwen3_5", HYBRID | {"dtype": torch.bfloat16}),
}
ADAPTERS = {
    "all layers": ("llama", {"target_modules": "all-linear"}),
    "queries and values, rsLoRA": ("qwen3", {"target_modules": ["q_proj", "v_proj"], "use_rslora": True}),
    "some of each": ("qwen2", {"target_modules": ["k_proj", "o_proj", "up_proj"], "lora_alpha": 7}),
    "a part of an MLP": ("llama tied, head_dim", {"target_modules": ["gate_proj", "down_proj"]}),
    "layers by their names": ("mistral", {"target_modules": ["0.mlp.up_proj", "model.layers.2.self_attn.v_proj"]}),
    "hybrid": ("qwen3_5", {"target_modules": "all-linear"}),
    "hybrid by name": ("qwen3_5", {"target_modules": ["in_proj_qkv", "in_proj_a", "out_proj", "q_proj"]}),
    "bfloat16": ("bfloat16", {"target_modules": "all-linear"}),
}


def made(name):
    """One of MODELS, and tokens for it."""
    family, fields = MODELS[name]
    fields = dict(fields)
    dtype = fields.pop("dtype", torch.float32)
    torch.manual_seed(0)
    of_text = "TextConfig" if family == "Qwen3_5" else "Config"  # beside which there is one for images
    config = getattr(transformers, family + of_text)(**COMMON | fields)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norms and biases, which start at constants
                parameter.add_(torch.randn_like(parameter) * 0.3)
    model = model.to(dtype).eval()
    ids = torch.randint(3, COMMON["vocab_size"], (2, 20))
    mask = torch.ones_like(ids)
    mask[0, :6] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    labels = torch.where(torch.rand(ids.shape) < 0.3, -100, ids)
    return model, {"ids": ids, "mask": mask, "positions": positions, "labels": labels}


def run(run_model, folder, inputs, *adapters):
    save_file(inputs, folder / "inputs.safetensors")
    names = ("theirs", "inputs.safetensors", "ours", "results.safetensors", *adapters)
    subprocess.run([run_model, *(folder / name for name in names)], check=True)
    return load_file(folder / "results.safetensors")


def judge(name):
    # The size of an element's rounding is that of the largest ones, of which it is a sum.
    def close(what, got, want, bound=2.0**-16, exact=None):
        """Within the bound; in bfloat16 as near to `exact`, of these weights in float64, as transformers, and half."""
        size = want.double().abs().max().item()
        if exact is not None:
            error, bound = (got.double() - exact).norm().item(), 1.5 * (want.double() - exact).norm().item() / size
        else:
            error = (got.double() - want.double()).abs().max().item()
        assert size > 0 and error <= bound * size, f"{name}: {what} differs by {error:.3g} of {size:.3g}"

    return close


def compare(name, run_model, folder):
    model, inputs = made(name)
    model.save_pretrained(folder / "theirs")
    found, close = run(run_model, folder, inputs), judge(name)
    ids, mask, positions, labels = inputs.values()
    # But for recurrences, which transformers computes in float32.
    exact = copy.deepcopy(model).double()
    if model.dtype != torch.float32:
        with torch.no_grad():
            close("logits", found["logits"], model(ids).logits, exact=exact(ids).logits)
            expected = exact(ids, labels=labels).loss
            close("loss", found["loss"], model(ids, labels=labels).loss, exact=expected)
        return reloaded(name, model, ids, folder / "ours")

    with torch.no_grad():
        close("logits", found["logits"], model(ids).logits)
        padded = model(ids, attention_mask=mask, position_ids=positions).logits
        close("padded logits", found["padded"][mask.bool()], padded[mask.bool()])
    # Terms of some gradients cancel: those of transformers in float32 may be further off than the bound.
    loss = exact(ids, labels=labels).loss
    loss.backward()
    close("loss", found["loss"], loss.detach())
    for key, parameter in exact.named_parameters():
        close(f"gradient of {key}", found[f"gradient.{key}"], parameter.grad, 2.0**-14)
    new = {}
    for what, attention in (("generated", torch.ones_like(ids)), ("generated padded", mask)):
        with torch.no_grad():
            generated = model.generate(ids, attention_mask=attention, max_new_tokens=12, do_sample=False)
        tokens = found[what]
        ended = (tokens[:, ids.shape[1] :] == 2).cumsum(1) > 1  # what comes after the end is padding: zeros of theirs
        theirs = torch.nn.functional.pad(generated, (0, tokens.shape[1] - generated.shape[1]))
        new[what] = theirs[:, ids.shape[1] :]
        assert torch.equal(tokens[:, ids.shape[1] :].masked_fill(ended, 0), new[what]), f"{name}: {tokens}, {theirs}"
    # What padding stands for is not in reach of a window.
    assert name == "mistral" or not torch.equal(*new.values()), f"{name}: padding changes nothing"
    reloaded(name, model, ids, folder / "ours")


def reloaded(name, model, ids, folder):
    again = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    assert type(again) is type(model) and again.dtype == model.dtype
    for key, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[key], value), f"{name}: C++ wrote another {key}"
    with torch.no_grad():
        same_but_for_order(f"{name}: the checkpoint that C++ wrote", model(ids).logits, again(ids).logits)


def compare_nested(run_model, folder):
    """Of a Qwen3.5 that sees images the model for text, whose weights have a prefix of their own."""
    model, inputs = made("qwen3_5")
    nested = {"model_type": "qwen3_5", "text_config": model.config.to_dict(), "vision_config": {"depth": 1}}
    (folder / "theirs").mkdir()
    (folder / "theirs" / "config.json").write_text(json.dumps(nested))
    weights = {key.replace("model.", "model.language_model.", 1): value for key, value in model.state_dict().items()}
    others = {"model.visual.patch_embed.proj.weight": torch.ones(3), "mtp.norm.weight": torch.ones(3)}
    save_file(weights | others, folder / "theirs" / "model.safetensors", {"format": "pt"})
    found = run(run_model, folder, inputs)
    again = transformers.AutoModelForCausalLM.from_pretrained(folder / "theirs", dtype="auto").eval()
    with torch.no_grad():
        judge("nested")("logits", found["logits"], again(inputs["ids"]).logits)
    reloaded("nested", model, inputs["ids"], folder / "ours")


def same_but_for_order(what, theirs, ours):
    """Not the same bits: a product of bfloat16 may be summed in another order where memory is aligned otherwise."""
    limit = 4 * torch.finfo(theirs.dtype).eps * theirs.abs().max()
    assert (ours - theirs).abs().max() <= limit, f"{what} is another model"


def compare_adapter(name, run_model, folder):
    """C++ runs an adapter that PEFT saved; PEFT runs the one that C++ saved, and transformers the merged weights."""
    of, fields = ADAPTERS[name]
    base, inputs = made(of)
    base.save_pretrained(folder / "theirs")
    model = peft.get_peft_model(base, peft.LoraConfig(r=3, task_type="CAUSAL_LM", **fields)).eval()
    trained = {key: value for key, value in model.named_parameters() if value.requires_grad}
    with torch.no_grad():
        for key, value in trained.items():
            if "lora_B" in key:
                value.normal_(0, 0.3)
    model.save_pretrained(folder / "adapter")
    found, close = run(run_model, folder, inputs, "adapter", "new adapter"), judge(f"{name} of {of}")
    ids, labels = inputs["ids"], inputs["labels"]

    def loaded(adapter):
        base = transformers.AutoModelForCausalLM.from_pretrained(folder / "theirs", dtype="auto").eval()
        return peft.PeftModel.from_pretrained(base, folder / adapter).eval() if adapter else base

    wide = model.dtype == torch.float32
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=not wide):
        loss, theirs = model(ids, labels=labels).loss, model(ids).logits
        assert (theirs - loaded(None)(ids).logits).abs().max() > 0.1  # the adapter says something
        before, again = loaded("adapter"), loaded("new adapter")
        same_but_for_order(f"{name}: the adapter that C++ wrote", before(ids).logits, again(ids).logits)
    for key, value in before.state_dict().items():
        assert torch.equal(again.state_dict()[key], value), f"{name}: C++ wrote another {key}"
    exact = None if wide else copy.deepcopy(model).double()
    with torch.no_grad():
        close("logits", found["logits"], theirs, exact=None if wide else exact(ids).logits)
        close("loss", found["loss"], loss, exact=None if wide else exact(ids, labels=labels).loss)
    if wide:
        model(ids, labels=labels).loss.backward()
        # Decays of up to e^-30 a token leave some gradients of a recurrence as differences of much larger terms: both
        # are up to 2^-12 from those of float64.
        bound = 2.0**-11 if of == "qwen3_5" else 2.0**-14
        for key, value in trained.items():
            ours = key.removeprefix("base_model.model.").removesuffix(".default.weight")
            close(f"gradient of {key}", found.pop(f"gradient.{ours}"), value.grad, bound)
        assert not [key for key in found if key.startswith("gradient.")], found.keys()
    merged = transformers.AutoModelForCausalLM.from_pretrained(folder / "ours", dtype="auto").state_dict()
    expected = (model if wide else exact).merge_and_unload().state_dict()
    for key, value in expected.items():
        close(f"merged {key}", merged[key], value, 2.0**-20 if wide else 2.0**-8)


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    for name in MODELS:
        with tempfile.TemporaryDirectory() as folder:
            compare(name, sys.argv[1], pathlib.Path(folder))
        print(name, "agrees", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        compare_nested(sys.argv[1], pathlib.Path(folder))
    print("a model for text within another agrees", flush=True)
    for name in ADAPTERS:
        with tempfile.TemporaryDirectory() as folder:
            compare_adapter(name, sys.argv[1], pathlib.Path(folder))
        print(f"{name}: the adapter agrees", flush=True)
