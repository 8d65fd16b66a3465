"""Helpers that third-party kernels import besides the operators."""

from liger_kernel.compat.triton import __getattr__, calculate_settings, compare_version, ensure_contiguous, is_hip
from liger_kernel.compat.triton import get_amp_custom_fwd_bwd as get_amp_custom_fwd_bwd
from liger_kernel.operators.common import *  # noqa: F403
