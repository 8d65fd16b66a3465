"""verl's distillation from the most probable classes of a teacher on its FSDP engine, on linear_log_prob."""

import contextvars
import dataclasses
import functools
import importlib
from typing import Any

from transformers.utils import ModelOutput

from liger_kernel.operators.coverage import kernels_cover
from liger_kernel.operators.topk_distillation import linear_topk_divergence
from liger_kernel.transformers.patching.report import OF_TOOLS, Report

_ENGINE = "verl.workers.engine.fsdp.transformer_impl"
_MODELS = "verl.models.transformers.monkey_patch"
_HEAD = "verl.utils.experimental.torch_functional"


@dataclasses.dataclass
class _FusedLinearAux(ModelOutput):
    """What verl's engine reads from a model's output, [1, tokens] each."""

    distillation_losses: Any = None
    student_mass: Any = None
    teacher_mass: Any = None


@dataclasses.dataclass
class _Teacher:
    """What a head needs to know of a teacher, and what it found."""

    class_ids: Any
    logp: Any
    log_prob_min: float | None
    max_bytes: int
    found: _FusedLinearAux | None = None


#: Of the model's forward that is running.
_teacher: contextvars.ContextVar[_Teacher | None] = contextvars.ContextVar("liger_kernel.verl", default=None)


def _head_forward(original):
    """Log-probabilities and entropies of verl's head; where there is a teacher, also the divergence from it."""

    @functools.wraps(original)
    def forward(self, hidden_states, vocab_weights, input_ids, temperature=1.0):
        teacher = _teacher.get()
        if teacher is None:
            return original(self, hidden_states, vocab_weights, input_ids, temperature)
        if not kernels_cover(hidden_states) or not kernels_cover(vocab_weights):
            raise TypeError(
                f"liger_kernel.verl: no kernels for {hidden_states.dtype} on {hidden_states.device.type}; distillation "
                "from logits has use_fused_kernels=False"
            )
        divergence, nll, masses, entropy = linear_topk_divergence(
            hidden_states, vocab_weights, teacher.class_ids, teacher.logp.float(), input_ids.long(), tail="drop",
            temperature=float(temperature), log_prob_min=teacher.log_prob_min, entropy=True,
            max_bytes=teacher.max_bytes, valid_count=input_ids.numel(),
        )  # fmt: skip
        teacher.found = _FusedLinearAux(divergence, masses["student"], masses["teacher"])
        return -nll, entropy

    return forward


@functools.cache
def _with_aux(cls):
    """A class of outputs with one field more: FSDP looks for tensors in the declared fields."""
    return dataclasses.make_dataclass(cls.__name__, [("fused_linear_aux", Any, None)], bases=(cls,))


def _model_forward(original, max_bytes):
    @functools.wraps(original)
    def forward(self, *args, teacher_topk_ids=None, teacher_topk_log_probs=None, log_prob_min_clamp=None, **kwargs):
        if teacher_topk_ids is None:
            return original(self, *args, **kwargs)
        teacher = _Teacher(teacher_topk_ids, teacher_topk_log_probs, log_prob_min_clamp, max_bytes)
        before = _teacher.set(teacher)
        try:
            output = original(self, *args, **kwargs)
        finally:
            _teacher.reset(before)
        return _with_aux(type(output))(**output, fused_linear_aux=teacher.found)

    return forward


def _patch_forward(original, max_bytes):
    @functools.wraps(original)
    def patch_forward_with_backends(model, use_fused_kernels=False, fused_kernels_backend=None):
        original(model, use_fused_kernels=use_fused_kernels, fused_kernels_backend=fused_kernels_backend)
        if use_fused_kernels and fused_kernels_backend == "liger":
            model.__class__.forward = _model_forward(model.__class__.forward, max_bytes)

    return patch_forward_with_backends


def _prepare(original):
    """Hands the teacher's classes to the model, sliced as its tokens are."""

    @functools.wraps(original)
    def prepare_model_inputs(self, micro_batch):
        from verl.utils import tensordict_utils as tu
        from verl.utils.ulysses import slice_input_tensor

        inputs, output_args = original(self, micro_batch)
        asked = all(
            tu.get_non_tensor_data(data=micro_batch, key=key, default=default)
            for key, default in (
                *(("use_fused_kernels", False), ("use_remove_padding", True), ("distillation_use_topk", False)),
            )
        )
        ours = getattr(self.module, "_verl_fused_kernels_backend", None) == "liger"
        if asked and ours and "teacher_ids" in micro_batch.keys():
            of_teacher = [micro_batch[key].values().unsqueeze(0) for key in ("teacher_ids", "teacher_logprobs")]
            if self.use_ulysses_sp:
                of_teacher = [slice_input_tensor(t, dim=1, padding=True) for t in of_teacher]
            inputs["teacher_topk_ids"], inputs["teacher_topk_log_probs"] = of_teacher
            inputs["log_prob_min_clamp"] = self.__dict__.get("_liger_log_prob_min")
        return inputs, output_args

    return prepare_model_inputs


def _step(original):
    """Notes the loss's bound of log-probabilities, which verl applies to logits."""

    @functools.wraps(original)
    def forward_step(self, micro_batch, loss_function, forward_only):
        config = getattr(loss_function, "keywords", {}).get("distillation_config")
        self._liger_log_prob_min = None if config is None else config.distillation_loss.log_prob_min_clamp
        return original(self, micro_batch, loss_function, forward_only)

    return forward_step


def patch(max_bytes: int = 0) -> Report:
    """Run verl's loss_mode=forward_kl_topk without logits on the FSDP engine, with use_fused_kernels=True and
    fused_kernel_options.impl_backend=liger: log-probabilities, entropies, the divergence and both masses by one call.

    To be called in every worker before it makes its model: from a module that actor_rollout_ref.model.external_lib
    names. The losses are those of verl's compute_forward_kl_topk in float; its counts of classes that are among the
    most probable of both (overlap_*) are not computed. Logits of up to max_bytes (0: as in memory.set_memory_budget)
    wait for backward. Models that were made with the patch keep their forward after undo(), which the report has.
    Raises ImportError without verl.
    """
    try:
        engine = importlib.import_module(_ENGINE).FSDPEngineWithLMHead
        models, head = importlib.import_module(_MODELS), importlib.import_module(_HEAD).FusedLinearForPPO
    except ImportError as error:
        raise ImportError("liger_kernel.verl.patch() needs verl: pip install verl>=0.9") from error
    report = Report("verl", columns=OF_TOOLS)
    for owner, name, make in (
        (head, "forward", _head_forward),
        (models, "patch_forward_with_backends", functools.partial(_patch_forward, max_bytes=max_bytes)),
        (engine, "prepare_model_inputs", _prepare),
        (engine, "forward_step", _step),
    ):
        report.wrap(owner, name, make, owner.__name__, name, "linear_log_prob")
    return report
