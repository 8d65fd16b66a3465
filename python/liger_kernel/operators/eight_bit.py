"""Linear layers whose frozen weight is in eight bits."""

import torch
from torch import nn

from liger_kernel._library import ops

#: The largest number of each format: the largest of a row becomes it.
FORMATS = {"int8": 127.0, "fp8": 448.0}
#: Their numbers, as operators take them (EightBit in liger/options.h).
NUMBERS = {"fp8": 0, "int8": 1}


def quantise_rows(weight: torch.Tensor, format: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix in eight bits, rounded to nearest, and a scale per row, float32 [rows]:

      scale[i] = max |weight[i]| / largest,  1 for a row of zeros
      bytes[i] = weight[i] / scale[i]

    The bytes are int8 for "int8", whose largest number is 127, and uint8 for "fp8": the bits of E4M3 floats, up to 448
    (OCP 8-bit Floating Point, 2023).
    """
    rows = weight.float()
    most = rows.abs().amax(1)
    scale = torch.where(most > 0, most / FORMATS[format], 1.0)
    numbers = (rows / scale[:, None]).clamp(-FORMATS[format], FORMATS[format])
    if format == "fp8":
        return numbers.to(torch.float8_e4m3fn).view(torch.uint8), scale
    return numbers.round().to(torch.int8), scale


def stored_rows(linear: nn.Module) -> tuple[torch.Tensor, torch.Tensor, str] | None:
    """The bytes, the scales and the format of a layer that holds its weight in eight bits with a scale per row; None of
    any other."""
    weight = linear.weight
    if type(weight).__name__ == "Int8Params":  # of bitsandbytes: weight = bytes · SCB / 127
        state = linear.state
        bytes, most = (weight.CB, weight.SCB) if weight.CB is not None else (state.CB, state.SCB)
        return None if bytes is None else (bytes.detach(), most.float() / FORMATS["int8"], "int8")
    scale = getattr(linear, "weight_scale", None)
    if weight.dtype == torch.float8_e4m3fn and scale is not None and scale.numel() == len(weight):
        return weight.detach().view(torch.uint8), scale.detach().float().flatten(), "fp8"
    return None


def whole_weight(linear: nn.Module) -> torch.Tensor:
    """The weight of a layer as a matrix, of float32 where it is in eight bits; raises ValueError for a form that is not
    known."""
    weight = linear.weight.detach()
    if weight.dtype in (torch.float32, torch.float16, torch.bfloat16):
        return weight
    if (found := stored_rows(linear)) is not None:
        bytes, scale, _ = found
        return dequantised(bytes, scale, torch.float32)
    scale = getattr(linear, "weight_scale_inv", None)
    if weight.dtype != torch.float8_e4m3fn or scale is None or scale.dim() not in (0, 2):
        raise ValueError(f"a {type(linear).__name__} with a weight of {weight.dtype}")
    scale = scale.detach().float()
    if scale.dim() == 2:
        rows, columns = linear.block_size
        scale = scale.repeat_interleave(rows, 0)[: len(weight)].repeat_interleave(columns, 1)[:, : weight.shape[1]]
    return weight.float() * scale


def dtype_of(linear: nn.Module) -> torch.dtype:
    """What a layer computes in: the dtype of its weight, or where that is in eight bits of its bias, or bfloat16."""
    dtypes = linear.weight.dtype, getattr(linear.bias, "dtype", None)
    return next((d for d in dtypes if d in (torch.float32, torch.float16, torch.bfloat16)), torch.bfloat16)


def dequantised(bytes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """numbers · scale, of bytes [..., rows, columns] that are int8, or uint8 with the bits of E4M3 floats, and float32
    scales [..., rows]. 16 bits hold every number of 8 exactly, so that each product is rounded once."""
    numbers = bytes.view(torch.float8_e4m3fn) if bytes.dtype == torch.uint8 else bytes
    return numbers.to(dtype).mul_(scale.unsqueeze(-1))


class LigerLinear8bit(nn.Linear):
    """A Linear whose frozen weight is in eight bits: y = x (weight_scale ⊙ numbers(weight))ᵀ + bias.

    `weight` is int8 [out, in], or uint8 with the bits of E4M3 floats; `weight_scale` float32 [out]. On GPUs of compute
    capability 8.x (E4M3 from 8.9 on), 9.0 and 12.x, for x in float16 or bfloat16, the rows of x, and those of the
    gradient in backward, are rounded to the same eight bits, and the products are those of 8-bit numbers (formulas in
    liger/ops/linear/eight_bit.h). Elsewhere the weight is multiplied in x's dtype. The weight has no gradient.
    """

    weight_scale: torch.Tensor

    def __init__(self, linear: nn.Linear, format: str = "int8") -> None:
        """The layer `linear` in eight bits. One that has eight bits keeps its bytes where each row has a scale, and its
        format then: bitsandbytes' int8, a float8_e4m3fn weight with `weight_scale`. With `weight_scale_inv`, a scale
        per block, as transformers' FP8Linear has it, rows are rounded again."""
        nn.Module.__init__(self)
        self.out_features, self.in_features = linear.out_features, linear.in_features
        with torch.no_grad():
            if (found := stored_rows(linear)) is not None:
                weight, scale, self.format = found
            else:
                (weight, scale), self.format = quantise_rows(whole_weight(linear), format), format
        self.compute_dtype = dtype_of(linear)  # PEFT gives its adapters that dtype
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.register_buffer("weight_scale", scale)
        self.bias = linear.bias
        if self.bias is not None:
            self.bias.requires_grad_(False)
        self.train(linear.training)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return ops.linear(input, self.weight, self.bias, None, None, None, self.weight_scale, 1.0)

    def dequantize(self) -> torch.Tensor:
        """The weight as a matrix of the dtype that it had."""
        return dequantised(self.weight, self.weight_scale, self.compute_dtype)

    @property
    def W_q(self) -> torch.Tensor:
        """The weight, by the name at which PEFT knows a layer whose `dequantize` it has to call, as DoRA does."""
        return self.weight

    def _apply(self, fn, recurse=True):
        # model.to(dtype) is about what layers compute with: the scales belong to the weight.
        scale = self.weight_scale
        super()._apply(fn, recurse)
        if self.weight_scale.dtype != scale.dtype:
            self.compute_dtype = self.weight_scale.dtype
            self.weight_scale = scale.to(self.weight_scale.device)
        return self

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, format={self.format}"
