import torch
from cases import Case
from liger_kernel._library import ops
from liger_kernel.ops.experimental.mm_int8int2 import matmul, pack_weights, unpack_weights


def make(shape, options):
    m, k, n = shape
    return torch.randint(-128, 128, (m, k), dtype=torch.int8), torch.randint(0, 256, (k // 4, n), dtype=torch.uint8)


def reference(a, b):
    codes = torch.cat([b >> 2 * i & 3 for i in range(4)])
    return (a.double() @ (codes.double() - 1)).int()


def pack_reference(w):
    codes = torch.cat((w + 1, torch.zeros(-w.shape[0] % 4, *w.shape[1:], dtype=w.dtype, device=w.device))).chunk(4)
    return sum(c << 2 * i for i, c in enumerate(codes)).to(torch.uint8)


def rivals(inputs, options):
    a, b = inputs
    weights = unpack_weights(b)
    half, half_weights = a.bfloat16(), weights.bfloat16()
    found = {"bf16 matmul": lambda: half @ half_weights}
    if a.is_cuda and a.shape[0] > 16:
        signed = weights.to(torch.int8)
        found["torch._int_mm"] = lambda: torch._int_mm(a, signed)
    return found


def operands(d, k=8):
    return torch.zeros(2, k, dtype=torch.int8, device=d), torch.zeros(2, 3, dtype=torch.uint8, device=d)


CASES = [
    Case(
        name="int2_matmul",
        fit=lambda shape: (shape[0], 4 * shape[1], shape[2]),
        op=ops.int2_matmul,
        reference=reference,
        make=make,
        differentiable=(),
        dtypes=(torch.float32,),
        many_rows=(70000, 8, 3),
        emulated=4_000_000,
        shapes=[
            (1, 4, 1),
            (3, 20, 7),
            (1, 1024, 200),
            (8, 132, 65),
            (9, 260, 36),
            (33, 12, 20),
            (33, 512, 40),
            (40, 60, 130),
            (50, 512, 144),
            (50, 64, 608),
            (131, 148, 129),
            (200, 1024, 16),
            (300, 64, 144),
            (600, 68, 1090),
            (600, 192, 1152),
            (1100, 320, 2512),
            (1100, 8, 2500),
        ],
        schema=lambda inputs, options: (ops.int2_matmul, tuple(inputs)),
        rivals=rivals,
        bench=[((1, 4096, 4096), {}), ((16, 4096, 4096), {}), ((512, 4096, 4096), {}), ((4096, 4096, 4096), {})],
        bench_cpu=[((1, 4096, 4096), {}), ((256, 4096, 4096), {})],
        errors=[
            (lambda d: matmul(*operands(d, 12)), AssertionError, "holds 8 rows"),
            (lambda d: matmul(operands(d)[0][:, ::2].expand(2, 4), operands(d)[1][:1]), AssertionError, "contiguous"),
            (lambda d: ops.int2_matmul(*operands(d, 12)), RuntimeError, "expected a"),
            (lambda d: ops.int2_matmul(*operands(d)[::-1]), TypeError, "must be int8"),
            (
                lambda d: ops.int2_matmul(
                    *(
                        torch.empty(s, dtype=t, device="meta")
                        for s, t in (((1, 2**33), torch.int8), ((2**31, 1), torch.uint8))
                    )
                ),
                ValueError,
                "fewer than",
            ),
        ],
    ),
    Case(
        name="int2_unpack",
        op=unpack_weights,
        reference=lambda b: torch.cat([b >> 2 * i & 3 for i in range(4)]).int() - 1,
        differentiable=(),
        make=lambda shape, options: (torch.randint(0, 256, shape, dtype=torch.uint8),),
        dtypes=(torch.float32,),
        shapes=[(1,), (5,), (3, 2, 7), (9, 40)],
        schema=lambda inputs, options: (ops.int2_unpack, tuple(inputs)),
        errors=[
            (lambda d: unpack_weights(torch.zeros(3, device=d)), TypeError, "uint8"),
            (lambda d: unpack_weights(torch.zeros(3, device=d), 4), ValueError, "2 bits"),
        ],
    ),
    Case(
        name="int2_pack",
        op=pack_weights,
        reference=pack_reference,
        differentiable=(),
        make=lambda shape, options: (torch.randint(-1, 3, shape),),
        dtypes=(torch.float32,),
        shapes=[(1,), (5,), (4, 2, 7), (9, 40)],
        schema=lambda inputs, options: (ops.int2_pack, tuple(inputs)),
        errors=[(lambda d: pack_weights(torch.zeros(3, device=d)), TypeError, "integers")],
    ),
]
