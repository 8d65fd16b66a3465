"""Losses between a student's and a teacher's head without their logits; see liger/ops.h."""

import torch

from liger_kernel._library import ops

#: What is between the two distributions of a token, S and T, by the operator's numbers.
FORWARD_KL, REVERSE_KL, JENSEN_SHANNON, TOTAL_VARIATION, COSINE = range(5)
KINDS = {
    "forward_kl": FORWARD_KL,
    "reverse_kl": REVERSE_KL,
    "jsd": JENSEN_SHANNON,
    "tvd": TOTAL_VARIATION,
    "cosine": COSINE,
}


def autocast_dtype(tensor):
    """The dtype that autocast asks for on the tensor's device, or None."""
    device = tensor.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def linear_distillation(
    student,
    student_weight,
    teacher,
    teacher_weight,
    labels=None,
    kind="jsd",
    beta=0.5,
    temperature=1.0,
    soft_weight=1.0,
    hard_weight=0.0,
    ignore_index=-100,
    student_bias=None,
    teacher_bias=None,
    student_scale=1.0,
    student_softcap=None,
    teacher_scale=1.0,
    teacher_softcap=None,
    max_bytes=0,
):
    """(loss, soft, hard): loss = soft_weight · soft + hard_weight · hard, float, of which the loss alone is
    differentiable.

    soft is the mean over tokens of the divergence of softmax(z / temperature) of student and teacher, kind:
    "forward_kl" KL(T ‖ S), "reverse_kl" KL(S ‖ T), "jsd" β KL(T ‖ M) + (1 − β) KL(S ‖ M) with M = β T + (1 − β) S,
    "tvd" ½ Σ |S − T|, "cosine" 1 − cos z; hard is that of −ln softmax(z)_label of the student, 0 without labels. z =
    softcap · tanh(scale · y / softcap), or scale · y, of y = x weightᵀ + bias.

    student [..., H], student_weight [V, H], teacher [..., H'], teacher_weight [V, H'], labels [...] integers or None;
    tokens of ignore_index do not count and cost nothing. Forward makes the gradients of the student's tensors, the
    weight's summed in float. Logits of max_bytes are worked on at once (0: what is fastest). Raises KeyError for an
    unknown kind, ValueError for hard_weight without labels, IndexError on the CPU for a label outside [0, V).
    """
    if labels is None and hard_weight != 0:
        raise ValueError("linear_distillation: hard_weight needs labels")
    x, y = student.reshape(-1, student.shape[-1]), teacher.reshape(-1, teacher.shape[-1])
    ids = None if labels is None else labels.reshape(-1)
    counts = torch.ones(len(x), device=x.device) if ids is None else ids.ne(ignore_index).float()
    each = counts / counts.sum().clamp(min=1)
    weighted = lambda weight: each * weight if weight != 0 else None
    loss, divergence, nll, _ = ops.linear_distillation(
        x,
        student_weight,
        student_bias,
        y,
        teacher_weight,
        teacher_bias,
        ids,
        weighted(soft_weight),
        weighted(hard_weight),
        None,
        kind=KINDS[kind],
        beta=float(beta),
        temperature=float(temperature),
        student_scale=float(student_scale),
        student_softcap=float(student_softcap or 0),
        teacher_scale=float(teacher_scale),
        teacher_softcap=float(teacher_softcap or 0),
        ignore_index=ignore_index,
        max_bytes=max_bytes,
    )
    return loss, each @ divergence, each @ nll


def forward_with_gradients(
    student,
    teacher,
    labels,
    soft,
    hard,
    kind,
    beta=0.5,
    temperature=1.0,
    ignore_index=-100,
    skip_ignored=True,
    max_bytes=0,
    wanted=(False, False, False),
    maps=(1.0, 0.0, 1.0, 0.0),
    entropy=False,
    float_logits=False,
    dtype=None,
):
    """(loss, divergence, nll, entropy, gradients, rest) without autograd, for Functions that save the gradients: those,
    times rest, are the loss's.

    student and teacher are (hidden [N, H], weight [V, H], bias [V] or None); soft and hard [N] or None, the
    coefficients of divergence and nll [N] in the loss. A gradient that is not wanted is None; in float16 they are
    float. maps: scale and softcap of the student's logits, and of the teacher's.
    """
    dtype = dtype or autocast_dtype(student[0])
    with torch.autocast(student[0].device.type, enabled=False):
        loss, divergence, nll, entropies, *gradients, power = ops.linear_distillation_forward(
            *student,
            *teacher,
            labels,
            soft,
            hard,
            dtype,
            *wanted,
            kind,
            float(beta),
            float(temperature),
            *maps,
            ignore_index,
            skip_ignored,
            entropy,
            float_logits,
            max_bytes,
        )
    rest = 1 / power if power.ndim == 0 else torch.ones((), device=loss.device)
    return loss, divergence, nll, entropies, [g if w else None for g, w in zip(gradients, wanted)], rest
