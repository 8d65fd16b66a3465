"""The classes of the preference losses: names, subclasses, errors, what backward needs."""

import importlib
import inspect

import pytest
import torch
from liger_kernel._library import ops
from liger_kernel.chunked_loss import LigerFusedLinearCPOLoss, LigerFusedLinearDPOLoss, LigerFusedLinearKTOLoss
from liger_kernel.chunked_loss import functional as CF
from liger_kernel.chunked_loss.dpo_loss import LigerFusedLinearDPOFunction
from liger_kernel.chunked_loss.fused_linear_preference import LigerFusedLinearPreferenceBase
from liger_kernel.chunked_loss.fused_linear_unpaired_preference import LigerFusedLinearUnpairedPreferenceBase
from liger_kernel.chunked_loss.kto_loss import LigerFusedLinearKTOFunction
from preference import LOSS_TYPES, MODULES, Batch, N, V, check, close, nll_of, sequences


def test_names_and_attributes():
    for name in ("orpo", "dpo", "cpo", "simpo", "kto"):
        module = importlib.import_module(f"liger_kernel.chunked_loss.{name}_loss")
        cls = MODULES[name]
        function = getattr(module, cls.__name__.replace("Loss", "Function"))
        assert getattr(CF, f"liger_fused_linear_{name}") == function.apply
        base = LigerFusedLinearUnpairedPreferenceBase if name == "kto" else LigerFusedLinearPreferenceBase
        assert (
            issubclass(function, base)
            and issubclass(base, torch.autograd.Function)
            and issubclass(cls, torch.nn.Module)
        )
        options = {n: p.default for n, p in inspect.signature(cls).parameters.items()}
        assert {n: getattr(cls(), n) for n in options} == options
    assert LigerFusedLinearDPOLoss._SUPPORTED_LOSS_TYPES == set(LOSS_TYPES)
    with pytest.raises(NotImplementedError):
        LigerFusedLinearPreferenceBase.preference_loss_fn()
    with pytest.raises(NotImplementedError):
        LigerFusedLinearUnpairedPreferenceBase.preference_loss_fn()


def test_functions_take_positions():
    """In the order of the API: what differs from the defaults counts."""
    batch = Batch()
    x, w, b, y = batch.x, batch.w, batch.b, batch.y
    ours = CF.liger_fused_linear_dpo(
        x, w, y, b, *batch.ref, -100, 0.3, True, False, True, True, 2, "robust", 0.2, 0.5, 0.7
    )
    options = dict(
        beta=0.3, compute_nll_loss=True, average_log_prob=True, loss_type="robust", label_smoothing=0.2, alpha=0.7
    )
    check(batch, ours, batch.expected("dpo", options, ref=True), 2e-5)
    check(
        batch,
        CF.liger_fused_linear_orpo(x, w, y, b, -100, 0.3, True, y.flip(1), False, 2),
        batch.expected("orpo", dict(beta=0.3, compute_nll_loss=True), nll_y=y.flip(1)),
        2e-5,
    )
    check(
        batch,
        CF.liger_fused_linear_cpo(x, w, y, b, -100, 0.3, 0.6, 0.1, True, False, True, 2),
        batch.expected(
            "cpo", dict(beta=0.3, alpha=0.6, label_smoothing=0.1, compute_nll_loss=True, average_log_prob=True)
        ),
        2e-5,
    )
    check(
        batch,
        CF.liger_fused_linear_simpo(x, w, y, b, -100, 0.3, 0.6, 0.1, True, False, 0.2, 2),
        batch.expected("simpo", dict(beta=0.3, alpha=0.6, label_smoothing=0.1, compute_nll_loss=True, gamma=0.2)),
        2e-5,
    )
    check(
        batch,
        CF.liger_fused_linear_kto(
            x, w, y, batch.liked, b, *batch.ref, torch.tensor(0.2), -100, 0.3, False, True, True, 2
        ),
        batch.expected("kto", dict(beta=0.3, average_log_prob=True), ref=True, kl=torch.tensor(0.2).double()),
        2e-5,
    )
    # The Function's own defaults: no nll for SimPO, a reference for KTO and DPO.
    assert CF.liger_fused_linear_simpo(x, w, y, b)[1][4] == 0
    for call in (lambda: CF.liger_fused_linear_kto(x, w, y, batch.liked), lambda: CF.liger_fused_linear_dpo(x, w, y)):
        with pytest.raises(TypeError, match="ref_input"):
            call()


def test_errors():
    empty = torch.empty(0), torch.empty(0), torch.empty(0, 1)
    loss_fn = LigerFusedLinearDPOFunction.preference_loss_fn
    for options, error, message in (
        (dict(loss_type="aot"), ValueError, "Unsupported loss_type"),
        (dict(loss_type="exo_pair"), ValueError, r"label_smoothing must be > 0 for loss_type='exo_pair'"),
        (dict(loss_type="exo_pair", label_smoothing=1.0), ValueError, "below 1, got 1"),
        (
            dict(loss_type="robust", label_smoothing=0.5),
            ValueError,
            r"label_smoothing must lie in \[0.0, 0.5\) for loss_type='robust'",
        ),
        (
            dict(loss_type="robust", label_smoothing=-0.1),
            ValueError,
            r"label_smoothing must lie in \[0.0, 0.5\) for loss_type='robust'",
        ),
    ):
        with pytest.raises(error, match=message):
            LigerFusedLinearDPOLoss(**options)
        with pytest.raises(error, match=message):
            loss_fn(*empty, **options)
    with pytest.raises(ValueError, match="Unsupported loss_type 'ipo'"):
        LigerFusedLinearDPOLoss(loss_type="ipo")
    with pytest.raises(NotImplementedError, match="number of tokens"):
        loss_fn(*empty, loss_type="ipo")
    batch = Batch(rows=5)
    with pytest.raises(ValueError, match="as many rejected as chosen.*5 rows"):
        LigerFusedLinearCPOLoss()(batch.w, batch.x, batch.y)
    with pytest.raises(RuntimeError, match=r"chosen is \[2\] and rejected \[1\]"):
        ops.cpo_loss(torch.zeros(2), torch.zeros(1), 0.1, 0.0, 0.0, 0)
    batch.y[0, 0] = V
    with pytest.raises(IndexError):
        batch.call(LigerFusedLinearKTOLoss(), "kto")


class OwnPaired(LigerFusedLinearPreferenceBase):
    """A user's loss: squared margins, with a reference and an option, and aux of both kinds."""

    @staticmethod
    def preference_loss_fn(
        chosen_logps, rejected_logps, full_target, ref_chosen_logps=None, ref_rejected_logps=None, beta=0.1, margin=1.0
    ):
        gap = chosen_logps - ref_chosen_logps - rejected_logps + ref_rejected_logps
        return (beta * gap - margin).square().sum() / (len(full_target) // 2), gap, gap.max()

    @classmethod
    def forward(cls, ctx, _input, weight, target, bias, ref_input, ref_weight, margin):
        return super().forward(
            cls=cls,
            ctx=ctx,
            _input=_input,
            weight=weight,
            target=target,
            bias=bias,
            beta=0.3,
            alpha=0.5,
            use_ref_model=True,
            ref_input=ref_input,
            ref_weight=ref_weight,
            margin=margin,
        )

    @staticmethod
    def backward(ctx, *grad_output):
        return *LigerFusedLinearPreferenceBase.backward(ctx, grad_output)[:4], None, None, None


class FlatBackward(OwnPaired):
    @staticmethod
    def backward(ctx, *grad_output):
        return *LigerFusedLinearPreferenceBase.backward(ctx, *grad_output)[:4], None, None, None


@pytest.mark.parametrize("cls", [OwnPaired, FlatBackward])
def test_a_loss_of_ones_own(cls):
    batch = Batch(ref_bias=False)
    loss, aux = cls.apply(batch.x, batch.w, batch.y, batch.b, *batch.ref[:2], 0.8)
    copies = [t.detach().double().requires_grad_() for t in batch.leaves]
    x, w, b = copies
    logits, logp = sequences(x, w, b, batch.y, -100, True)
    delta = logp - sequences(batch.ref[0].double(), batch.ref[1].double(), None, batch.y, -100, True)[1]
    gap = delta[:N] - delta[N:]
    nll = nll_of(x[:N], w, b, batch.y[:N], -100)
    plain = 0.5 * nll + (0.3 * gap - 0.8).square().mean()
    expected = (
        plain,
        [*logp.chunk(2), *(part.mean() for part in logits.chunk(2)), nll, gap, gap.max()],
        torch.autograd.grad(plain, copies),
    )
    check(batch, (loss, aux), expected, 2e-5)


def test_an_unpaired_loss_of_ones_own():
    class Own(LigerFusedLinearUnpairedPreferenceBase):
        @staticmethod
        def preference_loss_fn(log_probs, labels, full_target, ref_log_prob_chunk=None, power=2):
            return ((log_probs - ref_log_prob_chunk) * torch.where(labels, -1, 1)).exp().pow(power).sum() / len(
                full_target
            ), log_probs.min()

        @classmethod
        def forward(cls, ctx, _input, weight, target, labels, bias, ref_input, ref_weight):
            return super().forward(
                cls=cls,
                ctx=ctx,
                _input=_input,
                weight=weight,
                target=target,
                preference_labels=labels,
                bias=bias,
                use_ref_model=True,
                ref_input=ref_input,
                ref_weight=ref_weight,
                average_log_prob=True,
                power=1.5,
            )

        @staticmethod
        def backward(ctx, *grad_output):
            return *LigerFusedLinearUnpairedPreferenceBase.backward(ctx, grad_output)[:5], None, None

    batch = Batch(ref_bias=False)
    ours = Own.apply(batch.x, batch.w, batch.y, batch.liked, batch.b, *batch.ref[:2])
    copies = [t.detach().double().requires_grad_() for t in batch.leaves]
    logits, logp = sequences(*copies, batch.y, -100, True)
    reference_logp = sequences(batch.ref[0].double(), batch.ref[1].double(), None, batch.y, -100, True)[1]
    plain = ((logp - reference_logp) * torch.where(batch.liked, -1, 1)).exp().pow(1.5).mean()
    sums = [s for v in (logp, logits.sum((1, 2))) for s in (v[batch.liked].sum(), v[~batch.liked].sum())]
    check(batch, ours, (plain, [*sums, logp.min()], torch.autograd.grad(plain, copies)), 2e-5)


def test_a_hook_without_log_probabilities():
    class Constant(LigerFusedLinearPreferenceBase):
        @staticmethod
        def preference_loss_fn(chosen_logps, rejected_logps, full_target, beta):
            return torch.tensor(2.0)

        @classmethod
        def forward(cls, ctx, _input, weight, target):
            return super().forward(cls, ctx, _input, weight, target, compute_nll_loss=False)

        @staticmethod
        def backward(ctx, *grad_output):
            return LigerFusedLinearPreferenceBase.backward(ctx, grad_output)[:3]

    batch = Batch(bias=False)
    loss, aux = Constant.apply(batch.x, batch.w, batch.y)
    loss.backward()
    assert loss == 2 and len(aux) == 5 and not batch.w.grad.any()


def test_the_parts_of_a_pass():
    """chunk_forward and _compute_loss by themselves: parts of the batch add up to it, and are differentiable."""
    batch = Batch()
    x, w, b, y = (t.detach() for t in (batch.x, batch.w, batch.b, batch.y))
    base = LigerFusedLinearPreferenceBase
    chosen, rejected, chosen_logits, rejected_logits, nll = base.chunk_forward(x, w, y, b)
    logits, logp = sequences(x.double(), w.double(), b.double(), y, -100, True)
    for ours, plain in zip((chosen, rejected, chosen_logits, rejected_logits), (*logp.chunk(2), *logits.chunk(2))):
        close(ours, plain, 2e-5)
    close(nll, nll_of(x[:N].double(), w.double(), b.double(), y[:N], -100) * (y[:N] != -100).sum(), 2e-5)
    assert base.chunk_forward(x, w, y, b, compute_nll_loss=False)[4] == 0
    options = dict(
        preference_loss_fn=LigerFusedLinearDPOFunction.preference_loss_fn,
        full_target=y,
        alpha=0.5,
        beta=0.3,
        average_log_prob=False,
    )
    w = w.requires_grad_()
    pairs = [torch.tensor([i, N + i]) for i in range(N)]
    parts = [base._compute_loss(x[p], w, y[p], b, **options, chosen_nll_target_chunk=y[p[:1]]) for p in pairs]
    expected = batch.expected("dpo", dict(alpha=0.5, beta=0.3, compute_nll_loss=True, average_log_prob=False))
    loss = sum(part[0] for part in parts)
    close(loss, expected[0], 2e-5)
    close(torch.autograd.grad(loss, w)[0], expected[2][1], 2e-5)
    for i, plain in enumerate(expected[1]):
        ours = [part[1][i] for part in parts]
        close(torch.cat(ours) if ours[0].ndim else sum(ours), plain, 2e-5)
    base = LigerFusedLinearUnpairedPreferenceBase
    logits, logp = sequences(x.double(), w.double(), b.double(), y, -100, False)
    log_probs, *sums = base.chunk_forward(x, w, y, batch.liked, b)
    close(log_probs, logp, 2e-5)
    for ours, plain in zip(
        sums, (s for v in (logp, logits.sum((1, 2))) for s in (v[batch.liked].sum(), v[~batch.liked].sum()))
    ):
        close(ours, plain, 2e-5)
    options = dict(preference_loss_fn=LigerFusedLinearKTOFunction.preference_loss_fn, full_target=y)
    parts = [base._compute_loss(x[p], w, y[p], batch.liked[p], b, **options) for p in pairs]
    expected = batch.expected("kto", {})
    close(sum(part[0] for part in parts), expected[0], 2e-5)


@pytest.mark.parametrize("name", MODULES)
def test_a_second_derivative_is_an_error(name):
    batch = Batch()
    module = MODULES[name](**({"use_ref_model": False} if name == "dpo" else {}))
    loss, _ = batch.call(module, name)
    (dw,) = torch.autograd.grad(loss, batch.w, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(dw.sum(), batch.x, retain_graph=True)
    scale = torch.ones((), requires_grad=True)
    (dw,) = torch.autograd.grad(loss * scale, batch.w, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(dw.sum(), scale)


def test_backward_needs_no_weight():
    """FSDP and ZeRO may have taken it away."""
    batch = Batch()
    loss, _ = batch.call(LigerFusedLinearDPOLoss(use_ref_model=False), "dpo")
    expected = torch.autograd.grad(loss, batch.leaves, retain_graph=True)
    with torch.no_grad():
        batch.w.zero_(), batch.x.zero_()
    assert all(map(torch.equal, torch.autograd.grad(loss, batch.leaves), expected))
