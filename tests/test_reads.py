"""Kernels read nothing behind their inputs, where a page that nobody may touch follows."""

import subprocess
import sys

GUARDED = """
import ctypes, mmap
import torch
from liger_kernel.transformers.functional import liger_modulated_rms_norm

def guarded(shape):
    # ones whose last byte is that of a page, with a page behind it that nobody may touch
    size = 2 * torch.Size(shape).numel()
    memory = mmap.mmap(-1, 2 * mmap.PAGESIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mprotect(ctypes.c_void_p(address + mmap.PAGESIZE), mmap.PAGESIZE, 0) == 0
    numbers = torch.frombuffer(memory, dtype=torch.bfloat16, count=size // 2, offset=mmap.PAGESIZE - size)
    return numbers.fill_(1).view(shape)

x, scale, shift = (guarded((3, 7)) for _ in range(3))
y = liger_modulated_rms_norm(x, guarded((7,)), scale, shift, 1e-6)
torch.testing.assert_close(y, torch.full_like(y, 3))
"""


def test_nothing_is_read_behind_a_tensor():
    """Also for threads whose row is behind the last one. In a process of its own, for it would crash."""
    done = subprocess.run([sys.executable, "-c", GUARDED], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stderr}\nexit code {done.returncode}"
