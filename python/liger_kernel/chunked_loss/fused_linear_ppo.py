"""The base of the losses on completions that a policy has sampled; formulas in liger/ops/preference/policy.h."""

import torch

from liger_kernel.chunked_loss.fused_linear_preference import REFERENCE
from liger_kernel.chunked_loss.gradients import gradients_of_arguments, loss_with_gradients
from liger_kernel.operators.common import IGNORE_INDEX
from liger_kernel.operators.head import linear_log_prob
from liger_kernel.operators.policy import CORRECTION, SAPO, VESPO, WHOLE, _compute_dapo_normalizer, check_ratio
from liger_kernel.signatures import required, takes

#: What the head needs, the completions, and the log-probabilities that are known of them or made of a reference model.
COMPLETIONS = required("_input", "weight", "selected_token_ids", "attention_mask", "advantages") | dict(bias=None)
KNOWN = dict(ref_per_token_logps=None, old_per_token_logps=None)
KNOWN_COMPLETIONS = COMPLETIONS | KNOWN | REFERENCE
#: Options of every policy's loss.
CLIP, KL = dict(epsilon_low=0.2, epsilon_high=0.2), dict(beta=0.04)
KIND = dict(loss_type="dapo", max_completion_length=None, importance_sampling_level="token")
RUN = dict(temperature=1.0, compiled=True, use_ref_model=False, chunk_size=1)
LAST = dict(vllm_is_ratio=None) | CORRECTION | VESPO | WHOLE  # of the signatures


class TwoReferences(ValueError, Warning):
    """The API raises a bare Warning here, which its callers may catch."""


class LigerFusedLinearPPOBase(torch.autograd.Function):
    """ppo_loss_fn(log-probabilities of the tokens), without their logits.

    A loss is a subclass with a static `ppo_loss_fn(per_token_logps [B, T], attention_mask, advantages, ...)`, which
    takes the keywords of `_compute_loss_from_logps` and returns the loss and a list of metrics. It is written in
    differentiable torch. Where `_reads_masked(loss_type)` is False, the tokens that the mask leaves out cost nothing,
    and their log-probabilities are 0.
    """

    @staticmethod
    def ppo_loss_fn(*args, **kwargs):
        raise NotImplementedError("a policy's loss defines ppo_loss_fn")

    @staticmethod
    def _check_options(loss_type, importance_sampling_level):
        """Raises where they do not go together."""

    @staticmethod
    def _reads_masked(loss_type):
        return True

    _compute_dapo_normalizer = staticmethod(_compute_dapo_normalizer)

    @staticmethod
    @takes(required("cls", "ctx") | KNOWN_COMPLETIONS | CLIP | KL | KIND | RUN | SAPO | LAST)
    def forward(cls, ctx, _input, weight, selected_token_ids, bias, temperature, compiled, chunk_size, **given):
        """(loss, metrics) for hidden states _input [B, T, H], weight [V, H], selected_token_ids and attention_mask [B,
        T], advantages [B], bias [V] or None.

        The log-probabilities of old_per_token_logps and ref_per_token_logps [B, T] are given, or the reference's are
        made from ref_input, ref_weight and ref_bias, where use_ref_model says that there is one. chunk_size and
        compiled change nothing: the head divides its work by itself.
        """
        use_ref_model, reference = given.pop("use_ref_model"), [given.pop(name) for name in REFERENCE]
        cls._check_options(given["loss_type"], given["importance_sampling_level"])
        _check_batch(use_ref_model, reference[0], selected_token_ids, **given)
        mask, ratio, known = (given[name] for name in ("attention_mask", "vllm_is_ratio", "ref_per_token_logps"))
        given["vllm_is_ratio"] = ratio.unsqueeze(-1) if ratio is not None and ratio.ndim == 1 else ratio
        ids = _readable(selected_token_ids, len(weight), mask, cls._reads_masked(given["loss_type"]))

        def log_probs(hidden, weight, bias):
            return linear_log_prob(hidden, weight, ids, bias, temperature, IGNORE_INDEX)

        def loss_of(logps):
            given["ref_per_token_logps"] = known if use_ref_model else None
            if use_ref_model and known is None:
                with torch.no_grad():
                    given["ref_per_token_logps"] = log_probs(*reference)
            return _loss_of_tokens(cls.ppo_loss_fn, per_token_logps=logps, full_attention_mask=mask, **given)

        return loss_with_gradients(ctx, log_probs, loss_of, _input, weight, bias)

    @staticmethod
    def backward(ctx, grad_output, *grad_metrics):
        return gradients_of_arguments(ctx, (grad_output,), bias=5)

    @staticmethod
    def chunk_forward(input_chunk, weight, selected_token_ids, bias=None, temperature=1.0):
        """log_softmax((input_chunk weightᵀ + bias) / temperature) at selected_token_ids [b, T], float, differentiable;
        0 for negative ids, which are padding."""
        ids = _readable(selected_token_ids, len(weight))
        return linear_log_prob(input_chunk, weight, ids, bias, temperature, IGNORE_INDEX)

    @staticmethod
    @takes(
        required("per_token_logps", "attention_mask_chunk", "advantages_chunk")
        | {f"{name}_chunk": None for name in (*KNOWN, "vllm_is_ratio")}
        | dict(full_attention_mask=None)
        | (CLIP | KL | KIND | dict(ppo_loss_fn=None) | SAPO | CORRECTION | VESPO | WHOLE)
    )
    def _compute_loss_from_logps(ppo_loss_fn, full_attention_mask, **given):
        """(loss, metrics) of some completions, as parts of those of the batch full_attention_mask; differentiable."""
        given = {name.removesuffix("_chunk"): value for name, value in given.items()}
        mask = given["attention_mask"] if full_attention_mask is None else full_attention_mask
        return _loss_of_tokens(ppo_loss_fn, full_attention_mask=mask, **given)


def _loss_of_tokens(ppo_loss_fn, **given):
    for name in KNOWN:
        given[name] = None if given[name] is None else given[name].detach().float()
    return ppo_loss_fn(**given)


def _check_batch(
    use_ref_model, ref_input, ids, ref_per_token_logps, loss_type, max_completion_length, vllm_is_ratio, **_
):
    if use_ref_model and ref_per_token_logps is None and ref_input is None:
        raise AssertionError("use_ref_model needs ref_per_token_logps or ref_input")
    if ref_per_token_logps is not None and ref_input is not None:
        raise TwoReferences("both ref_per_token_logps and ref_input are given: which one is the reference?")
    if loss_type == "dr_grpo" and max_completion_length is None:
        raise AssertionError("loss_type='dr_grpo' needs max_completion_length")
    check_ratio(vllm_is_ratio, *ids.shape)


def _readable(ids, classes, mask=None, reads_masked=True):
    """ids with IGNORE_INDEX for padding: for negative ones, and for masked ones that are not read or are outside the
    vocabulary."""
    padding = ids < 0
    if mask is not None:
        padding = padding | ((mask == 0) & (ids >= classes) if reads_masked else mask == 0)
    return ids.masked_fill(padding, IGNORE_INDEX)
