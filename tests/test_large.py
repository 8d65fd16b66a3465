"""More than 2^31 elements in one tensor, on a GPU, against plain torch on slices of the rows."""

import pytest
import torch
from cases import all_cases, rounded
from loss_cases import LOSSES
from test_ops import as_tuple

CASES = all_cases()
NONE = dict(reduction="none")
#: case, a shape of more than 2^31 elements in the first tensor or in the result, options, whether to compare gradients
LARGE = [
    ("rms_norm", (524304, 4100), {}, True),
    ("fused_add_rms_norm", (262160, 8200), {}, True),
    ("modulated_rms_norm", (524304, 4100), dict(each="token"), True),
    ("modulated_rms_norm", (16, 32784, 4100), {}, True),
    ("layer_norm", (131088, 16400), {}, True),
    ("gated_rms_norm", (524304, 4100), {}, True),
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
    ("linear_log_prob", (17000, 128, 128257), dict(max_bytes=2**35), True),
    ("linear_log_prob", (17000, 128, 128257), {}, True),
    ("gated_mlp", (140000, 64, 8192), dict(rank=0, recompute=True), True),
    ("rope", (65, 32, 8200, 128), {}, True),
    ("causal_conv1d", (33, 8200, 8200), {}, True),
    ("causal_conv1d", (33, 8200, 8200), dict(layout="time"), True),
    ("embedding", (530000, 1000, 4100), {}, False),
    ("int2_matmul", (70000, 64, 33000), {}, False),
]


needs_a_large_gpu = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_properties(0).total_memory < 120 * 2**30,
    reason="needs a GPU with 120 GiB",
)


@needs_a_large_gpu
@pytest.mark.parametrize(
    "name,shape,options,gradients", LARGE, ids=[f"{n}-{'x'.join(map(str, s))}" for n, s, *_ in LARGE]
)
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

    sliced = [
        t is not None and t.dim() > 0 and t.shape[0] == out[0].shape[0] and (t.dim() > 1 or t.shape[0] != shape[-1])
        for t in inputs
    ]
    rows = out[0].shape[0]
    n = min(rows, max(1, 2**22 // max(1, out[0].numel() // rows)))
    for begin in sorted(
        {0, min(rows - n, rows * 2**31 // max(t.numel() for t in out) if case.flops is None else 0), rows - n}
    ):

        def part(t, cut=True):
            return t if t is None or not cut else t[begin : begin + n]

        exact = [
            t if t is None or not t.is_floating_point() else t.detach().float().requires_grad_(t.requires_grad)
            for t in (part(t, cut) for t, cut in zip(inputs, sliced))
        ]
        reference = as_tuple(
            case.reference(*exact, **{k: v for k, v in options.items() if k != "max_bytes"} if case.flops else options)
        )
        pairs = list(zip(map(part, out), reference))
        if gradients:
            torch.autograd.backward(reference, [part(g).to(r) for g, r in zip(upstream, reference)])
            pairs += [(part(t.grad), e.grad) for t, e, cut in zip(inputs, exact, sliced) if cut and t.requires_grad]
        for ours, expected in pairs:
            expected = expected.detach().float()
            # Two units of bf16 of a value, and eight of the values' usual size: a difference, and a product between
            # GEMMs, is rounded before.
            torch.testing.assert_close(
                ours.detach().float(), expected, rtol=2**-6, atol=2**-4 * expected.square().mean().sqrt().item()
            )


@pytest.mark.parametrize(
    "device, classes, copies", (("cpu", 31, 3), pytest.param("cuda", 128257, 150, marks=needs_a_large_gpu))
)
@pytest.mark.parametrize("name", LOSSES)
def test_losses_of_copies(name, device, classes, copies):
    """The means of which a loss is made do not change when every sequence is there 150 times: 2.2e9 logits, against
    plain torch on one copy in float64."""
    case, rows = LOSSES[name], 114 if name in ("linear_jsd", "linear_cosine") else 6
    shape = (rows, 48, 64, classes) if rows > 6 else (rows, 19, 48, classes)
    options = {"linear_grpo": dict(ref=True)}.get(name, {})
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    one = case.inputs(shape, options, dtype, device)
    exact = rounded(one)
    expected, *_ = case.reference(*exact, **options)
    expected.backward()
    # All chosen sequences come before all rejected ones.
    places = torch.cat([half.repeat(copies) for half in torch.arange(rows, device=device).chunk(2)])
    copied = lambda t: t.detach()[places].requires_grad_(t.requires_grad)
    many = [t if t is None or t.ndim == 0 or t.shape[0] != rows else copied(t) for t in one]
    assert device == "cpu" or many[0][..., 0].numel() * classes > 2**31
    loss, *_ = case.op(*many, **options)
    loss.backward()
    pairs = [(loss, expected), (many[0].grad * copies, exact[0].grad[places]), (many[1].grad, exact[1].grad)]
    # In bf16 a logit between 8 and 16 is rounded by up to four units, and its probability by as much of itself: twice
    # that. In float sums of some thousand terms are rounded by the root of their number.
    bound = (8 if dtype == torch.bfloat16 else 64) * torch.finfo(dtype).eps
    for ours, plain in pairs:
        plain = plain.detach()
        assert plain.abs().max() > 1e-6
        usual = plain.square().mean().sqrt().item()
        torch.testing.assert_close(ours.detach().double(), plain, rtol=bound, atol=bound * usual)
