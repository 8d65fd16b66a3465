"""Per-token negative log-likelihood and entropy of a head, without its logits: linear_log_prob with the checks and
names of Liger's operator."""

import math
from typing import Any

import torch
from torch import Tensor


class LigerFusedLinearScaledCrossEntropyFunction:
    @staticmethod
    def apply(
        _input: Tensor, weight: Tensor, target: Tensor, temperature: float = 1.0, ignore_index: int = -100,
        m_tiles_per_cluster: int = 1, return_entropy: bool = False, selected_token_ids: Tensor | None = None,
    ) -> Any:  # fmt: skip
        """logsumexp(a) − a at target, float [M], a = _input weightᵀ / temperature; with return_entropy also −Σ p ln p
        of p = softmax(a) in _input's dtype; with selected_token_ids [K] also ln p of those classes, float [M, K].

        _input [M, H] and weight [V, H] of one dtype, target [M] int64. All are 0, with gradients of 0, where the
        target is ignore_index, and differentiable. m_tiles_per_cluster changes nothing. Raises TypeError for a wrong
        type or dtype and ValueError for a wrong shape, device, temperature or, on the CPU, target; on CUDA a target
        outside [0, V) is a device assertion.
        """
        _check_options(temperature, m_tiles_per_cluster, return_entropy, _input, weight, target, ignore_index)
        _check_selected(selected_token_ids, weight)
        from liger_kernel.ops.linear_log_prob import linear_log_prob  # this file can be loaded by its path alone

        selects = selected_token_ids is not None
        wanted = ("entropy",) * return_entropy + ("lse",) * selects
        results = linear_log_prob(_input, weight, target, None, float(temperature), ignore_index, outputs=wanted)
        if not wanted:
            return -results
        given = (-results[0], *(results[1].to(_input.dtype),) * return_entropy)
        if selected_token_ids is None:
            return given
        logits = torch.nn.functional.linear(_input, weight[selected_token_ids]).float() / temperature
        ignored = (target == ignore_index).unsqueeze(1)
        return *given, (logits - results[-1].unsqueeze(1)).masked_fill(ignored, 0)


class LigerFusedLinearScaledCrossEntropyTPFunction:
    @staticmethod
    def apply(
        input: Tensor, weight: Tensor, target: Tensor, tp_group: Any, temperature: float = 1.0,
        ignore_index: int = -100, tiles_per_reduce: int = 1, return_entropy: bool = False,
    ) -> Any:  # fmt: skip
        """LigerFusedLinearScaledCrossEntropyFunction under a head whose classes are spread over the ranks of tp_group
        in their order: weight [V of this rank, H], as many on each.

        input and target are the same on all ranks, and so are the results. The gradient of input is the sum over the
        ranks, that of weight is this rank's. tiles_per_reduce changes nothing.
        """
        from liger_kernel.ops.sliced_log_prob import vocab_parallel_linear_log_prob

        results = vocab_parallel_linear_log_prob(
            input,
            weight,
            target,
            tp_group,
            entropy=return_entropy,
            ignore_index=ignore_index,
            temperature=float(temperature),
        )
        return (-results[0], results[1].to(input.dtype)) if return_entropy else -results


def _check_selected(ids, weight):
    if ids is None:
        return
    if not isinstance(ids, Tensor) or ids.dtype != torch.int64:
        raise TypeError("selected_token_ids must be an int64 tensor")
    if ids.ndim != 1:
        raise ValueError(f"selected_token_ids must be [K], got {list(ids.shape)}")
    if ids.device != weight.device:
        raise ValueError(f"selected_token_ids must be on {weight.device}, got {ids.device}")
    if ids.device.type == "cpu" and len(ids) and not (0 <= int(ids.min()) and int(ids.max()) < len(weight)):
        raise ValueError(f"selected_token_ids must be in [0, {len(weight)})")


def _is_number(value):
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _check_options(temperature, tiles, return_entropy, x, weight, target, ignore_index):
    if not isinstance(tiles, int) or isinstance(tiles, bool):
        raise TypeError(f"m_tiles_per_cluster must be an integer, got {tiles!r}")
    if tiles < 1:
        raise ValueError(f"m_tiles_per_cluster must be at least 1, got {tiles}")
    if not isinstance(return_entropy, bool):
        raise TypeError(f"return_entropy must be True or False, got {return_entropy!r}")
    if x.ndim != 2 or weight.ndim != 2 or target.ndim != 1 or x.shape[1] != weight.shape[1] or len(x) != len(target):
        raise ValueError(
            f"expected _input [M, H], weight [V, H] and target [M], got {list(x.shape)}, {list(weight.shape)} and "
            f"{list(target.shape)}"
        )
    if 0 in (*x.shape, *weight.shape):
        raise ValueError(f"no dimension may be empty, got _input {list(x.shape)} and weight {list(weight.shape)}")
    if not x.device == weight.device == target.device:
        raise ValueError(
            f"_input, weight and target must be on one device, got {x.device}, {weight.device} and {target.device}"
        )
    if x.dtype != weight.dtype or not x.is_floating_point():
        raise TypeError(f"_input and weight must have one floating dtype, got {x.dtype} and {weight.dtype}")
    if target.dtype != torch.int64:
        raise TypeError(f"target must be int64, got {target.dtype}")
    if target.device.type == "cpu":
        outside = target[(target != ignore_index) & ((target < 0) | (target >= len(weight)))]
        if len(outside):
            raise ValueError(
                f"target {int(outside[0])} is outside [0, {len(weight)}) and not ignore_index {ignore_index}"
            )
    if not _is_number(temperature):
        raise TypeError(f"temperature must be a number, got {temperature!r}")
    if not (math.isfinite(temperature) and temperature > 0):
        raise ValueError(f"temperature must be positive and finite, got {temperature}")
