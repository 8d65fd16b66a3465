"""Weights of two bits."""

import torch
from liger_kernel.ops.experimental import mm_int8int2


def test_int2_weights():
    """Packing is exact, pads with −1, and leaves its argument alone; a product takes b in any layout."""
    w = torch.randint(-1, 3, (12, 5))
    kept, packed = w.clone(), mm_int8int2.pack_weights(w)
    assert torch.equal(w, kept) and torch.equal(mm_int8int2.unpack_weights(packed), w.int())
    assert torch.equal(
        mm_int8int2.unpack_weights(mm_int8int2.pack_weights(w[:10])),
        torch.cat((w[:10], -torch.ones(2, 5, dtype=w.dtype))).int(),
    )
    a = torch.randint(-128, 128, (3, 12), dtype=torch.int8)
    for b in (packed, packed.t().contiguous().t()):
        assert torch.equal(mm_int8int2.matmul(a, b), a.int() @ w.int())
