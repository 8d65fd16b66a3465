"""Losses of policies on logits, against plain torch in float64."""

import pytest
import torch
from liger_kernel import ops as liger_ops
from liger_kernel.chunked_loss import grpo_loss as fused
from liger_kernel.ops import grpo_loss as on_logits
from liger_kernel.transformers.grpo_loss import triton_grpo_loss
from policy_reference import BOUNDS, CLIPPED, LOSSES, SOFT, B, T, batch, check, reduced, terms


def logits_of(tensors, dtype=torch.float32):
    x, weight, bias = (t.detach() for t in tensors)
    return (x @ weight.T + bias).to(dtype).contiguous().requires_grad_()


def expected_on_logits(logits, ids, mask, advantages, reduce, upstream, loss, normalizer=None, max_length=T, **options):
    exact = logits.detach().double().requires_grad_()
    m = mask.double()
    lp = torch.log_softmax(exact[:, :-1] / 0.9, -1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    wide = lambda t: t.double() if isinstance(t, torch.Tensor) else t
    out, kl, clipped = terms(lp, m, advantages.double(), **{k: wide(v) for k, v in options.items()}, loss=loss)
    out, clipped = out * m, clipped * m
    kl = None if kl is None else kl * m
    if reduce:
        out, kl, clipped = (
            reduced(out, m, loss, max_length, normalizer),
            None if kl is None else kl.sum() / m.sum().clamp(min=1),
            clipped.sum() / m.sum().clamp(min=1),
        )
    out.backward(upstream.double() if not reduce else torch.tensor(1.0, dtype=torch.float64, device=out.device))
    return out, kl, clipped, exact.grad


@pytest.mark.parametrize("reduce", [True, False], ids=["reduced", "each"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("loss,level", LOSSES)
def test_on_logits(device, loss, level, dtype, reduce):
    tensors, ids, mask, advantages, old, ref, ratio = batch(device)
    for options in (
        dict(),
        dict(beta=0.0, old=None),
        dict(unbiased=True, ratio=ratio),
        dict(ratio=ratio[:, 0], delta=1.3),
    ):
        if loss in SOFT and "delta" in options:
            options.pop("delta")
        options = {"old": old, "ref": ref, "beta": 0.1, **options}
        logits = logits_of(tensors, dtype)
        upstream = (
            torch.randn(T, B, generator=torch.Generator().manual_seed(4)).to(device).t()
        )  # masked places too, and in other strides
        result = triton_grpo_loss(
            logits,
            options["old"],
            options["ref"] if options["beta"] else None,
            ids,
            advantages,
            mask,
            0.9,
            options["beta"],
            0.2,
            0.3,
            False,
            loss,
            None,
            level,
            reduce,
            vllm_is_ratio=options.get("ratio"),
            delta=options.get("delta"),
            use_bias_correction_kl=options.get("unbiased", False),
        )
        got, second, clipped = unpack(result) if reduce else result
        got.backward(None if reduce else upstream)
        loss_, kl, ratio_clipped, gradient = expected_on_logits(
            logits, ids, mask, advantages, reduce, upstream, loss, level=level, high=0.3, **options
        )
        bounds = BOUNDS[dtype]
        check((got, logits.grad), (loss_, gradient), ("loss", "logits"), bounds)
        assert got.dtype == torch.float32 and logits.grad.dtype == dtype
        assert logits.grad[:, -1].count_nonzero() == 0 and logits.grad[:, :-1][mask == 0].count_nonzero() == 0
        torch.testing.assert_close(clipped.double(), ratio_clipped, rtol=1e-5, atol=1e-6)
        assert (second is None) == (options["beta"] == 0)
        if second is not None:
            torch.testing.assert_close(second.double(), kl, rtol=1e-4, atol=1e-5)
            assert not second.requires_grad and not clipped.requires_grad


def unpack(result):
    loss, metrics = result
    return loss, None if len(metrics) == 1 else metrics[0], metrics[-1]


def test_grpo_function():
    tensors, ids, mask, advantages, old, ref, _ = batch("cpu")
    logits = logits_of(tensors)
    before = logits.detach().clone()
    loss, kl, clipped = liger_ops.GrpoLossFunction.apply(
        logits, old, ref, ids, advantages, mask.bool(), 0.9, 0.1, 0.2, 0.3, True
    )
    loss.backward(retain_graph=True)
    once = logits.grad.clone()
    loss.backward()
    torch.testing.assert_close(logits.grad, 2 * once)
    torch.testing.assert_close(logits.detach(), before, rtol=0, atol=0)
    assert once.abs().max() > 1e-4
    expected = expected_on_logits(
        logits, ids, mask, advantages, True, None, "grpo", old=old, ref=ref, beta=0.1, high=0.3
    )
    check((loss, kl, clipped, once), expected, ("loss", "kl", "clipped", "logits"), BOUNDS[torch.float32])
    apply = lambda *a, loss_type="grpo", **kw: liger_ops.GrpoLossFunction.apply(
        *{
            **dict(
                zip(("logits", "old", "ref", "ids", "advantages", "mask"), (logits, old, ref, ids, advantages, None))
            ),
            **kw,
        }.values(),
        0.9,
        0.1,
        0.2,
        0.3,
        False,
        loss_type,
        *a,
    )
    everything, _, _ = apply()
    torch.testing.assert_close(everything, apply(mask=torch.ones_like(ids))[0])
    for wrong, match in (
        (dict(ref=None), "ref_logp"),
        (dict(ids=None), "must be given"),
        (dict(logits=logits.transpose(0, 1)), "."),
        (dict(old=old[:, :-1]), "old_logp"),
        (dict(advantages=old), "advantages"),
    ):
        with pytest.raises(AssertionError, match=match):
            apply(**wrong)
    for loss_type, options, match in (
        ("ppo", (), "loss_type"),
        ("vespo", (), "phi_seq"),
        ("sapo", (None, True, "token", 0.0), "positive"),
        ("cispo", (None, True, "token", 1.0, 1.0, None, 1.5), "delta"),
        ("cispo", (None, True, "sequence"), "Sequence-level importance sampling is not supported"),
    ):
        with pytest.raises(ValueError, match=match):
            apply(*options, loss_type=loss_type)
    with pytest.raises(AssertionError, match="importance_sampling_level"):
        apply(None, True, "word")
    with pytest.raises(ValueError, match="Sequence-level"):
        triton_grpo_loss(logits, old, ref, ids, advantages, loss_type="vespo", importance_sampling_level="sequence")
    phi = fused.get_gamma_weights(
        advantages, on_logits.fused_selective_log_softmax(logits, ids, 0.9) - old, torch.ones_like(ids)
    )
    torch.testing.assert_close(
        apply(None, True, "token", 1.0, 1.0, None, None, False, None, phi.squeeze(1), loss_type="vespo")[0],
        triton_grpo_loss(logits, old, ref, ids, advantages, None, 0.9, 0.1, 0.2, 0.3, False, "vespo", reduce=True)[0],
    )


def test_fused_and_on_logits_agree():
    """One formula: where the API defines both alike, they are the same number."""
    tensors, ids, mask, advantages, old, ref, ratio = batch("cpu")
    x, weight, bias = tensors
    for loss in CLIPPED[:-1] + SOFT:
        a, _ = fused.LigerFusedLinearGRPOLoss(beta=0.1, temperature=0.9, loss_type=loss, max_completion_length=T)(
            x[:, :-1], weight, ids, mask, advantages, bias, ref, old, vllm_is_ratio=ratio[:, :1]
        )
        b, _ = triton_grpo_loss(
            logits_of(tensors),
            old,
            ref,
            ids,
            advantages,
            mask,
            0.9,
            0.1,
            0.2,
            0.2,
            loss_type=loss,
            reduce=True,
            vllm_is_ratio=ratio[:, :1],
        )
        torch.testing.assert_close(a, b)
