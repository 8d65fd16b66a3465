"""Less memory: of the language-model heads, and of what layers keep for backward."""

import torch

from liger_kernel import _recompute
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


class Recomputed:
    """What recompute returns; `remove()` takes it back."""

    def __init__(self, model: torch.nn.Module):
        self._began: list[bool] = []
        self._handles = [
            model.register_forward_pre_hook(lambda *_: self._began.append(_recompute.start())),
            model.register_forward_hook(lambda *_: self._end(), always_call=True),
        ]

    def _end(self):
        if self._began.pop():
            _recompute.stop()

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


def recompute(model: torch.nn.Module) -> Recomputed:
    """Have backward make again what this library's operators can make from what is kept anyway: the results of norms,
    beside their inputs, the product of an MLP, beside gate and up, and rotated queries and keys whose norm is made
    again.

    ```python
    apply_liger_kernel_to_llama(model)
    recomputed = liger_kernel.memory.recompute(model)
    ```

    Losses and gradients are the same to the bit. Of a Llama's layer in bfloat16 this leaves 2 · (2 hidden +
    intermediate) bytes per token unkept. Layers under gradient checkpointing keep only their inputs already: nothing
    changes there, nor in what torch.compile has compiled. Tensors of subclasses, such as DTensors, are kept. The model
    must be patched, or made of this library's modules.
    """
    return Recomputed(model)
