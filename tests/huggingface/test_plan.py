"""liger_kernel.memory.plan: layers keep what fits into a budget, and the numbers are the same to the bit."""

import copy
import gc
import logging
import os
import pathlib
import sys
import types
import weakref

import peft
import pytest
import torch
from conftest import VOCABULARY, batch, make
from liger_kernel import memory
from liger_kernel._memory import measure as measure_module
from liger_kernel._memory.layers import Host
from liger_kernel._memory.measure import _Call
from liger_kernel._memory.plan import bytes_of
from liger_kernel.transformers import _apply_liger_kernel_to_instance
from test_recompute import Storages, same, step
from torch.distributed.device_mesh import init_device_mesh
from transformers import DynamicCache, Trainer, TrainingArguments

sys.path.append(str(pathlib.Path(__file__).parents[1]))
from ranks import DEVICE, on_ranks  # noqa: E402

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="memory of the host is for a GPU's tensors")
LAYERS = 4
INPUTS = dict(rows=2, length=32)


class Peak(Storages):
    """The most bytes that were alive at once; those of `before` are none of them."""

    def __init__(self, before):
        super().__init__()
        self.before, self.most = {t.untyped_storage()._cdata for t in before}, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        results = super().__torch_dispatch__(function, types, args, kwargs)
        for key in self.before & self.found.keys():
            del self.found[key]
        self.found = {key: entry for key, entry in self.found.items() if not entry[0].expired()}
        self.most = max(self.most, self.alive())
        return results


def made(family="llama", patched=None, **fields):
    model = make(family, num_hidden_layers=LAYERS, **fields)
    if patched is not None:
        patched(family, model)
    return model


def peak(model, inputs):
    model.zero_grad()
    with Peak([*model.parameters(), *model.buffers(), *inputs.values()]) as found:
        model(**inputs).loss.backward()
    return found.most


def between(model, inputs, share):
    """A budget: this share of the way from every layer checkpointed to nothing checkpointed."""
    plan = memory.plan(model, inputs, "1GiB")
    assert set(plan.levels.values()) == {"all"}
    return int(plan.checkpointed_bytes + share * (plan.peak_bytes - plan.checkpointed_bytes))


@pytest.mark.parametrize("family, fields", [("llama", {"attention_dropout": 0.3}), ("gemma2", {}), ("qwen3", {})])
def test_the_same_step(family, fields, patched):
    model, inputs = made(family, patched, **fields), batch(**INPUTS)

    def run():
        torch.manual_seed(7)  # of dropout
        return step(model, inputs)

    expected = run()
    seen = set()
    for share in (0, 0.6, 1):
        plan = memory.plan(model, inputs, between(model, inputs, share)).apply()
        seen |= set(plan.levels.values())
        same(run(), expected)
        plan.undo()
    assert {"all", "input"} <= seen
    same(run(), expected)


@pytest.mark.parametrize("share", [0, 0.3, 0.6, 1])
def test_the_peak_is_what_was_predicted(share, patched):
    """Within 5 %, and within the budget."""
    model, inputs = made(patched=patched), batch(**INPUTS)
    budget = between(model, inputs, share)
    plan = memory.plan(model, inputs, budget).apply()
    found = peak(model, inputs)
    assert plan.peak_bytes <= budget and found <= budget
    assert plan.peak_bytes == pytest.approx(found, rel=0.05)
    if share == 0.6:  # backward frees what the last layers keep first
        order = {"input": 0, "cheap": 1, "all": 2}
        levels = [order[level] for level in plan.levels.values()]
        assert levels[0] < levels[-1]


def test_states_that_the_optimizer_has_yet_to_make(patched):
    model, inputs = made(patched=patched), batch(**INPUTS)
    optimizer = torch.optim.AdamW(model.parameters())
    without, with_states = memory.plan(model, inputs, "1GiB"), memory.plan(model, inputs, "1GiB", optimizer=optimizer)
    moments = 2 * sum(p.nbytes for p in model.parameters())
    assert with_states.peak_bytes - without.peak_bytes == moments
    model(**inputs).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    assert memory.plan(model, inputs, "1GiB", optimizer=optimizer).peak_bytes == without.peak_bytes


def test_it_leaves_nothing_behind(patched):
    model, inputs = made(patched=patched), batch(**INPUTS)
    before = [set(vars(module)) for module in model.modules()]
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    plan = memory.plan(model, inputs, "1GiB")
    assert torch.equal(torch.rand(1), expected) and all(p.grad is None for p in model.parameters())
    plan.apply().undo()
    assert [set(vars(module)) for module in model.modules()] == before
    model.gradient_checkpointing_enable()
    plan = memory.plan(model, inputs, "1GiB").apply()
    assert not any(layer.gradient_checkpointing for layer in model.model.layers)
    plan.undo()
    assert all(layer.gradient_checkpointing for layer in model.model.layers)


def test_the_table(patched):
    model, inputs = made(patched=patched), batch(**INPUTS)
    plan = memory.plan(model, inputs, between(model, inputs, 0.5))
    lines = str(plan).splitlines()
    assert [line.split()[0] for line in lines[1:-1]] == [
        str([*plan.levels.values()].count(level)) for level in ("all", "cheap", "input")
    ]
    assert lines[-1].startswith(f"peak {plan.peak_bytes / 2**30:.2f} GiB of {plan.budget / 2**30:.2f} GiB")
    assert list(plan.levels) == [f"model.layers.{i}" for i in range(LAYERS)]


def test_errors(patched):
    model, inputs = made(patched=patched), batch(**INPUTS)
    with pytest.raises(ValueError, match="0.00 GiB are too few: .* even with every layer checkpointed; take a smaller"):
        memory.plan(model, inputs, 10_000)
    with pytest.raises(ValueError, match="in evaluation"):
        memory.plan(model.eval(), inputs, "1GiB")
    with pytest.raises(ValueError, match="'much'"):
        memory.plan(model, inputs, "much")
    loss = lambda model, batch: model(torch.ones(2, 3)).sum()
    with pytest.raises(ValueError, match="Linear has no layers that transformers can checkpoint"):
        memory.plan(torch.nn.Linear(3, 3), {}, "1GiB", loss=loss)


@pytest.mark.parametrize("text, bytes", [("70GiB", 70 << 30), ("1.5 gb", 1_500_000_000), ("12", 12), (7e9, 7 * 10**9)])
def test_budgets(text, bytes, patched):
    model, inputs = made(patched=patched), batch(**INPUTS)
    if bytes < 1000:
        with pytest.raises(ValueError, match="too few"):
            memory.plan(model, inputs, text)
    else:
        assert memory.plan(model, inputs, text).budget == bytes


def test_with_adapters_and_autocast(patched):
    torch.manual_seed(0)
    config = peft.LoraConfig(r=2, lora_dropout=0.2, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(made(patched=patched), config)
    inputs = batch(**INPUTS)

    def run():
        torch.manual_seed(5)
        with torch.autocast("cpu", torch.bfloat16):
            return step(model, inputs)

    expected = run()
    with torch.autocast("cpu", torch.bfloat16):
        budget = between(model, inputs, 0.5)
        plan = memory.plan(model, inputs, budget).apply()
    assert len(plan.costs) == 2, "the first layer's input has no gradient"
    same(run(), expected)


def test_layers_of_two_kinds(patched):
    """Each kind of layers has costs of its own: here the second layer has no window."""
    model, inputs = made("gemma2", patched), batch(**INPUTS)
    model.model.layers[1].mlp.requires_grad_(False)
    plan = memory.plan(model, inputs, "1GiB")
    assert len(plan.costs) == 2 and plan.costs[0]["all"].bytes > plan.costs[1]["all"].bytes


class Rows(torch.utils.data.Dataset):
    def __init__(self, lengths):
        self.lengths = lengths

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, i):
        return {name: t[0] for name, t in batch(i, rows=1, length=self.lengths[i]).items()}


def trained(model, folder, lengths, **options):
    arguments = TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=1, logging_steps=1, report_to=[], use_cpu=True,
        save_strategy="no", learning_rate=1e-2, num_train_epochs=1, **options,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=Rows(lengths))
    trainer.get_train_dataloader = lambda: torch.utils.data.DataLoader(Rows(lengths))
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_trainer(tmp_path, caplog, available):
    """A plan is made for the first batch, and again where one is longer."""
    reference, lengths = made(), (32, 16, 64, 48)
    on = dict(use_liger_kernel=True)
    expected = trained(copy.deepcopy(reference), tmp_path, lengths, **on)
    with caplog.at_level(logging.WARNING):
        found = trained(
            copy.deepcopy(reference), tmp_path, lengths, liger_kernel_config={"memory_budget": "1GiB"}, **on
        )
    assert found == expected
    plans = [record.getMessage() for record in caplog.records if "memory budget" in record.getMessage()]
    assert [plan.split(":")[0] for plan in plans] == ["memory budget, for 32 tokens", "memory budget, for 64 tokens"]


def _planned(rank, budget):
    """The levels of a rank, whose batch is the longer the higher its rank, and the most bytes in use on it."""
    model, inputs = made().to(DEVICE), {name: t.to(DEVICE) for name, t in batch(length=16 * (1 + rank)).items()}
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    expected = step(wrapped, inputs)
    plan = memory.plan(model, inputs, budget).apply()
    same(step(wrapped, inputs), expected)
    plan.undo()
    # One rank's batches grow while the other's do not: it must not wait for the other's plan.
    planner, plans = memory.plan_later(model, "1GiB"), 0
    for length in (16, 32) if rank else (32, 16):
        before = planner.plan
        step(wrapped, {name: t.to(DEVICE) for name, t in batch(length=length).items()})
        plans += planner.plan is not before
    assert plans == 1 + rank
    return plan.levels, plan.peak_bytes


def test_what_is_not_planned(caplog):
    """A model that is sharded while it runs, and one that makes no loss: the log says so, and the model runs."""
    inputs = batch(**INPUTS)
    for change, reason in (
        (lambda model: setattr(model.lm_head.weight, "ds_id", 0), "the model is sharded: call"),
        (lambda model: inputs.pop("labels"), "the model is called without labels"),
    ):
        model = made()
        planner = memory.plan_later(model, "1GiB")
        change(model)
        model(**inputs)
        assert planner.plan is None and reason in caplog.text


def test_a_model_with_a_budget_is_freed():
    model = made()
    memory.plan_later(model, "1GiB")
    model(**batch(**INPUTS)).loss.backward()
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


@pytest.mark.full()
def test_ranks_agree():
    """A rank that checkpoints another layer would gather its weights at another time."""
    budget = between(made(), batch(length=32), 0.5)
    (levels, peak), others = on_ranks(_planned, budget)
    assert others == (levels, peak) and set(levels.values()) >= {"input", "all"} and peak <= budget


@cuda
def test_inputs_in_memory_of_the_host(patched, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)  # torch's gradient of an embedding adds in any order
    try:
        check_host(patched)
    finally:
        torch.use_deterministic_algorithms(False)


def check_host(patched):
    model, inputs = made(hidden_size=256, intermediate_size=512), batch(rows=8, length=512)
    patched("llama", model.cuda())
    inputs = {name: t.cuda() for name, t in inputs.items()}
    expected = step(model, inputs)
    plan = memory.plan(model, inputs, "1GiB")
    held = {}
    for level in ("input", "host"):
        plan.levels = dict.fromkeys(plan.levels, level)
        plan.apply()
        for _ in range(3):
            same(step(model, inputs), expected)
        before = torch.cuda.memory_allocated()
        loss = model(**inputs).loss
        torch.cuda.synchronize()
        held[level] = torch.cuda.memory_allocated() - before
        del loss
    size = 8 * 512 * 256 * 4
    assert plan.costs[0]["input"].bytes - plan.costs[0]["host"].bytes == size
    assert held["input"] - held["host"] >= (LAYERS - 1) * size
    plan.undo()
    same(step(model, inputs), expected)


@cuda
def test_a_step_that_fits_only_with_inputs_on_the_host(patched):
    """It is measured there, and the peak of what is planned from it is right."""
    model, inputs = made(hidden_size=256, intermediate_size=512), batch(rows=8, length=512)
    patched("llama", model.cuda())
    inputs = {name: t.cuda() for name, t in inputs.items()}

    def loss(model, inputs):
        if not isinstance(getattr(model.model.layers[0]._gradient_checkpointing_func, "__self__", None), Host):
            raise torch.OutOfMemoryError
        return model(**inputs).loss

    at_host = memory.plan(model, inputs, "1GiB", loss=loss)
    at_input = memory.plan(model, inputs, "1GiB")
    for share in (0.2, 0.7):
        budget = int(at_host.checkpointed_bytes + share * (at_host.peak_bytes - at_host.checkpointed_bytes))
        plan = memory.plan(model, inputs, budget, loss=loss).apply()
        step(model, inputs)
        torch.cuda.reset_peak_memory_stats()
        step(model, inputs)
        assert plan.peak_bytes == pytest.approx(torch.cuda.max_memory_allocated(), rel=0.05)
        assert plan.peak_bytes <= budget
        plan.undo()
    assert at_host.peak_bytes == pytest.approx(at_input.peak_bytes, rel=0.05)


@pytest.mark.parametrize("level", ["all", "cheap", "input", pytest.param("host", marks=cuda)])
def test_one_level_for_all_layers(level, patched):
    device = "cuda" if level == "host" else "cpu"
    model, inputs = made(patched=patched).to(device), {name: t.to(device) for name, t in batch(**INPUTS).items()}
    expected, usual = step(model, inputs), peak(model, inputs)
    kept = memory.keep(model, level)
    same(step(model, inputs), expected)
    assert (peak(model, inputs) < usual) == (level != "all")
    kept.undo()
    assert peak(model, inputs) == usual


def test_errors_of_keep(patched):
    model = made(patched=patched)
    with pytest.raises(ValueError, match="level must be one of all, cheap, input, host, got 'less'"):
        memory.keep(model, "less")
    with pytest.raises(ValueError, match="Linear has no layers that transformers can checkpoint"):
        memory.keep(torch.nn.Linear(3, 3), "input")
    if next(model.parameters()).device.type == "cpu":
        with pytest.raises(ValueError, match="the model is on cpu"):
            memory.keep(model, "host")


def test_a_cache_is_left_out_by_its_type(patched):
    """Layers are called with a cache, whatever the argument is called, and measured without it."""
    model = made(patched=patched)
    model.config.use_cache = True
    inputs = batch(**INPUTS)
    expected = step(model, inputs)
    same(step(model, inputs), expected)
    plan = memory.plan(model, inputs, between(model, inputs, 0.5)).apply()
    same(step(model, inputs), expected)
    plan.undo()
    layer = torch.nn.Linear(2, 2)
    for name in ("cache", "past_key_values", "past_key_value", "some_cache"):
        call = _Call(layer, (torch.ones(1), DynamicCache()), {name: DynamicCache(), "use_cache": True}, "cpu")
        assert call.args[1] is None and call.kwargs == {name: None, "use_cache": False}


def test_a_first_batch_that_fails(patched):
    """The next batch is planned for."""
    model = made()
    _apply_liger_kernel_to_instance(model, memory_budget="1GiB")
    (planner,) = [hook.__self__ for hook in model._forward_pre_hooks.values() if hasattr(hook, "__self__")]
    inputs = batch(**INPUTS)
    for labels in (inputs["labels"] + VOCABULARY, torch.ones(1)):
        bad = batch(rows=9, length=32) | {"labels": labels}
        with pytest.raises(Exception):
            model(**bad)
        assert planner.plan is None
    model(**inputs)
    assert planner.plan is not None


def test_units_and_shares():
    device = torch.device("cpu")
    total, page = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    assert bytes_of("70GiB") == 70 * 2**30 and bytes_of("70 GB") == 70 * 10**9 and bytes_of(5) == 5
    assert bytes_of("50%", device) == total * page // 2 and bytes_of(" 12.5 %", device) == total * page // 8
    assert 0 < bytes_of("auto", device) < total * page
    for bad in ("much", "5 XiB", "", "1.2.3GB", "%"):
        with pytest.raises(ValueError, match="a budget is"):
            bytes_of(bad, device)


@pytest.mark.parametrize("budget", ["auto", "90%"])
def test_a_share_of_the_memory_is_a_budget(budget, patched):
    model = made()
    _apply_liger_kernel_to_instance(model, memory_budget=budget)
    step(model, batch(**INPUTS))
    with pytest.raises(ValueError, match="a budget is"):
        _apply_liger_kernel_to_instance(made(), memory_budget="90 percent")


def _sharded(model, by):
    """The model under FSDP2, as accelerate makes it for Trainer, or by hand."""
    mesh = init_device_mesh(DEVICE, (2,), mesh_dim_names=("ranks",))  # by default one of GPUs, where there is one
    if by == "accelerate":
        from accelerate.utils import FullyShardedDataParallelPlugin
        from accelerate.utils.fsdp_utils import fsdp2_prepare_model

        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=False,
            transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        )  # fmt: skip
        accelerator = types.SimpleNamespace(
            state=types.SimpleNamespace(fsdp_plugin=plugin), mixed_precision="no", device=torch.device(DEVICE),
            is_main_process=True, torch_device_mesh=mesh,
            parallelism_config=types.SimpleNamespace(fsdp_dim_names=["ranks"]),
        )  # fmt: skip
        return fsdp2_prepare_model(accelerator, model)
    from torch.distributed.fsdp import fully_shard

    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _trained(model, lengths, accumulate):
    """The losses of steps of AdamW, each over some batches of the same lengths, of which the last reduces gradients."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for length in lengths:
        for i in range(accumulate):
            model.set_requires_gradient_sync(i == accumulate - 1)
            inputs = {name: t.to(DEVICE) for name, t in batch(length=length).items()}
            loss = model(**inputs).loss
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def _planned_under_fsdp2(rank, by, accumulate):
    """A plan is made between the first step and the second, and after the second and the fourth where a batch of any
    rank was longer. Losses are those without a plan."""
    lengths = (16, 16, 16 + 16 * rank, 16, 16, 16)
    expected = _trained(_sharded(made().to(DEVICE), by), lengths, accumulate)
    model = made().to(DEVICE)
    planner = memory.plan_later(model, "1GiB")
    sharded, plans = _sharded(model, by), []
    handle = sharded.register_forward_hook(lambda *_: plans.append((planner.tokens, planner.plan)))
    assert _trained(sharded, lengths, accumulate) == expected
    handle.remove()
    assert plans[0] == (0, None) and planner.kept is not None
    tokens = list(dict.fromkeys(tokens for tokens, _ in plans))
    rows = batch()["input_ids"].shape[0]
    assert tokens == [0, 16 * rows, 32 * rows], tokens
    assert set(planner.plan.levels.values()) == {"all"}
    assert all(p.grad is None for p in model.parameters())
    return planner.plan.levels


@pytest.mark.parametrize(("by", "accumulate"), [("accelerate", 1), ("fully_shard", 2)])
def test_a_budget_under_fsdp2(by, accumulate):
    pytest.importorskip("accelerate")
    levels, others = on_ranks(_planned_under_fsdp2, by, accumulate)
    assert levels == others


def test_levels_are_timed_in_turns(monkeypatch, patched):
    """Every level runs once before any is timed, and then all in turns, so that none of them is the cold one."""
    model, order = made(), []
    original = measure_module.Layer.set
    monkeypatch.setattr(measure_module.Layer, "set", lambda self, level, host=None: (
        order.append(level), original(self, level, host))[1])  # fmt: skip
    memory.plan(model, batch(**INPUTS), "1GiB")
    first = order.index("all")
    assert order[first : first + 12] == ["all", "cheap", "input"] * 4
