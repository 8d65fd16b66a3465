"""Adapters of patched models that change, and copies of such models: nothing is kept between calls."""

import copy
import pickle

import peft
import pytest
import torch
from conftest import TOLERANCE, batch, make
from liger_kernel.transformers.lora import LoRALinear
from liger_kernel.transformers.patching.place import is_variant
from peft import get_peft_model
from peft.utils.hotswap import prepare_model_for_compiled_hotswap
from test_lora import EACH, Ran, adapted, adapters, assert_same, attention_of, patched_copy, step
from torch._dynamo.testing import CompileCounter


def test_layers_keep_nothing_between_calls(patched):
    """k_proj and v_proj compute what they are now: an adapter updated, scaled or switched since q_proj ran, a layer
    called by itself, hooks that sum what adapters add."""
    reference = adapted()
    ours, _ = patched_copy(reference, patched)
    models = reference, ours
    given = torch.randn(2, 5, attention_of(ours).q_proj.in_features)

    def after(change):
        results = []
        for model in models:
            attention, x = attention_of(model), given.clone()
            attention.q_proj(x)
            change(attention, x)
            results.append((attention.k_proj(x), attention.v_proj(x)))
        for found, expected in zip(results[1], results[0]):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)

    def update(attention, x):
        with torch.no_grad():
            attention.k_proj.lora_B["default"].weight.mul_(3)

    after(lambda attention, x: None)
    after(update)
    after(lambda attention, x: attention.v_proj.scale_layer(2.5))
    after(lambda attention, x: x.mul_(2))
    after(lambda attention, x: attention.k_proj.enable_adapters(False))
    after(lambda attention, x: attention.k_proj.enable_adapters(True))
    added = []
    for model in models:
        attention, sums = attention_of(model), []
        layers = attention.q_proj, attention.k_proj, attention.v_proj
        handles = [
            layer.register_forward_hook(lambda m, args, y: sums.append((y - m.base_layer(args[0])).abs().sum().item()))
            for layer in layers
        ]
        for layer in layers:
            layer(given)
        for handle in handles:
            handle.remove()
        added.append(sums)
    assert added[1] == pytest.approx(added[0], rel=1e-4) and min(added[0]) > 0
    attention_of(ours).q_proj(given)
    names = {name for module in ours.modules() for name in vars(module) if name.startswith("liger_")}
    assert not [n for n in names if any(isinstance(vars(m).get(n), torch.Tensor) for m in ours.modules())]
    assert_same(copy.deepcopy(ours), reference)
    assert_same(pickle.loads(pickle.dumps(ours)), reference)


def test_an_adapter_that_is_added_again_under_its_name(patched):
    """With other layers than before: all of them are fused, and the report says so."""
    reference = make("llama")
    ours, report = patched_copy(reference, patched)
    few, many = adapters(target_modules=["q_proj"]), adapters()
    models = [get_peft_model(model, few) for model in (reference, ours)]
    models[1](**batch())
    assert [entry.count for entry in report.replaced if entry.by == "linear"] == [2]
    for config in (many, few, adapters(r=2)):
        for model in models:
            model.delete_adapter("default")
            torch.manual_seed(2)
            model.add_adapter("default", config)
            model.set_adapter("default")
        assert_same(models[1], models[0])
        layers = [m for m in models[1].modules() if isinstance(m, peft.tuners.lora.LoraLayer)]
        assert all(is_variant(type(m), LoRALinear) for m in layers)
        assert [entry.count for entry in report.replaced if entry.by == "linear"] == [len(layers)]


def replica_of(model):
    """What torch.nn.DataParallel makes of a model on each of its devices: parameters are tensors, and attributes."""
    modules = list(model.modules())
    made = {module: module._replicate_for_data_parallel() for module in modules}
    for module, replica in made.items():
        for name, child in module._modules.items():
            replica._modules[name] = made.get(child)
        for name, parameter in module._parameters.items():
            if parameter is None:
                replica._parameters[name] = None
            else:
                setattr(replica, name, parameter.expand(parameter.shape))
        replica._former_parameters = dict(module._parameters)
    return made[model]


def test_replicas_of_data_parallel(patched):
    reference = adapted()
    ours, _ = patched_copy(reference, patched)
    expected = step(reference)[1]
    for model in (ours,):
        model(**batch())
        model.zero_grad()
        replica = replica_of(model)
        with Ran() as ran:
            replica(**batch()).loss.backward()
        assert ran.counts == EACH
        for name, parameter in model.named_parameters():
            if name in expected:
                torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-3, atol=1e-5)


def test_inference_mode(patched):
    """Whose tensors have no version: adapters compute what they did."""
    reference = adapted()
    ours, _ = patched_copy(reference, patched)
    for each in (reference, ours):
        each.eval()
    with torch.inference_mode():
        expected, found = (model(batch()["input_ids"]).logits for model in (reference, ours))
    torch.testing.assert_close(found, expected, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("hot_swap", [False, True])
def test_compiled_scales(hot_swap, patched):
    """Other scales make no graph breaks, and no more graphs than one for a float that varies; PEFT's hot-swapping,
    whose scales are tensors, none."""
    torch._dynamo.reset()
    model = adapted()
    patched("llama", model)
    if hot_swap:
        prepare_model_for_compiled_hotswap(model, target_rank=4)
    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    seen = []
    for scale in (1.0, 2.0, 3.0, 0.5, 0.7):
        for module in model.modules():
            if isinstance(module, peft.tuners.lora.LoraLayer):
                value = module.scaling["default"]
                module.scaling["default"] = torch.full_like(value, scale) if hot_swap else scale
        torch.testing.assert_close(compiled(**batch()).loss, model(**batch()).loss, rtol=TOLERANCE, atol=0)
        seen.append(counter.frame_count)
    assert seen[-1] == seen[-2] <= (1 if hot_swap else 3)


def test_the_report_of_a_base_with_a_hook(patched):
    reference = adapted()
    ours = copy.deepcopy(reference)
    for model in (reference, ours):
        attention_of(model).o_proj.base_layer.register_forward_hook(lambda module, args, y: 1.5 * y)
    report = patched("llama", ours)
    counts = {(entry.name, entry.by): entry.count for entry in report.replaced if entry.switch == "lora"}
    assert counts[("Linear with an adapter", "addmm")] == 1 and counts[("Linear with an adapter", "linear")] == 13
    assert_same(ours, reference)
