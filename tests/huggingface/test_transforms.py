"""torch.func: patched parts run their original code under a transform, and an operator that is called there raises."""

import copy

import pytest
import torch
from conftest import TOLERANCE, assert_close, batch, make
from liger_kernel.memory import recompute
from liger_kernel.transformers import functional
from torch.func import functional_call, grad, jacrev, jvp, vjp, vmap


def loss_of(model):
    def loss(parameters, ids, labels):
        return functional_call(model, parameters, (), {"input_ids": ids, "labels": labels, "use_cache": False}).loss

    return loss


@pytest.fixture(params=["llama", "gemma2", "qwen3"])
def models(request, patched):
    reference = make(request.param)
    model = copy.deepcopy(reference)
    patched(request.param, model)
    return model, reference


def per_sample(model, parameters, inputs):
    one = lambda ids, labels: grad(loss_of(model))(parameters, ids[None], labels[None])
    return vmap(one, randomness="different")(inputs["input_ids"], inputs["labels"])


def pulled_back(model, parameters, inputs):
    loss, pull = vjp(lambda p: loss_of(model)(p, inputs["input_ids"], inputs["labels"]), parameters)
    return pull(torch.ones_like(loss))[0]


def compiled(model, parameters, inputs):
    run = lambda p: grad(loss_of(model))(p, inputs["input_ids"], inputs["labels"])
    return torch.compile(run, backend="aot_eager")(parameters)


WAYS = {
    "grad": lambda model, parameters, inputs: grad(loss_of(model))(parameters, inputs["input_ids"], inputs["labels"]),
    "per_sample": per_sample,
    "vjp": pulled_back,
    "compiled": compiled,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.full(when=lambda p: p["way"] == "compiled" and p["models"] != "gemma2")
def test_gradients(models, way):
    parameters = {name: p.detach() for name, p in models[1].named_parameters()}
    found, expected = (WAYS[way](model, parameters, batch()) for model in models)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert_close(found[name], gradient)


def test_afterwards_parts_run_again(models):
    model, reference = models
    parameters = {name: p.detach() for name, p in reference.named_parameters()}
    recomputed = recompute(model)
    WAYS["grad"](model, parameters, batch())
    recomputed.remove()
    assert model(**batch()).logits is None  # the loss is made in the head again
    torch.testing.assert_close(model(**batch()).loss, reference(**batch()).loss, rtol=TOLERANCE, atol=0)


def test_operators_raise_by_name():
    x, w = torch.randn(3, 8), torch.ones(8)
    norm = lambda x: functional.liger_rms_norm(x, w, 1e-6).sum()
    for transform in (grad(norm), jacrev(norm), lambda x: vjp(norm, x)[1](torch.tensor(1.0)), vmap(grad(norm))):
        with pytest.raises(
            NotImplementedError, match="liger::rms_norm has no derivative under transforms of torch.func"
        ):
            transform(x)
    with pytest.raises(NotImplementedError, match="liger::gated has no derivative"):
        grad(lambda x: functional.liger_swiglu(x, x).sum())(x)
    with pytest.raises(NotImplementedError, match="forward-mode"):
        jvp(norm, (x,), (x,))
    # Without a derivative, torch calls an operator for each sample.
    torch.testing.assert_close(
        vmap(lambda x: functional.liger_rms_norm(x, w, 1e-6))(x), functional.liger_rms_norm(x, w, 1e-6)
    )
