"""The base of the losses between a student's and a teacher's logits."""

import torch

from liger_kernel._library import ops
from liger_kernel.chunked_loss.classes import Loss
from liger_kernel.chunked_loss.gradients import gradients_of_arguments, save_gradients
from liger_kernel.operators.common import wanted_gradients
from liger_kernel.operators.distillation import forward_with_gradients, sums_over_tokens
from liger_kernel.signatures import required, takes

#: The chunk_size of the API's signatures: it stands for the library's own choice.
DEFAULT_CHUNK = 1024

HEADS = required("student_input", "student_weight", "teacher_input", "teacher_weight")
CHUNK = required("student_input_chunk", "student_weight", "teacher_input_chunk", "teacher_weight", "target_chunk")
BIASES = dict(student_bias=None, teacher_bias=None)
WEIGHTS = dict(weight_hard_loss=0.5, weight_soft_loss=0.5, beta=0.5)
#: The options of a loss, as the API has them.
OPTIONS = WEIGHTS | dict(ignore_index=-100, temperature=1.0, compiled=True, chunk_size=DEFAULT_CHUNK)
OPTIONS |= dict(return_soft_hard_loss=False)


def formula(kind, masks_ignored):
    """Says of a distillation_loss_fn that it is the operator's `kind`, and whether ignored tokens add nothing to it."""

    def mark(function):
        function.formula = kind, masks_ignored
        return function

    return mark


class LigerFusedLinearDistillationBase(torch.autograd.Function):
    """weight_hard_loss · cross entropy + weight_soft_loss · distillation_loss_fn(logits), both as means over the tokens
    that count, without keeping the logits.

    A loss is a subclass with a static `distillation_loss_fn(student_logits [n, V], teacher_logits [n, V], target,
    ignore_index, beta, **loss_kwargs)`, which returns a sum over these n tokens and is written in differentiable torch.
    It takes a loop of chunks in Python; the losses of this package, which are marked by `formula`, run in one operator.
    """

    @staticmethod
    def distillation_loss_fn(student_logits, teacher_logits, target=None, ignore_index=None):
        raise NotImplementedError("a distillation loss defines distillation_loss_fn")

    @staticmethod
    @takes(
        required("cls", "ctx")
        | HEADS
        | required("target")
        | BIASES
        | dict(chunk_size=DEFAULT_CHUNK, ignore_index=-100)
        | WEIGHTS
        | dict(compute_ce_loss=True, temperature=1.0, compiled=True, return_soft_hard_loss=False),
        extra="loss_kwargs",
    )
    def forward(cls, ctx, target, chunk_size, return_soft_hard_loss, loss_kwargs, compiled, **given):
        """The loss, or with return_soft_hard_loss (loss, soft, hard), all float, of which only the loss is
        differentiable.

        student_input [..., H], student_weight [V, H], teacher_input [..., H'], teacher_weight [V', H'], target [...],
        student_bias [V] and teacher_bias [V'] or None. Both logits are divided by the temperature for the soft loss,
        and the student's are then padded with zeros where V' > V. At most chunk_size rows of target are worked on at
        once, unless it is the default, which leaves their number to the library; compiled changes nothing. Raises
        ValueError where V > V'.
        """
        labels = target.reshape(-1)
        factor = 1 / labels.ne(given["ignore_index"]).sum().clamp(min=1)
        heads = {name: given.pop(name) for name in (*HEADS, *BIASES)}
        flat = lambda hidden, *others: (hidden.reshape(-1, hidden.shape[-1]), *others)
        tensors, teacher = _head(heads, "student"), flat(*_head(heads, "teacher"))
        student, wanted = flat(*tensors), wanted_gradients(ctx, *tensors)
        chunk = chunk_size * target[:1].numel()
        kind, masks_ignored = getattr(cls.distillation_loss_fn, "formula", (None, False))
        if kind is not None and len(student[1]) == len(teacher[1]) and not loss_kwargs:
            chunk = 0 if chunk_size == DEFAULT_CHUNK else chunk
            made = _run_operator(student, teacher, labels, factor, kind, masks_ignored, chunk, wanted, **given)
        else:
            terms = dict(all_terms=return_soft_hard_loss, **given, **loss_kwargs)
            loss_of = lambda z, teacher_z, rows: _sums(z, teacher_z, labels[rows], cls.distillation_loss_fn, **terms)
            made = sums_over_tokens(student, teacher, loss_of, 3, factor, chunk, wanted=wanted)
        sums, (grad_input, *others), grad_scale = made
        grad_input = grad_input if grad_input is None else grad_input.view(tensors[0].shape)
        save_gradients(ctx, tensors, (grad_input, *others), grad_scale)
        loss, soft, hard = (s.clone() for s in sums * factor)
        if not return_soft_hard_loss:
            return loss
        ctx.mark_non_differentiable(soft, hard)
        return loss, soft, hard

    @staticmethod
    def backward(ctx, grad_output, *args):
        return gradients_of_arguments(ctx, (grad_output,), bias=5)

    @staticmethod
    @takes(CHUNK | BIASES | dict(ignore_index=-100, compute_ce_loss=True))
    def chunk_forward(target_chunk, ignore_index, compute_ce_loss, **heads):
        """(student_logits, teacher_logits, Σ of the cross entropy) of some tokens, differentiable."""
        logits = lambda model: torch.nn.functional.linear(*_head(heads, model, "input_chunk"))
        student_logits = logits("student")
        with torch.no_grad():
            teacher_logits = logits("teacher")
        ce_loss = student_logits.new_zeros(()).float()
        if compute_ce_loss:
            ce_loss = _cross_entropy(student_logits, target_chunk, ignore_index)
        return student_logits, teacher_logits, ce_loss

    @staticmethod
    @takes(
        CHUNK
        | BIASES
        | dict(distillation_loss_fn=None, full_target=None, ignore_index=-100, weight_hard_loss=0.5)
        | dict(weight_soft_loss=0.5, compute_ce_loss=True, temperature=1),
        extra="loss_kwargs",
    )
    def _compute_loss(target_chunk, distillation_loss_fn, full_target, loss_kwargs, **given):
        """(loss, (soft, hard, student_logits, teacher_logits)) of some tokens, as parts of those of the batch
        full_target; differentiable."""
        heads = {name: given.pop(name) for name in (*CHUNK, *BIASES) if name in given}
        chunk_forward = LigerFusedLinearDistillationBase.chunk_forward
        *logits, _ = chunk_forward(target_chunk=target_chunk, compute_ce_loss=False, **heads)
        sums = _sums(*logits, target_chunk, distillation_loss_fn, all_terms=True, **given, **loss_kwargs)
        counted = target_chunk if full_target is None else full_target
        loss, soft, hard = (s / counted.ne(given["ignore_index"]).sum().clamp(min=1) for s in sums)
        return loss, (soft, hard, *logits)


def _head(heads, model, hidden="input"):
    return heads[f"{model}_{hidden}"], heads[f"{model}_weight"], heads[f"{model}_bias"]


def _run_operator(student, teacher, labels, factor, kind, masks_ignored, chunk, wanted, **options):
    """([weighted sum, soft, hard] over the tokens, gradients, grad_scale) of the loss, factor times the first."""
    ignore_index, beta, temperature = options["ignore_index"], options["beta"], options["temperature"]
    with_hard, soft_weight = options["compute_ce_loss"], options["weight_soft_loss"]
    hard_weight = options["weight_hard_loss"] * bool(with_hard)
    counts = labels.ne(ignore_index).float()
    each = counts if masks_ignored else torch.ones_like(counts)
    share = 1.0 if masks_ignored else beta  # the cosine distance has beta as a factor
    weights = each * factor * (soft_weight * share), counts * factor * hard_weight
    divergence_of = kind, beta if masks_ignored else 0.5, temperature, ignore_index, masks_ignored
    max_bytes = chunk * 2 * len(student[1]) * student[0].element_size()
    made = forward_with_gradients(student, teacher, labels, *weights, *divergence_of, max_bytes, wanted)
    loss, divergence, nll, _, gradients, grad_scale = made
    # Not a product of vectors, which autocast would round to 16 bits.
    soft, hard = share * (each * divergence).sum(), (counts * nll).sum() if with_hard else torch.zeros_like(loss)
    return torch.stack([soft_weight * soft + hard_weight * hard, soft, hard]), gradients, grad_scale


def _cross_entropy(logits, labels, ignore_index):
    return -ops.selective_log_softmax(logits, labels, 1.0, ignore_index)[0].sum()


def _sums(student, teacher, labels, distillation_loss_fn, compute_ce_loss, temperature, all_terms, **options):
    """[weighted sum, soft, hard] of these tokens' logits; a term of weight 0 is left out unless all are asked for."""
    hard_weight, soft_weight = (options.pop(name) for name in ("weight_hard_loss", "weight_soft_loss"))
    soft = hard = student.new_zeros((), dtype=torch.float32)
    if compute_ce_loss and (hard_weight or all_terms):
        hard = _cross_entropy(student, labels, options["ignore_index"])
    if soft_weight or all_terms:
        logits = _for_the_soft_loss(student, teacher, temperature)
        soft = distillation_loss_fn(*logits, target=labels, **options)
    return [hard_weight * hard + soft_weight * soft, soft, hard]


def _for_the_soft_loss(student, teacher, temperature):
    """Both logits divided by the temperature, as many of the student's as of the teacher's."""
    missing = teacher.shape[-1] - student.shape[-1]
    if missing < 0:
        raise ValueError(
            f"the student's vocabulary, {student.shape[-1]}, must not be larger than the teacher's, {teacher.shape[-1]}"
        )
    if temperature != 1:
        student, teacher = student.float() / temperature, teacher.float() / temperature
    return torch.nn.functional.pad(student, (0, missing)) if missing else student, teacher


def check_temperature(module):
    if module.temperature == 0:
        raise AssertionError("temperature must not be 0")


#: What the losses of distillation share.
DISTILLATION = Loss(
    base=LigerFusedLinearDistillationBase,
    arguments=HEADS | required("true_labels", *BIASES) | OPTIONS,
    call=HEADS | required("true_labels") | BIASES,
    check=check_temperature,
    doc="A Function of the base as a module. Raises AssertionError where the temperature is 0.",
)
DistillationLoss = DISTILLATION.module(None, "DistillationLoss", __name__)
