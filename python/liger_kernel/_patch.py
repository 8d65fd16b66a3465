"""`liger_kernel.patch` and `liger_kernel.report`, for transformers' models of any type."""

from torch import nn
from transformers import PreTrainedModel

from liger_kernel.transformers import monkey_patch
from liger_kernel.transformers.patching.report import Report


def _base_of(model):
    """The transformers model itself, or the one that PEFT or another module holds; raises TypeError where there is not
    one."""
    held = [*_models_in(model)]
    if len(held) != 1:
        names = ", ".join(type(each).__name__ for each in held)
        raise TypeError(
            f"a {type(model).__name__} holds several models of transformers ({names}): patch each of them"
            if held
            else f"a {type(model).__name__} is no model of transformers, and holds none: liger_kernel.transformers."
            "apply_liger_kernel_by_structure(model) replaces the parts of other modules"
        )
    return held[0]


def _models_in(module):
    """The models of transformers in a module, but for those in one of them."""
    if isinstance(module, PreTrainedModel):
        yield module
    elif isinstance(module, nn.Module):
        for child in module.children():
            yield from _models_in(child)


def patch(
    model: nn.Module,
    *,
    memory_budget: int | str | None = None,
    cuda_graphs: bool = False,
    base: str | None = None,
    **switches: bool,
) -> Report:
    """Patch a model of transformers, of any type, and return a Report: what was replaced, what was not, and why.

    ```python
    from liger_kernel import patch

    print(patch(model))
    ```

    A model whose type has a row in docs/families.md is patched by its family's function. In any other, everything is
    replaced whose source is known. Losses and gradients stay the same, except with `base`; `undo()` of the report
    restores the model.

    Args:
        model: a PreTrainedModel, PEFT's wrapper of one, or another module that holds one, such as a
            SentenceTransformer or a LightningModule. PEFT's layers then run on fused operators too.
        memory_budget: bytes, or a text such as "70GiB", "90%" or "auto": layers keep for backward what fits into it
            (liger_kernel.memory.plan_later).
        cuda_graphs: run forward and backward as CUDA graphs (liger_kernel.graphs.capture_model).
        base: "int8" or "fp8": the frozen linear layers and experts are put into eight bits before
            (liger_kernel.quantise), which is not exact, and which undo() leaves.
        switches: parts to replace, or not: rope, rms_norm, layer_norm, swiglu, geglu, router, layers, masks, lora,
            cross_entropy, fused_linear_cross_entropy, ... A switch that the family does not have has no effect, with a
            warning if it is on. With by_source=False, only families with a row are patched.

    Raises TypeError where there is no model of transformers, or more than one, for an unknown switch, and with
    by_source=False for a type without a row; ValueError for a budget that is none and for an unknown base.
    """
    inner = _base_of(model)
    report = monkey_patch._patch_instance(inner, memory_budget, cuda_graphs, base, switches)
    if report is None:
        raise TypeError(f"the model type {inner.config.model_type!r} has no row, and by_source is False")
    return report


def report(model: nn.Module) -> Report | None:
    """The report of a model's last patch, by `patch` or by a trainer's `use_liger_kernel=True`; None without one.

    Raises TypeError where there is no model of transformers, or more than one.
    """
    return Report.kept_on(_base_of(model))
