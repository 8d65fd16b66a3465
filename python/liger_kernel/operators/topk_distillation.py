"""Divergences from a teacher of which the log-probabilities of K classes per token are known.

With s_j the student's and t_j the teacher's probabilities of a token's buckets j, and m = β t + (1 − β) s,

    D = β Σ t_j ln(t_j / m_j) + (1 − β) Σ s_j ln(s_j / m_j),
    D = Σ t_j ln(t_j / s_j) for β = 0 and Σ s_j ln(s_j / t_j) for β = 1.

The buckets are the K classes (tail="drop"), these and all other classes together ("bucket"), or the K classes with both
distributions normalised over them ("renormalise").
"""

import math
from typing import Any

import torch
from torch import Tensor

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


def _normalised(logp: Tensor, there: Tensor) -> Tensor:
    """logp minus the logarithm of the mass of the classes that are there; of none, logp."""
    mass = logp.masked_fill(~there, -torch.inf).logsumexp(-1, keepdim=True)
    return logp - torch.where(there.any(-1, keepdim=True), mass, 0)


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
    check_options(beta, tail)
    student, teacher, there = _buckets(student, teacher, there, tail, student_tail, least_tail)
    if beta == 0:
        terms = teacher.exp() * (teacher - student)
    elif beta == 1:
        terms = student.exp() * (student - teacher)
    else:
        mixture = torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))
        terms = beta * teacher.exp() * (teacher - mixture) + (1 - beta) * student.exp() * (student - mixture)
    return terms.masked_fill(~there, 0).sum(-1)


@torch.no_grad()
def topk_entropy(
    teacher: Tensor, there: Tensor | None = None, tail: str = "bucket", least_tail: float = LEAST_TAIL
) -> Tensor:
    """−Σ t_j ln t_j [...] of the teacher's buckets, as topk_divergence makes them, without gradients."""
    any_tail = teacher.new_zeros(teacher.shape[:-1], dtype=torch.float32) if tail == "bucket" else None
    _, teacher, there = _buckets(teacher.float(), teacher, there, tail, any_tail, least_tail)
    return -(teacher.exp() * teacher).masked_fill(~there, 0).sum(-1)


def _buckets(student, teacher, there, tail, student_tail, least_tail):
    """The log-probabilities of the student and of the teacher, and which of them count, with the tail's as the last."""
    if (tail == "bucket") != (student_tail is not None):
        raise ValueError(f"student_tail is for tail='bucket', and is needed there; got tail={tail!r}")
    teacher = teacher.to(student.dtype)
    known = teacher > -torch.inf
    there = known if there is None else there & known
    # Outside, numbers without a gradient and without infinities take their place, and nothing is summed of them.
    student, teacher = student.masked_fill(~there, 0), teacher.masked_fill(~there, 0)
    if tail == "renormalise":
        student, teacher = (_normalised(logp, there).masked_fill(~there, 0) for logp in (student, teacher))
    elif student_tail is not None:
        mass = teacher.masked_fill(~there, -torch.inf).logsumexp(-1).clamp(max=math.log1p(-least_tail))
        outside = student_tail > -torch.inf  # the student may have no other class
        there = torch.cat([there, outside.unsqueeze(-1)], -1)
        student = torch.cat([student, student_tail.masked_fill(~outside, 0).unsqueeze(-1)], -1)
        teacher = torch.cat([teacher, (-mass.expm1()).log().unsqueeze(-1)], -1)
    return student, teacher, there


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
