"""Distillation from the K most probable classes of a teacher."""

from typing import Any

import torch
from torch import Tensor, nn

from liger_kernel.operators.common import IGNORE_INDEX
from liger_kernel.operators.topk_distillation import check_options, linear_topk_divergence

REDUCTIONS = ("mean", "sum", "none")


class LigerFusedLinearTopKDistillationLoss(nn.Module):
    """weight_hard_loss · cross entropy + weight_soft_loss · divergence from a teacher's K classes per token, without
    the logits; formulas in liger_kernel/operators/topk_distillation.py.

    Args:
        beta: 0 for KL(teacher ‖ student), 1 for KL(student ‖ teacher), between them the Jensen-Shannon divergence.
        tail: of the classes that the teacher did not send: "bucket" takes them as one, "drop" leaves them out,
            "renormalise" normalises both distributions over the K classes. Then, without a hard loss, log_prob_min and
            options of forward, no other class is computed: several times faster.
        temperature: divides the student's logits, in both losses; the teacher's log-probabilities have it already.
        reduction: "mean" over the tokens that count, "sum" or "none"; num_items of forward takes the mean's place.
        log_prob_min: a lower bound of log-probabilities, with no gradient below it.
        loss_max: an upper bound of a token's divergence, with no gradient above it.
        softcap: of the head, as in linear_log_prob.
        logit_scale: likewise.
        max_bytes: likewise.

    Raises ValueError for an unknown tail or reduction, and a beta outside [0, 1].
    """

    def __init__(
        self, beta: float = 0.0, tail: str = "bucket", temperature: float = 1.0, weight_hard_loss: float = 0.0,
        weight_soft_loss: float = 1.0, ignore_index: int = IGNORE_INDEX, reduction: str = "mean",
        log_prob_min: float | None = None, loss_max: float | None = None, softcap: float | None = None,
        logit_scale: float = 1.0, max_bytes: int = 0,
    ) -> None:  # fmt: skip
        super().__init__()
        check_options(beta, tail)
        if reduction not in REDUCTIONS:
            raise ValueError(f"reduction must be one of {', '.join(REDUCTIONS)}, got {reduction!r}")
        self.beta, self.tail, self.temperature, self.ignore_index = beta, tail, temperature, ignore_index
        self.weight_hard_loss, self.weight_soft_loss, self.reduction = weight_hard_loss, weight_soft_loss, reduction
        self.log_prob_min, self.loss_max = log_prob_min, loss_max
        self.softcap, self.logit_scale, self.max_bytes = softcap, logit_scale, max_bytes

    def forward(
        self, lin_weight: Tensor, _input: Tensor, class_ids: Tensor, teacher_logp: Tensor,
        target: Tensor | None = None, bias: Tensor | None = None, token_weight: Tensor | None = None,
        num_items: Tensor | float | None = None, **options: Any,
    ) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
        """(loss, {"soft", "hard", "student_mass", "teacher_mass"}), float; no student_mass where only the K classes are
        computed.

        lin_weight [V, H], _input [..., H], bias [V]; class_ids [..., K] (-1: none) and teacher_logp [..., K] (-inf:
        none). target [...]: ignore_index leaves a token out; needed where weight_hard_loss is not 0. token_weight
        [...] multiplies each token's loss. num_items: the divisor of the mean, as trainers have it over batches and
        ranks. What is beside the loss is [...] and has no gradient. options: lora, main_grad, batch_invariant,
        valid_count.
        """
        if target is None and self.weight_hard_loss:
            raise ValueError("weight_hard_loss needs a target")
        only_classes = self.tail == "renormalise" and not self.weight_hard_loss and self.log_prob_min is None
        only_classes = only_classes and not options and lin_weight.dtype == _input.dtype
        if not only_classes:
            options["max_bytes"] = self.max_bytes
        soft, hard, masses = linear_topk_divergence(
            _input, lin_weight, class_ids, teacher_logp, target, bias, self.beta, self.tail, self.temperature,
            self.ignore_index, self.log_prob_min, softcap=self.softcap, logit_scale=self.logit_scale,
            only_classes=only_classes, **options,
        )  # fmt: skip
        if self.loss_max is not None:
            soft = soft.clamp(max=self.loss_max)
        loss = self.weight_soft_loss * soft
        if self.weight_hard_loss:
            loss = loss + self.weight_hard_loss * hard
        if token_weight is not None:
            loss = loss * token_weight
        if self.reduction != "none":
            loss = loss.sum()
        if self.reduction == "mean":
            if num_items is None:
                num_items = soft.numel() if target is None else (target != self.ignore_index).sum()
            loss = loss / torch.as_tensor(num_items, dtype=loss.dtype, device=loss.device).clamp(min=1)
        seen = {"soft": soft.detach(), "hard": hard.detach()}
        return loss, seen | {f"{name}_mass": mass for name, mass in masses.items()}
