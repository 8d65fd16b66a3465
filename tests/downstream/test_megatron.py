"""Megatron-LM's GPTModel on CPUs, patched and not, on one rank and on two tensor-parallel ones."""

import contextlib
import pathlib
import sys

import pytest
import torch

sys.path.append(str(pathlib.Path(__file__).parents[1]))
from ranks import on_ranks  # noqa: E402

TOLERANCE = 2e-5  # of float32 losses, relative: sums in another order, carried on over the steps


def _train(rank, flags):
    ranks = torch.distributed.get_world_size()
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import dot_product_attention
    from megatron.core.transformer.transformer_config import TransformerConfig

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks)
    torch.cuda.current_device = lambda: torch.device("cpu")  # where it allocates scores
    # Its tracker of random states keeps those of GPUs; without dropout nothing is drawn.
    nothing = type("Tracker", (), {"fork": lambda self, *a: contextlib.nullcontext()})()
    dot_product_attention.tensor_parallel.get_cuda_rng_tracker = lambda: nothing
    tensor_parallel.get_cuda_rng_tracker = lambda: nothing
    if any(flags.values()):
        from liger_kernel.megatron import apply_liger_kernel_to_megatron

        apply_liger_kernel_to_megatron(**flags)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        ffn_hidden_size=96,
        use_cpu_initialization=True,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        bias_activation_fusion=True,
        cross_entropy_loss_fusion=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=ranks,
        pipeline_dtype=torch.float32,
    )
    torch.manual_seed(0)
    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    model = GPTModel(config, spec, vocab_size=96, max_sequence_length=16)
    norms = [type(m).__name__ for m in model.modules() if "Norm" in type(m).__name__]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    ids = torch.randint(96, (3, 13), generator=torch.Generator().manual_seed(1))
    positions, mask = torch.arange(12).expand(3, 12), torch.ones(1, 1, 12, 12).triu(1).bool()
    losses = []
    for _ in range(4):
        loss = model(ids[:, :-1], positions, mask, labels=ids[:, 1:]).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms


@pytest.mark.parametrize("ranks", [1, 2])
def test_training(ranks, record_property):
    (plain, norms), (patched, patched_norms) = (
        on_ranks(_train, dict.fromkeys(("rms_norm", "cross_entropy", "swiglu"), on), ranks=ranks)[0]
        for on in (False, True)
    )
    assert set(norms) == {"RMSNorm"} and set(patched_norms) == {"LigerMegatronRMSNorm"}
    assert len(norms) == len(patched_norms)
    apart = max(abs(a - b) for a, b in zip(plain, patched)) / plain[0]
    assert plain[-1] < 0.95 * plain[0] and apart <= TOLERANCE, (plain, patched)
    record_property("setup", f"GPTModel, {ranks} tensor-parallel rank{'s' * (ranks > 1)}")
    record_property("result", f"{len(plain)} equal losses ({apart:.0e} apart)")
