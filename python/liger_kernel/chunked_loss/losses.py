"""The table of the losses, a row for each. Formulas of preferences are in liger/ops/preference/preference.h, those of
policies in liger/ops/preference/policy.h."""

import dataclasses

import torch

from liger_kernel._library import ops
from liger_kernel.chunked_loss import fused_linear_ppo as ppo
from liger_kernel.chunked_loss.classes import Loss
from liger_kernel.chunked_loss.fused_linear_distillation import DISTILLATION, DistillationLoss, formula
from liger_kernel.chunked_loss.fused_linear_preference import PAIRS, REFERENCE, LigerFusedLinearPreferenceBase
from liger_kernel.chunked_loss.fused_linear_unpaired_preference import SEQUENCES, LigerFusedLinearUnpairedPreferenceBase
from liger_kernel.operators import policy
from liger_kernel.operators.distillation import COSINE, JENSEN_SHANNON, jensen_shannon
from liger_kernel.signatures import required, takes

# Preferences. A call of a module has the weight first, but for KTO's.

CALL_OF_PAIRS = required("lin_weight", "_input", "target") | dict(bias=None)
SCORES = required("chosen_logps", "rejected_logps", "full_target")
IGNORE, BETA, ALPHA = dict(ignore_index=-100), dict(beta=0.1), dict(alpha=1.0)
SMOOTHING, MARGIN, KL = dict(label_smoothing=0.0), dict(gamma=0.5), dict(kl=None)
WEIGHED = IGNORE | BETA | ALPHA | SMOOTHING
WITH_REFERENCE = dict(compiled=True, use_ref_model=True, average_log_prob=False, chunk_size=1)
FORM = dict(loss_type="sigmoid") | SMOOTHING | dict(discopop_tau=0.05)
LOSS_TYPES = "sigmoid hinge exo_pair nca_pair robust bco_pair sppo_hard apo_zero apo_down discopop".split()


@takes(SCORES | dict(ref_chosen_logps=None, ref_rejected_logps=None) | BETA | FORM)
def dpo(chosen_logps, rejected_logps, full_target, ref_chosen_logps, ref_rejected_logps, **options):
    """(loss, chosen_rewards [n], rejected_rewards [n]); a reference that is not given counts as 0.

    Raises ValueError for an unknown loss_type or a label_smoothing that it cannot have, NotImplementedError for ipo.
    """
    logps = chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps
    return ops.dpo_loss(*logps, **options, pairs=len(full_target) // 2)


def check_dpo(module):
    if module.loss_type not in module._SUPPORTED_LOSS_TYPES:
        known = ", ".join(sorted(module._SUPPORTED_LOSS_TYPES))
        raise ValueError(f"Unsupported loss_type {module.loss_type!r}: it is one of {known}")
    nothing = torch.empty(0, device="cpu")
    dpo(nothing, nothing, nothing, loss_type=module.loss_type, label_smoothing=module.label_smoothing)


@takes(SCORES | BETA)
def orpo(chosen_logps, rejected_logps, full_target, beta):
    """(loss, chosen_rewards [n], rejected_rewards [n], log_odds_ratio, log_odds_chosen) of average
    log-probabilities."""
    return ops.orpo_loss(chosen_logps, rejected_logps, beta, len(full_target) // 2)


@takes(SCORES | BETA | SMOOTHING)
def cpo(chosen_logps, rejected_logps, full_target, beta, label_smoothing):
    """(loss, chosen_rewards [n], rejected_rewards [n])."""
    return ops.cpo_loss(chosen_logps, rejected_logps, beta, label_smoothing, 0.0, len(full_target) // 2)


@takes(SCORES | BETA | MARGIN | SMOOTHING)
def simpo(chosen_logps, rejected_logps, full_target, beta, gamma, label_smoothing):
    """(loss, chosen_rewards [n], rejected_rewards [n]) of average log-probabilities; gamma is not multiplied by beta,
    nor a part of the rewards."""
    return ops.cpo_loss(chosen_logps, rejected_logps, beta, label_smoothing, gamma, len(full_target) // 2)


SCORE = required("log_prob_chunk", "preference_labels_chunk", "full_target") | dict(ref_log_prob_chunk=None)


@takes(SCORE | BETA | KL)
def kto(log_prob_chunk, preference_labels_chunk, full_target, ref_log_prob_chunk, beta, kl):
    """(loss, chosen_rewards_sum, rejected_rewards_sum); a reference that is not given counts as 0, and so does kl, one
    number.

    Raises ValueError where kl holds more than one.
    """
    return ops.kto_loss(log_prob_chunk, preference_labels_chunk, ref_log_prob_chunk, kl, beta, len(full_target))


DPO = Loss(
    name="DPO",
    formula="Direct preference optimisation and its relatives, of which loss_type names one",
    paper="Rafailov et al. 2023, arXiv:2305.18290",
    base=LigerFusedLinearPreferenceBase,
    hooks=dict(preference_loss_fn=dpo),
    arguments=PAIRS | REFERENCE | IGNORE | BETA | dict(compute_nll_loss=False) | WITH_REFERENCE | FORM | ALPHA,
    call=CALL_OF_PAIRS | REFERENCE,
    first=("ignore_index", "beta", "alpha"),
    check=check_dpo,
    attributes=dict(_SUPPORTED_LOSS_TYPES=set(LOSS_TYPES)),
    doc="""DPO of a head `lin_weight` on hidden states of n chosen and n rejected sequences: (loss, aux) with seven
    entries, the last two the rewards.

    Raises ValueError for an unknown loss_type or a label_smoothing that it cannot have.
    """,
)

ORPO = Loss(
    name="ORPO",
    formula="Odds ratio preference optimisation",
    paper="Hong et al. 2024, arXiv:2403.07691",
    base=LigerFusedLinearPreferenceBase,
    hooks=dict(preference_loss_fn=orpo),
    arguments=PAIRS | IGNORE | BETA | dict(compute_nll_loss=True, nll_target=None, compiled=True, chunk_size=1),
    call=CALL_OF_PAIRS | dict(nll_target=None),
    doc="""ORPO of a head `lin_weight` on hidden states of n chosen and n rejected sequences: (loss, aux) with nine
    entries.

    nll_target [2n, T] holds the labels of the nll, of which the first half counts, by default target.
    """,
)

CPO = Loss(
    name="CPO",
    formula="Contrastive preference optimisation",
    paper="Xu et al. 2024, arXiv:2401.08417",
    base=LigerFusedLinearPreferenceBase,
    hooks=dict(preference_loss_fn=cpo),
    arguments=PAIRS | WEIGHED | dict(compute_nll_loss=True, compiled=True, average_log_prob=False, chunk_size=1),
    call=CALL_OF_PAIRS,
    doc="""CPO of a head `lin_weight` on hidden states of n chosen and n rejected sequences: (loss, aux) with seven
    entries, the last two the rewards.

    alpha multiplies the nll.
    """,
)

SIMPO = Loss(
    name="SimPO",
    formula="CPO of average log-probabilities with a margin",
    paper="Meng et al. 2024, arXiv:2405.14734",
    base=LigerFusedLinearPreferenceBase,
    hooks=dict(preference_loss_fn=simpo),
    arguments=PAIRS | WEIGHED | dict(compute_nll_loss=False, compiled=True) | MARGIN | dict(chunk_size=1),
    call=CALL_OF_PAIRS,
    module_defaults=dict(compute_nll_loss=True),
    doc="""SimPO of a head `lin_weight` on hidden states of n chosen and n rejected sequences: (loss, aux) with seven
    entries, the last two the rewards.

    alpha multiplies the nll, which is a part of the loss by default here, and not in the Function.
    """,
)

KTO = Loss(
    name="KTO",
    formula="Kahneman-Tversky optimisation",
    paper="Ethayarajh et al. 2024, arXiv:2402.01306",
    base=LigerFusedLinearUnpairedPreferenceBase,
    hooks=dict(preference_loss_fn=kto),
    arguments=SEQUENCES | REFERENCE | KL | IGNORE | BETA | WITH_REFERENCE,
    call=required("_input", "lin_weight", "target") | dict(bias=None, preference_labels=None) | REFERENCE | KL,
    module_defaults=dict(use_ref_model=False),
    doc="""KTO of a head `lin_weight` on hidden states of sequences that are liked or not: (loss, aux) with six sums.

    The reference counts only with use_ref_model=True, which is the default of the Function, and not here. kl is one
    number.
    """,
)

# Policies.

LOGPS = required("per_token_logps", "attention_mask", "advantages", "full_attention_mask") | ppo.KNOWN


@takes(LOGPS | ppo.CLIP | ppo.KL | ppo.KIND | policy.SAPO | ppo.LAST, extra="kwargs", renamed=policy.OPERATOR_NAMES)
def grpo(per_token_logps, attention_mask, advantages, full_attention_mask, kwargs, **options):
    """(loss, [mean kl, unless beta is 0, mean clipped]); policy_loss of libliger."""
    ref, old, ratio, items = (options.pop(name) for name in (*ppo.KNOWN, "vllm_is_ratio", "num_items_in_batch"))
    loss_type = options["loss_type"]
    policy.check_loss(loss_type, options["level"], *(options[name] for name in policy.SAPO))
    if loss_type == "dr_grpo" and options["max_length"] is None:
        raise ValueError("loss_type='dr_grpo' needs max_completion_length")
    if loss_type != "sapo":
        options |= policy.SAPO  # callers by position leave anything there
    normalizer = None
    if loss_type in policy.NORMALIZED:
        normalizer = policy._compute_dapo_normalizer(full_attention_mask, items)
    batch = attention_mask, advantages, old, ref, ratio, None, normalizer, full_attention_mask
    options = policy.policy_options(**options, masked_terms=loss_type == "luspo")
    loss, kl, clipped = ops.policy_loss(per_token_logps, *batch, **options)
    return loss, [kl, clipped] if options["beta"] else [clipped]


def check_grpo(module):
    for name in (*policy.SAPO, "delta"):
        value = getattr(module, name)
        if value is not None and value <= 0:
            raise ValueError(f"{name} must be positive, got {value}")


RUN = ppo.RUN | dict(use_ref_model=True)

GRPO = Loss(
    name="GRPO",
    formula="Group-relative policy optimisation and its relatives, of which loss_type names one: (loss, (mean kl, "
    "unless beta is 0, mean clipped))",
    paper="Shao et al. 2024, arXiv:2402.03300",
    base=ppo.LigerFusedLinearPPOBase,
    hooks=dict(
        ppo_loss_fn=grpo, _check_options=policy.check_level, _reads_masked=lambda loss_type: loss_type == "luspo"
    ),
    arguments=ppo.KNOWN_COMPLETIONS | ppo.KL | ppo.CLIP | ppo.KIND | policy.SAPO | RUN | ppo.LAST,
    call=required("_input", "lin_weight", "selected_token_ids", "attention_mask", "advantages")
    | dict(bias=None)
    | ppo.KNOWN
    | REFERENCE
    | dict(vllm_is_ratio=None, num_items_in_batch=None),
    first=("beta", "compiled", "use_ref_model", "chunk_size"),
    check=check_grpo,
    doc="""The loss of completions under a policy's head, without its logits; see LigerFusedLinearGRPOFunction.

    Raises ValueError where a temperature of sapo, or delta, is not positive.
    """,
)

# Distillation.


@formula(JENSEN_SHANNON, masks_ignored=True)
def jsd(student_logits, teacher_logits, beta=0.5, target=None, ignore_index=-100):
    """Σ over the tokens whose target is not ignore_index (None: all) of β KL(T ‖ M) + (1 − β) KL(S ‖ M), M = β T + (1 −
    β) S; β = 0 is KL(T ‖ S), β = 1 KL(S ‖ T)."""
    logits = (z.reshape(-1, z.shape[-1]) for z in (student_logits, teacher_logits))
    return jensen_shannon(*logits, None if target is None else target.reshape(-1), beta, ignore_index)


@formula(COSINE, masks_ignored=False)
def cosine(student_logits, teacher_logits, target=None, ignore_index=None, beta=1.0):
    """beta · Σ over all tokens, ignored ones too, of 1 − cos(student_logits, teacher_logits)."""
    return beta * ops.cosine_distance(student_logits, teacher_logits).sum()


JSD = dataclasses.replace(
    DISTILLATION,
    name="JSD",
    formula="Distillation by the generalised Jensen-Shannon divergence",
    paper="Agarwal et al. 2024, arXiv:2306.13649",
    hooks=dict(distillation_loss_fn=jsd),
    module_base=DistillationLoss,
    doc="weight_hard_loss · cross entropy + weight_soft_loss · divergence; see LigerFusedLinearJSDFunction.",
)

COSINE_SIMILARITY = dataclasses.replace(
    DISTILLATION,
    name="CosineSimilarity",
    formula="Distillation by the angle between the logits",
    hooks=dict(distillation_loss_fn=cosine),
    module_base=DistillationLoss,
    doc="weight_hard_loss · cross entropy + weight_soft_loss · beta · (1 − cosine); see "
    "LigerFusedLinearCosineSimilarityFunction.",
)
