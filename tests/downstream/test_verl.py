"""verl's actor on this package: the head of its `liger` backend, and a model that its FSDP engine patches."""

import copy

import pytest
import torch
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM
from verl.models.transformers.monkey_patch import patch_forward_with_backends
from verl.utils.experimental import torch_functional
from watched import Seen

TOLERANCE = 2e-5  # of float32, relative to the largest number: sums in another order
TEMPERATURE = 0.7


def close(ours, expected):
    torch.testing.assert_close(ours, expected, rtol=0, atol=TOLERANCE * max(1, expected.abs().max().item()))


def plain(hidden, weight, ids):
    """Log-probabilities of ids, and entropies."""
    logp = F.log_softmax(hidden @ weight.T / TEMPERATURE, -1)
    return logp.gather(-1, ids[..., None])[..., 0], -(logp.exp() * logp).sum(-1)


@pytest.mark.parametrize("shape", [(13,), (2, 7)])
def test_the_head(shape):
    assert torch_functional._LIGER_FUSED_LINEAR_SCALED_CROSS_ENTROPY.__module__.startswith("liger_kernel.")
    torch.manual_seed(0)
    hidden, weight, ids = torch.randn(*shape, 16), torch.randn(50, 16), torch.randint(50, shape)
    upstream = torch.randn(2, *shape)
    results = []
    for head in (torch_functional.FusedLinearForPPO(impl_backend="liger"), None):
        tensors = [t.clone().requires_grad_() for t in (hidden, weight)]
        found = plain(*tensors, ids) if head is None else head(*tensors, ids, TEMPERATURE)
        results.append([*found, *torch.autograd.grad(found, tensors, tuple(upstream))])
    for ours, expected in zip(*results, strict=True):
        close(ours, expected)


@pytest.mark.parametrize("fused_head", [False, True])
def test_an_actor(fused_head):
    """As verl's engine patches it: norms, rotary embeddings and MLPs are ours, and the head is verl's."""
    from liger_kernel.transformers.monkey_patch import _apply_liger_kernel_to_instance

    fields = dict(vocab_size=50, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**fields, num_key_value_heads=2)).train()
    ids = torch.randint(50, (2, 9))
    reference = copy.deepcopy(model)
    logits = reference(ids).logits
    expected = plain(logits, torch.eye(50), ids.roll(-1, -1))
    (expected[0].sum() + expected[1].sum()).backward()

    _apply_liger_kernel_to_instance(model=model, fused_linear_cross_entropy=False, swiglu=True)
    before = LlamaForCausalLM.forward
    try:
        patch_forward_with_backends(model, use_fused_kernels=fused_head, fused_kernels_backend="liger")
        with Seen() as seen:
            if fused_head:
                output = model(ids, temperature=TEMPERATURE, return_dict=True)
                found = output.log_probs, output.entropy
            else:
                found = plain(model(ids).logits, torch.eye(50), ids.roll(-1, -1))
    finally:
        LlamaForCausalLM.forward = before
    head = {"linear_log_prob_forward"} if fused_head else set()
    assert seen.counts.keys() >= {f"{name}_forward" for name in ("rms_norm", "gated", "rope")} | head
    for ours, theirs in zip(found, expected, strict=True):
        close(ours, theirs)
    (found[0].sum() + found[1].sum()).backward()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        close(ours.grad, theirs.grad)
