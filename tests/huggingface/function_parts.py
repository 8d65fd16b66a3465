"""Which part computes what a function of transformers' modeling files does: a rotary embedding, a convolution, a
recurrence, or the routers' loss.

Functions are run against the formulas of liger_kernel/transformers/patching/formulas.py on random input.
"""

import inspect

import torch
from liger_kernel.transformers.patching import numeric
from liger_kernel.transformers.patching.families import Swap
from liger_kernel.transformers.patching.formulas import FORMULAS

ROPES = ("half_table_rope", "rope", "interleaved_rope", "deinterleaving_rope")


def part_of_function(function):
    if function.__name__ == "load_balancing_loss_func":
        return "load_balancing_loss" if _same_router_loss(function) else None
    if function.__name__ == "causal_conv1d_fn":
        return "causal_conv1d" if _same_convolution(function) else None
    if function.__name__ == "torch_chunk_gated_delta_rule":
        return "chunk_gated_delta_rule" if _same_delta_rule(function, "chunk_gated_delta_rule") else None
    if function.__name__ == "chunk_kimi_delta_attention":
        return function.__name__ if _same_delta_rule(function, function.__name__) else None
    if function.__name__ == "mamba2_chunk_scan":
        return "mamba2_scan" if _same_scan(function) else None
    if function.__name__ == "mamba2_split_conv1d_scan_combined":  # which gives None and calls nothing
        return None if function.__code__.co_names else "mamba2_parts"
    if function.__name__ in INPUTS:
        made = (make() for make in INPUTS[function.__name__])
        return next(
            (n for n, inputs in made if same_results(Swap("", FORMULAS[n].targets).load(), function, *inputs)), None
        )
    for name in ROPES:
        if numeric._same_function(Swap("", FORMULAS[name].targets).load(), function):
            return _kind_of_rope(function) if name == "rope" else name
    name, inputs = _paired()
    return name if same_results(Swap("", FORMULAS[name].targets).load(), function, *inputs) else None


def _kind_of_rope(function):
    """Which of the parts that one operator computes: of a part of a head, in q's dtype, or neither."""
    q, tables = torch.ones(1, 1, 1, 4, dtype=torch.bfloat16), torch.ones(1, 1, 4)
    try:
        function(q, q, tables[..., :2], tables[..., :2])
        return "partial_rope"
    except RuntimeError:  # the tables must be as wide as a head
        return "float_rope" if function(q, q, tables, tables)[0].dtype == q.dtype else "rope"


def drawn(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def _sectioned():
    cos, sin = (drawn(3, 2, 6, 16 + i)[..., :16].repeat(1, 1, 1, 2) for i in (0, 1))
    return "sectioned_rope", (drawn(2, 4, 6, 32), drawn(2, 2, 6, 32), cos, sin, [4, 6, 6])


def _paired():
    tables = (drawn(2, 6, 16 + i)[..., :16].repeat_interleave(2, -1) for i in (0, 1))
    return "paired_table_rope", (drawn(2, 4, 6, 32), drawn(2, 2, 6, 32), *tables)


def _vision():
    tables = (drawn(6, 16 + i)[:, :16].repeat(1, 2) for i in (0, 1))
    return "vision_rope", (drawn(6, 4, 32), drawn(6, 4, 33)[..., :32], *tables)


def _turns(*shape):
    return torch.polar(torch.ones(*shape), drawn(*shape))


INPUTS = {
    "apply_multimodal_rotary_pos_emb": (_sectioned,),
    "apply_rotary_pos_emb_vision": (_vision,),
    "apply_rotary_emb": (
        lambda: ("llama4_rope", (drawn(2, 6, 4, 32), drawn(2, 6, 2, 32), _turns(2, 6, 16))),
        lambda: ("complex_rope", (drawn(2, 4, 6, 32), drawn(2, 2, 6, 32), _turns(2, 6, 16))),
    ),
    "vision_apply_rotary_emb": (
        lambda: ("llama4_vision_rope", (drawn(2, 6, 4, 32), drawn(2, 6, 4, 34)[..., :32], _turns(6, 1, 16))),
    ),
}


def same_results(replacement, part, *inputs, tolerance=2.0**-18):
    try:
        return all(numeric._close(a, b, tolerance) for a, b in zip(replacement(*inputs), part(*inputs), strict=True))
    except (ValueError, RuntimeError, TypeError, IndexError):
        return False


def _same_router_loss(function):
    target = Swap("", FORMULAS["load_balancing_loss"].targets).load()
    if list(inspect.signature(function).parameters) != list(inspect.signature(target).parameters):
        return False
    logits = tuple(torch.randn(12, 8, generator=torch.Generator().manual_seed(i)) for i in (0, 1))
    mask = torch.ones(3, 4)
    mask[:2, 1:3] = 0
    given = ((logits, 8, 2), (logits, 8, 3, mask.long()), (None, 8), (list(logits), 8))
    try:
        results = [[torch.as_tensor(f(*arguments)) for f in (target, function)] for arguments in given]
    except (RuntimeError, TypeError, ValueError):
        return False
    return all(a.dtype == b.dtype and torch.allclose(a, b, rtol=2.0**-18) for a, b in results)


def _same_convolution(function):
    target = Swap("", FORMULAS["causal_conv1d"].targets).load()
    x, weight, bias = drawn(2, 6, 9), drawn(6, 4), drawn(6)
    given = ((x, weight), (x, weight, bias, "silu"), (x.bfloat16(), weight.bfloat16(), bias.bfloat16(), "silu"))
    return all(
        same_results(
            lambda *of: (target(*of).float(),), lambda *of: (function(*of).float(),), *arguments, tolerance=tolerance
        )
        for arguments, tolerance in zip(given, (2.0**-18, 2.0**-18, 2.0**-6))
    )


def _same_delta_rule(function, name):
    """More tokens than a chunk has, with a state and without, key heads as many as heads, or where the function repeats
    them itself also fewer."""
    target, heads = Swap("", FORMULAS[name].targets).load(), 4
    of_gates = (8,) if "kimi" in name else ()

    def same(key_heads, dtype, tolerance, **more):
        q, k, v = drawn(2, 70, key_heads, 8), drawn(2, 70, key_heads, 8) / 3, drawn(2, 70, heads, 6)
        g, beta = -drawn(2, 70, heads, *of_gates).abs(), drawn(2, 70, heads).sigmoid()
        given = (q.to(dtype), k.to(dtype), v.to(dtype), g, beta.to(dtype))
        call = lambda f: lambda *of: [result.float() for result in f(*of, output_final_state=True, **more)]
        return same_results(call(target), call(function), *given, tolerance=tolerance)

    given = ({}, {"use_qk_l2norm_in_kernel": True}, {"initial_state": drawn(2, heads, 8, 6)})
    wide = all(same(heads, torch.float32, 2.0**-16, **more) for more in given)
    repeats = "repeat_interleave" not in inspect.getsource(function) or same(2, torch.float32, 2.0**-16)
    return wide and repeats and same(heads, torch.bfloat16, 2.0**-6, use_qk_l2norm_in_kernel=True)


def _same_scan(function):
    """More tokens than a chunk has, with a state and limits of dt, and without."""
    target, heads = Swap("", FORMULAS["mamba2_scan"].targets).load(), 4

    def same(dtype, tolerance, **more):
        x, dt, A = drawn(2, 21, heads, 8), drawn(2, 21, heads), -drawn(heads).abs()
        B, C, D, bias = drawn(2, 21, 2, 6), drawn(2, 21, 2, 7)[..., 1:], drawn(heads), drawn(heads, 1)[:, 0]
        given = (x, dt, A.float(), B, C, 8, D, bias)
        given = [t.to(dtype) if isinstance(t, torch.Tensor) and t is not A else t for t in given]
        call = lambda f: lambda *of: f(*of, dt_softplus=True, return_final_states=True, **more)
        return same_results(call(target), call(function), *given, tolerance=tolerance)

    more = {"initial_states": drawn(2, heads, 8, 6), "dt_limit": (0.3, 1.2)}
    # In 16 bits the original rounds dt, too.
    return all(same(torch.float32, 2.0**-16, **m) for m in ({}, more)) and same(torch.bfloat16, 2.0**-4)
