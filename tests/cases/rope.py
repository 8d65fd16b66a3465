import torch
from liger_kernel._library import ops
from liger_kernel.transformers.functional import liger_rope

from cases import Case


def make(shape, options):
    batch, heads, seq, dim = shape
    rotary = options.get("rotary", dim)
    tables = options.get("tables", 1)
    # As projections give them: [batch, seq, heads, dim] seen as [batch, heads, seq, dim].
    q, k = (torch.randn(batch, seq, h, dim).transpose(1, 2) for h in (heads, max(1, heads // options.get("groups", 2))))
    angles = torch.rand(batch if tables == "batch" else 1, seq, rotary // 2) * 6
    angles = torch.cat((angles, angles), -1)
    return q, k, *((angles.cos(), angles.sin()) if tables else (angles.cos()[0], angles.sin()[0]))


def op(q, k, cos, sin, **_):
    return liger_rope(q, k, cos, sin)


def reference(q, k, cos, sin, **_):
    """Hugging Face's apply_rotary_pos_emb, on the leading columns that cos and sin cover."""
    cos, sin = (t.unsqueeze(-3).to(q.dtype) for t in (cos, sin))
    d = cos.shape[-1]

    def rotate(x):
        left, rest = x[..., :d], x[..., d:]
        half = torch.cat((-left[..., d // 2 :], left[..., : d // 2]), -1)
        return torch.cat((left * cos + half * sin, rest), -1)

    return rotate(q), rotate(k)


def error(text, **shapes):
    sizes = {"q": (1, 2, 3, 8), "k": (1, 2, 3, 8), "cos": (1, 3, 8), "sin": (1, 3, 8), **shapes}
    return (lambda d: liger_rope(*(torch.randn(sizes[name], device=d) for name in sizes)), RuntimeError, text)


def traffic(shape, options, e):
    batch, heads, seq, dim = shape
    one = 2 * e * batch * seq * dim * (heads + heads // options.get("groups", 2))
    return one, one


CASES = [
    Case(
        name="rope", op=op, reference=reference, make=make, differentiable=(0, 1), linear=True,
        shapes=[(2, 4, 3, 8), (1, 2, 5, 6), (2, 3, 7, 64), (2, 8, 4, 128)],
        options=[{}, dict(tables="batch"), dict(tables=0), dict(groups=1), dict(rotary=4)],
        many_rows=(70000, 1, 1, 4), schema=lambda inputs, options: (ops.rope, (*inputs, False)), bytes=traffic,
        bench=[((4, 32, 4096, 128), dict(groups=4)), ((1, 32, 512, 128), dict(groups=4))],
        bench_cpu=[((1, 32, 2048, 128), dict(groups=4))],
        errors=[error("must be .batch, heads, seq, dim.", q=(2, 3, 8)), error("differ in more than heads", k=(1, 2, 4, 8)),
                error("cos is", sin=(1, 3, 6)), error("cos and sin must be", cos=(1, 4, 8), sin=(1, 4, 8)), error("wider", cos=(1, 3, 10), sin=(1, 3, 10))],
    ),
]
