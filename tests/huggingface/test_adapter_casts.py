"""Adapters in float are cast under autocast once per step, and give the bits of adapters that each call casts."""

import copy
import gc
import itertools

import pytest
import torch
from conftest import batch, make
from liger_kernel._library import ops
from liger_kernel.transformers import apply_liger_kernel_to_llama, lora
from peft import LoraConfig, get_peft_model
from torch.profiler import ProfilerActivity, profile

SEEDS = itertools.count()
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
#: Casts of a layer's forward where each call makes its own: of q, k and v, of the output projection, of gate and up,
#: and of the down projection.
OF_LAYER = 4


def adapted(patched, checkpointing=False):
    """A patched model in bfloat16 with adapters in float32, as PEFT makes them."""
    torch.manual_seed(1)
    model = make("llama").to(torch.bfloat16)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    model = get_peft_model(model, LoraConfig(r=4, target_modules=ALL, init_lora_weights=False)).train()
    patched("llama", model.get_base_model())
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    return model


def step(model, seed=0):
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(**batch(seed)).loss
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def alone(model):
    """A step of a copy, of which nothing is held: each call casts."""
    return step(copy.deepcopy(model))


def assert_equal(found, expected):
    assert len(found) == len(expected)
    for a, b in zip(found, expected):
        assert torch.equal(a, b)


def casts_of(call):
    with profile(activities=[ProfilerActivity.CPU]) as found:
        call()
    return sum(event.count for event in found.key_averages() if event.key == "aten::_foreach_copy_")


@pytest.mark.parametrize("checkpointing", [False, True])
def test_one_cast_a_step(checkpointing, patched):
    model = adapted(patched, checkpointing)
    layers = model.config.num_hidden_layers
    assert casts_of(lambda: step(model)) == OF_LAYER * layers * (1 + checkpointing)
    step(model)
    for _ in range(2):
        assert casts_of(lambda: step(model)) == 1


def change_by_optimizer(model):
    torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1).step()


def change_past_versions(model):
    """As optimizers do that write to `data`: no version tells of it."""
    for p in model.parameters():
        if p.requires_grad:
            p.data -= 0.1 * p.grad


def change_by_loading(model):
    torch.manual_seed(next(SEEDS))
    state = {name: torch.randn_like(p) / 4 for name, p in model.named_parameters() if p.requires_grad}
    model.load_state_dict(state, strict=False)


def change_by_new_tensors(model):
    for p in model.parameters():
        if p.requires_grad:
            p.data = p.data * 1.5


def change_none(model):
    pass


CHANGES = (change_by_optimizer, change_past_versions, change_by_loading, change_by_new_tensors, change_none)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_bits_after_a_change(checkpointing, change, patched):
    model = adapted(patched, checkpointing)
    before = None
    for _ in range(5):
        expected = alone(model)
        found = step(model)
        assert_equal(found, expected)
        assert before is None or change is change_none or not torch.equal(found[0], before)
        before = found[0]
        change(model)


def test_two_forwards_before_their_backward_passes(patched):
    """As of a preference loss."""
    model = adapted(patched)
    for _ in range(3):
        step(model)
    expected = [step(model, seed) for seed in (0, 1)]
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        losses = [model(**batch(seed)).loss for seed in (0, 1)]
    for loss, (value, *gradients) in zip(losses, expected):
        model.zero_grad()
        loss.backward()
        assert_equal([loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)], [value, *gradients])


def test_layers_that_are_called_outside_of_their_model(patched):
    """They cast their adapters themselves, also where checkpointing runs them again."""
    model = adapted(patched, checkpointing=True)
    for _ in range(3):
        step(model)
    base = model.get_base_model().model

    def direct(base):
        base.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            out = base(input_ids=batch()["input_ids"]).last_hidden_state.float().square().mean()
        out.backward()
        return [out.detach(), *(p.grad.clone() for p in base.parameters() if p.grad is not None)]

    change_past_versions(model)
    assert_equal(direct(base), direct(copy.deepcopy(base)))
    assert_equal(step(model), alone(model))


def test_a_forward_of_another_owner(patched):
    """Its number is new: the casts that another one holds are not its."""
    model = adapted(patched)
    for _ in range(3):
        step(model)
    del lora._numbers[model.get_base_model()]
    for _ in range(3):
        change_past_versions(model)
        assert_equal(step(model), alone(model))
    assert casts_of(lambda: step(model)) == 1


def test_an_adapter_that_comes_later(patched):
    model = adapted(patched)
    for _ in range(3):
        step(model)
    torch.manual_seed(2)
    model.add_adapter("second", LoraConfig(r=8, target_modules=["q_proj", "down_proj"], init_lora_weights=False))
    model.set_adapter("second")
    for _ in range(3):
        assert_equal(step(model), alone(model))


def test_nothing_is_left():
    """When the model is gone, though its adapters are not; an error ends a forward, too."""
    model = adapted(lambda _, model: apply_liger_kernel_to_llama(model=model))
    for _ in range(3):
        step(model)
    number = lora._numbers[model.get_base_model()]
    parameters = [p for p in model.parameters() if p.requires_grad]
    assert ops.begin_adapter_casts(number) == sum(p.numel() for p in parameters)
    ops.end_adapter_casts()
    with pytest.raises(IndexError), torch.autocast("cpu", torch.bfloat16):
        model(input_ids=torch.tensor([[10**6]]))
    assert_equal(step(model), alone(model))
    del model
    gc.collect()
    assert ops.begin_adapter_casts(number) == 0
    ops.end_adapter_casts()
