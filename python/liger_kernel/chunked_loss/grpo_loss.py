"""Group-relative policy optimisation (Shao et al. 2024, arXiv:2402.03300) and its relatives; formulas in
liger/ops/preference/policy.h."""

import torch

from liger_kernel._library import ops
from liger_kernel.chunked_loss.fused_linear_ppo import LigerFusedLinearPPOBase
from liger_kernel.chunked_loss.losses import GRPO
from liger_kernel.operators.policy import VESPO
from liger_kernel.signatures import required, takes


def k3_loss_fn(log_p, log_q):
    """e^(log_p − log_q) − (log_p − log_q) − 1."""
    return ops.k3(log_p, log_q)


def sapo_loss_fn(importance_ratio, temperature):
    """4 / temperature · σ(temperature · (importance_ratio − 1)); raises ValueError unless temperature is positive."""
    if not temperature > 0:
        raise ValueError(f"sapo's temperature must be positive, got {temperature}")
    return ops.soft_clip(
        importance_ratio, torch.as_tensor(temperature, dtype=importance_ratio.dtype, device=importance_ratio.device)
    )


def clip_coef_fn(coef, epsilon_low, epsilon_high, loss_type):
    """(the ratio as the loss clips it or None, where it is below, where it is above); cispo's bound is epsilon_high
    itself and not differentiable."""
    if loss_type == "cispo":
        return coef.clamp(max=epsilon_high).detach(), False, coef > epsilon_high
    if loss_type in ("sapo", "vespo"):
        return None, False, False
    return coef.clamp(1 - epsilon_low, 1 + epsilon_high), coef < 1 - epsilon_low, coef > 1 + epsilon_high


@takes(
    required("advantages", "log_ratio_per_token", "mask")
    | dict(importance_sampling_ratio=None)
    | {name.removeprefix("vespo_"): default for name, default in VESPO.items()}
)
def get_gamma_weights(**given):
    """vespo's weights [B, 1] of completions with advantages [B], log_ratio_per_token and mask [B, T], not
    differentiated; see vespo_weights."""
    return ops.vespo_weights(*given.values())


LigerFusedLinearGRPOFunction = GRPO.function(__name__)
LigerFusedLinearGRPOLoss = GRPO.module(LigerFusedLinearGRPOFunction)
