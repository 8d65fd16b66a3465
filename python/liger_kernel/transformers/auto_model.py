"""AutoModelForCausalLM with Liger kernels."""

from transformers import AutoConfig, AutoModelForCausalLM

from liger_kernel.transformers import monkey_patch


def _get_model_config(model_dir, **model_init_kwargs):
    return AutoConfig.from_pretrained(model_dir, **model_init_kwargs)


def _patch_type(config, kwargs):
    """Patch the classes for a config; the keywords that are no switches of its family."""
    model_type = getattr(config, "model_type", None)
    monkey_patch._apply_liger_kernel(model_type, **kwargs)
    apply = monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN.get(model_type)
    switches = monkey_patch.switches_of(apply) if apply else ()
    return {name: value for name, value in kwargs.items() if name not in switches}


class AutoLigerKernelForCausalLM(AutoModelForCausalLM):
    """AutoModelForCausalLM whose models are patched, where their type is supported.

    Keywords that are switches of the family's `apply_liger_kernel_to_*` go there, the others to transformers.
    """

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *model_args, **kwargs):
        """Load a model, as AutoModelForCausalLM.from_pretrained does, with Liger kernels."""
        rest = _patch_type(_get_model_config(pretrained_model_name_or_path, **kwargs), kwargs)
        return super().from_pretrained(pretrained_model_name_or_path, *model_args, **rest)

    @classmethod
    def from_config(cls, config, **kwargs):
        """Create a model from its config, as AutoModelForCausalLM.from_config does, with Liger kernels."""
        return super().from_config(config, **_patch_type(config, kwargs))
