"""Patched models over two processes: the loss and every gradient are those of the plain model in one process on the
whole batch.

Each process computes its share of a sum of losses over all tokens, as Trainer does with num_items_in_batch. Collectives
are as many as the plain model's: the head's weight is gathered once a forward and once a backward.
"""

import contextlib
import copy
import functools
import itertools
import pathlib
import sys
import tempfile

import conftest
import peft
import pytest
import torch
from conftest import VOCABULARY, assert_close, run
from liger_kernel.transformers.patching.apply import patch
from torch import nn
from torch.distributed import init_device_mesh
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.distributed import DistributedConfig

sys.path.append(str(pathlib.Path(__file__).parents[1]))
from ranks import DEVICE, each_on_ranks  # noqa: E402
from tiers import ALL  # noqa: E402

RANKS, ROWS, LENGTH = 2, 4, 12


def batch():
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, VOCABULARY, (ROWS, LENGTH), generator=generator)
    labels = ids.clone()
    labels[0, :5], labels[3, 7:] = -100, -100
    found = {"input_ids": ids, "labels": labels, "num_items_in_batch": (labels[:, 1:] != -100).sum()}
    return {name: value.to(DEVICE) for name, value in found.items()}


def make(family, adapted=False, **options):
    model = conftest.make(family, **options)
    if adapted:
        config = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
        torch.manual_seed(1)
        model = peft.inject_adapter_in_model(config, model)
    return model.to(DEVICE)


def part(inputs, rank, ranks=RANKS):
    rows = slice(rank * ROWS // ranks, (rank + 1) * ROWS // ranks)
    return {name: value[rows] if value.dim() else value for name, value in inputs.items()}


def is_head(module):
    return isinstance(module, nn.Linear) and module.out_features == VOCABULARY


def fsdp1(model, own_head=False, **options):
    policy = lambda module, recurse, nonwrapped_numel: (
        recurse or type(module).__name__.endswith("DecoderLayer") or own_head and is_head(module)
    )
    return FullyShardedDataParallel(
        model, auto_wrap_policy=policy, device_id=torch.device(DEVICE), **{"use_orig_params": True, **options}
    )


def fsdp2(model, own_head=False, checkpointed=False, **options):
    for i, layer in enumerate(model.model.layers):
        if checkpointed:
            layer = model.model.layers[i] = checkpoint_wrapper(layer)
        fully_shard(layer, **options)
    if own_head:
        fully_shard([model.model.norm, model.lm_head], **options)
    return fully_shard(model, **options)


def compiled(model):
    torch._dynamo.reset()
    return torch.compile(nn.parallel.DistributedDataParallel(model), backend="aot_eager")


BF16 = dict(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
#: mode -> how a model becomes one over the ranks.
#: The factor of a rank's loss is the number of ranks where gradients are averaged.
MODES = {
    "ddp": nn.parallel.DistributedDataParallel,
    "ddp_accumulating": nn.parallel.DistributedDataParallel,
    "ddp_compiled": compiled,
    "fsdp1": fsdp1,
    "fsdp1_accumulating": fsdp1,
    "fsdp1_flat": functools.partial(fsdp1, use_orig_params=False),
    "fsdp1_own_head": functools.partial(fsdp1, own_head=True),
    "fsdp1_bf16": functools.partial(fsdp1, mixed_precision=MixedPrecision(**BF16)),
    "fsdp2": fsdp2,
    "fsdp2_accumulating": fsdp2,
    "fsdp2_own_head": functools.partial(fsdp2, own_head=True),
    "fsdp2_offload": functools.partial(fsdp2, offload_policy=CPUOffloadPolicy(pin_memory=False)),
    "fsdp2_checkpointed": functools.partial(fsdp2, checkpointed=True),
    "fsdp2_bf16": functools.partial(fsdp2, mp_policy=MixedPrecisionPolicy(**BF16)),
}
UNTIED = ("own_head",)  # a head of its own group has a weight of its own


def gradients_of(wrapped):
    """name -> gradient of the whole parameter, named as in the plain model; of FSDP1's flat ones a rank's part."""
    context = contextlib.nullcontext()
    if isinstance(wrapped, FullyShardedDataParallel) and wrapped._use_orig_params:
        context = FullyShardedDataParallel.summon_full_params(wrapped, with_grads=True)
    with context:
        found = {}
        for name, parameter in wrapped.named_parameters():
            for own in ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.", "module."):
                name = name.replace(own, "")
            if parameter.grad is not None:
                whole = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
                found[name] = whole.to(DEVICE, copy=True)  # of offloaded ones on the CPU
        return found


class Collectives(TorchDispatchMode):
    """Counts them; unlike CommDebugMode it leaves the modules without hooks, in sight of which no result is replaced by
    another."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.namespace in ("c10d", "_c10d_functional") and "wait" not in func.__name__
        return func(*args, **(kwargs or {}))


def step(mode, model, rank):
    """(the sum of the ranks' losses, the gradients, the number of collectives, whether there were logits) of one step
    of a wrapped model."""
    wrapped, inputs = MODES[mode](model), part(batch(), rank)
    micro_batches = [inputs]
    if mode.endswith("accumulating"):
        micro_batches = [
            {name: value[i : i + 1] if value.dim() else value for name, value in inputs.items()}
            for i in range(ROWS // RANKS)
        ]
    total, logits = torch.zeros((), device=DEVICE), False
    with contextlib.nullcontext() if mode.endswith("compiled") else Collectives() as collectives:
        for i, micro_batch in enumerate(micro_batches):
            last = i == len(micro_batches) - 1
            if hasattr(wrapped, "set_requires_gradient_sync"):
                wrapped.set_requires_gradient_sync(last)
            with contextlib.nullcontext() if last or not hasattr(wrapped, "no_sync") else wrapped.no_sync():
                output = wrapped(**micro_batch)
                (output.loss * RANKS).backward()
            total += output.loss.detach().float()
            logits = logits or output.logits is not None
    torch.distributed.all_reduce(total)
    return total, gradients_of(wrapped), collectives and collectives.count, logits


def evaluated(mode, model, rank):
    """The loss and the logits of the last tokens, in eval mode and without gradients."""
    wrapped = MODES[mode](model).eval()
    with torch.no_grad():
        output = wrapped(**part(batch(), rank))
    return output.loss, output.logits


def compare(rank, family, mode, tied, adapted=False):
    reference = make(family, adapted, tie_word_embeddings=tied)
    expected, expected_gradients = run(copy.deepcopy(reference), **batch())
    plain = step(mode, copy.deepcopy(reference), rank)
    model = copy.deepcopy(reference)
    report = patch(family, model, strict=True)
    try:
        loss, gradients, communications, logits = step(mode, model, rank)
    finally:
        report.undo()
    assert not logits and plain[3]
    assert communications == plain[2] != 0, f"{communications} collectives, the plain model {plain[2]}"
    if mode.endswith("bf16"):  # plain and patched model round in other places
        assert abs(loss - expected.loss) <= 2**-8 * expected.loss
        for name, gradient in expected_gradients.items():
            ours, theirs = ((g[name] - gradient).norm() for g in (gradients, plain[1]))
            assert ours <= 1.5 * theirs + 2**-8 * gradient.norm(), name
        return
    assert_close(loss, expected.loss.detach())
    assert gradients.keys() == plain[1].keys()
    for name, gradient in (plain[1] if mode == "fsdp1_flat" else expected_gradients).items():
        assert_close(gradients[name], gradient)
    model = copy.deepcopy(reference)
    report = patch(family, model)
    try:
        for a, b in zip(evaluated(mode, model, rank), evaluated(mode, copy.deepcopy(reference), rank)):
            assert_close(a, b)
    finally:
        report.undo()


def compare_halves(rank, family, mode):
    """Context parallelism: a rank has a half of every sequence, and labels that were shifted before the sequences were
    cut."""
    whole, half = batch(), LENGTH // RANKS
    shifted = nn.functional.pad(whole["labels"][:, 1:], (0, 1), value=-100)

    def of(rank):
        cut = slice(rank * half, (rank + 1) * half)
        positions = torch.arange(cut.start, cut.stop, device=DEVICE).expand(ROWS, half)
        return {
            "input_ids": whole["input_ids"][:, cut], "position_ids": positions,
            "labels": whole["labels"][:, cut].contiguous(), "shift_labels": shifted[:, cut].contiguous(),
            "num_items_in_batch": whole["num_items_in_batch"],
        }  # fmt: skip

    reference = make(family)
    expected, gradients = 0, {}
    for i in range(RANKS):
        output, found = run(copy.deepcopy(reference), **of(i))
        expected = expected + output.loss.detach()
        gradients = {name: gradients.get(name, 0) + gradient for name, gradient in found.items()}
    report = patch(family, reference, strict=True)
    try:
        wrapped = MODES[mode](reference)
        output = wrapped(**of(rank))
        (output.loss * RANKS).backward()
    finally:
        report.undo()
    assert output.logits is None
    loss = output.loss.detach()
    torch.distributed.all_reduce(loss)
    assert_close(loss, expected)
    for name, gradient in gradients_of(wrapped).items():
        assert_close(gradient, gradients[name])


#: FSDP1's flat parameters are all trained or none is.
LORA_MODES = [mode for mode in MODES if mode != "fsdp1_flat"]
LORA_MODES_OF_EVERY_RUN = ("ddp", "fsdp1", "fsdp2_checkpointed", "fsdp2_bf16")


def of_lora(mode):
    return compare, "llama", mode, False, True


@pytest.fixture(scope="module")
def found_lora():
    return each_on_ranks([of_lora(mode) for mode in (LORA_MODES if ALL else LORA_MODES_OF_EVERY_RUN)])


@pytest.mark.parametrize("mode", LORA_MODES)
@pytest.mark.full(when=lambda p: p["mode"] not in LORA_MODES_OF_EVERY_RUN)
def test_lora(found_lora, mode):
    assert not found_lora[of_lora(mode)], found_lora[of_lora(mode)]


FAMILIES = ("llama", "gemma2")
TRAINED = FAMILIES if ALL else FAMILIES[1:]  # in every run: softcapped, and windows of attention
only_trained = pytest.mark.full(when=lambda p: p["name"] not in TRAINED)


def of_mode(name, mode):
    if mode == "halves":
        return [(compare_halves, name, "ddp"), (compare_halves, name, "fsdp2")]
    tied = (ALL or mode in ("ddp", "fsdp2")) and not mode.endswith(UNTIED)
    return [(compare, name, mode, False), *([(compare, name, mode, True)] if tied else [])]


@pytest.fixture(scope="module")
def found():
    return each_on_ranks([case for name in TRAINED for mode in ("halves", *MODES) for case in of_mode(name, mode)])


@pytest.mark.parametrize("mode", [*MODES, "halves"])
@pytest.mark.parametrize("name", FAMILIES)
@only_trained
def test_modes(found, name, mode):
    for case in of_mode(name, mode):
        assert not found[case], f"{case}: {found[case]}"


def sequence_parallel(model):
    """Tensor parallelism with the residual stream sharded along the sequence (Korthikanti et al. 2022,
    arXiv:2205.05198): norms run on DTensors."""
    rows = functools.partial(RowwiseParallel, output_layouts=Shard(1), use_local_output=False)
    plan = {
        "model.embed_tokens": rows(input_layouts=Replicate()),
        "model.norm": SequenceParallel(),
        "lm_head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    for name, module in model.model.layers.named_modules(prefix="model.layers"):
        leaf = name.rpartition(".")[2]
        if leaf in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"):
            plan[name] = ColwiseParallel()
        elif leaf in ("o_proj", "down_proj"):
            plan[name] = rows()
        elif leaf.endswith("layernorm"):
            plan[name] = SequenceParallel()
        elif leaf == "self_attn":
            layouts = dict(
                input_kwarg_layouts={"hidden_states": Shard(1)},
                desired_input_kwarg_layouts={"hidden_states": Replicate()},
            )
            plan[name] = PrepareModuleInput(**layouts, use_local_output=True)
        elif leaf == "mlp":
            plan[name] = PrepareModuleInput(
                input_layouts=Shard(1), desired_input_layouts=Replicate(), use_local_output=True
            )
    return parallelize_module(model, init_device_mesh(DEVICE, (RANKS,)), plan)


def tensor_parallel(model):
    styles = {"gate_proj": ColwiseParallel, "up_proj": ColwiseParallel, "down_proj": RowwiseParallel}
    plan = {
        name: styles[name.rpartition(".")[2]]()
        for name, _ in model.named_modules()
        if name.rpartition(".")[2] in styles
    }
    plan["lm_head"] = ColwiseParallel(output_layouts=Replicate())
    return parallelize_module(model, init_device_mesh(DEVICE, (RANKS,)), plan)


def of_transformers(model, **spread):
    """The model under transformers' plan for it, which shards weights as it loads them; over RANKS tensor-parallel
    ranks, or as `spread`, options of DistributedConfig, has it."""
    with tempfile.TemporaryDirectory() as folder:
        shared = [folder]  # the first rank's, which alone writes
        torch.distributed.broadcast_object_list(shared)
        model.save_pretrained(shared[0])
        torch.distributed.barrier()
        loaded = (
            type(model)
            .from_pretrained(
                shared[0],
                distributed_config=DistributedConfig(**(spread or dict(tp_size=RANKS))),
                attn_implementation=model.config._attn_implementation,  # a checkpoint doesn't keep it
            )
            .to(DEVICE)
            .train()
        )
        torch.distributed.barrier()
        return loaded


#: Tensor parallelism: all ranks have the same tokens. (how, whether the patch comes before, tied)
TENSOR_PARALLEL = {
    "torch": (tensor_parallel, False, False),
    "torch_patched_before": (tensor_parallel, True, False),
    "sequence": (sequence_parallel, False, False),
    "sequence_patched_before": (sequence_parallel, True, False),
    "transformers": (of_transformers, False, False),
    "transformers_tied": (of_transformers, False, True),
}


def largest_gathered(model):
    """The loss of a training step, every gradient, and the most numbers that a rank received at once."""

    class Largest(TorchDispatchMode):
        numbers = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            found = func(*args, **(kwargs or {}))
            if func.namespace == "_c10d_functional" and "gather" in func.__name__:
                self.numbers = max(self.numbers, found.numel())
            return found

    with Largest() as largest:
        output = model(**batch())
    output.loss.backward()
    return output, gradients_of(model), largest.numbers


def compare_tensor_parallel(rank, family, how):
    build, before, tied = TENSOR_PARALLEL[how]
    reference = make(family, tie_word_embeddings=tied, vocab_size=VOCABULARY)
    expected, expected_gradients = run(copy.deepcopy(reference), **batch())
    of_plain, _, gathered = largest_gathered(build(copy.deepcopy(reference)))
    assert gathered >= VOCABULARY * ROWS * LENGTH and of_plain.logits is not None
    model = copy.deepcopy(reference)
    model = model if before else build(model)
    report = patch(family, model, strict=True)
    try:
        model = build(model) if before else model
        output, gradients, gathered = largest_gathered(model)
        assert output.logits is None and gathered < VOCABULARY * ROWS * LENGTH
        assert_close(output.loss, expected.loss)
        assert gradients.keys() == expected_gradients.keys()
        for name, gradient in expected_gradients.items():
            assert_close(gradients[name], gradient)
        model.zero_grad()
        output = model(**batch(), return_token_accuracy=True)  # a head spread over ranks has none: logits
        assert_close(output.loss, expected.loss)
        assert_close(model.eval()(**batch()).logits, reference.eval()(**batch()).logits)
    finally:
        report.undo()


@pytest.fixture(scope="module")
def found_tensor_parallel():
    return each_on_ranks(list(itertools.product([compare_tensor_parallel], TRAINED, TENSOR_PARALLEL)))


@pytest.mark.parametrize("how", TENSOR_PARALLEL)
@pytest.mark.parametrize("name", FAMILIES)
@only_trained
def test_tensor_parallel(found_tensor_parallel, name, how):
    error = found_tensor_parallel[compare_tensor_parallel, name, how]
    assert not error, error
