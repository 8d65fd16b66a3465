import torch
import torch.nn.functional as F
from liger_kernel._library import ops
from liger_kernel.transformers.functional import liger_xielu

from cases import Case


def make(shape, options):
    """In a low precision, what is 0 is right of eps, and some are between the two."""
    x = torch.randn(shape) * 2
    x.view(-1)[::7] *= 1e-7
    x.view(-1)[::11] = 0
    return x, torch.randn(1), torch.randn(1), torch.tensor(0.5), torch.tensor(-1e-6)


def reference(x, alpha_p, alpha_n, beta, eps):
    """As transformers has it."""
    p, n = F.softplus(alpha_p), beta + F.softplus(alpha_n)
    return torch.where(x > 0, p * x * x + beta * x, (torch.expm1(torch.min(x, eps)) - x) * n + beta * x)


CASES = [
    Case(
        terms_of_order_one=1,
        name="xielu",
        op=liger_xielu,
        reference=reference,
        make=make,
        shapes=[(3, 5, 1), (5, 7), (7, 129), (3, 4104), (2, 40000), (37, 6000)],
        differentiable=(0, 1, 2),
        many_rows=(70000, 8),
        schema=lambda inputs, options: (ops.xielu, tuple(inputs)),
        scales=(1, 1, 1, 30.0),  # 1e-3 makes a float16 eps to 0, where torch.min shares the gradient between equals
        bench=[((16384, 14336), {})],
        bench_cpu=[((4096, 4096), {})],
        bytes=lambda shape, options, e: (2 * e * shape[0] * shape[1], 3 * e * shape[0] * shape[1]),
        errors=[
            (
                lambda d: liger_xielu(torch.randn(2, 8, device=d), torch.ones(2, device=d), torch.ones(1, device=d)),
                RuntimeError,
                "alpha_p must be",
            )
        ],
    )
]
