"""transformers' expert parallelism by collectives of equal sizes: `DistributedConfig(ep_implementation="liger")`."""

import functools
import importlib.abc
import importlib.util
import sys
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from liger_kernel.operators import expert_parallel as operators
from liger_kernel.operators.experts import Experts

_PLACE = "transformers.distributed.expert_parallel"
_registered: dict[str, Any] = {}


def _own(t: Tensor, group: Any, rows: int, value: int) -> Tensor:
    """This rank's rows of a tensor that the ranks of a group share, padded to equal numbers."""
    rank = dist.get_rank(group)
    own = t[rank * rows : (rank + 1) * rows]
    return own.clone() if own.shape[0] == rows else operators.padded_rows(own, rows, value)


def _whole(t: Tensor, group: Any, tokens: int) -> Tensor:
    """The rows of all ranks of a group."""
    whole = t.new_empty(dist.get_world_size(group) * t.shape[0], *t.shape[1:])
    operators.all_gather(whole, t.contiguous(), group=group)
    return whole[:tokens]


class _Slice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, t, group, rows, value):
        ctx.group, ctx.tokens = group, t.shape[0]
        return _own(t, group, rows, value)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d):
        return _whole(d, ctx.group, ctx.tokens), None, None, None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx, t, group, tokens):
        ctx.group, ctx.rows = group, t.shape[0]
        return _whole(t, group, tokens)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d):
        return _own(d, ctx.group, ctx.rows, 0), None, None


class LigerExpertParallel:
    """An EPImplementation of transformers, for one module of experts: see register_expert_parallel."""

    def __init__(
        self, experts: torch.nn.Module, ep_mesh: Any, tp_mesh: Any, parts: int | None = None,
        rows: int | Literal["largest"] | None = None, sent: float | None = None, capacity: float | None = None,
    ):  # fmt: skip
        self.experts_forward = experts.forward
        self.num_local_experts = experts.num_experts
        self.ep_mesh, self.tp_mesh = ep_mesh, tp_mesh
        self.options = parts, rows, sent
        self.share = operators.share_of(capacity, ep_mesh.size(), sent)
        # Not a decorator: it imports torch._dynamo, which takes seconds.
        self.expert_parallel = torch.compiler.disable(operators.expert_parallel)

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        x, index, weights = (t.reshape(-1, t.shape[-1]) for t in (hidden_states, top_k_index, top_k_weights))
        tokens, ranks, group = x.shape[0], self.tp_mesh.size(), self.tp_mesh.get_group()
        if ranks > 1:  # which have the same tokens: each sends some
            rows, none = -(-tokens // ranks), self.num_local_experts * self.ep_mesh.size()
            cut = lambda t, value: _Slice.apply(t, group, rows, value)
            x, index, weights = cut(x, 0), cut(index, none), cut(weights, 0)
        y = self.expert_parallel(
            x, index, weights, self._run, self.num_local_experts, self.ep_mesh.get_group(), *self.options
        )
        if ranks > 1:
            y = _Join.apply(y, group, tokens)
        # No view of y: FSDP2 warns of modules that return one, and nothing else has y.
        return torch.ops.aten._unsafe_view(y, hidden_states.shape)

    def _run(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        experts = getattr(self.experts_forward, "__self__", None)
        if self.share is None or not isinstance(experts, Experts):
            return self.experts_forward(x, index, weights)
        experts.liger_share = self.share
        try:
            return self.experts_forward(x, index, weights)
        finally:
            del experts.liger_share


def register_expert_parallel(name: str = "liger", **options: Any) -> None:
    """Registers expert parallelism by collectives of equal sizes under a name for `ep_implementation` of transformers'
    DistributedConfig, which expert_parallel of liger_kernel.operators describes. `import liger_kernel.transformers`
    registers "liger" without options.

    ```python
    register_expert_parallel("liger", rows="largest", capacity=1.5)
    model = AutoModelForCausalLM.from_pretrained(
        name, distributed_config=DistributedConfig(fsdp_size=4, ep_size=4, ep_implementation="liger")
    )
    ```

    Args:
        name: replaces what was registered under it, for models that are loaded from then on.
        parts: 1, or more parts of the tokens: the collectives of one run beside the experts of another. None: two where
            an expert gets many tokens.
        rows: the number of tokens that each rank's are padded to, or "largest" where the ranks' numbers differ, which
            the hosts then tell each other in every layer. None: they are the same.
        sent: the part of its tokens that a rank sends to each rank at most, in place of all: for more than 4 ranks.
        capacity: bounds the buffers of patched experts: a rank's experts get at most that many times the pairs of
            tokens and experts that they got if all ranks' were chosen equally often. More are an error. None: no bound.

    Raises TypeError for another option. Without a transformers that has such a registry, it has no effect.
    """
    unknown = options.keys() - {"parts", "rows", "sent", "capacity"}
    if unknown:
        raise TypeError(f"register_expert_parallel has no option {', '.join(sorted(unknown))}")
    _registered[name] = functools.partial(LigerExpertParallel, **options)
    if _PLACE in sys.modules:
        _register(sys.modules[_PLACE])
    elif not any(isinstance(finder, _Registers) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Registers())


def _register(module: Any) -> None:
    if interface := getattr(module, "EPImplementationInterface", None):
        for name, implementation in _registered.items():
            interface.register(name, implementation)


class _Registers(importlib.abc.MetaPathFinder):
    """Registers when transformers' module is imported, so that nobody imports transformers for it."""

    finding = False

    def find_spec(self, fullname, path, target=None):
        if fullname != _PLACE or self.finding:
            return None
        self.finding = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self.finding = False
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            _register(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]  # this spec's alone
        return spec
