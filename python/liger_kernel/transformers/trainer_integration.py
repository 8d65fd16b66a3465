"""The name under which older versions of transformers' Trainer look for the patch."""

from liger_kernel.transformers.monkey_patch import _apply_liger_kernel
