"""AdamW at the rate of the memory."""

from itertools import chain

import torch

from liger_kernel._library import ops
from liger_kernel.utils import is_dtensor


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

    The other arguments are torch's; `amsgrad` and `differentiable` are not supported.
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
        norm = _local(torch.nn.utils.get_total_norm(gradients, norm_type), whole=True)
        self._factor = (max_norm / (norm + 1e-6)).clamp(max=1).float()
        return norm

    @torch.no_grad()
    def step(self, closure=None):
        """A step; returns what `closure`, which runs before it, returns."""
        check = getattr(self, "_accelerator_graph_capture_health_check", None)  # torch 2.11 has it under another name
        (check or self._cuda_graph_capture_health_check)()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        factor, found_inf = self.__dict__.pop("_factor", None), getattr(self, "found_inf", None)
        if (scale := getattr(self, "grad_scale", None)) is not None:
            factor = scale.reciprocal() if factor is None else factor / scale
        for group in self.param_groups:
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
        masters = [self.state[p]["master"] for p in parameters] if group["master_weights"] else []
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
        """Load a state dict, of this class or of torch's AdamW. The dtypes of moments stay this optimizer's."""
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


def _local(t: torch.Tensor, whole: bool = False) -> torch.Tensor:
    """This rank's part of a DTensor, or all of it."""
    if not is_dtensor(t):
        return t
    return t.full_tensor() if whole else t.to_local()
