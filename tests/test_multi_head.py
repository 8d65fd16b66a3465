"""Several heads on shifted labels, against torch's cross entropy of each head in float64."""

import pytest
import torch
from liger_kernel.ops.multi_head import linear_multi_head_cross_entropy, shifted_labels

D, B, L, H, V = 3, 2, 9, 16, 51
#: A loss is a mean of differences of a logit, a float sum of H products, and the logarithm of a sum of V terms.
BOUND = 2 * (H + V) ** 0.5 * torch.finfo(torch.float32).eps


def inputs(device, heads):
    g = torch.Generator().manual_seed(1)
    hidden = torch.randn(D, B, L, H, generator=g).to(device).requires_grad_()
    shape = (V, H) if heads == 1 else (heads, V, H)
    weight = (torch.randn(shape, generator=g) / 2).to(device).requires_grad_()
    labels = torch.randint(0, V, (B, L), generator=g)
    labels[0, :3] = -100
    return hidden, weight, labels.to(device)


def exact(hidden, weight, labels, shifts, factors, documents=None, divisor=None):
    losses = []
    for d, shift in enumerate(shifts):
        w = weight if weight.dim() == 2 else weight[d]
        terms = []
        for row in range(B):
            for place in range(L - shift):
                later = labels[row, place + shift]
                apart = documents is not None and documents[row, place] != documents[row, place + shift]
                if later != -100 and not apart:
                    terms.append(-(w @ hidden[d, row, place]).log_softmax(-1)[later])
        losses.append(torch.stack(terms).sum() / (divisor or len(terms)))
    return sum(factor * loss for factor, loss in zip(factors, losses, strict=True)), torch.stack(losses)


@pytest.mark.parametrize("heads", [1, D])
@pytest.mark.parametrize("options", [{}, dict(max_bytes=1)], ids=str)
@pytest.mark.parametrize("packed", [False, True])
def test_every_head(device, heads, options, packed):
    hidden, weight, labels = inputs(device, heads)
    documents = torch.tensor([[0] * 4 + [1] * 5, [0] * L], device=device) if packed else None
    divisor = 7.0 if packed else None
    shifts, factors = (1, 2, 4), (1.0, 0.5, 0.25)
    weights = weight if heads == 1 else list(weight.unbind())
    found, losses = linear_multi_head_cross_entropy(
        hidden, weights, labels, shifts, factors, documents, num_items=divisor, **options
    )
    gradients = torch.autograd.grad(found, (hidden, weight))
    h, w = (t.detach().double().requires_grad_() for t in (hidden, weight))
    truth, each = exact(h, w, labels, shifts, factors, documents, divisor)
    wanted = torch.autograd.grad(truth, (h, w))
    for ours, theirs in zip((found, losses, *gradients), (truth, each, *wanted), strict=True):
        scale = theirs.abs().max()
        torch.testing.assert_close(ours.double() / scale, theirs / scale, rtol=0, atol=BOUND)
    assert not losses.requires_grad


def test_a_list_of_hidden_states_and_biases(device):
    hidden, weight, labels = inputs(device, 1)
    bias = torch.linspace(-1, 1, V, device=device)
    stacked = linear_multi_head_cross_entropy(hidden, weight, labels, bias=bias)
    listed = linear_multi_head_cross_entropy(list(hidden.unbind()), weight, labels, (1, 2, 3), bias=bias)
    assert torch.equal(stacked[0], listed[0])
    apart = linear_multi_head_cross_entropy(hidden, [weight] * D, labels, bias=[bias] * D)
    torch.testing.assert_close(stacked[1], apart[1])


def test_shifted_labels():
    labels, documents = torch.arange(12).view(2, 6), torch.tensor([[0, 0, 0, 1, 1, 1], [3, 3, 4, 4, 4, 4]])
    ignored = -100
    assert shifted_labels(labels, 2).tolist() == [[2, 3, 4, 5, ignored, ignored], [8, 9, 10, 11, ignored, ignored]]
    assert shifted_labels(labels, 1, documents).tolist() == [
        [1, 2, ignored, 4, 5, ignored],
        [7, ignored, 9, 10, 11, ignored],
    ]
    assert torch.equal(shifted_labels(labels, 0, documents), labels)
    assert (shifted_labels(labels, 7) == ignored).all()
    with pytest.raises(ValueError, match="shift"):
        shifted_labels(labels, -1)


def test_numbers_that_differ(device):
    hidden, weight, labels = inputs(device, 1)
    for wrong in (dict(shifts=(1, 2)), dict(head_weights=(1.0,)), dict(bias=[weight[:, 0]] * D)):
        with pytest.raises(ValueError, match="as many heads"):
            linear_multi_head_cross_entropy(hidden, weight, labels, **wrong)
    with pytest.raises(ValueError, match="as many heads"):
        linear_multi_head_cross_entropy(hidden, [weight] * 2, labels)
