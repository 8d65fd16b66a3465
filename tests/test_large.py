"""More than 2^31 elements in one tensor, on a GPU, against plain torch on slices of the rows."""

import pytest
import torch
from cases import all_cases
from test_ops import as_tuple

CASES = all_cases()
NONE = dict(reduction="none")
#: case, a shape of more than 2^31 elements in the first tensor or in the result, options, whether gradients are compared
LARGE = [
    ("rms_norm", (524304, 4100), {}, True),
    ("fused_add_rms_norm", (262160, 8200), {}, True),
    ("modulated_rms_norm", (524304, 4100), dict(each="token"), True),
    ("modulated_rms_norm", (16, 32784, 4100), {}, True),
    ("layer_norm", (131088, 16400), {}, True),
    ("poly_norm", (524304, 4100), {}, True),
    ("dyt", (524304, 4100), {}, True),
    ("group_norm", (33, 64, 1048580), {}, True),
    ("gated", (150000, 14337), dict(activation="silu"), True),
    ("activate", (150000, 14337), dict(activation="relu_squared"), True),
    ("softmax", (17000, 128257), {}, True),
    ("softmax", (2200000, 1000), {}, True),
    ("sparsemax", (70000, 33000), {}, True),
    ("kl_div", (17000, 128257), NONE, True),
    ("tvd", (17000, 128257), NONE, True),
    ("cross_entropy", (17000, 128257), NONE, True),
    ("selective_log_softmax", (17000, 128257), {}, True),
    ("fused_linear_cross_entropy", (17000, 128, 128257), dict(reduction="none", max_bytes=2**35), True),
    ("fused_mlp", (140000, 64, 8192), {}, True),
    ("rope", (65, 32, 8200, 128), {}, True),
    ("embedding", (530000, 1000, 4100), {}, False),
    ("int2_matmul", (70000, 64, 33000), {}, False),
]


@pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_properties(0).total_memory < 120 * 2**30, reason="needs a GPU with 120 GiB")
@pytest.mark.parametrize("name,shape,options,gradients", LARGE, ids=[f"{n}-{'x'.join(map(str, s))}" for n, s, *_ in LARGE])
def test_large(name, shape, options, gradients):
    case, dtype = CASES[name], torch.bfloat16
    torch.manual_seed(0)
    with torch.device("cuda"):
        made = list(case.make(shape, options))
    inputs = []
    for i, t in enumerate(made):
        made[i] = None
        t = t if t is None or not t.is_floating_point() or i in case.keep else t.to(dtype)
        inputs.append(t.requires_grad_() if gradients and t is not None and i in case.differentiable else t)
    torch.cuda.empty_cache()
    out = as_tuple(case.op(*inputs, **options))
    assert max(t.numel() for t in [*[t for t in inputs if t is not None], *out]) > 2**31 or case.flops
    upstream = [torch.randn_like(o) if gradients else None for o in out]
    if gradients:
        torch.autograd.backward(out, upstream)

    sliced = [t is not None and t.dim() > 0 and t.shape[0] == out[0].shape[0] and (t.dim() > 1 or t.shape[0] != shape[-1]) for t in inputs]
    rows = out[0].shape[0]
    n = min(rows, max(1, 2**22 // max(1, out[0].numel() // rows)))
    for begin in sorted({0, min(rows - n, rows * 2**31 // max(t.numel() for t in out) if case.flops is None else 0), rows - n}):
        def part(t, cut=True):
            return t if t is None or not cut else t[begin : begin + n]

        exact = [t if t is None or not t.is_floating_point() else t.detach().float().requires_grad_(t.requires_grad) for t in (part(t, cut) for t, cut in zip(inputs, sliced))]
        reference = as_tuple(case.reference(*exact, **{k: v for k, v in options.items() if k != "max_bytes"} if case.flops else options))
        pairs = list(zip(map(part, out), reference))
        if gradients:
            torch.autograd.backward(reference, [part(g).to(r) for g, r in zip(upstream, reference)])
            pairs += [(part(t.grad), e.grad) for t, e, cut in zip(inputs, exact, sliced) if cut and t.requires_grad]
        for ours, expected in pairs:
            expected = expected.detach().float()
            # Two units of bf16 of a value, and eight of the values' usual size: a difference, and a product between GEMMs, is rounded before.
            torch.testing.assert_close(ours.detach().float(), expected, rtol=2**-6, atol=2**-4 * expected.square().mean().sqrt().item())
