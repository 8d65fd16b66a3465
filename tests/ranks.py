"""Runs a function of a test on several processes of one group: NCCL's where each of two has a GPU, otherwise gloo's."""

import multiprocessing
import os
import sys
import traceback

import torch

#: What takes seconds to import. A server of the process that tests does so once, and ranks on CPUs are forked from it.
SLOW = (
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "transformers.modeling_utils",
    "peft",
    "liger_kernel.transformers",
)
HOST = "127.0.0.1"
DEVICE = "cuda" if torch.cuda.device_count() > 1 else "cpu"


def _rank(rank, port, ranks, results, function, arguments):
    os.environ.update(
        MASTER_ADDR=HOST, MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank),
        TORCHELASTIC_USE_AGENT_STORE="True",  # it listens already: rank 0 need not
    )  # fmt: skip
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if DEVICE == "cuda":
        torch.cuda.set_device(rank)
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # which FSDP2 would take
    torch.distributed.init_process_group(
        "cpu:gloo,cuda:nccl" if DEVICE == "cuda" else "gloo", rank=rank, world_size=ranks
    )
    try:
        results.put((rank, function(rank, *arguments)))
        torch.distributed.barrier()  # a rank that ends first makes another's last collective fail
    finally:
        torch.distributed.destroy_process_group()


def on_ranks(function, *arguments, ranks=2):
    """[function(rank, *arguments) for each rank], all with one seed; raises what a rank raises. The function is a
    module's, its result can be pickled."""
    # A port that is free now may be another process's when a rank listens to it: this one keeps it.
    store = torch.distributed.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    # An import may start CUDA, which a forked process cannot use.
    method = "spawn" if DEVICE == "cuda" else "forkserver"
    multiprocessing.set_forkserver_preload([name for name in SLOW if name in sys.modules])
    results = multiprocessing.get_context(method).SimpleQueue()
    torch.multiprocessing.start_processes(
        _rank, (store.port, ranks, results, function, arguments), nprocs=ranks, start_method=method
    )
    return [result for _, result in sorted((results.get() for _ in range(ranks)), key=lambda pair: pair[0])]


def off_over_ranks(model, ids, kind):
    """How far loss and gradients of a step over two ranks, by "ddp" or "fsdp2", are from those of one process, where
    both ranks have the same tokens; and of how many parameters."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    ids = ids.to(DEVICE)

    def run(of):
        with torch.autocast(DEVICE, torch.bfloat16):
            loss = of(input_ids=ids, labels=ids).loss
        loss.backward()
        grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        return loss.detach(), {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in grads.items()}

    loss, grads = run(model)
    if kind == "ddp":
        whole = torch.nn.parallel.DistributedDataParallel(model)
    else:
        mesh = init_device_mesh(DEVICE, (2,))  # by default one of GPUs, where there is one
        for layer in model.get_base_model().model.layers:
            fully_shard(layer, mesh=mesh)
        whole = fully_shard(model, mesh=mesh)
        assert all(isinstance(p, DTensor) for p in model.parameters())
    found, of_ranks = run(whole)
    return (found - loss).abs().item(), max((of_ranks[n] - g).abs().max().item() for n, g in grads.items()), len(grads)


def _each(rank, cases):
    found = dict.fromkeys(cases, "")
    for case in cases:
        function, *arguments = case
        torch.manual_seed(0)
        try:
            function(rank, *arguments)
        except Exception:
            found[case] = f"rank {rank}: {traceback.format_exc()}"
    return found


def each_on_ranks(cases, ranks=2):
    """case -> the tracebacks of what it raises on the ranks, "" where it raises nothing. A case is (function,
    *arguments) and runs as function(rank, *arguments). The processes, whose start takes seconds, are the same for all
    cases: a fixture of the module calls this, and each test asks for its own case."""
    of_ranks = on_ranks(_each, cases, ranks=ranks)
    return {case: "".join(found[case] for found in of_ranks) for case in cases}
