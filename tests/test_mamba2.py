"""Mamba-2's scan against plain torch in float64, token by token; tests/cases/gated_delta_rule.py has its operator."""

import pytest
import torch
import torch.nn.functional as F
from liger_kernel.transformers.functional import liger_mamba2_scan

LENGTHS = (5, 1, 40, 24)
TOKENS, HEADS, GROUPS, P, N = sum(LENGTHS), 4, 2, 12, 16


def inputs(device, dtype=torch.float32):
    torch.manual_seed(0)
    tensors = {
        "x": torch.randn(1, TOKENS, HEADS, P),
        "dt": torch.randn(1, TOKENS, HEADS),
        "A": -torch.rand(HEADS) * 4,
        "B": torch.randn(1, TOKENS, GROUPS, N),
        "C": torch.randn(1, TOKENS, GROUPS, N),
        "D": torch.randn(HEADS),
        "z": torch.randn(1, TOKENS, HEADS, P),
        "dt_bias": torch.randn(HEADS),
        "state": torch.randn(len(LENGTHS), HEADS, P, N),
    }
    return {
        name: t.to(device, torch.float32 if name in ("A", "state") else dtype).requires_grad_()
        for name, t in tensors.items()
    }


def scan(x, dt, A, B, C, D, z, dt_bias, state, limit=(0.0, float("inf"))):
    """In the dtype of its arguments."""
    dt = F.softplus(dt + dt_bias).clamp(*limit)
    B, C = (t.repeat_interleave(HEADS // GROUPS, 2) for t in (B, C))
    rows, lasts, at = [], [], 0
    for document, length in enumerate(LENGTHS):
        S = state[document]
        for t in range(at, at + length):
            S = (
                S * (dt[0, t] * A).exp()[:, None, None]
                + dt[0, t, :, None, None] * x[0, t, :, :, None] * B[0, t, :, None]
            )
            rows.append((S * C[0, t, :, None]).sum(-1) + D[:, None] * x[0, t])
        at += length
        lasts.append(S)
    return torch.stack(rows)[None] * F.silu(z), torch.stack(lasts)


def starts(device):
    return torch.tensor([0, *LENGTHS[:-1]]).cumsum(0).repeat_interleave(torch.tensor(LENGTHS))[None].int().to(device)


@pytest.mark.parametrize("limit", [(0.0, float("inf")), (0.3, 1.2)])
@pytest.mark.parametrize("dtype,bound", [(torch.float32, 2**-16), (torch.bfloat16, 2**-7)])
def test_exact(dtype, bound, limit, device):
    """Results and gradients of packed documents with states. A decay's gradient is a difference of sums over tokens: in
    float32 two digits less than its unit; in bfloat16 two units, for what lies between operators is rounded."""
    given = inputs(device, dtype)
    exact = {name: t.detach().double().requires_grad_() for name, t in given.items()}
    found = liger_mamba2_scan(**given, dt_limit=limit, starts=starts(device), final_state=True)
    expected = scan(**exact, limit=limit)
    upstream = [torch.randn_like(t) for t in expected]
    gradients = torch.autograd.grad(found, list(given.values()), [u.to(t.dtype) for u, t in zip(upstream, found)])
    theirs = torch.autograd.grad(expected, list(exact.values()), upstream)
    names = ("y", "last", *given)
    for name, ours, true in zip(names, (*found, *gradients), (*expected, *theirs), strict=True):
        error = (ours.double() - true).norm() / true.norm()
        assert error <= bound, (name, error)


def test_documents_as_alone(device):
    """The same bits. dt is given: torch's softplus rounds by where a number lies in a CPU's vectors."""
    given = {name: t.detach() for name, t in inputs(device).items() if name not in ("state", "z", "dt_bias")}
    given |= {"dt": given["dt"].exp(), "dt_softplus": False}
    packed = liger_mamba2_scan(**given, seq_idx=starts(device))[0]
    at = 0
    for length in LENGTHS:
        of_tokens = {
            n: t[:, at : at + length] if isinstance(t, torch.Tensor) and t.dim() > 1 else t for n, t in given.items()
        }
        assert torch.equal(liger_mamba2_scan(**of_tokens)[0], packed[:, at : at + length])
        at += length
    ends = torch.tensor((0, *LENGTHS), device=device).cumsum(0)
    assert torch.equal(liger_mamba2_scan(**given, cu_seqlens=ends)[0], packed)
    two = [given[name].expand(2, -1, *given[name].shape[2:]) for name in ("x", "dt", "B", "C")]
    with pytest.raises(ValueError, match="batch of 1"):
        liger_mamba2_scan(*two[:2], given["A"], *two[2:], cu_seqlens=ends)
