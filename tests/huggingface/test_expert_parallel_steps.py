"""Experts over two and four ranks by `ep_implementation="liger"`: a training step is that of one process on the whole
batch, with FSDP2, tensor parallelism, checkpointing, accumulation, router replay and an optimizer."""

import copy
import functools
import json
import pathlib
import subprocess
import sys
import tempfile
import warnings

import peft
import pytest
import torch
import torch.distributed as dist
import transformers
from conftest import Ran, assert_close
from liger_kernel import routing
from liger_kernel.optim import LigerAdamW
from liger_kernel.transformers import register_expert_parallel
from liger_kernel.transformers.expert_parallel import LigerExpertParallel
from liger_kernel.transformers.patching.apply import patch
from packaging import version
from test_distributed import gradients_of, of_transformers
from test_experts import operator_calls
from test_routing import other_ids
from tiny import model_of, text
from torch.distributed.tensor import DTensor
from transformers.distributed import DistributedConfig

sys.path.append(str(pathlib.Path(__file__).parents[1]))
from ranks import DEVICE, each_on_ranks  # noqa: E402
from tiers import ALL  # noqa: E402

pytestmark = pytest.mark.skipif(
    version.parse(transformers.__version__) < version.parse("5.23"), reason="5.23 has a registry"
)
ROWS, LENGTH = 8, 10
#: layout -> (ranks, options of transformers' DistributedConfig)
LAYOUTS = {
    "ep 2": (2, dict(fsdp_size=2, ep_size=2)),
    "tp 2, ep 2": (2, dict(tp_size=2, ep_size=2)),
    "ep 4": (4, dict(fsdp_size=4, ep_size=4)),
    "efsdp 2, ep 2": (4, dict(fsdp_size=4, ep_size=2)),
    "tp 2, ep 4": (4, dict(fsdp_size=2, tp_size=2, ep_size=4)),
    "efsdp 2, tp 2, ep 2": (4, dict(fsdp_size=2, tp_size=2, ep_size=2)),
}


def small():
    return model_of("qwen3_moe", "Qwen3MoeForCausalLM").to(DEVICE).train()


def on_device(inputs):
    return {name: value.to(DEVICE) for name, value in inputs.items()}


def batch():
    inputs = on_device(text(rows=ROWS, length=LENGTH))
    return {**inputs, "num_items_in_batch": (inputs["labels"][:, 1:] != -100).sum(), "output_router_logits": False}


def rows_of(inputs, rank, spread, parts=1, part=0):
    """A rank's rows of a batch, or a part of them: the ranks of a tensor-parallel group have the same."""
    of_all = spread.get("fsdp_size", 1)
    each = ROWS // of_all
    first = rank // spread.get("tp_size", 1) * each + part * each // parts
    rows = slice(first, first + each // parts)
    return {name: v[rows] if torch.is_tensor(v) and v.dim() else v for name, v in inputs.items()}


def spread_over(model, spread, name="liger"):
    made = of_transformers(copy.deepcopy(model), **spread, ep_implementation=name)
    assert any(
        isinstance(cell.cell_contents, LigerExpertParallel)
        for module in made.modules()
        for cell in getattr(vars(module).get("forward"), "__closure__", None) or ()
    )
    return made


def whole_step(model, inputs):
    loss = model(**inputs).loss
    loss.backward()
    return loss.detach(), gradients_of(model)


def step(model, rank, spread, inputs, parts=1):
    """The loss of the whole batch and every gradient."""
    total = 0
    for part in range(parts):
        if hasattr(model, "set_requires_gradient_sync"):
            model.set_requires_gradient_sync(part == parts - 1)
        loss = model(**rows_of(inputs, rank, spread, parts, part)).loss
        (loss * spread.get("fsdp_size", 1)).backward()  # whose gradients are averaged
        total = total + loss.detach()
    dist.all_reduce(total)
    return total / spread.get("tp_size", 1), gradients_of(model)


def same(found, expected):
    assert_close(found[0], expected[0])
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        assert_close(found[1][name], gradient)


def compare(rank, layout, how):
    spread = LAYOUTS[layout][1]
    reference, inputs = small(), batch()
    expected = whole_step(copy.deepcopy(reference), inputs)
    model = spread_over(reference, spread)
    if how != "plain":
        patch("qwen3_moe", model)
    if how.startswith("checkpointed"):
        model.gradient_checkpointing_enable(dict(use_reentrant=how.endswith("reentrant")))
    if how == "compiled":
        torch._dynamo.reset()
        model.compile(backend="aot_eager")
    with Ran() as ran, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        same(step(model, rank, spread, inputs, parts=2 if how == "accumulating" else 1), expected)
    assert (operator_calls(ran) > 0) == (how != "plain")
    assert not [w for w in caught if "returned a view" in str(w.message)]  # FSDP2 may lose the hook of such a module


def replays(rank, layout):
    spread = LAYOUTS[layout][1]
    reference, inputs, ids = small(), batch(), other_ids(ROWS * LENGTH, 2, 4, 2, dtype=torch.uint8)
    alone = copy.deepcopy(reference)
    with routing.replay(alone, ids):
        expected = whole_step(alone, inputs)
    model = spread_over(reference, spread)
    patch("qwen3_moe", model)
    own = rows_of({"ids": ids.view(ROWS, LENGTH, *ids.shape[1:])}, rank, spread)["ids"]
    with routing.replay(model, own):
        same(step(model, rank, spread, inputs), expected)


def lengths_differ(rank, layout):
    """Each rank has rows of its own length: padded in the experts alone."""
    spread = LAYOUTS[layout][1]
    ranks = spread["fsdp_size"]
    batches = [on_device(text(seed=i, rows=2, length=6 + i)) for i in range(ranks)]
    items = sum((b["labels"][:, 1:] != -100).sum() for b in batches)
    batches = [{**b, "num_items_in_batch": items, "output_router_logits": False} for b in batches]
    reference = small()
    alone = copy.deepcopy(reference)
    for b in batches:
        alone(**b).loss.backward()
    expected = gradients_of(alone)
    register_expert_parallel("padded", rows="largest", parts=2, capacity=float(ranks))
    model = spread_over(reference, spread, "padded")
    patch("qwen3_moe", model)
    (model(**batches[rank]).loss * ranks).backward()
    for name, gradient in gradients_of(model).items():
        assert_close(gradient, expected[name])
    if DEVICE == "cpu":
        model = spread_over(reference, spread)
        with pytest.raises(ValueError, match="the ranks have .* tokens; rows='largest' pads them"):
            model(**batches[rank])


def sends_once(rank, layout):
    """Tokens that go once to each rank that has some of their experts."""
    spread = LAYOUTS[layout][1]
    reference, inputs = small(), batch()
    expected = whole_step(copy.deepcopy(reference), inputs)
    register_expert_parallel("once", sent=1.0, capacity=2.0)
    model = spread_over(reference, spread, "once")
    patch("qwen3_moe", model)
    same(step(model, rank, spread, inputs), expected)


def optimized(model, optimizer, run, clip, steps=2):
    norms = []
    for _ in range(steps):
        optimizer.zero_grad()
        run(model)
        norms.append(clip(optimizer, model))
        optimizer.step()
    return norms


def optimizes(rank, layout):
    """Steps of LigerAdamW, whose norm is that of the parameters of both meshes."""
    spread = LAYOUTS[layout][1]
    reference, inputs = small(), batch()
    alone = copy.deepcopy(reference)
    clip = lambda optimizer, model: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    expected = optimized(alone, torch.optim.AdamW(alone.parameters(), 1e-2), lambda m: whole_step(m, inputs), clip)
    model = spread_over(reference, spread)
    patch("qwen3_moe", model)
    ours = lambda optimizer, model: optimizer.clip_grad_norm_(0.1)
    run = lambda m: step(m, rank, spread, inputs)
    norms = optimized(model, LigerAdamW(model.parameters(), 1e-2), run, ours)
    for norm, wanted in zip(norms, expected, strict=True):
        assert_close(norm, wanted)
    wanted = dict(alone.named_parameters())
    for name, parameter in model.named_parameters():
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        # A step is lr · m / √v, whose relative error is that of a gradient near 0: compare the steps' sum.
        error = (whole.detach() - wanted[name].detach()).norm()
        assert error <= 1e-3 * 2e-2 * whole.numel() ** 0.5, (name, error)


def saves(rank, layout):
    """What one layout saves, another and one process load."""
    spread = LAYOUTS[layout][1]
    reference, inputs = small(), batch()
    expected = whole_step(copy.deepcopy(reference), inputs)
    model = spread_over(reference, spread)
    patch("qwen3_moe", model)
    with tempfile.TemporaryDirectory() as folder:
        shared = [folder]
        dist.broadcast_object_list(shared)
        model.save_pretrained(shared[0])
        dist.barrier()
        alone = type(reference).from_pretrained(shared[0]).to(DEVICE).train()
        same(whole_step(alone, inputs), expected)
        assert all(torch.equal(a, b) for a, b in zip(alone.parameters(), reference.parameters(), strict=True))
        for other, (ranks, options) in LAYOUTS.items():
            if ranks == LAYOUTS[layout][0] and other != layout:
                again = type(reference).from_pretrained(
                    shared[0], distributed_config=DistributedConfig(**options, ep_implementation="liger")
                )
                same(step(again.to(DEVICE).train(), rank, options, inputs), expected)
                break
        dist.barrier()


def refuses_adapters(rank, layout):
    """PEFT adds whole adapters of experts to the ranks' parts of their weights."""
    model = spread_over(small(), LAYOUTS[layout][1])
    config = peft.LoraConfig(target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"], r=4)
    adapted = peft.get_peft_model(model, config)
    patch("qwen3_moe", model)
    with pytest.raises(NotImplementedError, match="an adapter of .*_proj of experts that are spread over ranks"):
        adapted(**rows_of(batch(), rank, LAYOUTS[layout][1]))


def trains(rank, layout):
    """Trainer's losses and norms with gradient checkpointing and clipping: those of transformers' all-to-all."""
    spread, reference, seen = LAYOUTS[layout][1], small(), []
    data = [{name: value[0] for name, value in text(seed=i, rows=1).items()} for i in range(8)]
    for name in ("all_to_all", "liger"):
        model = of_transformers(copy.deepcopy(reference), **spread, ep_implementation=name)
        if name == "liger":
            patch("qwen3_moe", model)
        with tempfile.TemporaryDirectory() as folder:
            arguments = transformers.TrainingArguments(
                folder, per_device_train_batch_size=1, gradient_accumulation_steps=2, max_steps=2, learning_rate=1e-2,
                gradient_checkpointing=True, max_grad_norm=0.1, use_cpu=DEVICE == "cpu", report_to=[],
                logging_steps=1, save_strategy="no", disable_tqdm=True,
            )  # fmt: skip
            trainer = transformers.Trainer(model, arguments, train_dataset=data)
            trainer.train()
        seen.append([(h["loss"], h["grad_norm"]) for h in trainer.state.log_history if "loss" in h])
    assert len(seen[0]) == 2
    assert_close(torch.tensor(seen[1]), torch.tensor(seen[0]))


MOST = ("ep 2", "efsdp 2, ep 2")
HOW = ("plain", "patched", "checkpointed", "checkpointed, reentrant", "accumulating", "compiled")


@pytest.mark.full()
def test_benchmark(tmp_path):
    """The arms of benchmarks/expert_parallel.py start from the same loss and the same norm of all gradients."""
    root = pathlib.Path(__file__).parents[2]
    command = [sys.executable, root / "benchmarks/expert_parallel.py", "--tiny", "--gpus", "2", "--routing", "balanced"]
    command += ["--arms", "fsdp,ours,ours+parts=2+capacity=1,ours+sent=1.0", "--out", tmp_path / "out.json"]
    subprocess.run(list(map(str, command)), check=True, cwd=tmp_path)
    rows = [(row["job"], row["result"]) for row in json.loads((tmp_path / "out.json").read_text())["rows"]]
    assert len(rows) == 8
    for job, result in rows:
        like = next(other for of, other in rows if of["tokens"] == job["tokens"])
        for name in ("loss", "gradient_norm"):
            assert abs(result[name] - like[name]) <= 1e-5 * like[name], (job, name, result)


CASES = [
    *((compare, layout, how) for layout in LAYOUTS for how in (HOW if layout in MOST else HOW[:2])),
    *((function, layout) for function in (replays, optimizes) for layout in MOST),
    *((sends_once, layout) for layout in ("ep 2", "ep 4", "tp 2, ep 4")),
    *((lengths_differ, layout) for layout in ("ep 2", "ep 4")),
    *((saves, layout) for layout in ("ep 2", "ep 4")),
    (refuses_adapters, "ep 2"), (trains, "ep 2"),
]  # fmt: skip

#: On two ranks; what takes longer is left out.
OF_EVERY_RUN = [case for case in CASES if LAYOUTS[case[1]][0] == 2 and case[0] not in (saves, trains)]
CHOSEN = CASES if ALL else OF_EVERY_RUN


@pytest.fixture(scope="module")
def found():
    @functools.cache
    def of(ranks):
        if DEVICE == "cuda" and torch.cuda.device_count() < ranks:
            pytest.skip(f"needs {ranks} GPUs")
        return each_on_ranks([case for case in CHOSEN if LAYOUTS[case[1]][0] == ranks], ranks=ranks)

    return of


@pytest.mark.full(when=lambda p: p["trained"] not in OF_EVERY_RUN)
@pytest.mark.parametrize("trained", CASES, ids=lambda case: "-".join([case[0].__name__, *case[1:]]))
def test_step(found, trained):
    raised = found(LAYOUTS[trained[1]][0])
    assert not raised[trained], raised[trained]
