"""How much memory the language-model heads take, and how to bound it."""

import torch

from liger_kernel._library import ops


def set_memory_budget(bytes: int) -> int:
    """Let heads work on, or keep for backward, `bytes` of logits at once where a caller names no max_bytes, in the
    whole process. Returns what it was.

    0 stands for the defaults: what waits for backward takes up to 4 GiB on a GPU and 256 MiB on a CPU. Code that
    torch.compile has traced keeps what was set then. Raises ValueError for a negative number.
    """
    return ops.set_memory_budget(bytes)


def head_peak_bytes(
    tokens: int, width: int, classes: int, dtype: torch.dtype = torch.bfloat16, device: torch.device | str = "cuda",
    trains_hidden: bool = True, trains_weight: bool = True, keeps_logits: bool = True, max_bytes: int = 0,
) -> int:  # fmt: skip
    """The bytes beyond the inputs that a head's forward and backward pass take at their peak, the gradients among them.

    hidden is [tokens, width], weight [classes, width], both of dtype; tokens that are ignored do not count. On a
    CPU the scratch memory of 16-bit GEMMs comes on top. keeps_logits: of linear_log_prob and the losses of
    chunked_loss on it; False: of fused_linear_cross_entropy.
    """
    cpu = torch.device(device).type == "cpu"
    trains = trains_hidden, trains_weight
    return ops.head_peak_bytes(tokens, width, classes, dtype, cpu, *trains, keeps_logits, max_bytes)
