import torch
import torch.nn.functional as F
from liger_kernel._library import ops
from liger_kernel.operators.head import OUTPUTS
from liger_kernel.operators.multi_head import linear_multi_head_cross_entropy

from cases import Case
from cases.cross_entropy import IGNORE, labels


def make(shape, options):
    """The hidden states of several heads, and their weights, or that of all."""
    tokens, width, classes = shape
    heads = options.get("heads", 3)
    weights = (classes, width) if options.get("shared") else (heads, classes, width)
    hidden, weight = torch.randn(heads, tokens, width), torch.randn(weights) * width**-0.5 * 2
    return hidden, weight, labels(tokens, classes, options.get("ignored", 0.25))


def factors(hidden):
    return [0.8**d for d in range(len(hidden))]


def op(hidden, weight, labels, max_bytes=0, **_):
    weights = weight if weight.dim() == 2 else list(weight.unbind())
    return linear_multi_head_cross_entropy(hidden, weights, labels, head_weights=factors(hidden), max_bytes=max_bytes)


def reference(hidden, weight, labels, **_):
    """Head d predicts the label d + 1 places later."""
    losses = []
    for d, states in enumerate(hidden):
        later = F.pad(labels[d + 1 :], (0, min(d + 1, len(labels))), value=IGNORE)
        y = F.linear(states, weight if weight.dim() == 2 else weight[d])
        y = y.to(torch.promote_types(y.dtype, torch.float32))
        total = F.cross_entropy(y, later, ignore_index=IGNORE, reduction="sum")
        losses.append(total / (later != IGNORE).sum().clamp(min=1))
    losses = torch.stack(losses)
    return (losses * losses.new_tensor(factors(hidden))).sum(), losses.detach()


def heads_of(inputs):
    hidden, weight, _ = inputs
    if weight.dim() == 2:
        return [(hidden, weight, True)]
    return [(states, of_head, True) for states, of_head in zip(hidden, weight)]


def schema(inputs, options):
    """Of what the first head is made of."""
    hidden, weight, labels = inputs
    of_head = weight if weight.dim() == 2 else weight[0].detach().requires_grad_()
    rest = 1.0, 0.0, 1.0, IGNORE, *(False,) * len(OUTPUTS), 0, False, -1, options.get("max_bytes", 0), False
    states = hidden[0].detach().requires_grad_()
    return ops.linear_log_prob, (states, of_head, None, labels, *(None,) * 5, *rest)


CASES = [
    Case(
        name="linear_multi_head",
        op=op,
        reference=reference,
        make=make,
        schema=schema,
        differentiable=(0, 1),
        shapes=[(1, 4, 3), (33, 16, 101), (40, 64, 1000)],
        options=[{}, dict(shared=True), dict(heads=2, max_bytes=4000), dict(ignored=1.1, shared=True)],
        # Five heads of Medusa, and five depths of multi-token prediction, which share a head.
        bench=[
            ((8192, 4096, 32000), dict(heads=5, ignored=0.0)),
            ((8192, 4096, 32000), dict(heads=5, ignored=0.0, shared=True)),
        ],
        bench_cpu=[((512, 256, 8192), dict(heads=5, ignored=0.0))],
        heads=heads_of,
        flops=lambda shape, options: tuple(
            n * options.get("heads", 3) * shape[0] * shape[1] * shape[2] for n in (2, 4)
        ),
        errors=[
            (
                lambda d: linear_multi_head_cross_entropy(
                    torch.randn(2, 3, 4, device=d), [torch.randn(5, 4, device=d)], torch.zeros(3).long().to(d)
                ),
                ValueError,
                "of as many heads",
            )
        ],
    )
]
