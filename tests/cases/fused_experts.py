import torch
import torch.nn.functional as F
from liger_kernel._library import ops
from liger_kernel.operators.experts import Adapter, fused_experts

from cases import Case
from cases.gated import ACTIVATIONS, CLAMPED, GATE, GPT_OSS, clamped, of_silu


def make(shape, options):
    """x, gate_up, down, the weights of a token's experts, biases or None, adapters or None, and which experts: some are
    drawn twice, some not at all. bounded: a token's first is none, and buffers have room for the others."""
    tokens, hidden, width = shape
    experts, k, rows = options.get("experts", 5), options.get("k", 2), (1 + options.get("gated", True)) * width
    gate_up, down = (
        torch.randn(experts, rows, hidden) * hidden**-0.5,
        torch.randn(experts, hidden, width) * width**-0.5,
    )
    if options.get("transposed"):
        gate_up, down = (t.transpose(1, 2).contiguous() for t in (gate_up, down))
    biases = [torch.randn(experts, rows), torch.randn(experts, hidden)] if options.get("biases") else [None, None]
    adapters = [None] * 4
    if rank := options.get("rank"):
        sizes = (rank, hidden), (rows, rank), (rank, width), (hidden, rank)
        adapters = [torch.randn(experts, *size) * size[-1] ** -0.5 for size in sizes]
    index = torch.randint(options.get("first", 0), experts + options.get("beyond", 0), (tokens, k))
    if options.get("bounded"):
        index[:, 0] = -1
    return torch.randn(tokens, hidden), gate_up, down, torch.rand(tokens, k), *biases, *adapters, index


ACTIVATED = ("activation", "interleaved", "gated", *GATE)
KNOWN = (*ACTIVATED, "transposed", "recompute")
SCALES = 0.7, 1.5


def most_rows(index, options):
    return index.shape[0] * (index.shape[1] - 1) if options.get("bounded") else None


def op(x, gate_up, down, weights, gate_up_bias, down_bias, gate_up_a, gate_up_b, down_a, down_b, index, **options):
    adapters = {}
    if gate_up_a is not None:
        adapters = dict(
            gate_up_adapter=Adapter(gate_up_a, gate_up_b, SCALES[0]), down_adapter=Adapter(down_a, down_b, SCALES[1])
        )
    return fused_experts(
        x,
        gate_up,
        down,
        index,
        weights,
        gate_up_bias,
        down_bias,
        **{name: value for name, value in of_silu(options).items() if name in KNOWN},
        **adapters,
        most_rows=most_rows(index, options),
    )


def activated(a, activation="silu", interleaved=False, gated=True, **clamps):
    if not gated:
        return ACTIVATIONS[activation][1](a)
    gate, up = (a[..., ::2], a[..., 1::2]) if interleaved else a.chunk(2, -1)
    return clamped(gate, up, **clamps) if clamps else ACTIVATIONS[activation][1](gate) * up


def linear(x, w, bias, a, b, scale):
    """The product is rounded before the bias comes, as in transformers' grouped_mm: at the limit of a gate, where its
    gradient jumps, roundings decide."""
    y = F.linear(x, w) if bias is None else F.linear(x, w) + bias
    return y if a is None else y + F.linear(F.linear(x, a) * scale, b)


def reference(
    x, gate_up, down, weights, gate_up_bias, down_bias, gate_up_a, gate_up_b, down_a, down_b, index, transposed=False,
    **options,
):  # fmt: skip
    """A loop over the experts, whose outputs are summed in float."""
    of_expert = lambda t, e: None if t is None else t[e]
    options = {name: value for name, value in options.items() if name in ACTIVATED}
    wide = torch.promote_types(x.dtype, torch.float32)
    y = torch.zeros(x.shape, dtype=wide, device=x.device)
    for e in range(len(gate_up)):
        token, slot = (index == e).nonzero(as_tuple=True)
        first, second = (w[e].T if transposed else w[e] for w in (gate_up, down))
        of_gate_up, of_down = (
            [of_expert(t, e) for t in tensors]
            for tensors in ((gate_up_bias, gate_up_a, gate_up_b), (down_bias, down_a, down_b))
        )
        a = linear(x[token], first, *of_gate_up, SCALES[0])
        out = linear(activated(a, **options), second, *of_down, SCALES[1])
        y = y.index_add(0, token, out.to(wide) * weights[token, slot].to(wide)[:, None])
    return y.to(x.dtype)


def schema(inputs, options):
    *tensors, index = inputs
    most = most_rows(index, options)
    return ops.fused_experts, (
        *tensors,
        None,
        None,
        index,
        ACTIVATIONS[of_silu(options).get("activation", "silu")][0],
        options.get("transposed", False),
        options.get("interleaved", False),
        *({**GATE, **options}[name] for name in GATE),
        True,
        *SCALES,
        -1 if most is None else most,
        options.get("gated", True),
    )


def draw(pick):
    drawn = dict(
        experts=pick.choice((1, 3, 17)),
        k=pick.choice((1, 2, 5)),
        transposed=True,
        biases=True,
        recompute=False,
        rank=pick.choice((1, 4, 16)),
        activation=pick.choice(sorted(ACTIVATIONS)),
        first=-1,
        beyond=1,
        bounded=True,
    )
    return {name: drawn[name] for name in pick.sample(sorted(drawn), pick.randrange(5))}


def rivals(inputs, options):
    """transformers' experts by grouped GEMMs, where it can be imported."""
    try:
        from transformers.integrations.moe import grouped_mm_experts_forward
    except ImportError:
        return {}
    x, gate_up, down, weights, *_, index = inputs
    activation = ACTIVATIONS[options.get("activation", "silu")][1]

    class Experts:
        has_gate, has_bias, is_transposed, is_concatenated, has_post_expert_norm, _is_expert_parallel, num_experts = (
            options.get("gated", True),
            False,
            False,
            True,
            False,
            False,
            len(gate_up),
        )
        gate_up_proj, up_proj, down_proj = gate_up, gate_up, down
        act_fn = staticmethod(activation)

        def _apply_gate(self, a):
            gate, up = a.chunk(2, -1)
            return activation(gate) * up

    return {"transformers": lambda: grouped_mm_experts_forward(Experts(), x, index, weights)}


def flops(shape, options):
    pair = 2 * shape[0] * options.get("k", 2) * shape[1] * shape[2]
    matrices = 2 + options.get("gated", True)
    return matrices * pair, 2 * matrices * pair


def few_rows(device, most, experts=3, width=8, **options):
    sizes = (4, 8), (experts, 16, 8), (experts, 8, width)
    x, gate_up, down = (torch.randn(size, device=device, requires_grad=True) for size in sizes)
    index = torch.tensor([[0, 1], [-1, 1], [experts, 0], [2, 2]], device=device)
    return fused_experts(x, gate_up, down, index, torch.ones(4, 2, device=device), most_rows=most, **options)


MIXTRAL, QWEN = ((16384, 4096, 14336), dict(experts=8, k=2)), ((16384, 2048, 768), dict(experts=128, k=8))
QWEN_NEXT, OLMOE = ((16384, 2048, 512), dict(experts=512, k=10)), ((16384, 2048, 1024), dict(experts=64, k=8))
NEMOTRON = (16384, 2688, 1856), dict(gated=False, activation="relu_squared", experts=128, k=6)
GPT_OSS_20B = (16384, 2880, 2880), dict(experts=32, k=4, transposed=True, biases=True, **GPT_OSS)


def case(name, **fields):
    return Case(
        name=name,
        op=op,
        reference=reference,
        make=make,
        draw=draw,
        schema=schema,
        flops=flops,
        differentiable=tuple(range(10)),
        keep=(3,),
        # The gradient of a weight is a sum that cancels, of products over the width: 6 in the smallest shape.
        terms_of_order_one=6,
        **fields,
    )


CASES = [
    case(
        "fused_experts",
        rivals=rivals,
        captured=((40, 24, 64), torch.bfloat16),
        # (9, 16, 24): every option in 16 bits, in Hopper's grouped GEMM. The last one: experts with one and with two of
        # its tiles, none of them full.
        shapes=[(1, 4, 6), (5, 7, 9), (9, 16, 24), (40, 24, 65), (33, 64, 128), (650, 72, 40)],
        emulated=2_000_000,
        options=[
            {},
            dict(experts=1, k=1),
            dict(experts=9, k=4, biases=True),
            dict(first=-1, beyond=2, biases=True),
            dict(recompute=False),
            dict(rank=3, biases=True),
            dict(rank=8, transposed=True, first=-1, recompute=False),
            dict(rank=72),  # more than a stage of Hopper's grouped GEMM
            dict(bounded=True, k=4, beyond=1, biases=True, rank=8),
            dict(bounded=True, recompute=False),
            dict(bounded=True, k=1, biases=True),
            dict(activation="gelu_tanh", transposed=True),
            dict(activation="relu_squared", experts=40),
        ],
        bench=[
            (shape, options | more)
            for shape, options in (MIXTRAL, QWEN, QWEN_NEXT, OLMOE, ((4096, *QWEN[0][1:]), QWEN[1]))
            for more in ({}, dict(recompute=False))
        ],
        bench_cpu=[((512, 512, 256), dict(experts=128, k=8))],
        errors=[
            (
                lambda d: fused_experts(
                    torch.randn(2, 4, device=d),
                    torch.randn(3, 6, 4, device=d),
                    torch.randn(3, 4, 2, device=d),
                    torch.zeros(2, 1, device=d, dtype=torch.long),
                    torch.ones(2, 1, device=d),
                ),
                RuntimeError,
                r"down must be \[3, 4, 3\]",
            ),
            (
                lambda d: fused_experts(
                    torch.randn(2, 4, device=d),
                    torch.randn(3, 6, 4, device=d),
                    torch.randn(3, 4, 3, device=d),
                    torch.zeros(2, 1, device=d),
                    torch.ones(2, 1, device=d),
                ),
                TypeError,
                "index must be",
            ),
            (lambda d: few_rows(d, -2), RuntimeError, "fused_experts: most_rows must be -1, for no bound, or a number"),
        ],
    ),
    # Not in float16: a product that rounds across the limit changes a gradient by a whole term, which is more than the
    # tolerances of that dtype.
    case(
        "fused_experts_clamped",
        dtypes=(torch.float32, torch.bfloat16),
        captured=((40, 24, 64), torch.bfloat16),
        shapes=[(1, 4, 6), (5, 7, 9), (9, 16, 24), (40, 24, 65), (33, 64, 128), (650, 72, 40)],
        emulated=2_000_000,
        options=[
            dict(transposed=True, biases=True, **GPT_OSS),
            CLAMPED,
            dict(experts=9, k=4, recompute=False, **GPT_OSS),
            dict(biases=True, recompute=False, **CLAMPED),
            dict(biases=True, recompute=False, **GPT_OSS),
            dict(first=-1, beyond=2, rank=8, **GPT_OSS),
        ],
        bench=[GPT_OSS_20B],
    ),
    case(
        "fused_experts_ungated",
        rivals=rivals,
        captured=((40, 24, 64), torch.bfloat16),
        shapes=[(1, 4, 6), (5, 7, 9), (9, 16, 24), (40, 24, 65), (33, 64, 128), (650, 72, 40)],
        emulated=2_000_000,
        options=[
            dict(gated=False, activation="relu_squared"),
            dict(gated=False, activation="relu_squared", experts=9, k=4, biases=True, recompute=False),
            dict(gated=False, activation="relu_squared", experts=40, transposed=True),
            dict(gated=False, activation="relu_squared", rank=8, biases=True, first=-1, beyond=2),
            dict(gated=False, activation="relu_squared", bounded=True, k=4, beyond=1, rank=3, recompute=False),
            dict(gated=False),
            dict(gated=False, activation="gelu_tanh", transposed=True, biases=True),
            dict(gated=False, activation="gelu_erf", recompute=False),
        ],
        bench=[(NEMOTRON[0], NEMOTRON[1] | more) for more in ({}, dict(recompute=False))],
        errors=[
            (lambda d: few_rows(d, None, gated=False), RuntimeError, r"fused_experts: down must be \[3, 8, 16\]"),
            *(
                (
                    lambda d, of_gate=of_gate: few_rows(d, None, width=16, gated=False, **of_gate),
                    ValueError,
                    "fused_experts: limit, alpha, up_offset and interleaved are of experts with a gate",
                )
                for of_gate in (dict(interleaved=True), dict(limit=1.0), dict(alpha=2.0), dict(up_offset=1.0))
            ),
        ],
    ),
]
