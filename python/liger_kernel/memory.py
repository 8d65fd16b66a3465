"""Less memory: of the language-model heads, and of what layers keep for backward."""

from collections.abc import Callable, Mapping

import torch

from liger_kernel._library import ops
from liger_kernel._memory.layers import LEVELS
from liger_kernel._memory.plan import Kept, Plan, Planner, bytes_of_moments, make_plan
from liger_kernel._recompute import Recomputed


def set_memory_budget(bytes: int) -> int:
    """Let heads work on, or keep for backward, `bytes` of logits at once where a caller names no max_bytes, in the
    whole process. Returns what it was.

    0 stands for the defaults: what waits for backward takes up to a sixteenth of a GPU's memory, but not more than 4
    GiB, and 256 MiB on a CPU. Code that torch.compile has traced keeps what was set then. Raises ValueError for a
    negative number.
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
    trains = trains_hidden, trains_weight
    return ops.head_peak_bytes(tokens, width, classes, dtype, torch.device(device), *trains, keeps_logits, max_bytes)


def recompute(model: torch.nn.Module) -> Recomputed:
    """Have backward recompute what this library's operators can from what is kept anyway: the results of norms,
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


def keep(model: torch.nn.Module, level: str) -> Kept:
    """Have every layer of a transformers model keep for backward what one level of LEVELS says, unmeasured: "all",
    "cheap", "input" (gradient checkpointing) or "host" (its input in pinned memory of the host, by copies that run
    beside the computation). `undo()` of what is returned takes it back.

    ```python
    kept = liger_kernel.memory.keep(model, "host")
    ```

    For sequences so long that not even the inputs of layers fit on the GPU, and a plan's steps would take long. Losses
    and gradients are the same to the bit. Raises ValueError for another level, for "host" where the model is not on a
    GPU, and where the model has no GradientCheckpointingLayer.
    """
    return Kept(model, level)


def plan(
    model: torch.nn.Module,
    batch: Mapping[str, torch.Tensor],
    budget: int | float | str,
    *,
    loss: Callable[[torch.nn.Module, Mapping], torch.Tensor] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> Plan:
    """What each layer of a transformers model should keep for backward, so that a step is as fast as a budget of
    memory allows.

    ```python
    plan = liger_kernel.memory.plan(model, batch, budget="70GiB", optimizer=optimizer)
    print(plan)
    plan.apply()
    ```

    Runs two steps with every layer checkpointed, and a layer of each kind by itself at each level of LEVELS; where such
    a step does not fit on the GPU, and there is one process, with every layer's input on the host. No gradient and no
    state of the random number generator is left behind. Layers then get the level that saves the most time per byte,
    until the predicted peak reaches the budget. Losses and gradients are the same to the bit at every level.

    Args:
        model: in training; its layers are transformers' GradientCheckpointingLayer. Gradient checkpointing that is on
            is overridden where the plan is applied.
        batch: as large as batches get.
        budget: of what torch's allocator gives out on the model's device: bytes, or a text such as "70GiB". Leave a
            few GiB of a GPU for what is not torch's, and for gaps between its blocks.
        loss: what is differentiated, of the model and a batch; by default `model(**batch).loss`.
        optimizer: if it has not taken a step, the two moments of an Adam are added to the peak.

    Raises ValueError if the budget is below what a step takes with every layer's input on the host, or checkpointed on
    a CPU, and where there are no such layers or the model is in evaluation. With several processes all must call it;
    they take the measurements of the one that needs most.
    """
    compute = loss or (lambda model, batch: model(**batch).loss)
    moments = 0
    if optimizer is not None:
        every = [p for group in optimizer.param_groups for p in group["params"]]
        moments = bytes_of_moments(p for p in every if not optimizer.state.get(p))
    return make_plan(model, lambda: compute(model, batch), budget, moments, agree=True)


def plan_later(model: torch.nn.Module, budget: int | float | str) -> Planner:
    """Make and apply a plan for `budget` when the model first runs in training with labels, and again for a batch that
    has more tokens. The Planner that is returned has it as `plan`; the log shows it.

    This is what `TrainingArguments(use_liger_kernel=True, liger_kernel_config={"memory_budget": "70GiB"})` does. Before
    the first step of an optimizer, room is left for two moments of each trained parameter, as AdamW has them. Under
    FSDP2, by hand or by accelerate and Trainer, every layer is checkpointed in the first step, all processes plan
    together before the second, and look after the second, fourth, eighth, ... step whether the batches of one of them
    have grown. FSDP1 and ZeRO need `plan`, called by all processes between two steps; DDP does not.
    """
    return Planner(model, budget)
