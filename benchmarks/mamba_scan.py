"""What bench.py times of Mamba-2's scan, which is the gated delta rule without its delta; tests/test_mamba2.py compares
its results."""

import torch
from cases import Case
from cases.causal_conv1d import document_starts
from cases.gated_delta_rule import reference
from liger_kernel.transformers.functional import liger_mamba2_scan


def make(shape, options):
    """x, dt, A, B, C, dt_bias, where documents begin and D. A, dt_bias and D are as models begin with them."""
    rows, tokens, groups, group, N, P = shape
    heads = groups * group
    x, dt = torch.randn(rows, tokens, heads, P), torch.randn(rows, tokens, heads)
    B, C = torch.randn(rows, tokens, groups, N), torch.randn(rows, tokens, groups, N)
    documents = options.get("documents")
    starts = None if documents is None else document_starts(rows, tokens, documents)
    return x, dt, -torch.arange(1, heads + 1).float(), B, C, torch.full((heads,), -4.0), starts, torch.ones(heads)


def scan(x, dt, A, B, C, dt_bias, starts, D, **_):
    return liger_mamba2_scan(x, dt, A, B, C, D, dt_bias=dt_bias, starts=starts)[0]


def chunks(x, dt, A, B, C, dt_bias, starts, D, **_):
    """In chunks of 64 tokens, as transformers' own."""
    dt = torch.nn.functional.softplus(dt.float() + dt_bias)
    return reference(C * C.shape[-1] ** 0.5, B, x, dt * A, dt, None, starts, D, eps=None, delta=False)


SCANS = {
    "mamba2_scan": Case(
        "mamba2_scan",
        scan,
        chunks,
        make,
        shapes=[(1, 70, 2, 2, 16, 16), (2, 5, 1, 2, 16, 8)],
        differentiable=(0, 1, 2, 3, 4, 5, 7),
        keep=(2, 5),
        # Nemotron-H 8B, and Granite 4 tiny's heads of 64 with one group.
        bench=[
            ((1, 8192, 8, 16, 128, 64), {}),
            ((1, 8192, 8, 16, 128, 64), {"documents": 1024}),
            ((4, 2048, 8, 16, 128, 64), {}),
            ((1, 8192, 1, 48, 128, 64), {}),
        ],
        bench_cpu=[((2, 1024, 1, 4, 128, 64), {})],
    )
}
