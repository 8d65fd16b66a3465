"""What a patch did, as a table, and how to take it back."""

from liger_kernel.transformers.patching.report import Replacement, Report, Skip  # noqa: F401
