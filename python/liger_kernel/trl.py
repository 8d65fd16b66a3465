"""TRL's trainers on this library's operators: `liger_kernel.trl.patch()` before or after a trainer is made, nothing
else."""

import functools
import importlib.util
import inspect

import torch
from transformers import PreTrainedModel
from transformers.utils import is_triton_available

from liger_kernel._library import ops
from liger_kernel.operators.common import IGNORE_INDEX, autocast_dtype, first_derivative_only, wanted_gradients
from liger_kernel.operators.coverage import kernels_cover
from liger_kernel.operators.distillation import LinearTokenDistillation, TokenOptions
from liger_kernel.operators.head import OUTPUTS as ALL_OUTPUTS
from liger_kernel.operators.head import RESULTS, linear_log_prob
from liger_kernel.operators.lazy_logits import LazyLogits, with_lazy_heads
from liger_kernel.operators.topk_distillation import topk_divergence, topk_entropy
from liger_kernel.transformers.monkey_patch import _apply_liger_kernel_to_instance
from liger_kernel.transformers.patching.report import OF_TOOLS, Report

#: What TRL's function can give, in its order.
OUTPUTS = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


class _LinearLogProb(torch.autograd.Function):
    """linear_log_prob, whose backward gathers the weight again where ZeRO-3 has taken it away since."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, ids, temperature, softcap, logit_scale, outputs, max_bytes):
        keep_bytes = -any(wanted_gradients(ctx, hidden, weight, bias))  # -1: of logits as many as max_bytes says
        ctx.dtype = autocast_dtype(hidden)
        ctx.options = dict(
            temperature=float(temperature),
            softcap=float(softcap),
            logit_scale=float(logit_scale),
            ignore_index=IGNORE_INDEX,
            valid_count=ids.numel(),
            max_bytes=max_bytes,
            **{ALL_OUTPUTS[name]: True for name in OUTPUTS if name in outputs},  # TRL may list "log_probs" too
        )  # no id is ignored, so that the device is not asked for their number
        logp, *found, stats, classes, logits = ops.linear_log_prob_forward(
            hidden, weight, bias, ids, None, None, None, ctx.dtype, keep_bytes, **ctx.options
        )
        found = dict(zip(RESULTS, found))
        ctx.save_for_backward(hidden, weight, bias, ids, stats, classes, logits)
        ctx.set_materialize_grads(False)
        found = [found[name] if name in outputs else None for name in OUTPUTS]
        ctx.mark_non_differentiable(*(t for t in found[1:] if t is not None))
        return logp, *found

    @staticmethod
    @first_derivative_only
    def backward(ctx, dlogp, dentropy, *_):
        if dlogp is None and dentropy is None:
            return (None,) * 9
        from trl.trainer.utils import maybe_gather_lm_head_ctx

        hidden, weight, bias, ids, stats, classes, logits = ctx.saved_tensors
        again = torch.compiler.is_compiling() or torch._C._autograd._get_current_graph_task_keep_graph()
        backward = (
            ops.linear_log_prob_backward if again else ops.linear_log_prob_backward_
        )  # which overwrites the logits
        wanted = ctx.needs_input_grad[:3]
        with maybe_gather_lm_head_ctx(weight, bias):
            found = backward(
                *(dlogp, dentropy, None, None, None, None),
                *(hidden, weight, bias, ids, None, None, None, None),
                *(stats, classes, logits),
                ctx.dtype,
                *wanted,
                False,
                False,
                **ctx.options,
            )
        return *(t if w else None for t, w in zip(found, wanted)), *(None,) * 6


def _covered(*tensors):
    return all(t is None or kernels_cover(t) for t in tensors)


def _log_prob_function(original, max_bytes):
    # Up to TRL 1.14 it gives log-probabilities and entropies, and is not asked for more.
    chooses = "outputs" in inspect.signature(original.forward).parameters

    class ChunkedLogProbFunction:
        @staticmethod
        def apply(
            hidden,
            weight,
            bias,
            targets,
            temperature,
            chunk_size,
            final_logit_softcapping=None,
            logit_scale=1.0,
            outputs=OUTPUTS if chooses else OUTPUTS[:1],
        ):
            softcap = 0.0 if final_logit_softcapping is None else final_logit_softcapping
            sensible = (
                temperature > 0
                and logit_scale > 0
                and (final_logit_softcapping is None or 0 < softcap < float("inf"))
                and len(weight) > 0
            )
            if not sensible or not _covered(hidden, weight, bias):
                return original.apply(
                    hidden,
                    weight,
                    bias,
                    targets,
                    temperature,
                    chunk_size,
                    final_logit_softcapping,
                    logit_scale,
                    *([outputs] if chooses else []),
                )
            found = _LinearLogProb.apply(
                hidden, weight, bias, targets, temperature, softcap, logit_scale, outputs, max_bytes
            )
            return found if chooses else found[:2]

    return ChunkedLogProbFunction


#: The beta for which TRL's kernels take less time on a GPU than ours: benchmarks/replacements.py measures it.
FASTER_IN_TRL = frozenset((0, 1))


def _is_faster(hidden, beta):
    """Whether TRL's kernels take less time than ours."""
    return hidden.is_cuda and beta in FASTER_IN_TRL and is_triton_available()


def _divergence_function(original, max_bytes):
    class ChunkedDivergenceFunction:
        @staticmethod
        def apply(
            student_hidden,
            student_weight,
            student_bias,
            teacher_hidden,
            teacher_weight,
            teacher_bias,
            beta,
            temperature=1.0,
            student_logit_scale=1.0,
            student_final_logit_softcapping=None,
            teacher_logit_scale=1.0,
            teacher_final_logit_softcapping=None,
        ):
            tensors = student_hidden, student_weight, student_bias, teacher_hidden, teacher_weight, teacher_bias
            softcaps = student_final_logit_softcapping, teacher_final_logit_softcapping
            options = beta, temperature, student_logit_scale, softcaps[0], teacher_logit_scale, softcaps[1]
            sensible = (
                all(cap is None or 0 < cap < float("inf") for cap in softcaps)
                and min(temperature, *options[2::2]) > 0
                and 0 <= beta <= 1
            )
            if not sensible or not _covered(*tensors) or _is_faster(student_hidden, beta):
                return original.apply(*tensors, *options)
            from trl.trainer.utils import maybe_gather_lm_head_ctx

            maps = tuple(float(m or 0) for m in options[2:])
            token_options = TokenOptions(
                beta=float(beta), temperature=float(temperature), maps=maps, max_bytes=max_bytes, entropy=True,
                float_logits=True, around=maybe_gather_lm_head_ctx,
            )  # fmt: skip
            loss, _, _, entropy = LinearTokenDistillation.apply(token_options, None, *tensors)
            return loss, entropy

    return ChunkedDivergenceFunction


def _fused_logprob_entropy(original, max_bytes):
    def selective_log_softmax_and_entropy(logits, index, temperature=1.0, row_mask=None):
        lazy = isinstance(logits, LazyLogits)
        if not lazy and not _covered(logits):
            return original(logits, index, temperature, row_mask)
        if row_mask is not None:
            index = index.masked_fill(row_mask == 0, IGNORE_INDEX)
        if lazy:
            return (logits / float(temperature)).log_prob(index, outputs=("entropy",))
        return ops.selective_log_softmax(logits, index, float(temperature), IGNORE_INDEX)

    return selective_log_softmax_and_entropy


def _chunked_jsd_loss(original, max_bytes):
    """Of the asynchronous distillation trainer: a teacher's log-probabilities of a few classes per token."""

    def chunked_jsd_loss(
        hidden_valid, lm_head_weight, lm_head_bias, logit_scale, final_logit_softcapping, target_ids,
        teacher_target_logps, valid_candidate_mask, beta, temperature, add_tail_bucket, teacher_id_idx, num_teachers,
        chunk_size,
    ):  # fmt: skip
        softcap = final_logit_softcapping
        sensible = temperature > 0 and logit_scale > 0 and (softcap is None or 0 < softcap < float("inf"))
        if not sensible or not _covered(hidden_valid, lm_head_weight, lm_head_bias):
            return original(
                hidden_valid, lm_head_weight, lm_head_bias, logit_scale, softcap, target_ids, teacher_target_logps,
                valid_candidate_mask, beta, temperature, add_tail_bucket, teacher_id_idx, num_teachers, chunk_size,
            )  # fmt: skip
        tail = "bucket" if add_tail_bucket else "renormalise"
        _, entropy, student, *outside = linear_log_prob(
            hidden_valid, lm_head_weight, None, lm_head_bias, temperature, outputs=("entropy",), softcap=softcap,
            logit_scale=logit_scale, max_bytes=max_bytes, log_tail=add_tail_bucket,
            class_ids=target_ids.masked_fill(~valid_candidate_mask, -1),
        )  # fmt: skip
        teacher = teacher_target_logps.float()
        each = topk_divergence(student, teacher, valid_candidate_mask, beta, tail, *outside)
        with torch.no_grad():
            of_teacher = topk_entropy(teacher, valid_candidate_mask, tail)
            stats = each.new_zeros(3 * num_teachers)
            if teacher_id_idx is not None:  # of each teacher: its tokens, their divergences and entropies
                numbers = torch.stack([torch.ones_like(each), each, of_teacher], -1)
                stats = each.new_zeros(num_teachers, 3).index_add(0, teacher_id_idx, numbers).flatten()
        return each.sum(), each.detach().sum(), entropy.detach().sum(), of_teacher.sum(), stats

    return chunked_jsd_loss


def _supports(original, max_bytes):
    def supports(logits, index=None, row_mask=None):
        if not isinstance(logits, LazyLogits) and not _covered(logits):
            return is_triton_available() and original(logits, index, row_mask)
        alike = all(
            t is None or (t.shape == logits.shape[:-1] and t.device == logits.device and not t.is_floating_point())
            for t in (index, row_mask)
        )
        return alike and logits.ndim > 0 and logits.shape[-1] > 0

    return supports


def _available(original, max_bytes):
    return lambda: True  # TRL asks this first, and then what `_supports` answers


def _compute_loss(original, max_bytes):
    """Of a trainer that distils from logits: those of student and teacher at a few classes, and sums over a row."""
    from trl.models.utils import _ForwardRedirection

    return with_lazy_heads(original, max_bytes, _ForwardRedirection())


def _compacts(original, max_bytes):
    return lambda device: device.type in ("cpu", "cuda") or original(device)


def _layers(trainer, model, left_out=("memory_budget", "cuda_graphs", "base")):
    """Patches the layers of a model of a trainer, by its configuration."""
    model = trainer.accelerator.unwrap_model(model)
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    if isinstance(model, PreTrainedModel):
        config = trainer.args.liger_kernel_config or {}
        switches = {name: value for name, value in config.items() if name not in left_out}
        _apply_liger_kernel_to_instance(model, **switches | {"fused_linear_cross_entropy": False})


def _patch_others(trainer):
    """Patches the models beside the one that is trained, which alone transformers patches for use_liger_kernel. A
    reference that rounds in other places than the policy differs from it before the first step, and rewards are noise
    of that size."""
    for name in ("ref_model", "teacher_model") if trainer.args.use_liger_kernel else ():
        model = getattr(trainer, name, None)
        if isinstance(model, torch.nn.Module) and model is not trainer.model:
            _layers(trainer, model)


def _patch_reference(trainer):
    """Patches what log-probabilities of the reference are computed with when a trainer is made: without a reference
    model the policy, which transformers patches later."""
    _patch_others(trainer)
    if trainer.args.use_liger_kernel and trainer.ref_model is None:
        _layers(trainer, trainer.model, left_out=("memory_budget", "cuda_graphs"))


def _after(patch_models):
    """What makes a trainer's method that patches models first."""

    def make(original, max_bytes):
        @functools.wraps(original)
        def method(self, *args, **kwargs):
            patch_models(self)
            return original(self, *args, **kwargs)

        return method

    return make


#: What happens where TRL lacks an attribute: the report notes it; it is made, because TRL has it only where Triton is
#: installed; or nothing, because other versions have it.
_NOTE, _MAKE, _OTHERS = range(3)
#: (module or module:class, attribute, what makes its replacement of the original, by what, one of the above)
_PARTS = (
    *(  # of TRL 1.14, whose trainers have names of their own for it
        (f"trl.trainer.{name}_trainer", "_ChunkedLogProbFunction", _log_prob_function, "linear_log_prob", _OTHERS)
        for name in ("dpo", "kto", "grpo")
    ),
    ("trl.trainer.utils", "_ChunkedLogProbFunction", _log_prob_function, "linear_log_prob", _NOTE),
    ("trl.trainer.distillation_trainer", "ChunkedDivergenceFunction", _divergence_function, "divergence", _NOTE),
    (
        "trl.experimental.async_distillation.async_distillation_trainer",
        "_chunked_jsd_loss",
        _chunked_jsd_loss,
        "linear_log_prob",
        _NOTE,
    ),
    ("trl.trainer.utils", "_use_triton", _compacts, "CPU and CUDA", _NOTE),
    ("trl.trainer.distillation_trainer", "_use_triton", _compacts, "CPU and CUDA", _NOTE),
    ("trl.trainer.utils", "_supports_trl_loss_kernel", _supports, "CPU and CUDA", _NOTE),
    ("trl.trainer.utils", "_fused_logprob_entropy", _fused_logprob_entropy, "selective_log_softmax", _MAKE),
    ("trl.trainer.utils", "is_triton_available", _available, "always", _NOTE),
    (
        "trl.trainer.base_trainer:_BaseTrainer",
        "train",
        _after(_patch_others),
        "layers of references and teachers",
        _NOTE,
    ),
    *(
        (
            f"trl.trainer.{name}_trainer:{name.upper()}Trainer",
            "_precompute_ref_logps",
            _after(_patch_reference),
            "layers",
            _NOTE,
        )
        for name in ("dpo", "kto")
    ),
    *(
        (f"trl.experimental.{name}.{name}_trainer:{trainer}Trainer", "compute_loss", _compute_loss, "LazyLogits", _NOTE)
        for name, trainer in dict(
            server_distillation="ServerDistillation", sdft="SDFT", sdpo="SDPO", iw_opd="IWOPD"
        ).items()
    ),
)


@functools.cache
def _replacement(make, original, max_bytes):
    new = make(original, max_bytes)
    new.liger_original = original
    return new


def _owner(name):
    """A module of TRL, or a class in it; None where it has none, or lacks what that one imports."""
    name, _, of_class = name.partition(":")
    try:
        module = importlib.import_module(name)
    except ImportError:
        return None
    return getattr(module, of_class, None) if of_class else module


def patch(max_bytes: int = 0) -> Report:
    """Run the fused head, the divergence and the log-probabilities of TRL's trainers on linear_log_prob, divergence and
    selective_log_softmax, on CPU and CUDA; also the loss of the asynchronous distillation trainer, and, without logits,
    those of the trainers that distil from a few classes per token (server distillation, SDFT, SDPO, IW-OPD).

    With use_liger_kernel=True, reference models and teachers get the layers that transformers gives the trained model:
    policy and reference are then the same function before the first step, where DPO's loss is ln 2 and rewards are 0.

    Attributes of TRL's modules are replaced; trainers, models and configurations stay as they are, also those that
    exist already. Logits of up to max_bytes (0: as in memory.set_memory_budget) wait for backward, others are made
    again. Where there are no kernels (float64, other devices), and where TRL's own are faster (a divergence with beta 0
    or 1 on a GPU), TRL's own functions run. The report says what was replaced, what this TRL does not have, and has
    undo(). Raises ImportError without TRL.
    """
    try:
        import trl
    except ImportError as error:
        raise ImportError("liger_kernel.trl.patch() needs TRL: pip install trl>=1.14") from error
    report = Report(f"trl {trl.__version__}", columns=OF_TOOLS)
    for name, attribute, make, by, missing in _PARTS:
        owner = _owner(name)
        original = getattr(owner, attribute, None)
        if original is None and missing != _MAKE:
            if missing == _NOTE:
                report.skip(name, attribute, "the installed TRL has none")
            continue
        original = getattr(original, "liger_original", original)
        report.rebind(owner, attribute, _replacement(make, original, max_bytes), name, attribute, by)
    return report
