"""Random trials of every operator against float64 statements of its formula: shapes, dtypes, layouts, options, frozen
inputs, upstream gradients.

`python tests/fuzz.py --seconds 600` draws fresh seeds for so long and prints how to repeat a trial that fails;
tests/test_fuzz.py runs fixed ones.
"""

import argparse
import math
import os
import random
import sys
import time
import traceback

import torch

if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from cases import all_cases, as_tuple, rounded
from loss_cases import LOSSES

CASES = all_cases() | LOSSES
SIZES = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 64, 65, 127, 129, 256, 257, 513, 1000, 1025, 2049, 4104)


def draw_shape(case, pick, elements):
    """A shape of the rank of one of the case's, of at most so many elements, with one size that may be large."""
    rank = len(pick.choice(case.shapes))
    while True:
        sizes = [pick.choice(SIZES[:14]) for _ in range(rank - 1)] + [pick.choice(SIZES)]
        pick.shuffle(sizes)
        shape = case.fit(tuple(sizes))
        if math.prod(shape) <= elements:
            return shape


def draw_options(case, pick):
    """One of the case's options, or two together, and those that it draws itself."""
    options = {}
    for chosen in pick.sample(case.options, pick.choice((1, 1, min(2, len(case.options))))):
        options.update(chosen)
    return {**options, **(case.draw(pick) if case.draw else {})}


def _normalised_together(name, shape, options):
    """How many numbers a norm that takes their mean away normalises together; None for another operator."""
    if name == "layer_norm":
        return shape[-1]
    return math.prod(shape[1:]) // options.get("groups", 2) if name == "group_norm" else None


def laid_out(t, layout):
    """The same numbers in memory of another layout."""
    if t is None or t.dim() == 0 or t.numel() == 0:
        return t
    if layout == "misaligned":
        return t.new_empty(t.numel() + 1)[1:].view(t.shape).copy_(t)
    if layout == "transposed":
        return t.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "every second":
        return t.new_empty(*t.shape[:-1], 2 * t.shape[-1])[..., ::2].copy_(t)
    if layout == "padded":
        return t.new_empty(*t.shape[:-1], t.shape[-1] + 3)[..., : t.shape[-1]].copy_(t)
    if layout == "expanded" and t.dim() > 1:
        return t[:1].clone().expand(t.shape)
    return t


LAYOUTS = ("plain", "plain", "misaligned", "transposed", "every second", "padded")


def gradients(out, inputs, upstream, **more):
    wanted = [t for t in inputs if t is not None and t.requires_grad]
    if not wanted:
        return []
    # A result may depend on frozen inputs alone.
    pairs = [(o, g.to(o)) for o, g in zip(out, upstream) if o.requires_grad]
    return list(torch.autograd.grad([o for o, _ in pairs], wanted, [g for _, g in pairs], **more))


def moved(inputs, dtype):
    """Inputs for a reference in float64, each number off by up to a unit in its last place."""
    return [
        t
        if t is None or not t.is_floating_point()
        else (t.detach() * (1 + torch.empty_like(t).uniform_(-1, 1) * torch.finfo(dtype).eps)).requires_grad_(
            t.requires_grad
        )
        for t in rounded(inputs)
    ]


def check_close(ours, eager, near, exact, dtype, terms, what):
    """Each element within eight times eager's largest error or what a unit in the inputs' last place changes, 32 units
    of the largest value's rounding, and of what a sum of so many terms of order one is rounded by. That is loose on
    purpose (tests/test_ops.py compares precision): a trial looks for what is wrong, not for what is less exact."""
    exact, ours, eager, near = exact.double(), ours.double(), eager.double(), near.double()
    assert ours.shape == exact.shape, f"{what}: shape {list(ours.shape)} instead of {list(exact.shape)}"
    info = torch.finfo(dtype)
    known = exact.isfinite() & (exact.abs() < info.max / 64)  # terms of larger sums may overflow on the way
    if not known.any():
        return
    error, theirs = (ours - exact).abs()[known], (eager - exact).abs()[known]
    scale = max(exact[known].abs().max().item(), math.sqrt(terms))
    least = torch.cat([theirs, (near - exact).abs()[known]])
    bound = 8 * least[least.isfinite()].max().item() if least.isfinite().any() else 0
    bound += 32 * info.eps * scale + 4 * info.smallest_normal * info.eps
    error = error[theirs.isfinite()]
    assert not error.numel() or error.max().item() <= bound, f"{what}: error {error.max():.3g}, allowed {bound:.3g}"


def check_meta(op, arguments, text):
    real = as_tuple(op(*arguments))
    meta = as_tuple(op(*(t.to("meta") if isinstance(t, torch.Tensor) else t for t in arguments)))
    for a, b in zip(real, meta, strict=True):
        assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype), (
            f"{text}: Meta says {b.shape} {b.stride()} {b.dtype}, not {a.shape} {a.stride()} {a.dtype}"
        )


def trial(seed, device="cpu", elements=8000, names=tuple(CASES)):
    """Draws and runs one trial; raises AssertionError with what differs."""
    pick = random.Random(seed)
    torch.manual_seed(seed)
    case = CASES[pick.choice(sorted(names))]
    shape, options, dtype = draw_shape(case, pick, elements), draw_options(case, pick), pick.choice(case.dtypes)
    if options.get("kind") == "cosine" and shape[-1] == 1:
        return  # of one class the cosine is 1 or -1, and all of its gradient is rounding
    if _normalised_together(case.name, shape, options) == 2:
        return  # two numbers less their mean become 1 and -1 whatever they are, and all of their gradient is rounding
    drawn = case.inputs(shape, options, dtype, device, seed)
    present = [i for i in case.differentiable if drawn[i] is not None]
    trained = [i for i in present if pick.random() < 0.75]
    scale = pick.choice(case.scales)
    inputs, layouts = [], []
    for i, t in enumerate(drawn):
        if t is not None and t.is_floating_point():
            t = t.detach() * scale
        layouts.append(pick.choice(LAYOUTS if i in trained else (*LAYOUTS, "expanded")))
        inputs.append(None if t is None else laid_out(t.detach(), layouts[-1]).requires_grad_(i in trained))
    text = f"seed {seed}: {case.name} {shape} {options} {dtype} times {scale:g} {layouts}, gradients of {trained}"
    before = [None if t is None else t.detach().clone() for t in inputs]

    def dense(t):  # an expanded input keeps one gradient for all its rows
        return None if t is None else t.detach().clone().requires_grad_(t.requires_grad)

    out = as_tuple(case.op(*inputs, **options))
    upstream = [
        torch.randn(o.shape, dtype=torch.float64).to(device, o.dtype) if o.is_floating_point() else None for o in out
    ]
    kind = pick.choice(("ones", "powers of two", "any", "zeros", "expanded", "transposed"))
    if kind == "ones":
        upstream = [g if g is None else torch.ones_like(g) for g in upstream]
    elif kind == "powers of two":
        upstream = [g if g is None else g.sign() * g.abs().clamp(min=2**-6).log2().round().exp2() for g in upstream]
    elif kind == "zeros":
        upstream = [g if g is None else torch.zeros_like(g) for g in upstream]
    elif kind == "expanded":
        upstream = [
            g if g is None or g.dim() == 0 else g.flatten()[:1].expand(g.shape) if g.numel() else g for g in upstream
        ]
    elif kind == "transposed":
        upstream = [g if g is None else laid_out(g, "transposed") for g in upstream]
    text += f", upstream {kind}"

    found = gradients(out, inputs, upstream, retain_graph=True)
    again = gradients(out, inputs, upstream, retain_graph=True)
    last = gradients(out, inputs, upstream)
    for a, b, c in zip(found, again, last):
        assert torch.equal(a, b) or a.isnan().any(), f"{text}: a second backward differs"
        assert torch.allclose(
            a, c, rtol=2 * torch.finfo(a.dtype).eps, atol=torch.finfo(a.dtype).smallest_normal, equal_nan=True
        ), f"{text}: backward without retain_graph differs"
    for t, old in zip(inputs, before):
        assert t is None or torch.equal(t, old) or t.is_floating_point() and t.isnan().any(), (
            f"{text}: an input was changed"
        )
        assert t is None or t.requires_grad or t.grad is None, f"{text}: a frozen input has a gradient"

    references = []
    plain = [dense(t) if t is not None and t.is_floating_point() else t for t in inputs]
    for copies in (rounded(inputs), moved(inputs, dtype), plain):
        result = as_tuple(case.reference(*copies, **options))
        references.append([*result, *gradients(result, copies, upstream)])
    exact, near, eager = references
    # Where float16 overflows on eager's way, what is infinite and what is NaN depends on the order of its products.
    if dtype == torch.float16 and any(a.isfinite().all() and not b.isfinite().all() for a, b in zip(exact, eager)):
        return
    # A number that rounding takes over a limit has another slope there, in eager too.
    if options.get("limit") and any(
        (b.double() - c).abs().max() > c.abs().max() / 8 for b, c in zip(eager, exact) if c.numel()
    ):
        return
    for i, (a, b, n, c) in enumerate(zip([*out, *found], eager, near, exact, strict=True)):
        if not a.is_floating_point():  # a choice, which of equal numbers may be another than of their exact values
            assert any(torch.equal(a, r.to(a.dtype)) for r in (c, b)), f"{text}: result {i} differs"
            continue
        terms = max(1, math.prod(shape) // max(1, c.numel()))
        check_close(a, b, n, c, dtype, terms, f"{text}: result {i}")

    if case.schema:
        check_meta(*case.schema([None if t is None else t.detach() for t in inputs], options), text)

    if device == "cpu" and not case.flops and not case.heads:  # a library's GEMM may sum in another order
        threads = torch.get_num_threads()
        torch.set_num_threads(1 if threads > 1 else 2)
        other = as_tuple(case.op(*inputs, **options))
        other = [*other, *gradients(other, inputs, upstream, retain_graph=True)]
        torch.set_num_threads(threads)
        for i, (a, b) in enumerate(zip([*out, *found], other)):
            assert torch.equal(a, b) or a.isnan().any(), f"{text}: result {i} depends on the number of threads"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60, help="how long to draw")
    parser.add_argument("--seed", type=int, help="run this one trial")
    parser.add_argument("--first", type=int, help="the first seed; by default it depends on the time")
    parser.add_argument("--trials", type=int, help="at most so many")
    parser.add_argument("--only", default=",".join(CASES), metavar="CASES", help="of these alone, separated by commas")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--elements", type=int, default=8000, help="the largest product of a shape")
    args = parser.parse_args()
    names = args.only.split(",")
    only = f" --only {args.only}" if len(names) < len(CASES) else ""
    if args.seed is not None:
        trial(args.seed, args.device, args.elements, names)
        return print(f"seed {args.seed} passed")
    first = int(time.time()) * 1000 if args.first is None else args.first
    failed, seed, end = [], first, time.monotonic() + args.seconds
    while time.monotonic() < end and (args.trials is None or seed < first + args.trials):
        try:
            trial(seed, args.device, args.elements, names)
        except Exception:
            failed.append(seed)
            traceback.print_exc()
            print(
                f"repeat it with: python tests/fuzz.py --device {args.device} --elements {args.elements}{only} --seed "
                f"{seed}",
                flush=True,
            )
        seed += 1
    print(f"{seed - first} trials from seed {first}: {len(failed)} failed {failed}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
