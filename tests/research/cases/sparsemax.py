import torch
from cases import Case
from cases.softmax import CAUSAL_SHAPES, SHAPES, floor, make, masked
from liger_kernel._library import ops
from liger_kernel.ops.softmax import SPARSEMAX
from liger_kernel.transformers.functional import liger_sparsemax


def sparsemax_reference(x, dim=-1, spread=None):
    """By sorting, as the paper has it (algorithm 1); autograd differentiates τ."""
    z = x.to(torch.promote_types(x.dtype, torch.float32)).transpose(dim, -1)
    ordered = z.sort(-1, descending=True).values
    sums = ordered.cumsum(-1)
    size = (ordered * torch.arange(1, z.shape[-1] + 1, device=z.device) > sums - 1).sum(-1, keepdim=True)
    tau = (sums.gather(-1, size - 1) - 1) / size
    return (z - tau).relu().transpose(dim, -1).to(x.dtype)


def sparsemax(x, dim=-1, spread=None):
    return liger_sparsemax(x, dim)


def causal(x, spread=None):
    return ops.causal_softmax(x, SPARSEMAX)


def causal_reference(x, spread=None):
    return sparsemax_reference(masked(x))


CASES = [
    Case(
        # The spread makes few or nearly all of a row's values members of the support.
        name="sparsemax",
        op=sparsemax,
        reference=sparsemax_reference,
        make=make,
        options=[{}, dict(spread=0.01), dict(spread=1e-4), dict(dim=0)],
        schema=lambda inputs, options: (ops.softmax, (*inputs, SPARSEMAX)),
        shapes=SHAPES,
        many_rows=(70000, 8),
        bytes=floor,
        bench=[((4096, 4096), {})],
        bench_cpu=[((4096, 4096), {})],
        errors=[(lambda d: liger_sparsemax(torch.ones(2, 8, device=d), 2), IndexError, "Dimension out of range")],
    ),
    Case(
        name="causal_sparsemax",
        op=causal,
        reference=causal_reference,
        make=make,
        options=[{}, dict(spread=0.01)],
        schema=lambda inputs, options: (ops.causal_softmax, (*inputs, SPARSEMAX)),
        shapes=CAUSAL_SHAPES,
        many_rows=(70000, 8),
    ),
]
