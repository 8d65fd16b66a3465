"""Losses against given probabilities or a teacher's logits, token by token, in chunks of tokens."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from liger_kernel.operators.common import (
    IGNORE_INDEX,
    accumulate,
    autocast_dtype,
    first_derivative_only,
    roots,
    wanted_gradients,
)
from liger_kernel.operators.loss import check_labels

#: Numbers of float logits that exist at once.
CHUNK = 1 << 26


def chunks(rows: int, classes: int, most: int | None = None) -> Iterator[slice]:
    """Slices of rows, of at most `most`, whose logits are CHUNK numbers."""
    step = max(1, min(CHUNK // max(1, classes), rows if most is None else most))
    return (slice(begin, min(begin + step, rows)) for begin in range(0, rows, step))


def _kl_pass(x, weight, target, kept, token_weight, temperature, eps, wanted):
    """(the loss of each token, float [tokens]; the gradients of x and weight for Σ token_weight · loss)."""
    tokens, classes = target.shape
    losses = torch.empty(tokens, device=x.device)
    dx = torch.empty(x.shape, device=x.device) if wanted[0] else None
    dw = torch.zeros(weight.shape, device=x.device) if wanted[1] else None
    for rows in chunks(tokens, classes):
        t = target[rows].detach().float()
        logp = torch.log_softmax((x[rows] @ weight.t()).float() / temperature, -1)
        if kept is not None:
            t = t.where(kept[rows].unsqueeze(1), 0)
        losses[rows] = (t * (t.clamp(min=eps).log() - logp)).sum(-1)
        if not any(wanted):
            continue
        gradient = logp.exp_().mul_(t.sum(-1, keepdim=True)).sub_(t).mul_(1 / temperature)
        if token_weight is not None:
            gradient.mul_(token_weight[rows].unsqueeze(1))
        gradient = gradient.to(x.dtype)
        if dx is not None:
            dx[rows] = gradient @ weight
        if dw is not None:
            accumulate(dw, gradient.t(), x[rows])
    return losses, dx, dw


class LigerFusedLinearKLDivFunction(torch.autograd.Function):
    """Σ t (ln max(t, eps) − ln p) of each token, p = softmax(student_input student_weightᵀ / temperature) (Kullback and
    Leibler 1951), for given probabilities t; the logits of a chunk of tokens exist at a time."""

    @staticmethod
    def forward(
        ctx: Any, student_input: Tensor, student_weight: Tensor, target: Tensor, shift_labels: Tensor | None = None,
        reduction: str = "batchmean", ignore_index: int = IGNORE_INDEX, temperature: float = 1.0, eps: float = 1e-10,
        accum_dtype: torch.dtype | None = None, token_weight: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """The sum over the tokens, float, of token_weight [tokens] (None: 1) times the loss; "batchmean" divides by the
        number of tokens, "mean" also by the classes'; "none" gives each token's, with any upstream gradient.

        student_input [tokens, H] and student_weight [V, H] of one dtype, target [tokens, V]; tokens whose shift_labels
        [tokens] is ignore_index do not count. The gradients are made in forward, for "none" in backward, from logits
        that are recomputed; the weight's is summed in float, whatever accum_dtype. Raises ValueError for another
        reduction, a temperature that is not positive and shapes that do not agree.
        """
        if reduction not in ("batchmean", "mean", "sum", "none"):
            raise ValueError(f"reduction must be batchmean, mean, sum or none, got {reduction!r}")
        if not temperature > 0:
            raise ValueError(f"temperature must be positive, got {temperature}")
        tokens, classes = len(student_input), len(student_weight)
        if target.shape != (tokens, classes):
            raise ValueError(f"target must be [{tokens}, {classes}], got {list(target.shape)}")
        if token_weight is not None:
            if token_weight.shape != (tokens,):
                raise ValueError(f"token_weight must be [{tokens}], got {list(token_weight.shape)}")
            token_weight = token_weight.detach().float()
        check_labels(shift_labels, tokens, ignore_index)
        dtype = autocast_dtype(student_input) or student_input.dtype
        kept = None if shift_labels is None else shift_labels != ignore_index
        later, wanted = reduction == "none", wanted_gradients(ctx, student_input, student_weight)
        x, weight = student_input.detach().to(dtype), student_weight.detach().to(dtype)
        losses, *gradients = _kl_pass(
            x, weight, target, kept, token_weight, temperature, eps, (False,) * 2 if later else wanted
        )
        ctx.dtypes, ctx.roots = (student_input.dtype, student_weight.dtype), roots(student_input, student_weight)
        losses = losses if token_weight is None else losses * token_weight
        ctx.later, ctx.dtype, ctx.options = later, dtype, (temperature, eps)
        if later:
            ctx.save_for_backward(student_input, student_weight, target, kept, token_weight)
            return losses
        count = torch.tensor(float(tokens), device=target.device) if kept is None else kept.sum().float()
        factor = (1.0 if reduction == "sum" else 1 / count.clamp(min=1)) / (classes if reduction == "mean" else 1)
        ctx.save_for_backward(*gradients, torch.as_tensor(factor, device=target.device))
        return losses.sum() * factor

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.later:
            (x, weight, target, kept, token_weight), (temperature, eps) = ctx.saved_tensors, ctx.options
            of_tokens = grad_output.float() if token_weight is None else grad_output * token_weight
            # In 16 bits the gradients of logits are made of coefficients whose largest is 1.
            scale = of_tokens.abs().amax().clamp(min=torch.finfo(torch.float32).tiny) if len(x) else of_tokens.sum()
            _, *gradients = _kl_pass(
                x.to(ctx.dtype), weight.to(ctx.dtype), target, kept, of_tokens / scale, temperature, eps,
                ctx.needs_input_grad[:2],
            )  # fmt: skip
        else:
            *gradients, factor = ctx.saved_tensors
            scale = grad_output * factor
        made = (g if g is None else (g * scale).to(dtype) for g, dtype in zip(gradients, ctx.dtypes))
        return *made, *[None] * 8


def liger_fused_linear_kl_div(
    student_input: Tensor, student_weight: Tensor, target: Tensor, shift_labels: Tensor | None = None,
    reduction: str = "batchmean", ignore_index: int = IGNORE_INDEX, temperature: float = 1.0, eps: float = 1e-10,
    accum_dtype: torch.dtype | None = None, token_weight: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """KL divergence of a head from given probabilities, without its logits; see LigerFusedLinearKLDivFunction."""
    options = reduction, ignore_index, temperature, eps, accum_dtype, token_weight
    return LigerFusedLinearKLDivFunction.apply(student_input, student_weight, target, shift_labels, *options)


class LigerFusedLinearKLDivLoss(nn.Module):
    """KL divergence of a head from given probabilities, such as cached soft labels; see
    LigerFusedLinearKLDivFunction."""

    def __init__(
        self, reduction: str = "batchmean", ignore_index: int = IGNORE_INDEX, temperature: float = 1.0,
        eps: float = 1e-10, accum_dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.reduction, self.ignore_index, self.temperature = reduction, ignore_index, temperature
        self.eps, self.accum_dtype = eps, accum_dtype

    def forward(
        self, student_input: Tensor, student_weight: Tensor, target: Tensor, shift_labels: Tensor | None = None,
        token_weight: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        options = self.reduction, self.ignore_index, self.temperature, self.eps, self.accum_dtype, token_weight
        return LigerFusedLinearKLDivFunction.apply(student_input, student_weight, target, shift_labels, *options)

    def extra_repr(self) -> str:
        return f"reduction={self.reduction!r}, ignore_index={self.ignore_index}, temperature={self.temperature}"


class LigerFusedCETVDFunction(torch.autograd.Function):
    """The cross entropy of a student's logits and the total variation distance ½ Σ |p − q| of its softmax p from a
    teacher's q (Wen et al. 2023, arXiv:2307.15190), for each row."""

    @staticmethod
    def forward(
        ctx: Any, student_logits: Tensor, teacher_logits: Tensor, target: Tensor, ignore_index: int = IGNORE_INDEX
    ) -> tuple[Tensor, Tensor]:
        """(cross entropy, distance), float [...], for logits [..., V] and classes target [...]; both 0, with gradients
        of 0, where that is ignore_index. The teacher gets no gradient."""
        if student_logits.shape != teacher_logits.shape or student_logits.shape[:-1] != target.shape:
            raise ValueError(
                f"the logits must be of one shape [..., V], and target [...], got {list(student_logits.shape)}, "
                f"{list(teacher_logits.shape)} and {list(target.shape)}"
            )
        classes = student_logits.shape[-1]
        student, teacher = (t.detach().reshape(-1, classes) for t in (student_logits, teacher_logits))
        kept = target.reshape(-1) != ignore_index
        ids = target.reshape(-1).where(kept, 0)
        ce, tvd = torch.empty(2, len(student), device=student.device)
        for rows in chunks(len(student), classes):
            logp = student[rows].float().log_softmax(-1)
            ce[rows] = -logp.gather(1, ids[rows].unsqueeze(1)).squeeze(1)
            tvd[rows] = (logp.exp_() - teacher[rows].float().softmax(-1)).abs_().sum(-1) / 2
        ctx.save_for_backward(student_logits, teacher_logits, ids, kept)
        return ce.where(kept, 0).view(target.shape), tvd.where(kept, 0).view(target.shape)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad_ce: Tensor, grad_tvd: Tensor) -> tuple[Tensor | None, ...]:
        student_logits, teacher_logits, ids, kept = ctx.saved_tensors
        classes = student_logits.shape[-1]
        student, teacher = (t.reshape(-1, classes) for t in (student_logits, teacher_logits))
        of_ce, of_tvd = (g.reshape(-1).where(kept, 0).unsqueeze(1) for g in (grad_ce, grad_tvd))
        gradient = torch.empty_like(student)
        for rows in chunks(len(student), classes):
            p = student[rows].float().softmax(-1)
            sign = (p - teacher[rows].float().softmax(-1)).sign_().mul_(0.5)
            of_rows = of_ce[rows] * p
            of_rows.scatter_add_(1, ids[rows].unsqueeze(1), -of_ce[rows].to(of_rows.dtype))
            of_rows += of_tvd[rows] * p * (sign - (p * sign).sum(-1, keepdim=True))
            gradient[rows] = of_rows.where(kept[rows].unsqueeze(1), 0)
        return gradient.view(student_logits.shape), None, None, None


class LigerFusedCETVDLoss(nn.Module):
    """Each token's cross entropy, and the distance of its probabilities from a teacher's; see
    LigerFusedCETVDFunction."""

    def __init__(self, ignore_index: int = IGNORE_INDEX) -> None:
        super().__init__()
        self.ignore_index = ignore_index

    def forward(self, student_logits: Tensor, teacher_logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return LigerFusedCETVDFunction.apply(student_logits, teacher_logits, target, self.ignore_index)
