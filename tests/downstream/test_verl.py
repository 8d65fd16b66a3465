"""verl's actor on this package: the head of its `liger` backend, and a model that its FSDP engine patches."""

import copy
import functools
from types import SimpleNamespace

import pytest
import torch
import verl
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


def micro_batch(lengths, prompts, k, only, fused):
    """Packed sequences with a teacher's classes, of which one token's are padding as verl makes it."""
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu

    g = torch.Generator().manual_seed(3)
    nested = lambda rows: torch.nested.nested_tensor(rows, layout=torch.jagged)
    ids = [torch.randint(50, (n,), generator=g) for n in lengths]
    teacher = [torch.randn(n, 50, generator=g).log_softmax(-1).topk(k, -1) for n in lengths]
    classes, logp = [t.indices.clone() for t in teacher], [t.values.clone() for t in teacher]
    classes[0][0], logp[0][0] = 2, 0.0
    data = TensorDict(
        {
            "input_ids": nested(ids),
            "position_ids": nested([torch.arange(n) for n in lengths]),
            "teacher_ids": nested(classes),
            "teacher_logprobs": nested(logp),
            "prompts": nested([t[:n] for t, n in zip(ids, prompts)]),
            "responses": nested([t[n:] for t, n in zip(ids, prompts)]),
            "response_mask": nested([torch.ones(len(t) - n) for t, n in zip(ids, prompts)]),
        },
        batch_size=[len(lengths)],
    )
    tokens = sum(lengths) - sum(prompts)
    told = dict(temperature=TEMPERATURE, use_remove_padding=True, use_fused_kernels=fused, calculate_entropy=True)
    told |= dict(distillation_use_topk=True, distillation_only=only, dp_size=1, batch_num_tokens=tokens)
    tu.assign_non_tensor(data, **told, global_batch_size=len(lengths))
    return data


def engine_of(model):
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    engine = object.__new__(FSDPEngineWithLMHead)
    engine.module, engine.pad_to_length, engine.use_ulysses_sp, engine._autocast_dtype = model, 0, False, torch.float32
    engine.engine_config = SimpleNamespace(entropy_checkpointing=False, entropy_from_logits_with_chunking=False)
    engine.compute_entropy_from_logits = lambda logits: torch.distributions.Categorical(logits=logits).entropy()
    engine.get_data_parallel_group = lambda: None
    return engine


@pytest.mark.parametrize("sharded", [False, True], ids=["plain", "FSDP2"])
@pytest.mark.parametrize("only", [True, False])
@pytest.mark.parametrize("clamp", [None, -4.0])
def test_distillation_from_the_most_probable_classes(clamp, only, sharded, tmp_path, monkeypatch):
    """The engine's step with verl's compute_forward_kl_topk, and without logits: loss, outputs, gradients."""
    import verl.models.transformers.monkey_patch as models
    from liger_kernel.verl import patch
    from verl.trainer.distillation import distillation_ppo_loss
    from verl.workers.config import DistillationLossConfig
    from verl.workers.engine.fsdp import transformer_impl

    monkeypatch.setattr(transformer_impl, "get_device_id", lambda: "cpu")
    monkeypatch.setattr(transformer_impl, "get_device_name", lambda: "cpu")
    loss_config = DistillationLossConfig(
        loss_mode="forward_kl_topk", topk=6, use_policy_gradient=False, use_task_rewards=False,
        log_prob_min_clamp=clamp, loss_max_clamp=None,
    )  # fmt: skip
    actor = SimpleNamespace(strategy="fsdp2", loss_agg_mode="token-mean", global_batch_info={}, loss_scale_factor=None)
    loss_function = functools.partial(
        distillation_ppo_loss, config=actor, distillation_config=SimpleNamespace(distillation_loss=loss_config)
    )
    fields = dict(vocab_size=50, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**fields, num_key_value_heads=2, initializer_range=0.2)).train()
    plain = copy.deepcopy(model)
    if sharded:
        torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/ranks", rank=0, world_size=1)
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
    before, report = LlamaForCausalLM.forward, patch()
    try:
        batch = lambda fused: micro_batch((7, 9), (3, 4), 6, only, fused)
        expected, wanted = engine_of(plain).forward_step(batch(False), loss_function, False)
        models.patch_forward_with_backends(model, use_fused_kernels=True, fused_kernels_backend="liger")
        if sharded:  # the weights are there within the model's forward alone
            torch.distributed.fsdp.fully_shard(model, mesh=mesh, reshard_after_forward=True)
        with Seen() as seen:
            found, got = engine_of(model).forward_step(batch(True), loss_function, False)
            found.backward()
        ids, options = torch.arange(9)[None], dict(temperature=TEMPERATURE, return_dict=True)
        again = model(ids, **options)
        classes = dict(teacher_topk_ids=ids[..., None], teacher_topk_log_probs=torch.zeros(1, 9, 1))
        output = model(ids, **options, **classes)
    finally:
        report.undo()
        LlamaForCausalLM.forward = before
        if sharded:
            torch.distributed.destroy_process_group()
    expected.backward()
    assert not hasattr(again, "fused_linear_aux")
    # FSDP gathers the weights for backward by hooks on the tensors that it finds in an output.
    losses = output.fused_linear_aux.distillation_losses
    assert any(t is losses for t in torch.utils._pytree.tree_leaves(output)) and losses.requires_grad
    assert seen.counts["linear_log_prob_forward"] == 1
    close(found.detach(), expected.detach())
    outputs = {"distillation_losses", "student_mass", "teacher_mass", "entropy"} | (
        {"log_probs"} if not only else set()
    )
    assert got["model_output"].keys() == outputs and expected.abs() > 0.1
    for name in outputs:
        close(got["model_output"][name].values(), wanted["model_output"][name].values())
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        ours = ours.grad.full_tensor() if sharded else ours.grad
        close(ours, theirs.grad)


@pytest.mark.parametrize("rival", ["verl", "verl chunked"])
def test_benchmarks_time_the_same_loss(rival, timed_loss):
    """What benchmarks/bench.py takes from verl, without the rest of it, has our results and gradients."""
    for ours, theirs in timed_loss(
        rival, verl, lambda rivals, folder: rivals.verl_topk_loss(folder, rival == "verl chunked")
    ):
        close(ours, theirs)
