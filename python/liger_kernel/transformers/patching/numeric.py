"""Whether a replacement computes what a part does, tried on random input: for parts whose source nobody has read."""

import copy
import functools
import inspect

import torch
from torch import nn

from liger_kernel.transformers.patching.place import instead_of, or_original, own_attributes

_ROWS = 64


def same_values(swap, original, module=None) -> str | None:
    """The first target of a swap that computes what `original` does, or None.

    Args:
        swap: the replacement.
        original: a function on (q, k, cos, sin), or a module class.
        module: a module of that class. Without one it is the first target: the module that is made will be tried.
    """
    if not isinstance(original, type):
        return next((target for target in swap.targets if _same_function(swap.load(target), original)), None)
    if module is None:
        return swap.targets[0]
    forward = original.forward  # type: ignore[attr-defined]
    return next((target for target in swap.targets if computes(swap.load(target), module, forward)), None)


@functools.cache
def _same_function(part, original):
    names = list(inspect.signature(original).parameters)[:4]
    if names != ["q", "k", "cos", "sin"]:
        return False
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, heads, 6, 32, generator=generator) for heads in (4, 2))
    tried = 0
    for width in (32, 16, 8):
        cos, sin = (torch.randn(2, 6, width // 2, generator=generator).repeat(1, 1, 2) for _ in range(2))
        results = []
        for function in (original, instead_of(part, original)):
            try:
                results.append(function(q, k, cos, sin))
            except (RuntimeError, ValueError, IndexError, TypeError, NameError):
                results.append(None)
        if results[0] is not None and results[1] is None:
            return False
        if results[0] is not None:
            tried += 1
            if not all(a.shape == b.shape and _close(a, b, 2.0**-18) for a, b in zip(*results)):
                return False
    return tried > 0


def computes(part, module, forward, rounded: bool = True) -> bool:
    """Whether `part.forward` computes what `forward`, a module's own, does; `rounded`: and rounds alike in bfloat16."""
    from transformers.modeling_utils import PreTrainedModel

    if isinstance(module, PreTrainedModel):
        return False
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            twin = copy.deepcopy(module).to_empty(device="cpu").float().train()
            vars(twin).update(own_attributes(module, part))
            for parameter in twin.parameters():
                parameter.copy_(
                    torch.randn_like(parameter) / parameter.shape[-1] ** 0.5
                    if parameter.dim() > 1
                    else torch.randn_like(parameter)
                )
            if (inputs := _inputs(twin, part.forward)) is None:
                return False
            ours, theirs = _seeded(part.forward, forward, twin, *inputs)
            if not _close(ours, theirs, 2.0**-16):
                return False
            if not rounded or len(inputs) > 2:  # the sum over a token's experts is rounded once, not for each
                return True
            norm = isinstance(getattr(twin, "weight", None), nn.Parameter)
            mixed = ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)) if norm else ()
            dtypes = ((torch.bfloat16,) * 2, *mixed)
            return all(_rounds_alike(part, twin, forward, inputs, *each) for each in dtypes)
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError, NotImplementedError):
        return False


@torch.no_grad()
def same_result(part, module, x) -> bool:
    """Whether `part` gives what a module gives for an input of the model's, on its device and in its dtypes."""
    if not isinstance(x, torch.Tensor):
        return False
    twin = copy.copy(module)
    vars(twin).update(own_attributes(module, part))
    forward = type(module).forward
    with torch.random.fork_rng(devices=[x.device] if x.is_cuda else []):
        ours, theirs = _seeded(or_original(part, forward), forward, twin, x)
    if ours.dtype != theirs.dtype or ours.shape != theirs.shape:
        return False
    return _close(ours.float(), theirs.float(), 2.0**-16 if ours.dtype == torch.float32 else 2.0**-6)


def _seeded(part, forward, *arguments):
    """The results of both, whose dropout draws the same numbers."""
    results = []
    for function in (part, forward):
        torch.manual_seed(0)
        results.append(function(*arguments))
    return results


def _rounds_alike(part, twin, forward, inputs, of_inputs, of_parameters):
    """Whether both give one dtype, and elements that differ only where that rounds less than the original did."""
    twin, inputs = twin.to(of_parameters), [x.to(of_inputs) for x in inputs]
    ours, theirs = _seeded(or_original(part, forward), forward, twin, *inputs)
    if ours.dtype != theirs.dtype:
        return False
    if ours.dtype == torch.float32:
        return _close(ours, theirs, 2.0**-6)
    return bool((ours != theirs).float().mean() <= 0.02)


def _inputs(module, forward):
    """What a norm, a feed-forward block or experts take, or None; with a gate if `forward`, a part's, takes one.

    Rows of very different sizes tell where eps is.
    """
    held = (module._parameters.get(name) for name in ("gate_up_proj", "up_proj"))
    if (experts := next((p for p in held if p is not None and p.dim() == 3), None)) is not None:
        width = next((getattr(module, name) for name in ("hidden_dim", "hidden_size") if hasattr(module, name)), None)
        routing = torch.rand(_ROWS, len(experts)).topk(min(2, len(experts)))
        extra = (routing.indices, routing.values)
    else:
        width, extra = _width(module), ()
    if width is None:
        return None
    x = torch.randn(_ROWS, width) * torch.logspace(-4, 1, _ROWS)[:, None]
    if "gate" in inspect.signature(forward).parameters:  # sequences of one token, which some originals tell apart
        return x[:, None], torch.randn(_ROWS, 1, width)
    return x, *extra


def _width(module):
    """The width of the input of a norm or of a feed-forward block; any that is even, of a norm without a weight."""
    linear = next((m for m in module.modules() if isinstance(m, nn.Linear)), None)
    if linear is not None:
        return linear.in_features
    weight = getattr(module, "weight", None)
    if not any(True for _ in module.parameters()):
        return getattr(module, "normalized_shape", (64,))[-1]
    return weight.shape[0] if weight is not None and weight.dim() == 1 else None


def _close(actual, expected, tolerance):
    """Every element to `tolerance` of itself and of a usual one of its row."""
    size = expected.abs() + expected.square().mean(-1, keepdim=True).sqrt()
    return actual.shape == expected.shape and bool(((actual - expected).abs() <= tolerance * size).all())
