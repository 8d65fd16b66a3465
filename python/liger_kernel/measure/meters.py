"""The peak memory of a step, and kernels by what they belong to."""

import ctypes
import gc
import os
import re
import resource
import sys
import time
from pathlib import Path

import torch


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device, or the host, had no room."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error)


class Memory:
    """The peak of one step: resident memory of the process on a CPU, torch's own count on a GPU."""

    def __init__(self, device):
        self.cuda, self.linux = device == "cuda", os.path.exists("/proc/self/clear_refs")
        self.before, self.highest = self.now("VmHWM"), 0

    def now(self, field):
        if self.linux:
            return int(Path("/proc/self/status").read_text().split(field + ":")[1].split()[0]) * 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

    def start(self):
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        elif self.linux:
            self.highest = self.process()
            gc.collect()
            libc = ctypes.CDLL(None)
            if hasattr(libc, "malloc_trim"):
                # glibc keeps freed blocks resident, which hides what a step needs, or adds to it: have it return what
                # it holds, and give every tensor (M_MMAP_THRESHOLD, -3) separate pages from here on.
                libc.malloc_trim(0)
                libc.mallopt(-3, 1 << 16)
            Path("/proc/self/clear_refs").write_text("5")
            self.before = self.now("VmRSS")

    def step(self, parameters, gradients, optimiser):
        """Bytes since start beyond model, gradients and optimiser state; at start there were no gradients."""
        if self.cuda:
            return torch.cuda.max_memory_allocated() - parameters - gradients - optimiser
        # Elsewhere than on Linux the mark cannot be reset: it counts from before there was an optimiser state.
        return self.now("VmHWM") - self.before - gradients - (0 if self.linux else optimiser)

    def process(self):
        return torch.cuda.max_memory_reserved() if self.cuda else max(self.highest, self.now("VmHWM"))

    def since_start(self):
        """The peak since start: of what torch's allocator has given out, or of the process."""
        return torch.cuda.max_memory_allocated() if self.cuda else self.now("VmHWM")


# What a kernel belongs to, by its name: the first that fits.
PARTS = (
    ("communication", "nccl"),
    ("attention", "flash|fmha|softmax_warp|attention"),
    ("GEMM", "gemm|nvjet|cutlass|xmma|cublas"),
    ("optimiser", "adam|multi_tensor"),
    ("ours", "liger::"),
    ("Triton", "triton|^_[a-z]|^liger_|^element_mul_kernel"),
    ("other", ""),
)


def kernel_times(step):
    """{part: ms} of one step on a GPU, the time in it when the GPU only communicates, and when it is idle; its
    launches."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        begin = time.perf_counter()
        step()
        torch.cuda.synchronize()
        whole = (time.perf_counter() - begin) * 1e3
    parts = {part: 0.0 for part, _ in PARTS}
    unnamed, launches = {}, 0
    spans = {"computing": [], "busy": []}
    for event in profiler.events():
        if event.device_type != torch.autograd.DeviceType.CUDA or event.is_user_annotation:
            continue
        part = next(part for part, names in PARTS if re.search(names, event.name))
        span = (event.time_range.start / 1e3, event.time_range.end / 1e3)
        parts[part] += span[1] - span[0]
        launches += 1
        spans["busy"].append(span)
        if part != "communication":
            spans["computing"].append(span)
        if part == "other":
            unnamed[event.name[:80]] = unnamed.get(event.name[:80], 0.0) + span[1] - span[0]
    largest = dict(sorted(unnamed.items(), key=lambda item: -item[1])[:8])
    busy, computing = covered(spans["busy"]), covered(spans["computing"])
    parts |= {"communication alone": busy - computing, "idle": max(0.0, whole - busy)}
    return {"ms": parts, "step": whole, "launches": launches, "largest of other": largest}


def covered(spans):
    """The time that is in at least one of some spans."""
    total, end = 0.0, float("-inf")
    for first, last in sorted(spans):
        total += max(0.0, last - max(first, end))
        end = max(end, last)
    return total
