"""Router replay with every version of transformers: older ones choose in the mixture's block, or in another method."""

import pytest
import torch
from liger_kernel import routing
from liger_kernel.transformers.patching.apply import patch
from tiny import model_of, text

MODELS = {
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "llama4": "Llama4ForCausalLM",
}


def step(model):
    loss = model(**text()).loss
    return loss, lambda: [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)]


def same(actual, expected):
    return all(a is b if b is None else torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("patched", (False, True))
def test_version(family, patched):
    """Every bit of loss and gradients, also where layers run again in backward; and another choice is taken."""
    model = model_of(family, MODELS[family])
    report = patch(family, model) if patched else None
    try:
        for checkpointed in (False, True):
            if checkpointed:
                model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            with routing.record(model) as recorded:
                expected = step(model)[1]()
            ids = recorded.ids
            with routing.replay(model, ids):
                backward = step(model)[1]
            assert same(backward(), expected)
            other = ids.flip(0)
            with routing.replay(model, other), routing.record(model) as used:
                step(model)
            assert torch.equal(used.ids, other) and not torch.equal(other, ids)
    finally:
        if report is not None:
            report.undo()
