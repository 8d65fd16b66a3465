"""`liger_kernel.batch_invariant`: a document's results have the same bits in any batch."""

from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from liger_kernel._invariance import products
from liger_kernel._invariance.audit import Audit
from liger_kernel._invariance.parts import SWITCH, judge
from liger_kernel._patch import _base_of
from liger_kernel.transformers.patching.report import Report


class BatchInvariant:
    """What `batch_invariant` returns; printed, the report."""

    def __init__(self, report: Report, audit: Audit | None):
        #: Which modules compute by which way, and which do not, and why.
        self.report = report
        #: With audit=True, what has kept the rows of each forward pass.
        self.audit = audit
        self._on = True

    def undo(self) -> None:
        """Switch off: the model has its attention back, and the process its products, unless another model needs
        them."""
        if not self._on:
            return
        self._on = False
        if self.audit is not None:
            self.audit.stop()
        self.report.undo()
        products.leave()

    def __enter__(self) -> "BatchInvariant":
        return self

    def __exit__(self, *_: Any) -> None:
        self.undo()

    def __str__(self) -> str:
        return str(self.report)


def batch_invariant(model: nn.Module, *, strict: bool = True, audit: bool = False) -> BatchInvariant:
    """From now on, or within `with batch_invariant(model)`, hidden states and log-probabilities of a document have the
    same bits whatever else is in the batch, and backward passes are deterministic.

    ```python
    liger_kernel.patch(model)
    with liger_kernel.batch_invariant(model):
        old = log_probs(model, batch)
    ```

    A document is a row of the batch, padded on the right or not, or one of several packed in a row, which position_ids
    or cu_seq_lens_q tell. Its bits are those that it has alone, with the same dtype, device, versions and number of
    threads. docs/batch-invariance.md has what is promised and what it costs.

    Products and pointwise functions are those of the whole process: while it is on for one model, others compute by the
    same ways.

    Args:
        model: a transformers model, after `liger_kernel.patch`, also in PEFT, DDP or FSDP2.
        strict: raise where a module is refused; otherwise the report names it, and its rows may differ.
        audit: keep a hash of every row that modules return in each forward pass: `audit.first_difference` of the result
            then names the first module that differs.

    Raises TypeError for a model that is none of transformers', ValueError where a module is refused, with all reasons.
    In a forward pass, attention raises ValueError for padding before a token, and NotImplementedError for a cache, for
    dropout and for masks that are not causal within documents.
    """
    inner = _base_of(model.module if isinstance(model, DistributedDataParallel) else model)
    report = Report(f"{SWITCH}: {type(inner).__name__}")
    judge(inner, report)
    if strict and report.skipped:
        report.undo()
        reasons = "; ".join(dict.fromkeys(f"{skip.name}: {skip.reason}" for skip in report.skipped))
        raise ValueError(f"batch_invariant refuses {reasons}")
    products.enter()
    keeper = Audit(inner) if audit else None
    if keeper is not None:
        keeper.start()
    return BatchInvariant(report, keeper)
