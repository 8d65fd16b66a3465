"""Per-token negative log-likelihood and entropy of a head, against plain torch in float64."""

import importlib.util
import math

import pytest
import torch
from liger_kernel import ops as liger_ops
from liger_kernel.ops import fused_linear_scaled_cross_entropy as scaled
from policy_reference import BOUNDS, check
from ranks import DEVICE, on_ranks


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_scaled_cross_entropy(device, dtype):
    g = torch.Generator().manual_seed(5)
    x, weight = (torch.randn(*s, generator=g).to(device, dtype).requires_grad_() for s in ((19, 24), (61, 24)))
    target = torch.randint(0, 61, (19,), generator=g).to(device)
    target[3] = target[11] = 7
    apply = liger_ops.LigerFusedLinearScaledCrossEntropyFunction.apply
    nll, entropy = apply(x, weight, target, 0.7, 7, 4, True)
    kept = target != 7
    exact = [t.detach().double().requires_grad_() for t in (x, weight)]
    lp = torch.log_softmax(exact[0] @ exact[1].T / 0.7, -1)
    expected = (
        torch.where(kept, -lp.gather(1, target.unsqueeze(1)).squeeze(1), 0),
        torch.where(kept, -(lp.exp() * lp).sum(1), 0),
    )
    up = [torch.randn(19, generator=g).to(device) for _ in range(2)]
    assert (
        nll.dtype == torch.float32
        and entropy.dtype == dtype
        and nll[~kept].count_nonzero() == 0 == entropy[~kept].count_nonzero()
    )
    check((nll, entropy), expected, ("nll", "entropy"), BOUNDS[dtype])
    for outputs, upstream in (((0, 1), up), ((0,), up[:1]), ((1,), up[1:])):
        got = torch.autograd.grad(
            [(nll, entropy)[i] for i in outputs],
            (x, weight),
            [u.to((nll, entropy)[i].dtype) for i, u in zip(outputs, upstream)],
            retain_graph=True,
        )
        right = torch.autograd.grad(
            [expected[i] for i in outputs], exact, [u.double() for u in upstream], retain_graph=True
        )
        check(got, right, ("x", "weight"), BOUNDS[dtype])
        assert got[0][~kept].count_nonzero() == 0
    torch.testing.assert_close(apply(x, weight, target, 0.7, 7), nll)


def test_scaled_cross_entropy_names_and_errors():
    function = liger_ops.LigerFusedLinearScaledCrossEntropyFunction
    assert function.__module__ == "liger_kernel.ops.fused_linear_scaled_cross_entropy"
    spec = importlib.util.spec_from_file_location("alone", scaled.__file__)
    alone = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(alone)
    x, weight, target = torch.randn(3, 4), torch.randn(5, 4), torch.tensor([0, 4, -100])
    apply = alone.LigerFusedLinearScaledCrossEntropyFunction.apply
    assert torch.equal(apply(x, weight, target), function.apply(x, weight, target))
    for error, arguments in (
        (TypeError, dict(m_tiles_per_cluster=True)),
        (TypeError, dict(m_tiles_per_cluster=1.0)),
        (ValueError, dict(m_tiles_per_cluster=0)),
        (TypeError, dict(return_entropy=1)),
        (ValueError, dict(_input=x[0])),
        (ValueError, dict(_input=x[:, :3])),
        (ValueError, dict(target=target[:2])),
        (ValueError, dict(_input=x[:0], target=target[:0])),
        (TypeError, dict(_input=x.half())),
        (TypeError, dict(_input=x.int(), weight=weight.int())),
        (TypeError, dict(target=target.int())),
        (ValueError, dict(target=torch.tensor([0, 5, 1]))),
        (TypeError, dict(temperature=True)),
        (TypeError, dict(temperature="1")),
        (TypeError, dict(temperature=torch.tensor(1.0))),
        (ValueError, dict(temperature=0.0)),
        (ValueError, dict(temperature=math.inf)),
    ):
        with pytest.raises(error):
            function.apply(**{**dict(_input=x, weight=weight, target=target), **arguments})
    with pytest.raises(ValueError, match=r"outside \[0, 5\)"):
        function.apply(x, weight, target - 2)


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_selected_tokens(device, dtype, entropy):
    """The log-probabilities of K classes for every token, and what they give to the gradients."""
    g = torch.Generator().manual_seed(5)
    x, weight = (torch.randn(*s, generator=g).to(device, dtype).requires_grad_() for s in ((19, 24), (61, 24)))
    target, selected = torch.randint(0, 61, (19,), generator=g).to(device), torch.tensor([4, 60, 4], device=device)
    target[3] = -100
    *found, logp = liger_ops.LigerFusedLinearScaledCrossEntropyFunction.apply(
        x, weight, target, 0.7, -100, 1, entropy, selected
    )
    assert len(found) == 1 + entropy and logp.dtype == torch.float32 and logp.shape == (19, 3)
    exact = [t.detach().double().requires_grad_() for t in (x, weight)]
    expected = torch.log_softmax(exact[0] @ exact[1].T / 0.7, -1)[:, selected]
    expected = expected.where((target != -100).unsqueeze(1), 0)
    up = torch.randn(19, 3, generator=g).to(device)
    gradients = torch.autograd.grad(logp, (x, weight), up)
    check((logp,), (expected,), ("selected",), BOUNDS[dtype])
    check(gradients, torch.autograd.grad(expected, exact, up.double()), ("dx", "dw"), BOUNDS[dtype])


@pytest.mark.parametrize(
    "selected, error, text",
    [
        ([1, 2], TypeError, "int64 tensor"),
        (torch.tensor([1.0]), TypeError, "int64 tensor"),
        (torch.tensor([[1]]), ValueError, "must be .K."),
        (torch.tensor([11]), ValueError, "in .0, 11."),
        (torch.tensor([-1]), ValueError, "in .0, 11."),
    ],
    ids=str,
)
def test_selected_tokens_that_do_not_exist(selected, error, text):
    x, weight, target = torch.randn(3, 4), torch.randn(11, 4), torch.tensor([0, 1, 2])
    with pytest.raises(error, match=text):
        liger_ops.LigerFusedLinearScaledCrossEntropyFunction.apply(x, weight, target, selected_token_ids=selected)


def _tensor_parallel(rank):
    g = torch.Generator().manual_seed(5)
    x, weight = torch.randn(19, 24, generator=g), torch.randn(60, 24, generator=g)
    target, up = torch.randint(0, 60, (19,), generator=g), torch.randn(2, 19, generator=g)
    target[3] = -100
    own = weight[rank * 30 : rank * 30 + 30]
    leaves = [t.to(DEVICE).requires_grad_() for t in (x, own)]
    apply = liger_ops.LigerFusedLinearScaledCrossEntropyTPFunction.apply
    group = torch.distributed.group.WORLD
    nll, entropy = apply(*leaves, target.to(DEVICE), group, 0.7, -100, 2, True)
    gradients = torch.autograd.grad((nll, entropy), leaves, tuple(up.to(DEVICE)))
    (alone,) = torch.autograd.grad(apply(*leaves, target.to(DEVICE), group, 0.7), leaves[0], up[0].to(DEVICE))
    exact = [x.double().requires_grad_(), weight.double().requires_grad_()]
    lp = torch.log_softmax(exact[0] @ exact[1].T / 0.7, -1)
    kept = target != -100
    expected = (
        (-lp.gather(1, target.clamp(min=0)[:, None])[:, 0]).where(kept, 0),
        (-lp.exp() * lp).sum(1).where(kept, 0),
    )
    dx, dw = torch.autograd.grad(expected, exact, tuple(up.double()), retain_graph=True)
    found = [t.cpu() for t in (nll, entropy, *gradients, alone)]
    of_nll = torch.autograd.grad(expected[0], exact[0], up[0].double())[0]
    wanted = (*expected, dx, dw[rank * 30 : rank * 30 + 30], of_nll)
    check(found, wanted, ("nll", "entropy", "dx", "dw", "dx of nll"), BOUNDS[torch.float32])


def test_over_two_ranks():
    on_ranks(_tensor_parallel)
