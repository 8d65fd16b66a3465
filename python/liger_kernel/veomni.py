"""VeOmni's distillation from the most probable classes of a teacher, on linear_log_prob."""

import functools
import importlib

from torch.nn.functional import pad

from liger_kernel.operators.coverage import kernels_cover
from liger_kernel.operators.topk_distillation import linear_topk_divergence
from liger_kernel.transformers.patching.report import OF_TOOLS, Report

_HOME, _NAME = "veomni.ops.kernels.cross_entropy", "chunk_topk_distill_function"


def _replacement(original, max_bytes):
    def chunk_topk_distill_function(
        hidden_states, weights, labels, teacher_topk_ids, teacher_topk_log_probs, chunk_size=1024, ignore_index=-100,
        shift_labels=None, temperature=1.0, log_prob_min_clamp=None,
    ):  # fmt: skip
        if not kernels_cover(hidden_states) or not kernels_cover(weights) or not temperature > 0:
            return original(
                hidden_states, weights, labels, teacher_topk_ids, teacher_topk_log_probs, chunk_size, ignore_index,
                shift_labels, temperature, log_prob_min_clamp,
            )  # fmt: skip
        from veomni.distributed.parallel_state import get_parallel_state

        shifts = shift_labels is None and not get_parallel_state().sp_enabled
        target = labels if shift_labels is None else shift_labels
        if shifts:  # the last hidden state predicts nothing, and the first label and teacher's row are not predicted
            hidden_states, target = hidden_states[..., :-1, :], labels[..., 1:]
            teacher_topk_ids, teacher_topk_log_probs = teacher_topk_ids[..., 1:, :], teacher_topk_log_probs[..., 1:, :]
        divergence, nll, masses, entropy = linear_topk_divergence(
            hidden_states, weights, teacher_topk_ids, teacher_topk_log_probs.float(), target, tail="drop",
            temperature=temperature, ignore_index=ignore_index, log_prob_min=log_prob_min_clamp, max_bytes=max_bytes,
            entropy=True,
        )  # fmt: skip
        results = -nll, entropy, divergence, masses["student"], masses["teacher"]
        return tuple(pad(t, (0, 1)) for t in results) if shifts else results

    return chunk_topk_distill_function


def patch(max_bytes: int = 0) -> Report:
    """Run `chunk_topk_distill_function` of VeOmni, which verl's distillation calls there, on linear_log_prob.

    The results are the original's: log-probabilities, entropies, the forward KL divergence over the teacher's classes,
    and both masses. Logits of up to max_bytes (0: as in memory.set_memory_budget) wait for backward. The report has
    undo(). Raises ImportError without VeOmni.
    """
    try:
        module = importlib.import_module(_HOME)
    except ImportError as error:
        raise ImportError("liger_kernel.veomni.patch() needs VeOmni: pip install veomni>=0.1.12") from error
    report = Report("veomni", columns=OF_TOOLS)
    if not hasattr(module, _NAME):
        report.skip(_HOME, _NAME, "the installed VeOmni has none")
        return report
    make = functools.partial(_replacement, max_bytes=max_bytes)
    report.wrap(module, _NAME, make, _HOME, _NAME, "linear_log_prob")
    return report
