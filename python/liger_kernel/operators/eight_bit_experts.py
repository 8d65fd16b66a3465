"""Weights of experts in eight bits: a matrix of each expert in one parameter, and a scale per row."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from liger_kernel._variant import variant
from liger_kernel.operators.coverage import DENSE
from liger_kernel.operators.eight_bit import dequantised, quantise_rows


class EightBitMatrices(torch.Tensor):
    """Matrices in eight bits, as a tensor of the dtype that they are computed with: numbers · scale.

    numbers: int8 [..., rows, columns], or uint8 with the bits of E4M3 floats. scale: float32 [..., rows].

    It stands for a parameter while that is read. torch's operators run on the dequantised matrices, all of them or the
    one that is selected. It has no gradient, and nothing can be written to it: RuntimeError.
    """

    numbers: torch.Tensor
    scale: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, numbers: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> "EightBitMatrices":
        return torch.Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=dtype, device=numbers.device)  # type: ignore[attr-defined]

    def __init__(self, numbers: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> None:
        self.numbers, self.scale = numbers, scale

    def dequantize(self) -> torch.Tensor:  # type: ignore[override]
        """The matrices in their dtype."""
        return dequantised(self.numbers, self.scale, self.dtype)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"EightBitMatrices({list(self.shape)}, {self.numbers.dtype}, as {self.dtype})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        aten: Any = torch.ops.aten
        first: Any = args[0] if args else None
        if func in (aten.detach.default, aten.alias.default, aten.clone.default):
            copied = func is aten.clone.default
            numbers, scale = (t.clone() if copied else t for t in (first.numbers, first.scale))
            return cls(numbers, scale, first.dtype)
        if func is aten.select.int and args[1] % first.dim() == 0 and first.dim() > 2:
            return cls(first.numbers[args[2]], first.scale[args[2]], first.dtype).dequantize()
        if func._schema.is_mutable:
            if func is aten.set_.source_Tensor and args[1] is first:  # torch.nn.utils.parametrize writes it to itself
                return first
            raise RuntimeError(
                f"{func}: weights in eight bits cannot be changed; merge adapters into the original model"
            )
        whole = lambda t: t.dequantize() if isinstance(t, cls) else t
        args, kwargs = torch.utils._pytree.tree_map(whole, (args, kwargs or {}))
        return func(*args, **kwargs)


@dataclass(frozen=True)
class EightBitExperts:
    """The part (liger_kernel/_variant.py) of a module whose parameters of these names are in eight bits, with a buffer
    of scales for each, `<name>_scale`. Their attributes are EightBitMatrices of the dtype `liger_dtype`, and shards
    while they are sharded."""

    names: tuple[str, ...]

    def __call__(self, base):
        names = self.names

        def attribute(name):
            def read(module):
                if (numbers := module._parameters.get(name)) is None:
                    raise AttributeError(name)
                if type(numbers) not in DENSE:  # a shard, which FSDP2 looks for
                    return numbers
                return EightBitMatrices(numbers, module._buffers[f"{name}_scale"], module.liger_dtype)

            return property(read)

        def register_buffer(module, name, tensor, persistent=True):
            # parametrize.remove_parametrizations puts back what it was given as a buffer.
            if name in names and isinstance(tensor, EightBitMatrices):
                module.register_parameter(name, nn.Parameter(tensor.numbers, requires_grad=False))
            else:
                base.register_buffer(module, name, tensor, persistent)

        def _apply(module, fn, recurse=True):
            # module.to(dtype) is about what experts compute with: scales belong to the numbers.
            scales = {f"{name}_scale": module._buffers[f"{name}_scale"] for name in names}
            base._apply(module, fn, recurse)
            for name, scale in scales.items():
                if (new := module._buffers[name]).dtype != scale.dtype:
                    module.liger_dtype = new.dtype
                    module._buffers[name] = scale.to(new.device)
            return module

        body = {name: attribute(name) for name in names}
        return base.__name__, (base,), {**body, "register_buffer": register_buffer, "_apply": _apply}


@torch.no_grad()
def put_into_eight_bits(experts: nn.Module, names: tuple[str, ...], format: str) -> dict[str, float]:
    """Put the parameters of these names [experts, rows, columns] of a module into eight bits, in place; the relative
    error of each, ‖rounded − weight‖ / ‖weight‖, which is that of products with normally distributed rows."""
    errors = {}
    for name in names:
        weight = experts._parameters[name]
        bytes = torch.empty(weight.shape, dtype=torch.uint8 if format == "fp8" else torch.int8, device=weight.device)
        scale = torch.empty(weight.shape[:2], dtype=torch.float32, device=weight.device)
        off = total = torch.zeros((), device=weight.device)
        for e, matrix in enumerate(weight):  # one at a time: it is in float32 meanwhile
            bytes[e], scale[e] = quantise_rows(matrix, format)
            rounded = dequantised(bytes[e], scale[e], torch.float32)
            off, total = off + (rounded - matrix).float().square().sum(), total + matrix.float().square().sum()
        errors[name] = (off / total.clamp_min(1e-30)).sqrt().item()
        vars(experts)["liger_dtype"] = weight.dtype
        experts._parameters[name] = nn.Parameter(bytes, requires_grad=False)
        experts._buffers[f"{name}_scale"] = scale
    experts.__class__ = variant(type(experts), EightBitExperts(names))  # type: ignore[arg-type]
    return errors


def in_eight_bits(experts: nn.Module, name: str) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The numbers and scales of a weight that put_into_eight_bits has put there; None if it has not."""
    own: dict[str, Any] = vars(experts)
    if "liger_dtype" not in own:
        return None
    numbers, scale = own["_parameters"].get(name), own["_buffers"].get(f"{name}_scale")
    return None if numbers is None or scale is None else (numbers, scale)
