"""ms-swift's distillation from the K most probable classes of a teacher, on class_logits."""

import importlib

from liger_kernel.operators.lazy_logits import with_lazy_heads
from liger_kernel.transformers.patching.report import OF_TOOLS, Report

_HOME, _CLASS, _NAME = "swift.rlhf_trainers.gkd_trainer", "GKDTrainer", "compute_loss"


def _reads_few_classes(trainer):
    return trainer.gkd_logits_topk is not None and trainer.template.sequence_parallel_size == 1


def patch(max_bytes: int = 0) -> Report:
    """Run GKD of ms-swift with `--gkd_logits_topk`, from a teacher in the process or from a server, without logits.

    ms-swift normalises both distributions over the teacher's K classes: no other class of the student is computed.
    Logits of up to max_bytes (0: as in memory.set_memory_budget) of a teacher in the process are held at once. The
    losses are ms-swift's. Under FSDP, ZeRO-3 and sequence parallelism there are logits, as before. The report has
    undo(). Raises ImportError without ms-swift.
    """
    try:
        trainer = getattr(importlib.import_module(_HOME), _CLASS)
        from swift.rlhf_trainers.utils import _ForwardRedirection
    except (ImportError, AttributeError) as error:
        raise ImportError("liger_kernel.ms_swift.patch() needs ms-swift: pip install ms-swift>=4.6") from error
    report = Report("ms-swift", columns=OF_TOOLS)
    make = lambda original: with_lazy_heads(original, max_bytes, _ForwardRedirection(), _reads_few_classes)
    report.wrap(trainer, _NAME, make, _HOME, f"{_CLASS}.{_NAME}", "LazyLogits")
    return report
