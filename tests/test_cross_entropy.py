"""What cross entropy promises beside tests/test_ops.py, of logits and in a linear layer: ignored labels, other results
than the loss, gradients of a scaled loss."""

import pytest
import torch
from cases import rounded
from test_ops import CASES, rms, run, same

NAMES = ("cross_entropy", "fused_linear_cross_entropy")
both = pytest.mark.parametrize("case", [CASES[name] for name in NAMES], ids=NAMES)


@both
def test_only_ignored_labels(case, device):
    """Loss 0 and gradients 0, where eager torch gives NaN."""
    for options in (dict(ignored=1.1), dict(ignored=1.1, reduction="none"), dict(ignored=1.1, weighted=True)):
        inputs = case.inputs(case.shapes[1], options, torch.float32, device)
        got, _ = run(case.op, inputs, options)
        assert all(not t.any() for t in got)


@both
def test_accuracy_and_predictions(case, device):
    for softcap in (None, 5.0):
        inputs = case.inputs(case.shapes[-2], {}, torch.float32, device)
        y = inputs[-2]
        out = case.op(
            *inputs,
            return_token_accuracy=True,
            return_predicted_tokens=True,
            return_z_loss=True,
            lse_square_scale=1e-2,
            softcap=softcap,
        )
        logits = inputs[0] if case.name == "cross_entropy" else inputs[0] @ inputs[1].T
        z = softcap * torch.tanh(logits / softcap) if softcap else logits
        valid = y != -100
        assert torch.equal(out.predicted_tokens, torch.where(valid, z.argmax(-1), -1))
        torch.testing.assert_close(out.token_accuracy, (z.argmax(-1) == y).float().sum() / valid.sum())
        torch.testing.assert_close(out.z_loss, (1e-2 * torch.logsumexp(z, -1).square())[valid].mean())
        assert not out.token_accuracy.requires_grad and not out.z_loss.requires_grad


@pytest.mark.parametrize(
    "wanted",
    [
        {},
        {"return_z_loss": True, "lse_square_scale": 1e-2},
        {"return_predicted_tokens": True, "return_token_accuracy": True},
    ],
    ids=str,
)
@both
def test_compiled_results(case, wanted, device):
    """What nobody asked for is None there too, and the rest the same."""
    inputs = case.inputs(case.shapes[-2], {}, torch.float32, device)
    out = case.op(*inputs, **wanted)
    torch._dynamo.reset()
    compiled = torch.compile(lambda *tensors: case.op(*tensors, **wanted), fullgraph=True, backend="aot_eager")(*inputs)
    assert isinstance(out, torch.Tensor) == (not wanted)
    for ours, theirs in zip(
        (out,) if not wanted else vars(out).values(),
        (compiled,) if not wanted else vars(compiled).values(),
        strict=True,
    ):
        assert (ours is None and theirs is None) or torch.equal(ours, theirs)


@both
def test_scaled_gradient(case, device):
    """The saved gradient times an upstream one that is no power of two: two roundings instead of one, √2 times the
    error."""
    for dtype in case.dtypes:
        inputs = case.inputs(case.shapes[-2], {}, dtype, device)
        exact, eager = rounded(inputs), [same(t) for t in inputs]
        for f, given in ((case.op, inputs), (case.reference, exact), (case.reference, eager)):
            (f(*given) * 0.3).backward()
        for a, b, c in zip(inputs, exact, eager):
            if a is not None and a.requires_grad:
                assert rms(a.grad.double() - b.grad) <= 1.5 * rms(c.grad.double() - b.grad) + torch.finfo(
                    dtype
                ).eps * rms(b.grad)
