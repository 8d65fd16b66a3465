"""The base of the losses between a student's and a teacher's logits."""

import torch

from liger_kernel._library import ops
from liger_kernel.ops.linear_distillation import forward_with_gradients
from liger_kernel.ops.two_heads import sums_over_tokens, wanted_gradients
from liger_kernel.ops.utils import first_derivative_only, roots

#: The chunk_size of the API's signatures: it stands for the library's own choice.
DEFAULT_CHUNK = 1024


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
    def forward(
        cls,
        ctx,
        student_input,
        student_weight,
        teacher_input,
        teacher_weight,
        target,
        student_bias=None,
        teacher_bias=None,
        chunk_size=1024,
        ignore_index=-100,
        weight_hard_loss=0.5,
        weight_soft_loss=0.5,
        beta=0.5,
        compute_ce_loss=True,
        temperature=1.0,
        compiled=True,
        return_soft_hard_loss=False,
        **loss_kwargs,
    ):
        """The loss, or with return_soft_hard_loss (loss, soft, hard), all float, of which the loss alone is
        differentiable.

        student_input [..., H], student_weight [V, H], teacher_input [..., H'], teacher_weight [V', H'], target [...],
        student_bias [V] and teacher_bias [V'] or None. Both logits are divided by the temperature for the soft loss,
        and the student's are then padded with zeros where V' > V. At most chunk_size rows of target are worked on at
        once, unless it is the default, which leaves their number to the library; compiled changes nothing. Raises
        ValueError where V > V'.
        """
        labels = target.reshape(-1)
        factor = 1 / labels.ne(ignore_index).sum().clamp(min=1)
        flat = lambda t: t.reshape(-1, t.shape[-1])
        tensors = student_input, student_weight, student_bias
        student, teacher = (flat(student_input), *tensors[1:]), (flat(teacher_input), teacher_weight, teacher_bias)
        wanted = wanted_gradients(ctx, *tensors)
        kind, masks_ignored = getattr(cls.distillation_loss_fn, "formula", (None, False))
        if kind is not None and len(student_weight) == len(teacher_weight) and not loss_kwargs:
            chunk = 0 if chunk_size == DEFAULT_CHUNK else chunk_size * target[:1].numel()
            sums, gradients, rest = _run_operator(
                student,
                teacher,
                labels,
                factor,
                kind,
                masks_ignored,
                ignore_index,
                weight_hard_loss * bool(compute_ce_loss),
                weight_soft_loss,
                beta,
                temperature,
                chunk,
                wanted,
                compute_ce_loss,
            )
        else:

            def loss_of(student_logits, teacher_logits, rows):
                return _sums(
                    student_logits,
                    teacher_logits,
                    labels[rows],
                    cls.distillation_loss_fn,
                    ignore_index,
                    weight_hard_loss,
                    weight_soft_loss,
                    compute_ce_loss,
                    temperature,
                    return_soft_hard_loss,
                    beta=beta,
                    **loss_kwargs,
                )

            sums, gradients, rest = sums_over_tokens(
                student, teacher, loss_of, 3, factor, chunk_size * target[:1].numel(), wanted=wanted
            )
        grad_input, *others = gradients
        ctx.save_for_backward(grad_input if grad_input is None else grad_input.view(student_input.shape), *others, rest)
        ctx.roots = roots(*tensors)
        loss, soft, hard = (s.clone() for s in sums * factor)
        if not return_soft_hard_loss:
            return loss
        ctx.mark_non_differentiable(soft, hard)
        return loss, soft, hard

    @staticmethod
    @first_derivative_only
    def backward(ctx, grad_output, *args):
        *gradients, rest = ctx.saved_tensors
        grad_input, grad_weight, grad_bias = (
            None if g is None else ops.scale_backward(g, grad_output * rest) for g in gradients
        )
        return grad_input, grad_weight, None, None, None, grad_bias

    @staticmethod
    def chunk_forward(
        student_input_chunk,
        student_weight,
        teacher_input_chunk,
        teacher_weight,
        target_chunk,
        student_bias=None,
        teacher_bias=None,
        ignore_index=-100,
        compute_ce_loss=True,
    ):
        """(student_logits, teacher_logits, Σ of the cross entropy) of some tokens, differentiable."""
        student_logits = torch.nn.functional.linear(student_input_chunk, student_weight, student_bias)
        with torch.no_grad():
            teacher_logits = torch.nn.functional.linear(teacher_input_chunk, teacher_weight, teacher_bias)
        return (
            student_logits,
            teacher_logits,
            _cross_entropy(student_logits, target_chunk, ignore_index)
            if compute_ce_loss
            else student_logits.new_zeros(()).float(),
        )

    @staticmethod
    def _compute_loss(
        student_input_chunk,
        student_weight,
        teacher_input_chunk,
        teacher_weight,
        target_chunk,
        student_bias=None,
        teacher_bias=None,
        distillation_loss_fn=None,
        full_target=None,
        ignore_index=-100,
        weight_hard_loss=0.5,
        weight_soft_loss=0.5,
        compute_ce_loss=True,
        temperature=1,
        **loss_kwargs,
    ):
        """(loss, (soft, hard, student_logits, teacher_logits)) of some tokens, as parts of those of the batch
        full_target; differentiable."""
        student_logits, teacher_logits, _ = LigerFusedLinearDistillationBase.chunk_forward(
            student_input_chunk,
            student_weight,
            teacher_input_chunk,
            teacher_weight,
            target_chunk,
            student_bias,
            teacher_bias,
            ignore_index,
            False,
        )
        sums = _sums(
            student_logits,
            teacher_logits,
            target_chunk,
            distillation_loss_fn,
            ignore_index,
            weight_hard_loss,
            weight_soft_loss,
            compute_ce_loss,
            temperature,
            True,
            **loss_kwargs,
        )
        count = (target_chunk if full_target is None else full_target).ne(ignore_index).sum().clamp(min=1)
        loss, soft, hard = (s / count for s in sums)
        return loss, (soft, hard, student_logits, teacher_logits)


def _run_operator(
    student,
    teacher,
    labels,
    factor,
    kind,
    masks_ignored,
    ignore_index,
    weight_hard_loss,
    weight_soft_loss,
    beta,
    temperature,
    chunk,
    wanted,
    with_hard,
):
    """([weighted sum, soft, hard] over the tokens, gradients, rest), of the loss that is factor times the first."""
    counts = labels.ne(ignore_index).float()
    each = counts if masks_ignored else torch.ones_like(counts)
    share = 1.0 if masks_ignored else beta  # the cosine distance has beta as a factor
    max_bytes = chunk * 2 * len(student[1]) * student[0].element_size()
    loss, divergence, nll, _, gradients, rest = forward_with_gradients(
        student,
        teacher,
        labels,
        each * factor * (weight_soft_loss * share),
        counts * factor * weight_hard_loss,
        kind,
        beta if masks_ignored else 0.5,
        temperature,
        ignore_index,
        masks_ignored,
        max_bytes,
        wanted,
    )
    soft, hard = share * (each @ divergence), counts @ nll if with_hard else torch.zeros_like(loss)
    return torch.stack([weight_soft_loss * soft + weight_hard_loss * hard, soft, hard]), gradients, rest


def _cross_entropy(logits, labels, ignore_index):
    return -ops.selective_log_softmax(logits, labels, 1.0, ignore_index)[0].sum()


def _sums(
    student_logits,
    teacher_logits,
    labels,
    distillation_loss_fn,
    ignore_index,
    weight_hard_loss,
    weight_soft_loss,
    compute_ce_loss,
    temperature,
    all_terms,
    **loss_kwargs,
):
    """[weighted sum, soft, hard] of these tokens; a term of weight 0 is left out unless all are asked for."""
    soft = hard = student_logits.new_zeros((), dtype=torch.float32)
    if compute_ce_loss and (weight_hard_loss or all_terms):
        hard = _cross_entropy(student_logits, labels, ignore_index)
    if weight_soft_loss or all_terms:
        student, teacher = (
            z if temperature == 1 else z.float() / temperature for z in (student_logits, teacher_logits)
        )
        missing = teacher.shape[-1] - student.shape[-1]
        if missing < 0:
            raise ValueError(
                f"the student's vocabulary, {student.shape[-1]}, must not be larger than the teacher's, "
                f"{teacher.shape[-1]}"
            )
        if missing:
            student = torch.nn.functional.pad(student, (0, missing))
        soft = distillation_loss_fn(student, teacher, target=labels, ignore_index=ignore_index, **loss_kwargs)
    return [weight_hard_loss * hard + weight_soft_loss * soft, soft, hard]


class DistillationLoss(torch.nn.Module):
    """A Function of the base as a module. Raises AssertionError where the temperature is 0."""

    function = None

    def __init__(
        self,
        weight_hard_loss=0.5,
        weight_soft_loss=0.5,
        beta=0.5,
        ignore_index=-100,
        temperature=1.0,
        compiled=True,
        chunk_size=1024,
        return_soft_hard_loss=False,
    ):
        super().__init__()
        if temperature == 0:
            raise AssertionError("temperature must not be 0")
        self.weight_hard_loss, self.weight_soft_loss, self.beta, self.ignore_index = (
            weight_hard_loss,
            weight_soft_loss,
            beta,
            ignore_index,
        )
        self.temperature, self.compiled, self.chunk_size, self.return_soft_hard_loss = (
            temperature,
            compiled,
            chunk_size,
            return_soft_hard_loss,
        )

    def forward(
        self,
        student_input,
        student_weight,
        teacher_input,
        teacher_weight,
        true_labels,
        student_bias=None,
        teacher_bias=None,
    ):
        return self.function.apply(
            student_input,
            student_weight,
            teacher_input,
            teacher_weight,
            true_labels,
            student_bias,
            teacher_bias,
            self.weight_hard_loss,
            self.weight_soft_loss,
            self.beta,
            self.ignore_index,
            self.temperature,
            self.compiled,
            self.chunk_size,
            self.return_soft_hard_loss,
        )
