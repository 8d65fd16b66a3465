"""The patch that NeMo Automodel applies to models of transformers, on this package."""

import copy

import torch
from nemo_automodel._transformers.kernel_patches import _patch_liger_kernel
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM
from watched import Seen

TOLERANCE = 2e-5  # of float32, relative to the largest number: sums in another order
FIELDS = dict(
    vocab_size=50,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)


def test_patched_models():
    for model in (LlamaForCausalLM(LlamaConfig(**FIELDS)), MistralForCausalLM(MistralConfig(**FIELDS))):
        torch.manual_seed(0)
        ours, reference = _patch_liger_kernel(copy.deepcopy(model)).train(), model.train()
        ids = torch.randint(50, (2, 9))
        with Seen() as seen:
            losses = [ours(input_ids=ids, labels=ids).loss]
        names = "rms_norm", "gated", "rope", "fused_linear_cross_entropy"
        assert seen.counts.keys() >= {f"{name}_forward" for name in names}
        losses.append(reference(input_ids=ids, labels=ids).loss)
        torch.testing.assert_close(*losses, rtol=TOLERANCE, atol=0)
        for loss in losses:
            loss.backward()
        for a, b in zip(ours.parameters(), reference.parameters(), strict=True):
            assert (a.grad - b.grad).abs().max() <= TOLERANCE * max(1, b.grad.abs().max())
