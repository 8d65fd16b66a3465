"""Per-token negative log-likelihood and entropy of a head, against plain torch in float64."""

import importlib.util
import math

import pytest
import torch
from liger_kernel import ops as liger_ops
from liger_kernel.ops import fused_linear_scaled_cross_entropy as scaled
from policy_reference import BOUNDS, check


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


def test_scaled_cross_entropy_names_and_errors(monkeypatch):
    function = liger_ops.LigerFusedLinearScaledCrossEntropyFunction
    assert function.__module__ == "liger_kernel.ops.fused_linear_scaled_cross_entropy"
    spec = importlib.util.spec_from_file_location("alone", scaled.__file__)
    alone = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(alone)
    asked = []

    def capability(device):
        asked.append(device)
        return answer

    monkeypatch.setattr(torch.cuda, "get_device_capability", capability)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    cuda = torch.device("cuda:0")
    for device, available, hip, answer, fallback in (
        (torch.device("cpu"), True, None, (9, 0), True),
        (cuda, False, None, (9, 0), True),
        (cuda, True, "6", (9, 0), True),
        (cuda, True, None, (8, 0), True),
        (cuda, True, None, (9, 0), False),
    ):
        monkeypatch.setattr(torch.version, "hip", hip)
        assert (alone._resolve_implementation(device) is alone._FusedLinearPPOFallbackFunction) == fallback
    assert asked == [cuda, cuda]
    monkeypatch.undo()

    called = []
    monkeypatch.setattr(
        scaled,
        "_resolve_implementation",
        lambda device: type("Other", (), {"apply": staticmethod(lambda *a: called.append(a) or "result")}),
    )
    x, weight, target = torch.randn(3, 4), torch.randn(5, 4), torch.tensor([0, 4, -100])
    assert function.apply(x, weight, target, 0.5, -100, 2) == "result" and called[0][3:] == (0.5, -100, 2, False)
    monkeypatch.undo()
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
