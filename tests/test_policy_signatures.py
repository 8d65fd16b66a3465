"""What callers of the losses of policies rely on: signatures and attributes."""

import inspect

import pytest
from liger_kernel import ops as liger_ops
from liger_kernel.chunked_loss import grpo_loss as fused
from liger_kernel.chunked_loss.fused_linear_ppo import LigerFusedLinearPPOBase
from liger_kernel.transformers.grpo_loss import triton_grpo_loss


def names(function):
    return [
        p.name if p.default is p.empty else (p.name, p.default)
        for p in inspect.signature(function).parameters.values()
        if p.name not in ("self", "ctx", "cls")
    ]


POLICY = [("sapo_temperature_pos", 1.0), ("sapo_temperature_neg", 1.05)]
VESPO = [("vespo_k_pos", 2.0), ("vespo_lambda_pos", 3.0), ("vespo_k_neg", 3.0), ("vespo_lambda_neg", 2.0)]
REFERENCE = [
    ("ref_per_token_logps", None),
    ("old_per_token_logps", None),
    ("ref_input", None),
    ("ref_weight", None),
    ("ref_bias", None),
]
BATCH = ["selected_token_ids", "attention_mask", "advantages", ("bias", None)]
SIGNATURES = {
    fused.LigerFusedLinearGRPOFunction.forward: [
        "_input",
        "weight",
        *BATCH,
        *REFERENCE,
        ("beta", 0.04),
        ("epsilon_low", 0.2),
        ("epsilon_high", 0.2),
        ("loss_type", "dapo"),
        ("max_completion_length", None),
        ("importance_sampling_level", "token"),
        *POLICY,
        ("temperature", 1.0),
        ("compiled", True),
        ("use_ref_model", True),
        ("chunk_size", 1),
        ("vllm_is_ratio", None),
        ("delta", None),
        ("use_bias_correction_kl", False),
        *VESPO,
        ("num_items_in_batch", None),
    ],
    fused.LigerFusedLinearGRPOLoss: [
        ("beta", 0.04),
        ("compiled", True),
        ("use_ref_model", True),
        ("chunk_size", 1),
        ("epsilon_low", 0.2),
        ("epsilon_high", 0.2),
        ("loss_type", "dapo"),
        ("max_completion_length", None),
        ("importance_sampling_level", "token"),
        *POLICY,
        ("temperature", 1.0),
        ("delta", None),
        ("use_bias_correction_kl", False),
        *VESPO,
    ],
    fused.LigerFusedLinearGRPOLoss.forward: [
        "_input",
        "lin_weight",
        *BATCH,
        *REFERENCE,
        ("vllm_is_ratio", None),
        ("num_items_in_batch", None),
    ],
    LigerFusedLinearPPOBase.forward: [
        "_input",
        "weight",
        *BATCH,
        *REFERENCE,
        ("epsilon_low", 0.2),
        ("epsilon_high", 0.2),
        ("beta", 0.04),
        ("loss_type", "dapo"),
        ("max_completion_length", None),
        ("importance_sampling_level", "token"),
        ("temperature", 1.0),
        ("compiled", True),
        ("use_ref_model", False),
        ("chunk_size", 1),
        *POLICY,
        ("vllm_is_ratio", None),
        ("delta", None),
        ("use_bias_correction_kl", False),
        *VESPO,
        ("num_items_in_batch", None),
    ],
    LigerFusedLinearPPOBase.chunk_forward: [
        "input_chunk",
        "weight",
        "selected_token_ids",
        ("bias", None),
        ("temperature", 1.0),
    ],
    liger_ops.GrpoLossFunction.apply: [
        "logits",
        "old_logp",
        "ref_logp",
        "completion_ids",
        "advantages",
        "completion_mask",
        "temperature",
        "beta",
        "eps_low",
        "eps_high",
        "inplace",
        ("loss_type", "grpo"),
        ("max_completion_length", None),
        ("reduce", True),
        ("importance_sampling_level", "token"),
        *POLICY,
        ("vllm_is_ratio", None),
        ("delta", None),
        ("use_bias_correction_kl", False),
        ("num_items_in_batch", None),
        ("phi_seq", None),
    ],
    triton_grpo_loss: [
        "logits",
        "old_logp",
        "ref_logp",
        "completion_ids",
        "advantages",
        ("completion_mask", None),
        ("temperature", 0.9),
        ("beta", 0.04),
        ("eps_low", 0.2),
        ("eps_high", 0.4),
        ("inplace", True),
        ("loss_type", "dapo"),
        ("max_completion_length", None),
        ("importance_sampling_level", "token"),
        ("reduce", False),
        *POLICY,
        ("vllm_is_ratio", None),
        ("delta", None),
        ("use_bias_correction_kl", False),
        ("num_items_in_batch", None),
        *VESPO,
    ],
    fused.get_gamma_weights: [
        "advantages",
        "log_ratio_per_token",
        "mask",
        ("importance_sampling_ratio", None),
        ("k_pos", 2.0),
        ("lambda_pos", 3.0),
        ("k_neg", 3.0),
        ("lambda_neg", 2.0),
    ],
}


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda f: f.__qualname__)
def test_signatures(function):
    assert names(function) == SIGNATURES[function]


def test_attributes():
    options = dict(
        beta=0.1,
        compiled=False,
        use_ref_model=False,
        chunk_size=3,
        epsilon_low=0.1,
        epsilon_high=0.3,
        loss_type="sapo",
        max_completion_length=5,
        importance_sampling_level="sequence",
        sapo_temperature_pos=2.0,
        sapo_temperature_neg=3.0,
        temperature=0.5,
        delta=4.0,
        use_bias_correction_kl=True,
        vespo_k_pos=1.0,
        vespo_lambda_pos=1.5,
        vespo_k_neg=1.6,
        vespo_lambda_neg=1.7,
    )
    module = fused.LigerFusedLinearGRPOLoss(**options)
    assert {name: getattr(module, name) for name in options} == options
