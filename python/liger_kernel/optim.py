"""AdamW at the rate of the memory."""

import functools
import inspect
import weakref
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

import torch

from liger_kernel._library import ops
from liger_kernel.utils import is_dtensor

_STATES = {"step", "exp_avg", "exp_avg_sq", "master"}


@functools.cache
def _foreign_options() -> frozenset[str]:
    """The options of torch's optimizers that this one has not."""
    optimizers = [o for o in vars(torch.optim).values() if isinstance(o, type) and issubclass(o, torch.optim.Optimizer)]
    every = {name for optimizer in optimizers for name in inspect.signature(optimizer).parameters}
    own = {*inspect.signature(LigerAdamW).parameters, "foreach", "fused"}
    return frozenset(every - own - {"args", "kwargs", "defaults", "decoupled_weight_decay"})


def _check_options(group: Mapping[str, Any]) -> None:
    """Raises ValueError where a group asks for what LigerAdamW would leave out without a word."""
    for name in sorted(_foreign_options() & group.keys()):
        if isinstance(value := group[name], torch.Tensor) or value:
            raise ValueError(f"LigerAdamW has no {name}, and a group of parameters has {name}={value}")
    if group.get("decoupled_weight_decay") is False and group.get("weight_decay"):
        raise ValueError("LigerAdamW decays weights apart from the gradients, and the group is one of torch.optim.Adam")


class LigerAdamW(torch.optim.AdamW):
    """`torch.optim.AdamW(fused=True)` (Loshchilov and Hutter 2019, arXiv:1711.05101) with kernels that update all
    parameters at the rate of the device's memory, in a fixed order: the same step gives the same bits.

    Its state dict is torch's: each loads the other's. Parameters may be float32, bfloat16 or float16, on a CPU or a
    GPU, and DTensors, as FSDP2 has them.

    Args:
        state_dtype: of the two moments: torch.float32, or the parameters' dtype (None), as torch has them. A bfloat16
            second moment keeps 8 bits: with beta2 = 0.999 it stops following the gradients. Use float32 where there is
            room.
        master_weights: keep a float32 copy of each 16-bit parameter, which is updated and then rounded to the
            parameter, as `state["master"]`; the moments are then float32.
        capturable: the learning rate is read from the device by a captured CUDA graph; give it as a tensor, then.

    The other arguments are torch's. `amsgrad`, `differentiable` and what else torch's optimizers know raise ValueError,
    in a group of parameters and in a state dict.
    """

    def __init__(
        self,
        params,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
        capturable: bool = False,
        state_dtype: torch.dtype | None = None,
        master_weights: bool = False,
    ):
        if master_weights and state_dtype not in (None, torch.float32):
            raise ValueError(f"LigerAdamW: with master_weights the moments are float32, got state_dtype={state_dtype}")
        super().__init__(params, lr, betas, eps, weight_decay, maximize=maximize, capturable=capturable, fused=True)
        own = {"state_dtype": state_dtype, "master_weights": master_weights}
        self.defaults.update(own)
        for group in self.param_groups:
            for name, value in own.items():
                group.setdefault(name, value)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """The norm of all gradients, which the next step scales to one of at most `max_norm`.

        The same update as after `torch.nn.utils.clip_grad_norm_`, but the gradients are not written: the kernels
        multiply them as they read them.
        """
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        of_meshes: dict[Any, list[torch.Tensor]] = {}  # of experts over GPUs, one, and of the other layers, another
        for gradient in gradients:
            of_meshes.setdefault(gradient.device_mesh if is_dtensor(gradient) else None, []).append(gradient)
        norms = [_local(torch.nn.utils.get_total_norm(of, norm_type), whole=True) for of in of_meshes.values()]
        norm = norms[0] if len(norms) == 1 else torch.nn.utils.get_total_norm(norms, norm_type)
        factor = (max_norm / (norm + 1e-6)).clamp(max=1).float()
        self._clipped = factor, [weakref.ref(gradient) for gradient in gradients]
        return norm

    def _clipping(self) -> torch.Tensor | None:
        """The factor of clip_grad_norm_, where the gradients are still those that it has measured: a step that was
        skipped leaves its factor behind."""
        factor, measured = self.__dict__.pop("_clipped", (None, ()))
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        same = len(measured) == len(gradients) and all(of() is g for of, g in zip(measured, gradients))
        return factor if same else None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch.optim.Optimizer.zero_grad."""
        self.__dict__.pop("_clipped", None)
        super().zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch.optim.Optimizer.add_param_group. Raises ValueError for an option of another optimizer."""
        _check_options(param_group)
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure=None):
        """A step; returns what `closure`, which runs before it, returns."""
        check = getattr(self, "_accelerator_graph_capture_health_check", None)  # torch 2.11 has it under another name
        (check or self._cuda_graph_capture_health_check)()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        factor, found_inf = self._clipping(), getattr(self, "found_inf", None)
        if (scale := getattr(self, "grad_scale", None)) is not None:
            factor = scale.reciprocal() if factor is None else factor / scale
        for group in self.param_groups:
            _check_options(group)
            self._update(group, factor, found_inf)
        return loss

    def _update(self, group, factor, found_inf):
        for p in group["params"]:
            if p.grad is not None:
                self._prepare(p, group)
        lists: list[list[torch.Tensor]] = [[] for _ in range(6)]
        self._init_group(group, *lists)
        parameters, gradients, means, squares, _, steps = lists
        if not parameters:
            return
        rows = [tuple(map(_local, row)) for row in zip(parameters, gradients, means, squares, steps)]
        torch._foreach_add_([row[-1] for row in rows], 1)
        masters = [self.state[p].get("master") for p in parameters]
        apart = [row for row, master in zip(rows, masters) if master is None]
        with_master = [(*row, _local(master)) for row, master in zip(rows, masters) if master is not None]
        for chosen in filter(None, (apart, with_master)):
            self._run(group, *map(list, zip(*chosen)), factor=factor, found_inf=found_inf)
        if found_inf is not None:  # no step was taken
            torch._foreach_sub_([row[-1] for row in rows], [found_inf] * len(rows))

    @staticmethod
    def _run(group, parameters, gradients, means, squares, steps, masters=(), *, factor, found_inf):
        lr, (beta1, beta2) = group["lr"], group["betas"]
        lr_tensor = lr.float().to(parameters[0].device) if isinstance(lr, torch.Tensor) else None
        ops.adamw_(
            parameters,
            gradients,
            means,
            squares,
            list(masters),
            steps,
            lr_tensor,
            factor,
            found_inf,
            0.0 if lr_tensor is not None else lr,
            beta1,
            beta2,
            group["weight_decay"],
            group["eps"],
            group["maximize"],
        )

    def _prepare(self, p, group):
        """The state of a parameter that takes its first step, where it is not as torch makes it."""
        state = self.state[p]
        dtype = torch.float32 if group["master_weights"] else group["state_dtype"]
        if dtype is not None and "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(p, dtype=dtype, memory_format=torch.preserve_format)
        if group["master_weights"] and p.dtype != torch.float32 and "master" not in state:
            state["master"] = p.detach().float()

    @torch.no_grad()
    def load_state_dict(self, state_dict) -> None:
        """Load a state dict, of this class or of torch's AdamW. The dtypes of moments stay this optimizer's.

        Raises ValueError for the state, or an option, of another optimizer.
        """
        for group in state_dict["param_groups"]:
            _check_options(group)
        _check_states(state_dict["state"].values())
        own = [(group["state_dtype"], group["master_weights"]) for group in self.param_groups]
        super().load_state_dict(state_dict)
        numbers = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        for group, (state_dtype, master_weights) in zip(self.param_groups, own):
            group["state_dtype"], group["master_weights"] = state_dtype, master_weights
            for p, number in zip(group["params"], numbers):
                saved, state = state_dict["state"].get(number, {}), self.state.get(p, {})
                dtype = torch.float32 if master_weights else state_dtype or p.dtype
                for name in ("exp_avg", "exp_avg_sq", "master"):  # torch casts them to the parameter's dtype
                    if name in saved:
                        wanted = torch.float32 if name == "master" else dtype
                        state[name] = saved[name].detach().to(device=p.device, dtype=wanted, copy=True)

    def __setstate__(self, state):
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("state_dtype", None)
            group.setdefault("master_weights", False)


def _check_states(states: Iterable[Mapping[str, Any]]) -> None:
    """Raises ValueError where a parameter's state is not that of an AdamW without options."""
    for state in states:
        if state and (unknown := sorted(state.keys() - _STATES)):
            raise ValueError(f"LigerAdamW does not know the state {', '.join(unknown)} of the optimizer that was saved")


def _local(t: torch.Tensor, whole: bool = False) -> torch.Tensor:
    """This rank's part of a DTensor, or all of it."""
    if not is_dtensor(t):
        return t
    return t.full_tensor() if whole else t.to_local()
