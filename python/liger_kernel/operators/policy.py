"""Policy losses on logits, and the log-probabilities that they need; formulas in liger/functions/policy.h."""

from typing import Any

import torch
from torch import Tensor

from liger_kernel._library import ops
from liger_kernel.operators.common import IGNORE_INDEX
from liger_kernel.utils import world_size

#: The losses' codes are libliger's.
_str_to_loss_type = {
    name: code for code, name in enumerate(("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo"))
}
#: Those whose ratio is not clipped: without delta and without a sequence level.
_SOFT = ("cispo", "sapo", "vespo")
#: Those divided by the tokens of all ranks.
NORMALIZED = ("dapo", "cispo", "vespo")


def check_loss(
    loss_type: str, level: str = "token", sapo_temperature_pos: float = 1.0, sapo_temperature_neg: float = 1.05
) -> None:
    """Raises ValueError for an unknown loss or level, for a sequence level that a loss does not have and for
    temperatures that are not positive."""
    check_level(loss_type, level)
    if loss_type not in _str_to_loss_type:
        raise ValueError(f"Unknown loss_type: {loss_type}; known are {', '.join(_str_to_loss_type)}")
    if level not in ("token", "sequence"):
        raise ValueError(f"Unknown importance_sampling_level: {level}; known are 'token' and 'sequence'")
    if loss_type == "sapo" and not (sapo_temperature_pos > 0 and sapo_temperature_neg > 0):
        temperatures = f"{sapo_temperature_pos} and {sapo_temperature_neg}"
        raise ValueError(f"sapo_temperature_pos and sapo_temperature_neg must be positive, got {temperatures}")


def check_level(loss_type: str, level: str) -> None:
    if level == "sequence" and loss_type in _SOFT:
        raise ValueError(f"Sequence-level importance sampling is not supported for loss_type={loss_type!r}")


def check_ratio(ratio: Tensor | None, batch: int, length: int) -> None:
    """Raises AssertionError where vllm_is_ratio is none of [batch], [batch, 1] and [batch, length]."""
    if ratio is not None:
        shape = tuple(ratio.shape)
        if shape not in ((batch,), (batch, 1), (batch, length)):
            shapes = f"[{batch}], [{batch}, 1] or [{batch}, {length}]"
            raise AssertionError(f"vllm_is_ratio must be {shapes}, got {list(shape)}")


def _compute_dapo_normalizer(attention_mask, num_items_in_batch=None):
    """What dapo, cispo and vespo are divided by, float: num_items_in_batch, or the mask's sum over all ranks, for each
    rank; at least 1.

    The sum is a collective: every rank must call it.
    """
    ranks = world_size()
    if num_items_in_batch is None:
        items = attention_mask.sum(dtype=torch.float32)
        if ranks > 1:
            torch.distributed.all_reduce(items)
    else:
        items = torch.as_tensor(num_items_in_batch, dtype=torch.float32, device=attention_mask.device)
    return (items / ranks).clamp(min=1.0)


def _reduce_grpo_loss(per_token_loss, completion_mask, loss_type, max_completion_length=None, num_items_in_batch=None):
    """Losses of tokens [batch, length], already 0 where the mask is, as one number, which see policy_reduce for; no
    mask counts all. Raises ValueError for an unknown loss."""
    check_loss(loss_type)
    mask = torch.ones_like(per_token_loss) if completion_mask is None else completion_mask
    normalizer = _compute_dapo_normalizer(mask, num_items_in_batch) if loss_type in NORMALIZED else None
    return ops.policy_reduce(per_token_loss, mask, loss_type, float(max_completion_length or 0), normalizer)


def _masked_mean(values, mask):
    """Σ values · mask / max(Σ mask, 1); no mask counts all."""
    return ops.masked_mean(values, torch.ones_like(values) if mask is None else mask)


def _log_probs(logits, ids, temperature, mask):
    """ln softmax(logits / temperature) at ids [B, L] for logits [B, L + 1, V], differentiable; 0 where mask is 0."""
    if not logits.is_contiguous():
        raise AssertionError("logits must be contiguous")
    if mask is not None:
        ids = ids.masked_fill(mask == 0, IGNORE_INDEX)
    ids = torch.nn.functional.pad(ids, (0, 1), value=IGNORE_INDEX)
    return ops.selective_log_softmax(logits, ids, float(temperature), IGNORE_INDEX)[0][:, :-1]


@torch.no_grad()
def fused_selective_log_softmax(
    logits: Tensor, input_ids: Tensor, temperature: float = 0.9, mask: Tensor | None = None, lse: Tensor | None = None
) -> Tensor:
    """ln softmax(logits / temperature) at the last L of input_ids, as float [B, L], for contiguous logits [B, L + 1,
    V].

    A position's token is predicted by the logits at its place, the last place's logits predict nothing. 0 where mask
    [B, >= L] is 0, whose logits are not read. lse is made anew and not used. Without gradients; raises AssertionError
    where the logits are not contiguous.
    """
    length = logits.shape[1] - 1
    last = lambda t: t[:, t.shape[1] - length :]
    return _log_probs(logits, last(input_ids), temperature, None if mask is None else last(mask)).contiguous()


def grpo_loss_of_logits(
    logits: Tensor, old_logp: Tensor | None, ref_logp: Tensor | None, completion_ids: Tensor, advantages: Tensor,
    completion_mask: Tensor | None, temperature: float, vllm_is_ratio: Tensor | None, phi_seq: Tensor | None,
    reduce: bool, num_items_in_batch: Tensor | float | None, **options: Any,
) -> tuple[Tensor, Tensor | None, Tensor]:  # fmt: skip
    """(loss, kl or None, clipped) of GrpoLossFunction, options those of policy_options; vespo's weights are made here
    where phi_seq is None."""
    if logits is None or completion_ids is None or advantages is None:
        raise AssertionError("logits, completion_ids and advantages must be given")
    if options["beta"] != 0 and ref_logp is None:
        raise AssertionError("ref_logp must be given where beta is not 0")
    batch, length = logits.shape[0], logits.shape[1] - 1
    given = dict(completion_ids=completion_ids, old_logp=old_logp, ref_logp=ref_logp, completion_mask=completion_mask)
    for name, t in given.items():
        if t is not None and t.shape != (batch, length):
            raise AssertionError(f"{name} must be [{batch}, {length}], got {list(t.shape)}")
    if advantages.shape != (batch,):
        raise AssertionError(f"advantages must be [{batch}], got {list(advantages.shape)}")
    if phi_seq is not None and tuple(phi_seq.shape) not in ((batch,), (batch, 1)):
        raise AssertionError(f"phi_seq must be [{batch}] or [{batch}, 1], got {list(phi_seq.shape)}")
    loss_type, level = options["loss_type"], options["level"]
    if level not in ("token", "sequence"):
        raise AssertionError(f"importance_sampling_level must be 'token' or 'sequence', got {level!r}")
    check_loss(loss_type, level, options["sapo_temperature_pos"], options["sapo_temperature_neg"])
    if options["delta"] is not None and loss_type in _SOFT:
        raise ValueError(f"delta is not supported for loss_type={loss_type!r}")
    check_ratio(vllm_is_ratio, batch, length)

    logp = _log_probs(logits, completion_ids, temperature, completion_mask)
    mask = torch.ones_like(logp) if completion_mask is None else completion_mask
    normalizer = _compute_dapo_normalizer(mask, num_items_in_batch) if reduce and loss_type in NORMALIZED else None
    tensors = logp, mask, advantages, old_logp, ref_logp, vllm_is_ratio, phi_seq, normalizer, None
    loss, kl, clipped = (ops.policy_loss if reduce else ops.policy_terms)(*tensors, **policy_options(**options))
    if not reduce:
        loss, kl, clipped = loss * mask, kl.detach() * mask if options["beta"] else kl, clipped * mask
    return loss, kl if options["beta"] else None, clipped


class GrpoLossFunction:
    @staticmethod
    def apply(
        logits: Tensor, old_logp: Tensor | None, ref_logp: Tensor | None, completion_ids: Tensor, advantages: Tensor,
        completion_mask: Tensor | None, temperature: float, beta: float, eps_low: float, eps_high: float,
        inplace: bool, loss_type: str = "grpo", max_completion_length: int | None = None, reduce: bool = True,
        importance_sampling_level: str = "token", sapo_temperature_pos: float = 1.0,
        sapo_temperature_neg: float = 1.05, vllm_is_ratio: Tensor | None = None, delta: float | None = None,
        use_bias_correction_kl: bool = False, num_items_in_batch: Tensor | float | None = None,
        phi_seq: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor]:  # fmt: skip
        """(loss, kl, clipped) of a policy with these contiguous logits [B, L + 1, V]; formulas in
        liger/functions/policy.h.

        completion_ids, completion_mask (None: all count), old_logp and ref_logp (None: the policy's own) [B, L],
        advantages [B]; vespo's weights phi_seq [B] or [B, 1]. reduce: three numbers, kl and clipped as means over the
        tokens that count; else all [B, L], 0 where the mask is. kl is None for beta 0. Only the loss is
        differentiable. The logits are not changed, whatever inplace says. Raises AssertionError for a shape that does
        not fit or a missing ref_logp, ValueError for options that do not go together.
        """
        if loss_type == "vespo" and phi_seq is None:
            raise ValueError("loss_type='vespo' needs phi_seq")
        return grpo_loss_of_logits(
            logits, old_logp, ref_logp, completion_ids, advantages, completion_mask, temperature, vllm_is_ratio,
            phi_seq, reduce, num_items_in_batch, loss_type=loss_type, level=importance_sampling_level,
            epsilon_low=eps_low, epsilon_high=eps_high, delta=delta, beta=beta, unbiased_kl=use_bias_correction_kl,
            sapo_temperature_pos=sapo_temperature_pos, sapo_temperature_neg=sapo_temperature_neg,
            max_length=max_completion_length,
        )  # fmt: skip


def policy_options(
    loss_type: str, level: str, epsilon_low: float, epsilon_high: float, delta: float | None, beta: float,
    unbiased_kl: bool, sapo_temperature_pos: float, sapo_temperature_neg: float, vespo_k_pos: float = 2.0,
    vespo_lambda_pos: float = 3.0, vespo_k_neg: float = 3.0, vespo_lambda_neg: float = 2.0,
    max_length: float | None = None, masked_terms: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """The options of libliger's policy_loss and policy_terms."""
    return dict(
        loss_type=loss_type, level=level, epsilon_low=epsilon_low, epsilon_high=epsilon_high, delta=delta, beta=beta,
        unbiased_kl=bool(unbiased_kl), sapo_temperature_pos=sapo_temperature_pos,
        sapo_temperature_neg=sapo_temperature_neg, vespo_k_pos=vespo_k_pos, vespo_lambda_pos=vespo_lambda_pos,
        vespo_k_neg=vespo_k_neg, vespo_lambda_neg=vespo_lambda_neg, max_length=max_length or 0,
        masked_terms=masked_terms,
    )  # fmt: skip


def triton_grpo_loss(
    logits: Tensor, old_logp: Tensor | None, ref_logp: Tensor | None, completion_ids: Tensor, advantages: Tensor,
    completion_mask: Tensor | None = None, temperature: float = 0.9, beta: float = 0.04, eps_low: float = 0.2,
    eps_high: float = 0.4, inplace: bool = True, loss_type: str = "dapo", max_completion_length: int | None = None,
    importance_sampling_level: str = "token", reduce: bool = False, sapo_temperature_pos: float = 1.0,
    sapo_temperature_neg: float = 1.05, vllm_is_ratio: Tensor | None = None, delta: float | None = None,
    use_bias_correction_kl: bool = False, num_items_in_batch: Tensor | float | None = None, vespo_k_pos: float = 2.0,
    vespo_lambda_pos: float = 3.0, vespo_k_neg: float = 3.0, vespo_lambda_neg: float = 2.0,
) -> tuple[Any, ...]:  # fmt: skip
    """(loss, kl or None, clipped) of tokens [B, L], 0 where completion_mask is; with reduce (loss, [mean kl, unless
    beta is 0, mean clipped]).

    Logits [B, L + 1, V]; see GrpoLossFunction, which raises for the rest. vespo's weights are made here.
    """
    loss, kl, clipped = grpo_loss_of_logits(
        logits, old_logp, ref_logp, completion_ids, advantages, completion_mask, temperature, vllm_is_ratio, None,
        reduce, num_items_in_batch, loss_type=loss_type, level=importance_sampling_level, epsilon_low=eps_low,
        epsilon_high=eps_high, delta=delta, beta=beta, unbiased_kl=use_bias_correction_kl,
        sapo_temperature_pos=sapo_temperature_pos, sapo_temperature_neg=sapo_temperature_neg, vespo_k_pos=vespo_k_pos,
        vespo_lambda_pos=vespo_lambda_pos, vespo_k_neg=vespo_k_neg, vespo_lambda_neg=vespo_lambda_neg,
        max_length=max_completion_length,
    )  # fmt: skip
    return (loss, [clipped] if kl is None else [kl, clipped]) if reduce else (loss, kl, clipped)
