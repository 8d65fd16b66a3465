"""What callers of the distillation losses rely on: signatures and attributes."""

import inspect

import pytest
import torch
from liger_kernel import ops as liger_ops
from liger_kernel.chunked_loss import cosine_similarity_loss, fused_linear_distillation, jsd_loss
from liger_kernel.chunked_loss.fused_linear_distillation import LigerFusedLinearDistillationBase
from liger_kernel.transformers import LigerFusedLinearJSD

N, H, H_TEACHER, V = 37, 16, 24, 53
JSD, Cosine = jsd_loss.LigerFusedLinearJSDLoss, cosine_similarity_loss.LigerFusedLinearCosineSimilarityLoss


def test_signatures_and_attributes():
    weights = [
        ("weight_hard_loss", 0.5),
        ("weight_soft_loss", 0.5),
        ("beta", 0.5),
        ("ignore_index", -100),
        ("temperature", 1.0),
        ("compiled", True),
        ("chunk_size", 1024),
        ("return_soft_hard_loss", False),
    ]
    tensors = ["student_input", "student_weight", "teacher_input", "teacher_weight"]
    names = lambda f: [
        p.name if p.default is p.empty else (p.name, p.default)
        for p in inspect.signature(f).parameters.values()
        if p.name not in ("self", "cls", "ctx")
    ]
    biases = [("student_bias", None), ("teacher_bias", None)]
    for module in (jsd_loss, cosine_similarity_loss):
        name = "JSD" if module is jsd_loss else "CosineSimilarity"
        loss, function = (
            getattr(module, f"LigerFusedLinear{name}Loss"),
            getattr(module, f"LigerFusedLinear{name}Function"),
        )
        assert names(function.forward) == [*tensors, "true_labels", "student_bias", "teacher_bias", *weights]
        assert names(loss) == weights and names(loss.forward) == [*tensors, "true_labels", *biases]
        options = dict(
            weight_hard_loss=0.1,
            weight_soft_loss=0.2,
            beta=0.3,
            ignore_index=7,
            temperature=2.0,
            compiled=False,
            chunk_size=3,
            return_soft_hard_loss=True,
        )
        made = loss(**options)
        assert {name: getattr(made, name) for name in options} == options and issubclass(
            function, torch.autograd.Function
        )
        with pytest.raises(AssertionError):
            loss(temperature=0)
    base = LigerFusedLinearDistillationBase
    assert names(base.forward) == [
        *tensors,
        "target",
        *biases,
        ("chunk_size", 1024),
        ("ignore_index", -100),
        *weights[:3],
        ("compute_ce_loss", True),
        ("temperature", 1.0),
        ("compiled", True),
        ("return_soft_hard_loss", False),
        "loss_kwargs",
    ]
    assert names(base.chunk_forward) == [
        *(f"{t}_chunk" if "input" in t else t for t in tensors),
        "target_chunk",
        *biases,
        ("ignore_index", -100),
        ("compute_ce_loss", True),
    ]
    assert names(liger_ops.LigerFusedLinearJSDFunction.forward) == [
        *tensors,
        ("shift_labels", None),
        ("jsd_beta", 0.5),
        ("ignore_index", -100),
        ("temperature", 1.0),
        ("accum_dtype", None),
    ]
    assert names(LigerFusedLinearJSD) == [
        ("jsd_beta", 0.5),
        ("ignore_index", -100),
        ("temperature", 1.0),
        ("accum_dtype", None),
    ]
    assert (
        names(LigerFusedLinearJSD.forward) == [*tensors, "shift_labels"]
        and fused_linear_distillation.DistillationLoss.function is None
    )
