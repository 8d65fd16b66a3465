"""Losses and maps of distributions where logarithms are infinite, labels select rows, or dtypes run out; and the API's
functions."""

import math
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from conftest import EMULATED
from liger_kernel import ops
from liger_kernel._library import ops as torch_ops
from liger_kernel.ops import jsd as jsd_functions
from liger_kernel.ops import kl_div as kl_functions
from liger_kernel.ops import softmax as softmax_functions
from liger_kernel.ops import tvd as tvd_functions
from liger_kernel.ops.grpo_loss import fused_selective_log_softmax
from liger_kernel.transformers import LigerJSD, LigerKLDIVLoss, LigerSoftmax, LigerTVDLoss
from liger_kernel.transformers.functional import (
    liger_cross_entropy,
    liger_jsd,
    liger_kl_div,
    liger_selective_log_softmax,
    liger_softmax,
    liger_tvd,
)

close = torch.testing.assert_close
not_emulated = pytest.mark.skipif(EMULATED, reason="a device assertion ends the process")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def logs(*shape, device="cpu"):
    torch.manual_seed(0)
    return torch.randn(shape, device=device).log_softmax(-1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cols", [4, 21])
def test_impossible_elements(dtype, cols, device):
    """Elements whose probability is 0 in both distributions change nothing; none of their terms is 0 · inf."""
    x, t = logs(3, cols, device=device).to(dtype), (logs(3, cols, device=device).flip(0)).to(dtype)
    never = torch.full((3, cols), -math.inf, device=device, dtype=dtype)

    def both(loss):
        results = []
        for more in ((), (never,)):
            leaf = torch.cat((x, *more), -1).requires_grad_()
            value = loss(leaf, torch.cat((t, *more), -1))
            value.backward()
            results.append((value.detach(), leaf.grad[:, :cols], leaf.grad[:, cols:]))
        close(results[1][:2], results[0][:2], rtol=torch.finfo(dtype).eps, atol=1e-7)
        assert not results[1][2].any()

    for beta in (0.0, 0.3, 0.5, 1.0):
        both(lambda x, t: liger_jsd(x, t, beta=beta))
    both(lambda x, t: liger_kl_div(x, t, reduction="batchmean", log_target=True))
    both(lambda x, t: liger_kl_div(x, t.exp(), reduction="batchmean"))


def test_disjoint(device):
    """Where the supports are disjoint the Jensen-Shannon divergence is ln 2, the other divergences are infinite, and
    nothing is NaN."""
    inf = math.inf
    x, t = torch.tensor([[0.0, -inf]], device=device), torch.tensor([[-inf, 0.0]], device=device)
    close(liger_jsd(x, t).item(), math.log(2))
    assert liger_jsd(x, t, beta=0.0) == inf and liger_jsd(x, t, beta=1.0) == inf
    assert liger_kl_div(x, t.exp()) == inf
    assert liger_tvd(x.exp(), t.exp(), reduction="sum") == 1


def test_nan_spreads(device):
    x = torch.rand(3, 40, device=device)
    x[1, 7] = math.nan
    assert liger_softmax(x).isnan().any(-1).tolist() == [False, True, False] and liger_softmax(x)[1].isnan().all()
    for each in (
        liger_kl_div(x, torch.rand_like(x), reduction="none"),
        liger_kl_div(torch.rand_like(x), x, reduction="none"),
        liger_tvd(x, torch.rand_like(x), reduction="none"),
    ):
        assert each.isnan().nonzero().tolist() == [[1, 7]]
    for beta in (0.0, 0.5, 1.0):
        assert (
            liger_jsd(x, torch.rand_like(x), beta=beta).isnan() and liger_jsd(torch.rand_like(x), x, beta=beta).isnan()
        )
    for result in liger_selective_log_softmax(x, torch.tensor([1, 2, 3], device=device)):
        assert result.isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("dtype", DTYPES)
def test_masked_logits(dtype, device):
    """-inf and the dtype's lowest number have probability 0; a row of -inf alone has none, which is NaN as in torch."""
    x = torch.randn(4, 300, device=device).to(dtype)
    x[0, ::2], x[1, :299], x[2, 1:] = -math.inf, torch.finfo(dtype).min, -math.inf
    plain = x.float()
    eps = torch.finfo(dtype).eps
    # In float an exponential is off by up to two units on CUDA, the sum and the quotient by one each, in torch's too.
    close(liger_softmax(x).float(), plain.softmax(-1), rtol=4 * eps if dtype == torch.float32 else eps, atol=eps / 100)
    ids = torch.tensor([1, 299, 0, 5], device=device)
    logp, entropy = liger_selective_log_softmax(x, ids)
    log_softmax = plain.log_softmax(-1)
    close(logp, log_softmax.gather(-1, ids[:, None])[:, 0], rtol=1e-5, atol=1e-6)
    close(entropy, torch.special.entr(log_softmax.exp()).sum(-1), rtol=1e-5, atol=1e-6)
    for level in (torch.finfo(dtype).min, -5e4, 3e4, torch.finfo(dtype).max) + (
        () if dtype == torch.float16 else (-1e10, 1e12, -1e30)
    ):
        same = torch.full((3, 300), level, device=device, dtype=dtype)
        same[1, 7], same[2, 1:9] = -math.inf, level * (1 - 2 * eps)
        close(liger_softmax(same).float(), same.float().softmax(-1), rtol=4 * eps, atol=torch.finfo(dtype).tiny)
        close(
            liger_cross_entropy(same, ids[:3]), F.cross_entropy(same.float(), ids[:3]).to(dtype), rtol=2 * eps, atol=0
        )
    assert liger_softmax(torch.full((1, 5), -math.inf, device=device, dtype=dtype)).isnan().all()


def test_large_logits(device):
    """log Σ stays in the loss beside logits that swallow it."""
    x, y = torch.full((3, 40), 1e37, device=device), torch.tensor([0, 7, 39], device=device)
    close(liger_cross_entropy(x, y), torch.tensor(math.log(40), device=device), rtol=1e-6, atol=0)


def test_masked_gradient(device):
    """The gradients of logits that a mask has excluded are 0, with the entropy's term too."""
    x = torch.randn(2, 600, device=device)
    x[:, 100:] = -math.inf
    leaf, short = x.clone().requires_grad_(), x[:, :100].clone().requires_grad_()
    ids = torch.tensor([3, 99], device=device)
    for t in (leaf, short):
        logp, entropy = liger_selective_log_softmax(t, ids, 0.8)
        (logp.sum() + entropy.square().sum()).backward()
    close(leaf.grad[:, :100], short.grad)
    assert not leaf.grad[:, 100:].any()


@pytest.mark.parametrize("loss", [liger_jsd, liger_tvd])
def test_labels_select_rows(loss, device):
    """A row whose label is ignored is not read: not even its NaN is seen. Any number can stand for it."""
    x, t = logs(6, 50, device=device), logs(6, 50, device=device).flip(0)
    y = torch.tensor([3, -100, 0, 3, -100, 1], device=device)
    x[1], t[4] = math.nan, math.nan
    for ignored, kept in ((-100, y != -100), (3, y != 3)):
        if ignored == 3:
            x, t = x.nan_to_num(-2.0), t.nan_to_num(-2.0)
        leaf, part = x.clone().requires_grad_(), x[kept].clone().requires_grad_()
        a, b = loss(leaf, t, y, ignore_index=ignored), loss(part, t[kept])
        close(a, b)
        a.backward()
        b.backward()
        close(leaf.grad[kept], part.grad)
        assert not leaf.grad[~kept].any()


def test_single_losses(device):
    """Without a reduction each element has its own upstream gradient."""
    x, t, g = logs(5, 33, device=device), logs(5, 33, device=device).flip(0), torch.randn(5, 33, device=device)
    for ours, plain in (
        (lambda x: liger_kl_div(x, t, reduction="none", log_target=True), lambda x: t.exp() * (t - x)),
        (lambda x: liger_tvd(x, t.exp(), reduction="none"), lambda x: 0.5 * (x - t.exp()).abs()),
    ):
        a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
        mine, theirs = ours(a), plain(b)
        close(mine, theirs)
        mine.backward(g)
        theirs.backward(g)
        close(a.grad, b.grad)


def test_equal_distributions(device):
    """The total variation's gradient is 0 where both are equal, as that of torch.abs is."""
    p = torch.rand(3, 20, device=device, requires_grad=True)
    loss = liger_tvd(p, p.detach(), reduction="sum")
    loss.backward()
    assert loss == 0 and not p.grad.any()


@pytest.mark.parametrize("labelled", [False, True])
def test_small_float16_gradients(labelled, device):
    """Gradients below float16's range survive until the loss scale lifts them."""
    x, y = logs(64, 4000, device=device), torch.arange(64, device=device) if labelled else None
    t, scale = x.flip(0), 2.0**15
    for loss in (lambda x, t: liger_jsd(x, t, y), lambda x, t: liger_tvd(x.exp() if x is t else x, t, y)):
        a, b = x.half().requires_grad_(), x.half().float().requires_grad_()
        (loss(a, t.half()).float() * scale).backward()
        (loss(b, t.half().float()) * scale).backward()
        close(a.grad.float(), b.grad, rtol=2e-3, atol=2.0**-24 * scale / 64)
        assert a.grad.any(-1).all()


def test_kl_functions(device):
    x, t, g = logs(6, 20, device=device), logs(6, 20, device=device).flip(0), torch.tensor(0.3, device=device)
    for log_target, target, df in ((True, t, -t.exp()), (False, t.exp(), -t.exp())):
        close(
            kl_functions.kldiv_forward_triton(x, target, log_target, "mean", 1e-10),
            F.kl_div(x, target, reduction="mean", log_target=log_target),
        )
        buffer = torch.empty_like(target)
        assert kl_functions.kldiv_backward_triton(target, g, buffer, log_target) is buffer
        close(buffer, df * g)
        module = LigerKLDIVLoss(1e-10, reduction="batchmean", log_target=log_target)
        close(module(x, target), F.kl_div(x, target, reduction="batchmean", log_target=log_target))
    loss = liger_kl_div(x.bfloat16(), t.exp(), reduction="sum")
    assert loss.dtype == torch.float32
    close(loss, F.kl_div(x.bfloat16().float(), t.exp(), reduction="sum"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_forward_functions_give_the_gradient(dtype, device):
    """jsd_forward and tv_distance_forward_triton return what autograd computes."""
    x, t, y = (
        logs(6, 20, device=device).to(dtype),
        logs(6, 20, device=device).flip(0).to(dtype),
        torch.tensor([1, -100, 2, 0, 5, 9], device=device),
    )
    for labels in (None, y):
        leaf = x.clone().requires_grad_()
        ops.LigerJSDFunction.apply(leaf, t, labels, 0.3).backward()
        loss, dx = ops.jsd_forward(x, t, labels, 0.3, -100, labels is not None)
        assert loss.dtype == dtype
        close((loss, ops.jsd_backward(dx, torch.tensor(1.0, device=device))), (LigerJSD(0.3)(x, t, labels), leaf.grad))
        for reduction in ("none", "sum", "mean", "batchmean"):
            leaf = x.clone().requires_grad_()
            module = LigerTVDLoss(reduction)
            out = module(leaf, t, labels)
            out.backward(torch.ones_like(out))
            loss, grads = tvd_functions.tv_distance_forward_triton(x, t, labels, reduction, -100, labels is not None)
            close(
                (loss, tvd_functions.tvd_backward_triton(torch.ones_like(loss), grads)),
                (out.detach(), leaf.grad),
                check_dtype=False,
            )
    assert jsd_functions.LigerJSDFunction is ops.LigerJSDFunction


def test_softmax_functions(device):
    x, dy = torch.randn(2, 3, 9, device=device), torch.randn(2, 3, 9, device=device)
    leaf = x.clone().requires_grad_()
    plain = leaf.softmax(-1)
    plain.backward(dy)
    y, *launch = softmax_functions._softmax_forward(x)
    close((y, softmax_functions._softmax_backward(dy, y, *launch)), (plain.detach(), leaf.grad))
    close(LigerSoftmax()(x), y)


def test_fused_selective_log_softmax(device):
    """The last L ids under the first L places; masked ones are 0 and read nothing."""
    logits, ids = torch.randn(3, 6, 50, device=device), torch.randint(0, 50, (3, 9), device=device)
    mask = torch.rand(3, 5, device=device) > 0.4
    plain = (logits[:, :-1] / 0.9).log_softmax(-1).gather(-1, ids[:, -5:, None])[..., 0]
    close(fused_selective_log_softmax(logits, ids), plain)
    logits.requires_grad_()
    spoiled = logits.detach().clone()
    spoiled[:, :-1][~mask] = math.nan
    for given in (mask, torch.nn.functional.pad(mask, (4, 0)), mask.long()):
        out = fused_selective_log_softmax(spoiled, ids, mask=given)
        close(out, torch.where(mask, plain, 0))
        assert out.is_contiguous() and not out.requires_grad
    assert not fused_selective_log_softmax(logits, ids).requires_grad
    assert fused_selective_log_softmax(logits[:, :1].contiguous(), ids).shape == (3, 0)
    with pytest.raises(AssertionError, match="contiguous"):
        fused_selective_log_softmax(logits.transpose(0, 1), ids)


def test_strided_logits(device):
    """Logits that skip places are read where they lie."""
    x = torch.randn(40, 2, 70, device=device)
    ids = torch.randint(0, 70, (40,), device=device)
    for a, b in zip(liger_selective_log_softmax(x[:, 0], ids), liger_selective_log_softmax(x[:, 0].contiguous(), ids)):
        close(a, b)


@not_emulated
def test_id_out_of_range(device):
    if device == "cpu":
        with pytest.raises(IndexError, match="id 5"):
            liger_selective_log_softmax(torch.randn(4, 5), torch.tensor([0, 1, 5, 2]))
        return
    code = f"""
import torch
from liger_kernel.transformers.functional import liger_selective_log_softmax
ids = torch.tensor([0, 1, 5, 2], device="{device}")
logp, _ = liger_selective_log_softmax(torch.randn(4, 5, device="{device}"), ids)
print(logp.tolist())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode != 0 and "device-side assert" in done.stderr and "label 5" in done.stdout + done.stderr


def test_names():
    assert all(hasattr(torch_ops, name) for name in ("divergence", "softmax", "selective_log_softmax"))
    assert ops.LigerKLDivLossFunction and ops.LigerTVDLossFunction and ops.LigerSoftmaxFunction


def test_confident_logits(device):
    """The label's gradient is formed in float before it is rounded: p − 1 keeps its digits where p is nearly 1."""
    for dtype in (torch.bfloat16, torch.float16):
        x = torch.zeros(4, 100, device=device, dtype=dtype)
        x[torch.arange(4), torch.arange(4)] = torch.tensor([4.0, 8.0, 10.0, 12.0], device=device, dtype=dtype)
        x.requires_grad_()
        liger_cross_entropy(x, torch.arange(4, device=device), reduction="sum").backward()
        exact = x.detach().double().requires_grad_()
        torch.nn.functional.cross_entropy(exact, torch.arange(4, device=device), reduction="sum").backward()
        torch.testing.assert_close(x.grad.double(), exact.grad, rtol=torch.finfo(dtype).eps, atol=1e-7)


def test_extreme_targets(device):
    """A target's logarithm is what it is at 0 and infinity too, and NaN stays NaN: t (ln t − x), and 0 where t is."""
    x = torch.log_softmax(torch.randn(1, 37), -1).to(device)
    t = torch.tensor([0.0, 1.0, math.inf, math.nan, 0.5, 1e30, 1e-30]).repeat(6)[:37].to(device)[None]
    expected, unit = (
        torch.where(t == 0, 0, t * (t.log() - x)),
        8 * torch.finfo(torch.float32).eps,
    )  # of three roundings and two logarithms
    torch.testing.assert_close(
        liger_kl_div(x, t, reduction="none", eps=0.0), expected, rtol=unit, atol=unit, equal_nan=True
    )
