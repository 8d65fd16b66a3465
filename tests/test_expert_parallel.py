"""Experts over ranks: results and gradients are those of one process on the tokens of all ranks, by a loop over experts
in float64."""

import contextlib
import functools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from liger_kernel._library import ops
from liger_kernel.operators import expert_parallel as operators
from liger_kernel.ops.configure import MoEConfig, configure
from liger_kernel.ops.cute.ops.moe import LigerExpertParallelFusedMoEFunction
from liger_kernel.ops.expert_parallel import GatheredTokens, expert_parallel, expert_parallel_fused_experts
from liger_kernel.ops.fused_moe import fused_experts
from liger_kernel.transformers.moe import LigerExpertParallelFusedMoe, moe_fused
from ranks import DEVICE, each_on_ranks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

EXPERTS, HIDDEN, WIDTH, TOKENS = 8, 16, 24, 10
#: Of float32: a last bit of each of a few dozen terms, relative to the largest number. Of bfloat16: every rank rounds
#: gate and up, their product and its sum, of results as of gradients.
TOLERANCES = {torch.float32: 2.0**-18, torch.bfloat16: 2.0**-5}


def reference(x, gate_up, down, weights, index):
    """A loop over the experts."""
    y = torch.zeros_like(x)
    for e in range(len(gate_up)):
        token, slot = (index == e).nonzero(as_tuple=True)
        gate, up = (x[token] @ gate_up[e].T).chunk(2, -1)
        y = y.index_add(0, token, (F.silu(gate) * up) @ down[e].T * weights[token, slot, None])
    return y


class Problem:
    """The tokens of all ranks, and what one process makes of them. `tokens` are those of each rank, or their number."""

    def __init__(self, ranks, tokens=TOKENS, k=2, dtype=torch.float32, index=None):
        generator = torch.Generator().manual_seed(1)
        normal = functools.partial(torch.randn, generator=generator)
        self.of_ranks = [tokens] * ranks if isinstance(tokens, int) else list(tokens)
        n = sum(self.of_ranks)
        if index is None:
            index = torch.randint(-1, EXPERTS + 1, (n, k), generator=generator)
        shapes = (n, HIDDEN), (EXPERTS, 2 * WIDTH, HIDDEN), (EXPERTS, HIDDEN, WIDTH), (n, k)
        values = [normal(shape) * (shape[-1] ** -0.5 if len(shape) == 3 else 1) for shape in shapes]
        values = [t.to(DEVICE, dtype) for t in values]
        self.index, self.dy, self.values, self.ranks = (
            index.to(DEVICE),
            normal(n, HIDDEN).to(DEVICE, dtype),
            values,
            ranks,
        )
        leaves = [t.double().requires_grad_() for t in values]
        self.y = reference(*leaves, self.index)
        self.y.backward(self.dy.double())
        self.gradients = [t.grad for t in leaves]
        self.tolerance = TOLERANCES[dtype]

    def cuts(self, rank):
        """What a rank holds of each of the values."""
        first = sum(self.of_ranks[:rank])
        rows, mine = slice(first, first + self.of_ranks[rank]), EXPERTS // self.ranks
        experts = slice(rank * mine, (rank + 1) * mine)
        return rows, experts, experts, rows

    def leaves(self, rank):
        return [t[cut].clone().requires_grad_() for t, cut in zip(self.values, self.cuts(rank))]

    def step(self, rank, run):
        """The result and the gradients of run(x, gate_up, down, weights, index) on a rank."""
        leaves, rows = self.leaves(rank), self.cuts(rank)[0]
        y = run(*leaves, self.index[rows])
        y.backward(self.dy[rows])
        return y.detach(), [t.grad for t in leaves]

    def check(self, rank, y, gradients, what=(0, 1, 2, 3)):
        cuts = self.cuts(rank)
        self.close("y", y, self.y[cuts[0]])
        for i in what:
            self.close(("dx", "dgate_up", "ddown", "dweights")[i], gradients[i], self.gradients[i][cuts[i]])

    def close(self, name, got, expected):
        expected = expected.detach()
        atol = self.tolerance * (expected.abs().max().item() if expected.numel() else 0)
        torch.testing.assert_close(got.double(), expected, rtol=0, atol=atol, msg=lambda text: f"{name}: {text}")


def ours(x, gate_up, down, weights, index, **options):
    return expert_parallel_fused_experts(x, gate_up, down, index, weights, **options)


def compare(rank, kind, ranks):
    problem, options = KINDS[kind](ranks)
    problem.check(rank, *problem.step(rank, functools.partial(ours, **options)))


FIRST = torch.zeros(8 * TOKENS, 2, dtype=torch.long)  # all tokens' experts are the first rank's first
#: kind -> (the problem on so many ranks, options)
KINDS = {
    "plain": lambda ranks: (Problem(ranks), {}),
    "two parts": lambda ranks: (Problem(ranks), dict(parts=2)),
    "parts that differ": lambda ranks: (Problem(ranks, k=3), dict(parts=3)),
    "more parts than tokens": lambda ranks: (Problem(ranks, tokens=2), dict(parts=5)),
    "k 1": lambda ranks: (Problem(ranks, k=1), dict(recompute=False)),
    "bfloat16": lambda ranks: (Problem(ranks, dtype=torch.bfloat16), dict(parts=2)),
    "one expert": lambda ranks: (Problem(ranks, index=FIRST[: ranks * TOKENS]), {}),
    "one expert, in parts": lambda ranks: (Problem(ranks, index=FIRST[: ranks * TOKENS]), dict(parts=2)),
    "largest": lambda ranks: (Problem(ranks, tokens=range(3, 3 + ranks)), dict(rows="largest", parts=2)),
    "a bound": lambda ranks: (Problem(ranks, tokens=range(3, 3 + ranks)), dict(rows=9)),
    "a rank without tokens": lambda ranks: (Problem(ranks, tokens=range(ranks)), dict(rows="largest")),
    "no tokens": lambda ranks: (Problem(ranks, tokens=0), {}),
    "capacity": lambda ranks: (Problem(ranks), dict(capacity=2.0, parts=2)),
    "sent once": lambda ranks: (Problem(ranks), dict(sent=1.0)),
    "sent once, a bound": lambda ranks: (Problem(ranks, k=1), dict(sent=0.95, capacity=2.5)),
    "sent once, bfloat16": lambda ranks: (Problem(ranks, k=3, dtype=torch.bfloat16), dict(sent=1.0)),
    "sent once, sizes differ": lambda ranks: (Problem(ranks, tokens=range(ranks)), dict(sent=1.0, rows="largest")),
    "sent once, no tokens": lambda ranks: (Problem(ranks, tokens=0), dict(sent=0.5)),
    "everything fits": lambda ranks: (
        Problem(ranks, index=FIRST[: ranks * TOKENS]), dict(capacity=float(ranks), parts=2),
    ),
}  # fmt: skip


def frozen(rank, ranks, which, sent):
    """Without a gradient of one of the tensors the others' are the same."""
    problem = Problem(ranks)

    def run(*tensors):
        return ours(
            *(t.detach() if i == which else t for i, t in enumerate(tensors[:4])), tensors[4], parts=2, sent=sent
        )

    problem.check(rank, *problem.step(rank, run), what=[i for i in range(4) if i != which])


def other_experts(rank, ranks, sent):
    """Experts of torch alone, which multiply whatever weight a row has: that of an expert elsewhere is 0."""
    problem = Problem(ranks)

    def run(x, gate_up, down, weights, index):
        def experts(x, index, weights):
            spare = [torch.cat((w, w.new_ones(1, *w.shape[1:]))) for w in (gate_up, down)]
            return reference(x, *spare, weights, index)

        return expert_parallel(x, index, weights, experts, len(gate_up), parts=2, sent=sent)

    problem.check(rank, *problem.step(rank, run))


def gathered_before(rank, ranks):
    """The tokens are on their way while something else runs, and are used once."""
    problem = Problem(ranks, tokens=range(2, 2 + ranks))

    def run(x, gate_up, down, weights, index):
        tokens = GatheredTokens(x, parts=2, rows="largest")
        y = ours(tokens, gate_up, down, weights, index)
        with pytest.raises(RuntimeError, match="used once"):
            ours(tokens, gate_up, down, weights, index)
        return y

    problem.check(rank, *problem.step(rank, run))


def checkpointed(rank, ranks, reentrant):
    problem = Problem(ranks)
    for options in (dict(parts=2), dict(sent=1.0)):
        run = lambda *t: checkpoint(functools.partial(ours, **options), *t, use_reentrant=reentrant)
        problem.check(rank, *problem.step(rank, run))


def twice(rank, ranks):
    """The same bits again, and a second backward pass over a retained graph adds the same gradients."""
    problem = Problem(ranks, dtype=torch.bfloat16)
    run = functools.partial(ours, parts=2)
    first, again = problem.step(rank, run), problem.step(rank, run)
    assert all(torch.equal(a, b) for a, b in zip((first[0], *first[1]), (again[0], *again[1])))
    leaves, rows = problem.leaves(rank), problem.cuts(rank)[0]
    y = run(*leaves, problem.index[rows])
    for _ in range(2):
        y.backward(problem.dy[rows], retain_graph=True)
    assert all(torch.equal(leaf.grad, 2 * gradient) for leaf, gradient in zip(leaves, first[1]))


def no_grad(rank, ranks):
    problem = Problem(ranks)
    with torch.no_grad():
        y = ours(*problem.leaves(rank), problem.index[problem.cuts(rank)[0]], parts=2)
    problem.check(rank, y, (), what=())


def refuses(rank, ranks):
    problem = Problem(ranks, tokens=range(3, 3 + ranks))
    arguments = *problem.leaves(rank), problem.index[problem.cuts(rank)[0]]
    if DEVICE == "cpu":  # GPUs do not compare their sizes
        with pytest.raises(ValueError, match=r"the ranks have \[3, 4.*\] tokens; rows='largest'"):
            ours(*arguments)
    with pytest.raises(ValueError, match=f"{3 + rank} tokens, and rows=2 at most"):
        ours(*arguments, rows=2)


def overflows(rank, ranks):
    """The first rank gets all pairs, twice of what its buffers have room for; elsewhere nothing is wrong."""
    if DEVICE == "cuda":
        return  # a device assertion ends the process's use of its GPU: see test_refused_on_the_device in test_ops.py
    index = FIRST[: ranks * TOKENS].to(DEVICE)
    problem = Problem(ranks, index=index)
    leaves = problem.leaves(rank)
    told = pytest.raises(RuntimeError, match="most_rows") if rank == 0 else contextlib.nullcontext()
    with told, torch.no_grad():
        experts = lambda x, i, w: fused_experts(x, *leaves[1:3], i, w, most_rows=i.numel() // 2)
        local = torch.where(index // len(leaves[1]) == rank, index, -1)
        experts(problem.values[0], local, problem.values[3])


def has_no_room(rank, ranks):
    """Every rank sends all of its tokens to the first, in buffers that have room for half of them."""
    problem = Problem(ranks, index=FIRST[: ranks * TOKENS])
    if DEVICE == "cpu":  # on a GPU a device assertion
        with pytest.raises(RuntimeError, match="more tokens than `sent` has room for"):
            ours(*problem.leaves(rank), problem.index[problem.cuts(rank)[0]], sent=0.5)
    with pytest.raises(ValueError, match="sent is for tokens that have not been gathered"):
        tokens = GatheredTokens(problem.leaves(rank)[0])
        ours(tokens, *problem.leaves(rank)[1:], problem.index[problem.cuts(rank)[0]], sent=0.5)


class Calls(TorchDispatchMode):
    """The collectives and the operators that read a number of a tensor on the host, in their order."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__.partition(".")[0]
        if func.namespace == "c10d" or name in ("_local_scalar_dense", "nonzero", "fused_experts_forward"):
            self.found.append(name.strip("_").replace("allgather_base", "gather").replace("alltoall_base", "scatter"))
        return func(*args, **(kwargs or {}))


def packed_order(rank, ranks):
    """The host reads nothing, each token goes once, and the same call gives the same bits."""
    problem = Problem(ranks, dtype=torch.bfloat16)
    leaves, rows = problem.leaves(rank), problem.cuts(rank)[0]
    run = lambda: ours(*leaves, problem.index[rows], sent=1.0, rows=TOKENS)
    first = run()
    with Calls() as calls, without_waiting():
        y = run()
        y.backward(problem.dy[rows])
    assert calls.found == ["scatter"] * 3 + ["fused_experts_forward"] + ["scatter"] * 4, calls.found
    assert torch.equal(y, first)


@contextlib.contextmanager
def without_waiting():
    """A GPU's host that waits is an error."""
    if DEVICE == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if DEVICE == "cuda":
            torch.cuda.set_sync_debug_mode("default")


def order(rank, ranks):
    """The host reads nothing, and the collectives of one part are started before the experts of another run."""
    problem = Problem(ranks, dtype=torch.bfloat16)
    leaves, rows = problem.leaves(rank), problem.cuts(rank)[0]
    ours(*leaves, problem.index[rows], parts=2, rows=TOKENS)  # connects the ranks
    with Calls() as calls, without_waiting():
        y = ours(*leaves, problem.index[rows], parts=2, rows=TOKENS, capacity=float(ranks))
    experts = "fused_experts_forward"
    # ids, weights, and the tokens of both parts
    assert calls.found == ["gather"] * 4 + [experts, "scatter", experts, "scatter"], calls.found
    with Calls() as calls, without_waiting():
        y.backward(problem.dy[rows])
    # The gradients of both parts' results, those of both parts' tokens, and the weights'.
    assert calls.found == ["gather"] * 2 + ["scatter"] * 3, calls.found


def on_a_part_of_the_ranks(rank, ranks):
    groups = [dist.new_group([first, first + 1]) for first in range(0, ranks, 2)]
    problem, mine = Problem(2), rank % 2
    problem.check(mine, *problem.step(mine, functools.partial(ours, group=groups[rank // 2])))
    alone = [dist.new_group([i]) for i in range(ranks)][rank]
    problem = Problem(1)
    with Calls() as calls:
        problem.check(0, *problem.step(0, functools.partial(ours, group=alone)))
    assert not set(calls.found) & {"gather", "scatter"}


def router(rank, ranks):
    """The gradient of a router reaches the rank that has the token."""
    problem, k = Problem(ranks), 2
    w = torch.randn(EXPERTS, HIDDEN, generator=torch.Generator().manual_seed(2)).to(DEVICE)

    def routed(x, w, experts):
        weights, index = (x @ w.T).softmax(-1).topk(k)
        return experts(x, index, weights)

    x, gate_up, down, _ = (t.double() for t in problem.values)
    expected = w.double().requires_grad_()
    routed(x, expected, lambda x, index, weights: reference(x, gate_up, down, weights, index)).backward(
        problem.dy.double()
    )
    leaves, rows = problem.leaves(rank), problem.cuts(rank)[0]
    own = w.clone().requires_grad_()
    y = routed(leaves[0], own, lambda x, index, weights: ours(x, *leaves[1:3], weights, index))
    y.backward(problem.dy[rows])
    dist.all_reduce(own.grad)
    problem.close("router", own.grad, expected.grad)


def default_parts(rank, ranks):
    """As many on each rank, though by its own tokens the first would take one and the last two."""
    problem = Problem(ranks, tokens=range(3, 3 + ranks))
    with pytest.MonkeyPatch.context() as patch, Calls() as calls:
        patch.setattr(operators, "PAIRS_OF_TWO_PARTS", (2 + ranks) * 2 * ranks // EXPERTS)
        problem.check(rank, *problem.step(rank, functools.partial(ours, rows="largest")))
    assert calls.found.count("fused_experts_forward") == 2, calls.found


def moe(rank, ranks):
    """The module and the functions of the API, with gate and up as two tensors; configure() lets sizes differ."""
    mine = EXPERTS // ranks
    for name, tokens in (("moe", TOKENS), ("configured", range(3, 3 + ranks))):
        problem = Problem(ranks, tokens=tokens)
        if name == "configured":
            assert configure(moe=MoEConfig(ranks + 3, HIDDEN, EXPERTS, 2, 1, ranks))

        def run(x, gate_up, down, weights, index, call):
            gate, up = gate_up.chunk(2, 1)
            return call(x[None], index[None], weights[None], gate, up, down, EXPERTS)[0]

        for call in (
            LigerExpertParallelFusedMoe(),
            LigerExpertParallelFusedMoe(dist.group.WORLD),
            lambda *t: LigerExpertParallelFusedMoEFunction.apply(*t, 2, None),
        ):
            problem.check(rank, *problem.step(rank, functools.partial(run, call=call)))
    x, gate_up, down, weights = problem.leaves(rank)
    gate, up = gate_up.chunk(2, 1)
    index = problem.index[problem.cuts(rank)[0]]
    with pytest.raises(ValueError, match=f"{ranks} ranks of {mine} experts, and num_experts=7"):
        moe_fused(x, index, weights, gate, up, down, 7, 2)
    with pytest.raises(ValueError, match="top_k=3"):
        moe_fused(x, index, weights, gate, up, down, EXPERTS, 3)
    with pytest.raises(ValueError, match=f"{ranks} ranks cannot share 9 experts"):
        configure(moe=MoEConfig(8, HIDDEN, 9, 2))


CASES = [
    *((compare, kind) for kind in KINDS),
    *((frozen, which, sent) for which in range(4) for sent in (None, 1.0)),
    (other_experts, None), (other_experts, 1.0), (gathered_before,), (checkpointed, False), (checkpointed, True),
    (twice,), (no_grad,), (refuses,), (overflows,), (order,), (on_a_part_of_the_ranks,), (router,), (moe,),
    (default_parts,), (has_no_room,), (packed_order,),
]  # fmt: skip


def name_of(case):
    return "-".join([case[0].__name__, *map(str, case[1:])])


def on(ranks, case):
    function, *arguments = case
    return (function, arguments[0], ranks) if function is compare else (function, ranks, *arguments)


#: Of 8 ranks only what is for so many.
OF_8 = [case for case in CASES if case[0] in (has_no_room, packed_order) or case[-1] == 1.0 or "sent" in str(case[-1])]
TESTS = [(2, case) for case in CASES] + [(4, case) for case in CASES] + [(8, case) for case in OF_8]


@pytest.fixture(scope="module")
def found():
    @functools.cache
    def of(ranks):
        if DEVICE == "cuda" and torch.cuda.device_count() < ranks:
            pytest.skip(f"needs {ranks} GPUs")
        return each_on_ranks([on(ranks, case) for of, case in TESTS if of == ranks], ranks=ranks)

    return of


@pytest.mark.full(when=lambda p: p["ranks"] > 2)
@pytest.mark.parametrize("ranks,case", TESTS, ids=lambda p: str(p) if isinstance(p, int) else name_of(p))
def test_ranks(found, ranks, case):
    raised = found(ranks)[on(ranks, case)]
    assert not raised, raised


def test_bound_of_buffers(device):
    """What is kept of gate and up, and all buffers of pairs beside, have most_rows rows."""
    problem = Problem(1, index=torch.tensor([[0, -1]] * TOKENS))
    x, gate_up, down, weights = (t.to(device) for t in problem.values)
    none, options = [None] * 8, (0, False, False, 0.0, 1.0, 0.0, False, 1.0, 1.0)
    for most, rows in ((-1, 2 * TOKENS), (TOKENS, TOKENS), (3 * TOKENS, 2 * TOKENS)):
        arguments = x, gate_up, down, weights, *none, problem.index.to(device), True, *options, most
        y, order, place, _, kept = ops.fused_experts_forward(*arguments)
        assert order.shape == (rows,) and kept.shape == (rows, 2 * WIDTH) and place.shape == (TOKENS, 2)
        problem.close("y", y.to(problem.y.device), problem.y)
        on_meta = [t.to("meta") if isinstance(t, torch.Tensor) else t for t in arguments]
        assert [t.shape for t in ops.fused_experts_forward(*on_meta)] == [t.shape for t in (y, order, place, _, kept)]
    ungated = x, gate_up[:, :WIDTH], down, weights, *none, problem.index.to(device), True, *options, -1, False
    assert ops.fused_experts_forward(*ungated)[-1].shape == (2 * TOKENS, WIDTH)
    on_meta = [t.to("meta") if isinstance(t, torch.Tensor) else t for t in ungated]
    assert ops.fused_experts_forward(*on_meta)[-1].shape == (2 * TOKENS, WIDTH)


def test_alone(device):
    """Without a process group the experts are all here."""
    problem = Problem(1)

    def run(x, gate_up, down, weights, index):
        gate, up = gate_up.chunk(2, 1)
        return LigerExpertParallelFusedMoe()(x, index, weights, gate, up, down, EXPERTS)

    if device == DEVICE:
        problem.check(0, *problem.step(0, run))
    assert configure() and configure(moe=MoEConfig(8, HIDDEN, 9, 2))
