"""AutoModelForCausalLM with Liger kernels."""

from transformers import AutoConfig, AutoModelForCausalLM

from liger_kernel.transformers import monkey_patch
from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN
from liger_kernel.transformers.patching.families import SWITCHES


def _get_model_config(model_dir, **model_init_kwargs):
    return AutoConfig.from_pretrained(model_dir, **model_init_kwargs)


def _patch_type(config, kwargs):
    """Patch the classes for a config; the keywords that are no switches of its family, and those that are where it has
    no row and the model is to be patched when it is made."""
    model_type = getattr(config, "model_type", None)
    apply = MODEL_TYPE_TO_APPLY_LIGER_FN.get(model_type)
    names = monkey_patch.switches_of(apply) if apply else {*SWITCHES, "by_source"}
    rest = {name: value for name, value in kwargs.items() if name not in names}
    if apply is not None:
        known = {name: value for name, value in kwargs.items() if name in SWITCHES or name == "by_source"}
        monkey_patch._apply_liger_kernel(model_type, **known)
    return rest, None if apply else {name: value for name, value in kwargs.items() if name in names}


def _patched(model, switches):
    if switches is not None:
        monkey_patch._apply_liger_kernel_to_instance(model=model, **switches)
    return model


class AutoLigerKernelForCausalLM(AutoModelForCausalLM):
    """AutoModelForCausalLM whose models are patched: by the function of their family or, if it has none, by source.

    Keywords that are switches of the family's `apply_liger_kernel_to_*`, or by_source=False, go there, the others to
    transformers.
    """

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *model_args, **kwargs):
        """Load a model, as AutoModelForCausalLM.from_pretrained does, with Liger kernels."""
        rest, switches = _patch_type(_get_model_config(pretrained_model_name_or_path, **kwargs), kwargs)
        return _patched(super().from_pretrained(pretrained_model_name_or_path, *model_args, **rest), switches)

    @classmethod
    def from_config(cls, config, **kwargs):
        """Create a model from its config, as AutoModelForCausalLM.from_config does, with Liger kernels."""
        rest, switches = _patch_type(config, kwargs)
        return _patched(super().from_config(config, **rest), switches)
