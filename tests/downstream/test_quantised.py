"""Heads that bitsandbytes has quantised."""

from types import SimpleNamespace

import torch
from bitsandbytes import functional
from liger_kernel.ops.sliced_log_prob import quantised_linear_log_prob


def test_4_bit_head():
    """nf4 and fp4, with statistics that are quantised themselves and without."""
    g = torch.Generator().manual_seed(1)
    hidden, weight, bias = (torch.randn(*shape, generator=g) for shape in ((21, 64), (90, 64), (90,)))
    ids = torch.randint(0, 90, (21,), generator=g)
    ids[3] = -100
    kept = ids != -100
    for kind in ("nf4", "fp4"):
        for nested in (False, True):
            packed, state = functional.quantize_4bit(weight, blocksize=64, compress_statistics=nested, quant_type=kind)
            dense = functional.dequantize_4bit(packed, state)
            q = SimpleNamespace(quant_state=state, data=packed)
            found = quantised_linear_log_prob(hidden.requires_grad_(), q, ids, bias, entropy=True, classes_at_once=40)
            leaf = hidden.detach().double().requires_grad_()
            p = torch.log_softmax(leaf @ dense.double().T + bias.double(), -1)
            exact = torch.where(kept, p.gather(-1, ids.clamp(min=0)[:, None])[:, 0], 0), torch.where(kept, -(p.exp() * p).sum(-1), 0)
            gradients = (torch.autograd.grad(out[0].sum() + 2 * out[1].sum(), x)[0] for out, x in ((found, hidden), (exact, leaf)))
            for a, b in zip((*found, next(gradients)), (*exact, next(gradients))):
                torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4)
