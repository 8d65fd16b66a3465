"""The model of an arm: random or loaded, quantised, with adapters, patched, checkpointed, sharded."""

import importlib
import importlib.util
import sys
import types
from pathlib import Path

import torch
from torch import nn

from liger_kernel.measure.shapes import config_of

#: Linear layers of the blocks that get adapters, and 4 bits; other models get them on all linear layers.
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
#: Parameters of experts that get adapters.
EXPERTS = ("experts.gate_up_proj", "experts.up_proj", "experts.down_proj")


def make_model(job: dict, side: str, device: torch.device, ranks: int = 1) -> nn.Module:
    """The model of a job (arm.py) in training, as a side has it: plain; fla, plain where FLA is found; mamba, plain
    with mamba-ssm and causal-conv1d; triton, which is the package that is found as liger_kernel; ours; peft, ours with
    PEFT's own layers; frozen, ours without adapters.

    Raises RuntimeError where transformers finds no FLA for side fla, and ImportError where side triton finds another
    liger_kernel, or side mamba not both packages."""
    if side == "fla":
        _check_fla()
    if side == "mamba":
        import_mamba(job["rival"])
        importlib.import_module("causal_conv1d")
    if side == "triton":
        check_rival(job["rival"])
        if not job["lora"]:
            _patch_classes(config_of(job["model"], job["layers"])[0].model_type)
    torch.manual_seed(0)
    model = _load(job, device)
    if job["lora"]:
        model.requires_grad_(False)
    if job["quantise"] == "nf4":
        _to_nf4(model)
        model.is_loaded_in_4bit = True  # what PEFT asks for
    elif job["quantise"]:
        from liger_kernel import quantise

        print(quantise(model, job["quantise"]), flush=True)
    if job["checkpointing"]:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if job["lora"] and (job["checkpointing"] or side == "frozen"):
        model.enable_input_require_grads()
    base = model
    if job["lora"] and side != "frozen":
        model = _with_adapters(model, job["lora"])
    if side == "triton":
        if job["lora"]:
            _patch_model(base)
    elif side not in ("plain", "fla", "mamba"):
        from liger_kernel import patch

        print(patch(base, **({"lora": False} if side == "peft" else {})), flush=True)
    if ranks > 1:
        from torch.distributed.fsdp import fully_shard

        for layer in base.model.layers:
            fully_shard(layer)
        fully_shard(model)
    return model


def _load(job, device):
    import transformers

    config, weights = config_of(job["model"], job["layers"])
    config.use_cache = False
    dtype = getattr(torch, job["dtype"])
    # A model that also sees images is no AutoModelForCausalLM; it is trained on text here. A type may be causal and
    # masked, as bert is: its checkpoint says which.
    causal, masked = transformers.AutoModelForCausalLM, transformers.AutoModelForMaskedLM
    kinds = causal, transformers.AutoModelForImageTextToText, masked
    if any(name.endswith("ForMaskedLM") for name in config.architectures or ()):
        kinds = kinds[::-1]
    for kind in kinds:
        try:
            if weights:
                return (
                    kind.from_pretrained(weights, config=config, dtype=dtype, local_files_only=True).to(device).train()
                )
            with device:
                return kind.from_config(config, dtype=dtype).train()
        except ValueError as error:
            if "Unrecognized configuration class" not in str(error):
                raise
    raise ValueError(f"transformers has no language model of type {config.model_type}")


def _to_nf4(module):
    """Holds the weights of the blocks' linear layers in nf4."""
    import bitsandbytes

    for name, child in list(module.named_children()):
        if name in TARGETS and isinstance(child, nn.Linear):
            given, device = child.weight.data, child.weight.device
            linear = bitsandbytes.nn.Linear4bit(  # on meta, where nobody draws the weights that are replaced
                child.in_features, child.out_features, bias=child.bias is not None, compute_dtype=given.dtype,
                quant_type="nf4", device="meta",
            )  # fmt: skip
            linear.weight = bitsandbytes.nn.Params4bit(given, requires_grad=False, quant_type="nf4", module=linear)
            if child.bias is not None:
                linear.bias = nn.Parameter(child.bias.data, requires_grad=False)
            setattr(module, name, linear.to(device))
        else:
            _to_nf4(child)


def _with_adapters(model, rank):
    from peft import LoraConfig, get_peft_model

    names = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    targets = [name for name in TARGETS if name in names] or "all-linear"
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets, task_type="CAUSAL_LM")
    parameters = [name for name, _ in model.named_parameters()]
    if experts := [name for name in EXPERTS if any(p.endswith(name) for p in parameters)]:
        config.target_parameters = experts
    model = get_peft_model(model, config)
    for name, parameter in model.named_parameters():  # as in training, where B is no longer 0
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.01)
    return model


def check_rival(folder):
    """Raises ImportError where liger_kernel is not the package in a rival's folder."""
    import liger_kernel

    if (home := Path(liger_kernel.__path__[0]).resolve().parent) != Path(folder).resolve():
        raise ImportError(f"liger_kernel comes from {home}, not from {folder}")


def import_mamba(folder):
    """The module of Mamba-2's scan of the mamba-ssm in a folder, where transformers finds it, too, from now on. The
    package's own import, which asks for compiled kernels of Mamba-1, is left out."""
    package = sys.modules["mamba_ssm"] = types.ModuleType("mamba_ssm")
    package.__path__ = [str(Path(folder, "mamba_ssm"))]
    return importlib.import_module("mamba_ssm.ops.triton.ssd_combined")


def _check_fla():
    from transformers.utils import is_flash_linear_attention_available

    if not is_flash_linear_attention_available():
        raise RuntimeError("transformers does not find FLA, or no GPU for it")


def _patch_classes(kind):
    """The rival's classes of a model type, in place of transformers', before the model is made."""
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    if (apply := MODEL_TYPE_TO_APPLY_LIGER_FN.get(kind)) is None:
        raise ValueError(f"this liger-kernel patches no models of type {kind}")
    apply()
    _tune_experts()


def _patch_model(model):
    """The rival's patch of one model, as transformers' Trainer calls it."""
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    _apply_liger_kernel_to_instance(model=model)
    _tune_experts()


def _tune_experts():
    if importlib.util.find_spec("liger_kernel.ops.fused_moe"):
        tune_less(importlib.import_module("liger_kernel.ops.fused_moe"))


def tune_less(module) -> None:
    """Triton's tuner tries three configurations, not all, for minutes, of each kernel of a module."""
    for kernel in vars(module).values():
        if type(kernel).__name__ == "Autotuner":
            kernel.configs = kernel.configs[:3]
