"""The base of the losses between a student's and a teacher's logits."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from liger_kernel._library import ops
from liger_kernel.chunked_loss.gradients import breaks_graph, gradients_of_arguments, save_gradients
from liger_kernel.operators.common import wanted_gradients
from liger_kernel.operators.distillation import forward_with_gradients, sums_over_tokens

#: The chunk_size of the API's signatures: it stands for the library's own choice.
DEFAULT_CHUNK = 1024


def formula(kind: int, masks_ignored: bool) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
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
    def distillation_loss_fn(
        student_logits: Tensor, teacher_logits: Tensor, target: Tensor | None = None, ignore_index: int | None = None
    ) -> Tensor:
        raise NotImplementedError("a distillation loss defines distillation_loss_fn")

    @staticmethod
    def forward(
        cls: Any, ctx: Any, student_input: Tensor, student_weight: Tensor, teacher_input: Tensor,
        teacher_weight: Tensor, target: Tensor, student_bias: Tensor | None = None, teacher_bias: Tensor | None = None,
        chunk_size: int = DEFAULT_CHUNK, ignore_index: int = -100, weight_hard_loss: float = 0.5,
        weight_soft_loss: float = 0.5, beta: float = 0.5, compute_ce_loss: bool = True, temperature: float = 1.0,
        compiled: bool = True, return_soft_hard_loss: bool = False, **loss_kwargs: Any,
    ) -> Any:  # fmt: skip
        """The loss, or with return_soft_hard_loss (loss, soft, hard), all float, of which only the loss is
        differentiable.

        student_input [..., H], student_weight [V, H], teacher_input [..., H'], teacher_weight [V', H'], target [...],
        student_bias [V] and teacher_bias [V'] or None. Both logits are divided by the temperature for the soft loss,
        and the student's are then padded with zeros where V' > V. At most chunk_size rows of target are worked on at
        once, unless it is the default, which leaves their number to the library; compiled changes nothing. Raises
        ValueError where V > V'.
        """
        labels = target.reshape(-1)
        factor = 1 / labels.ne(ignore_index).sum().clamp(min=1)
        flat = lambda hidden, *others: (hidden.reshape(-1, hidden.shape[-1]), *others)
        tensors = student_input, student_weight, student_bias
        teacher = flat(teacher_input, teacher_weight, teacher_bias)
        student, wanted = flat(*tensors), wanted_gradients(ctx, *tensors)
        chunk = chunk_size * target[:1].numel()
        weights = weight_hard_loss if compute_ce_loss else 0.0, weight_soft_loss
        kind, masks_ignored = getattr(cls.distillation_loss_fn, "formula", (None, False))
        if kind is not None and len(student_weight) == len(teacher_weight) and not loss_kwargs:
            chunk = 0 if chunk_size == DEFAULT_CHUNK else chunk
            made = _run_operator(
                student, teacher, labels, factor, kind, masks_ignored, chunk, wanted, weights, beta, ignore_index,
                temperature, compute_ce_loss,
            )  # fmt: skip
        else:

            def loss_of(z, teacher_z, rows):
                return _sums(
                    z, teacher_z, labels[rows], cls.distillation_loss_fn, weights, compute_ce_loss, temperature,
                    return_soft_hard_loss, ignore_index=ignore_index, beta=beta, **loss_kwargs,
                )  # fmt: skip

            made = sums_over_tokens(student, teacher, loss_of, 3, factor, chunk, wanted=wanted)
        sums, (grad_input, *others), grad_scale = made
        grad_input = grad_input if grad_input is None else grad_input.view(student_input.shape)
        save_gradients(ctx, tensors, (grad_input, *others), grad_scale)
        loss, soft, hard = (s.clone() for s in sums * factor)
        if not return_soft_hard_loss:
            return loss
        ctx.mark_non_differentiable(soft, hard)
        return loss, soft, hard

    @staticmethod
    def backward(ctx: Any, grad_output: Any, *args: Any) -> tuple[Tensor | None, ...]:
        return gradients_of_arguments(ctx, (grad_output,), bias=5)

    @staticmethod
    def chunk_forward(
        student_input_chunk: Tensor, student_weight: Tensor, teacher_input_chunk: Tensor, teacher_weight: Tensor,
        target_chunk: Tensor, student_bias: Tensor | None = None, teacher_bias: Tensor | None = None,
        ignore_index: int = -100, compute_ce_loss: bool = True,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """(student_logits, teacher_logits, Σ of the cross entropy) of some tokens, differentiable."""
        student_logits = torch.nn.functional.linear(student_input_chunk, student_weight, student_bias)
        with torch.no_grad():
            teacher_logits = torch.nn.functional.linear(teacher_input_chunk, teacher_weight, teacher_bias)
        ce_loss = student_logits.new_zeros(()).float()
        if compute_ce_loss:
            ce_loss = _cross_entropy(student_logits, target_chunk, ignore_index)
        return student_logits, teacher_logits, ce_loss

    @staticmethod
    def _compute_loss(
        student_input_chunk: Tensor, student_weight: Tensor, teacher_input_chunk: Tensor, teacher_weight: Tensor,
        target_chunk: Tensor, student_bias: Tensor | None = None, teacher_bias: Tensor | None = None,
        distillation_loss_fn: Callable[..., Tensor] | None = None, full_target: Tensor | None = None,
        ignore_index: int = -100, weight_hard_loss: float = 0.5, weight_soft_loss: float = 0.5,
        compute_ce_loss: bool = True, temperature: float = 1, **loss_kwargs: Any,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:  # fmt: skip
        """(loss, (soft, hard, student_logits, teacher_logits)) of some tokens, as parts of those of the batch
        full_target; differentiable."""
        student_logits, teacher_logits, _ = LigerFusedLinearDistillationBase.chunk_forward(
            student_input_chunk, student_weight, teacher_input_chunk, teacher_weight, target_chunk, student_bias,
            teacher_bias, compute_ce_loss=False,
        )  # fmt: skip
        sums = _sums(
            student_logits, teacher_logits, target_chunk, distillation_loss_fn, (weight_hard_loss, weight_soft_loss),
            compute_ce_loss, temperature, True, ignore_index=ignore_index, **loss_kwargs,
        )  # fmt: skip
        counted = target_chunk if full_target is None else full_target
        loss, soft, hard = (s / counted.ne(ignore_index).sum().clamp(min=1) for s in sums)
        return loss, (soft, hard, student_logits, teacher_logits)


class _DistillationFunction(LigerFusedLinearDistillationBase):
    """The base with the arguments of this package's losses."""

    @classmethod
    @breaks_graph
    def forward(
        cls, ctx: Any, student_input: Tensor, student_weight: Tensor, teacher_input: Tensor, teacher_weight: Tensor,
        true_labels: Tensor, student_bias: Tensor | None, teacher_bias: Tensor | None, weight_hard_loss: float = 0.5,
        weight_soft_loss: float = 0.5, beta: float = 0.5, ignore_index: int = -100, temperature: float = 1.0,
        compiled: bool = True, chunk_size: int = DEFAULT_CHUNK, return_soft_hard_loss: bool = False,
    ) -> Any:  # fmt: skip
        return LigerFusedLinearDistillationBase.forward(
            cls, ctx, student_input, student_weight, teacher_input, teacher_weight, true_labels, student_bias,
            teacher_bias, chunk_size, ignore_index, weight_hard_loss, weight_soft_loss, beta, temperature=temperature,
            return_soft_hard_loss=return_soft_hard_loss,
        )  # fmt: skip


def check_temperature(module: Any) -> None:
    """Raises AssertionError where a module's temperature is 0."""
    if module.temperature == 0:
        raise AssertionError("temperature must not be 0")


class DistillationLoss(torch.nn.Module):
    """A Function of the base as a module. Raises AssertionError where the temperature is 0."""

    function: Any = None

    def __init__(
        self, weight_hard_loss: float = 0.5, weight_soft_loss: float = 0.5, beta: float = 0.5,
        ignore_index: int = -100, temperature: float = 1.0, compiled: bool = True, chunk_size: int = DEFAULT_CHUNK,
        return_soft_hard_loss: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.weight_hard_loss, self.weight_soft_loss, self.beta = weight_hard_loss, weight_soft_loss, beta
        self.ignore_index, self.temperature, self.compiled = ignore_index, temperature, compiled
        self.chunk_size, self.return_soft_hard_loss = chunk_size, return_soft_hard_loss
        check_temperature(self)

    def forward(
        self, student_input: Tensor, student_weight: Tensor, teacher_input: Tensor, teacher_weight: Tensor,
        true_labels: Tensor, student_bias: Tensor | None = None, teacher_bias: Tensor | None = None,
    ) -> Any:  # fmt: skip
        return self.function.apply(
            student_input, student_weight, teacher_input, teacher_weight, true_labels, student_bias, teacher_bias,
            self.weight_hard_loss, self.weight_soft_loss, self.beta, self.ignore_index, self.temperature,
            self.compiled, self.chunk_size, self.return_soft_hard_loss,
        )  # fmt: skip


def _run_operator(
    student, teacher, labels, factor, kind, masks_ignored, chunk, wanted, loss_weights, beta, ignore_index,
    temperature, with_hard,
):  # fmt: skip
    """([weighted sum, soft, hard] over the tokens, gradients, grad_scale) of the loss, factor times the first."""
    hard_weight, soft_weight = loss_weights
    counts = labels.ne(ignore_index).float()
    each = counts if masks_ignored else torch.ones_like(counts)
    share = 1.0 if masks_ignored else beta  # the cosine distance has beta as a factor
    of_soft, of_hard = each * factor * (soft_weight * share), counts * factor * hard_weight
    max_bytes = chunk * 2 * len(student[1]) * student[0].element_size()
    loss, divergence, nll, _, gradients, grad_scale = forward_with_gradients(
        student, teacher, labels, of_soft, of_hard, kind, beta if masks_ignored else 0.5, temperature, ignore_index,
        masks_ignored, max_bytes, wanted,
    )  # fmt: skip
    # Not a product of vectors, which autocast would round to 16 bits.
    soft, hard = share * (each * divergence).sum(), (counts * nll).sum() if with_hard else torch.zeros_like(loss)
    return torch.stack([soft_weight * soft + hard_weight * hard, soft, hard]), gradients, grad_scale


def _cross_entropy(logits, labels, ignore_index):
    return -ops.selective_log_softmax(logits, labels, 1.0, ignore_index)[0].sum()


def _sums(student, teacher, labels, distillation_loss_fn, weights, compute_ce_loss, temperature, all_terms, **options):
    """[weighted sum, soft, hard] of these tokens' logits; a term of weight 0 is left out unless all are asked for."""
    hard_weight, soft_weight = weights
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
