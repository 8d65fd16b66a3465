"""The function that applies a row of the table of families to Hugging Face's classes or to one model."""

from liger_kernel.transformers.patching.apply import WrongModel, patch  # noqa: F401
