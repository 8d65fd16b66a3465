"""`liger_kernel.quantise`: the frozen linear layers and experts of a model in eight bits."""

import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from liger_kernel.operators.coverage import is_dense
from liger_kernel.operators.eight_bit import FORMATS, LigerLinear8bit, dtype_of, whole_weight
from liger_kernel.operators.eight_bit_experts import in_eight_bits, put_into_eight_bits

#: Linear layers of others that hold eight bits, by the names of their classes.
_EIGHT_BIT = ("Linear8bitLt", "FP8Linear", "CompressedLinear")
#: Parameters of a mixture that have a matrix of each expert.
_EXPERTS = ("gate_up_proj", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
_ROWS = 256  # of a layer's input, by which its error is measured


@dataclass(frozen=True)
class QuantisedLayers:
    """Layers of one name, or weights of experts: how many, the relative error of their products with 256 rows, mean and
    largest, and the bytes of their weights before and now."""

    name: str
    count: int
    error: float
    worst: float
    before: int
    after: int


@dataclass(frozen=True)
class Quantised:
    """What `quantise` did. Printed, a table."""

    format: str
    layers: list[QuantisedLayers]
    kept: dict[str, str]  # why a linear layer, or a weight of experts, was left as it is, by its name

    def __str__(self) -> str:
        experts = sum(row.count for row in self.layers if row.name.startswith("experts."))
        count = sum(row.count for row in self.layers) - experts
        lines = [f"{self.format}: {count} linear layers" + (f", {experts} weights of experts" if experts else "")]
        lines += [
            f"  {row.name} ({row.count})  error {row.error:.2%}, at most {row.worst:.2%}"
            f"  {row.before / 2**20:,.0f} -> {row.after / 2**20:,.0f} MiB"
            for row in self.layers
        ]
        reasons = defaultdict(list)
        for name, reason in self.kept.items():
            reasons[reason].append(name)
        lines += [
            f"  kept: {names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}: {reason}"
            for reason, names in reasons.items()
        ]
        return "\n".join(lines)


def quantise(
    model: nn.Module, format: str = "int8", *, skip: Iterable[str] = (), inputs: Mapping[str, Any] | None = None
) -> Quantised:
    """Put the frozen linear layers and experts of a model into eight bits, in place, for training adapters on them.

    ```python
    from liger_kernel import patch, quantise

    print(quantise(model))  # before or after get_peft_model
    model = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear"))
    patch(model)
    ```

    Not exact, unlike everything else in this package: products are off by about 1 % of their norm with int8 and 4 %
    with fp8, and the result says by how much for each kind of layer. On GPUs of compute capability 8.x (fp8 from
    8.9 on), 9.0 and 12.x forward and backward multiply 8-bit numbers; elsewhere only the memory is saved. Layers are
    replaced by LigerLinear8bit, whose weight is frozen.

    Experts of a mixture whose weights are parameters, as in transformers 5, keep their module, whose parameters become
    bytes with scales beside them; each pass rounds these to the model's dtype, on every device. Their memory is halved.

    Layers that are in eight bits already are taken over: those of bitsandbytes' int8 and of checkpoints in fp8 with a
    scale per row with the bytes that they have, those with a scale per block rounded again.

    Kept are the head, layers of which a size is no multiple of 16 or which have fewer than 128 rows, such as routers,
    the matrices of adapters, copies of layers that an adapter trains, and with PEFT every layer that is trained.

    Args:
        model: any module, PEFT's wrapper of one too.
        format: "int8", or "fp8": floats with 4 bits of exponent (E4M3). Each row of a weight has a scale.
        skip: names of layers or of weights of experts to keep, whole or their last parts: "down_proj",
            "layers.0.mlp.down_proj", "experts.down_proj".
        inputs: keyword arguments of the model. It is run on them once, and errors are those of the products with the
            inputs that its layers get there; without them, and of experts, of products with normally distributed rows.

    A second call does what is left to do, and nothing where all is done.

    Raises ValueError for an unknown format, and where no layer can be quantised and none has been.
    """
    if format not in FORMATS:
        raise ValueError(f"format must be one of {', '.join(FORMATS)}, got {format!r}")
    skip, kept = tuple(skip), {}
    found: dict[str, nn.Module] = {}
    experts: dict[str, nn.Module] = {}
    for chosen, every in ((found, _linear_layers(model)), (experts, _weights_of_experts(model))):
        for name, module, reason in every:
            bare = name.replace(".base_layer", "")
            if any(bare == end or bare.endswith("." + end) for end in skip):
                reason = "it is to be skipped"
            if reason is None:
                chosen[name] = module
            else:
                kept[name] = reason
    if not found and not experts and not _is_quantised(model):
        raise ValueError(f"a {type(model).__name__} has no linear layer that can be quantised")
    rows = {} if inputs is None else _inputs_of(model, found, inputs)
    measured = defaultdict(list)
    for name, module in found.items():
        new = LigerLinear8bit(module, format)
        x = rows.get(name)
        error = _error(module, new, _normal_rows(module) if x is None else x)
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, new)
        before, after = (t.numel() * t.element_size() for t in (module.weight, new.weight))
        measured[_kind(name)].append((error, before, after + new.weight_scale.numel() * 4))
    for name, error, before, after in _quantised_experts(experts, format):
        measured[f"experts.{name}"].append((error, before, after))
    layers = [
        QuantisedLayers(
            kind, len(all), sum(e for e, *_ in all) / len(all), max(e for e, *_ in all),
            sum(b for _, b, _ in all), sum(a for *_, a in all),
        )
        for kind, all in measured.items()
    ]  # fmt: skip
    return Quantised(format, layers, kept)


def is_adapted(model: nn.Module) -> bool:
    """Whether PEFT has put adapters into a model."""
    tuners = sys.modules.get("peft.tuners.tuners_utils")
    return tuners is not None and any(isinstance(module, tuners.BaseTunerLayer) for module in model.modules())


def _is_quantised(model):
    return any(
        isinstance(module, LigerLinear8bit) or any(in_eight_bits(module, of) is not None for of in _EXPERTS)
        for module in model.modules()
    )


def _kind(name):
    """q_proj for model.layers.0.self_attn.q_proj.base_layer."""
    return name.removesuffix(".base_layer").rpartition(".")[2]


def _linear_layers(model):
    """(name, module, why it is kept or None) of the linear layers that a model multiplies by."""
    tuners = sys.modules.get("peft.tuners.tuners_utils")
    owned = set()  # by adapters, and copies that they train
    for module in model.modules():
        if tuners is not None and isinstance(module, tuners.BaseTunerLayer):
            held = [getattr(module, name, None) for name in module.adapter_layer_names]
            owned.update(id(m) for each in held if isinstance(each, nn.Module) for m in each.modules())
        if tuners is not None and hasattr(module, "modules_to_save") and hasattr(module, "original_module"):
            owned.update(id(m) for m in module.modules())
    head = getattr(model, "get_output_embeddings", lambda: None)()
    adapted = is_adapted(model)
    for name, module in model.named_modules():
        if type(module) is not nn.Linear and type(module).__name__ not in _EIGHT_BIT or id(module) in owned or not name:
            continue
        out, into = module.out_features, module.in_features
        reason = None
        if module is head or getattr(head, "base_layer", None) is module:
            reason = "the head"
        elif out < 128 or out % 16 or into % 16:
            reason = f"it has {out} rows of {into} columns"
        elif adapted and module.weight.requires_grad:
            reason = "it is trained"
        else:
            try:
                whole_weight(module)
            except ValueError as error:
                reason = str(error)
        yield name, module, reason


def _weights_of_experts(model):
    """(name, module, why it is kept or None) of the parameters that have a matrix of each expert."""
    adapted = is_adapted(model)
    for name, module in model.named_modules():
        for of in _EXPERTS:
            weight = module._parameters.get(of)
            if weight is None or weight.dim() != 3 or in_eight_bits(module, of) is not None:
                continue
            reason = "it is sharded or quantised" if not is_dense(weight) else None
            if adapted and weight.requires_grad:
                reason = "it is trained"
            yield f"{name}.{of}".lstrip("."), module, reason


def _quantised_experts(experts, format):
    """(name of the parameter, its error, bytes before and after) of each."""
    of_module = defaultdict(list)
    for name, module in experts.items():
        of_module[module].append(name.rpartition(".")[2])
    for module, names in of_module.items():
        before = {name: module._parameters[name].nbytes for name in names}
        for name, error in put_into_eight_bits(module, tuple(names), format).items():
            yield name, error, before[name], sum(t.nbytes for t in in_eight_bits(module, name))


def _inputs_of(model, layers, inputs):
    """Some rows of what each layer is given in a forward of the model."""
    rows, hooks = {}, []
    for name, module in layers.items():

        def keep(module, args, name=name):
            x = args[0].detach().flatten(0, -2)
            rows[name] = x[torch.linspace(0, len(x) - 1, min(_ROWS, len(x)), device=x.device).long()]

        hooks.append(module.register_forward_pre_hook(keep))
    was_training = model.training
    try:
        with torch.no_grad():
            model.eval()(**inputs)
    finally:
        model.train(was_training)
        for hook in hooks:
            hook.remove()
    return rows


def _normal_rows(module):
    numbers = torch.randn(_ROWS, module.in_features, generator=torch.Generator().manual_seed(0))
    return numbers.to(module.weight.device, dtype_of(module))


@torch.no_grad()
def _error(module, new, x):
    """‖new(x) − module(x)‖ / ‖module(x)‖ without biases."""
    bias = 0.0 if module.bias is None else module.bias.float()
    x = x.to(new.compute_dtype)
    exact = nn.functional.linear(x.float(), whole_weight(module).float())
    return ((new(x).float() - bias - exact).norm() / exact.norm().clamp_min(1e-30)).item()
