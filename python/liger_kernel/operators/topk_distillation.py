"""Divergences from a teacher of which the log-probabilities of K classes per token are known.

With s_j the student's and t_j the teacher's probabilities of a token's buckets j, and m = β t + (1 − β) s,

    D = β Σ t_j ln(t_j / m_j) + (1 − β) Σ s_j ln(s_j / m_j),
    D = Σ t_j ln(t_j / s_j) for β = 0 and Σ s_j ln(s_j / t_j) for β = 1.

The buckets are the K classes (tail="drop"), these and all other classes together ("bucket"), or the K classes with both
distributions normalised over them ("renormalise").
"""

from typing import Any

import torch
from torch import Tensor

from liger_kernel._library import ops
from liger_kernel.operators.common import IGNORE_INDEX
from liger_kernel.operators.head import class_logits, linear_log_prob

TAILS = ("drop", "bucket", "renormalise")
#: The least mass outside its classes that a teacher has: what was sent is rounded, and 1 − Σ t may be nothing.
LEAST_TAIL = 1e-7


def check_options(beta: float, tail: str) -> None:
    """Raises ValueError for a beta outside [0, 1] and an unknown tail."""
    if not 0 <= beta <= 1:
        raise ValueError(f"beta must be in [0, 1], got {beta}")
    if tail not in TAILS:
        raise ValueError(f"tail must be one of {', '.join(TAILS)}, got {tail!r}")


def topk_divergence(
    student: Tensor, teacher: Tensor, there: Tensor | None = None, beta: float = 0.0, tail: str = "bucket",
    student_tail: Tensor | None = None, least_tail: float = LEAST_TAIL,
) -> Tensor:  # fmt: skip
    """D [...] of log-probabilities student and teacher [..., K], float; differentiable in student and student_tail.

    there [..., K] bool: which of them count (None: all). A class to which the teacher gives -inf does not. "bucket"
    needs student_tail [...], the student's log-probability of all other classes; the teacher's is ln(1 − Σ t), of a
    mass of at least least_tail. A token without classes has 0, but for its tail. Raises ValueError for options that do
    not go together.
    """
    return ops.topk_divergence(student, teacher, there, float(beta), tail, student_tail, least_tail)


@torch.no_grad()
def topk_entropy(
    teacher: Tensor, there: Tensor | None = None, tail: str = "bucket", least_tail: float = LEAST_TAIL
) -> Tensor:
    """−Σ t_j ln t_j [...] of the teacher's buckets, as topk_divergence makes them, without gradients."""
    teacher = teacher.float() if there is None else teacher.float().masked_fill(~there, -torch.inf)
    if tail == "renormalise":
        teacher, tail = teacher.log_softmax(-1), "drop"
    ones = torch.zeros_like(teacher)  # a student that gives 1 to each bucket: of D, Σ t ln t is left
    return -topk_divergence(ones, teacher, None, 0.0, tail, ones[..., 0] if tail == "bucket" else None, least_tail)


def linear_topk_divergence(
    hidden: Tensor, weight: Tensor, class_ids: Tensor, teacher_logp: Tensor, target: Tensor | None = None,
    bias: Tensor | None = None, beta: float = 0.0, tail: str = "bucket", temperature: float = 1.0,
    ignore_index: int = IGNORE_INDEX, log_prob_min: float | None = None, least_tail: float = LEAST_TAIL,
    entropy: bool = False, only_classes: bool = False, **options: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """(D, nll, masses), with entropy=True also the student's −Σ p ln p, of each token [...], float, for the student's
    logits hidden weightᵀ + bias, which are never held in full; see topk_divergence.

    hidden [..., H], weight [V, H], bias [V]; class_ids [..., K], -1 for none, and teacher_logp [..., K], -inf for none,
    at the teacher's temperature, which the student's logits are divided by. Tokens whose target [...] is ignore_index
    have 0 and cost nothing; nll is −ln p of the others' target at that temperature, 0 without targets, differentiable
    like D. masses: "student" and "teacher", the sums of probabilities of the classes, without gradients. log_prob_min:
    log-probabilities below it are raised to it, without a gradient there. only_classes, for tail="renormalise" without
    log_prob_min: only the logits of the classes are computed, so that nll is 0, there is no entropy, and masses have no
    "student"; options are then softcap and logit_scale. Otherwise options: softcap, logit_scale, max_bytes,
    lora, main_grad, batch_invariant, valid_count of linear_log_prob.
    """
    check_options(beta, tail)
    kept = None if target is None else target != ignore_index
    there = (class_ids >= 0) & (teacher_logp > -torch.inf)
    if kept is not None:
        there = there & kept.unsqueeze(-1)
    mass_of = lambda logp: logp.detach().float().exp().masked_fill(~there, 0).sum(-1)
    if only_classes:
        if tail != "renormalise" or log_prob_min is not None or entropy:
            raise ValueError("only_classes is for tail='renormalise' without log_prob_min and entropy")
        ids = class_ids.masked_fill(~there, -1)
        student = class_logits(hidden, weight, ids, bias, temperature, **options)
        divergence = topk_divergence(student, teacher_logp, there, beta, tail)
        return divergence, torch.zeros_like(divergence), {"teacher": mass_of(teacher_logp)}
    found = linear_log_prob(
        hidden, weight, target, bias, temperature, ignore_index, class_ids=class_ids, log_tail=tail == "bucket",
        outputs=("entropy",) * entropy, **options,
    )  # fmt: skip
    logp, *of_all = found[: 1 + entropy]
    student, *student_tail = found[1 + entropy :]
    sums = {"student": mass_of(student), "teacher": mass_of(teacher_logp)}
    if log_prob_min is not None:
        student, teacher_logp = student.clamp(min=log_prob_min), teacher_logp.clamp(min=log_prob_min)
    tails = student_tail[0] if student_tail else None
    divergence = topk_divergence(student, teacher_logp, there, beta, tail, tails, least_tail)
    if kept is not None:
        divergence = divergence.masked_fill(~kept, 0)
    return divergence, logp.new_zeros(logp.shape) if target is None else -logp, sums, *of_all
