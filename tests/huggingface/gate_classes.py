"""Modules of transformers that make the gates of Kimi delta attention: how they are found, made and tried."""

import re

import torch
from liger_kernel.transformers.patching import numeric

WIDTH = 32
GATE = re.compile(r"ForgetGate$")
GATE_CONFIG = dict(hidden_size=WIDTH, linear_head_dim=8, linear_num_heads=3)
# What branches ask for.
GATE_BRANCHES = dict(kda_safe_gate=(True, False), kda_lower_bound=(-5.0,), linear_lower_bound=(None, -4.0))
#: The parts that a source is tried against.
GATES = ("forget_gate", "bailing_forget_gate")


@torch.no_grad()
def same_gate(target, module) -> bool:
    """Whether the forward of a part computes what a module does, in float32 and in bfloat16, in which models keep A_log
    and dt_bias float32."""
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)
    for dtype in (torch.float32, torch.bfloat16):
        for linear in module.children():
            linear.to(dtype)
        x = torch.randn(2, 5, WIDTH, generator=generator).to(dtype)
        try:
            ours, theirs = (forward(module, x) for forward in (target.forward, type(module).forward))
        except (RuntimeError, TypeError, AttributeError):
            return False
        tolerance = 2.0**-16 if theirs.dtype == torch.float32 else 2.0**-7
        if ours.dtype != theirs.dtype or not numeric._close(ours.float(), theirs.float(), tolerance):
            return False
    return True
