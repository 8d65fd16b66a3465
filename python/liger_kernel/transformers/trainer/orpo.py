"""TRL's ORPOTrainer without logits."""

import inspect

import torch
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DataParallel, DistributedDataParallel

from liger_kernel.chunked_loss import LigerFusedLinearORPOLoss
from liger_kernel.transformers.fsdp import _FSDPForwardRedirection, run_inside

try:
    from trl.trainer import ORPOTrainer
except ImportError:
    try:
        from trl.experimental.orpo import ORPOTrainer
    except ImportError as error:
        raise ImportError("LigerORPOTrainer needs TRL with an ORPOTrainer: run `pip install trl`") from error

#: What a model may do to its logits, which the loss does not: options of its configuration, with the value that
#: changes nothing.
_LOGIT_OPTIONS = {"final_logit_softcapping": None, "logit_scale": 1, "logits_scaling": 1}


class LigerORPOTrainer(ORPOTrainer):
    """ORPOTrainer whose loss is made of the hidden states: no logits are kept.

    Raises ValueError for a model that caps or scales its logits, and for a head that is more than a Linear.
    """

    def concatenated_forward(self, model, batch):
        """(loss, aux) of LigerFusedLinearORPOLoss for a batch of pairs; the loss holds the router's where that is
        enabled."""
        pad = getattr(self, "label_pad_token_id", -100)
        # Newer TRL pads only labels with -100.
        known = inspect.signature(self.concatenated_inputs).parameters
        inputs = self.concatenated_inputs(
            batch,
            is_encoder_decoder=self.is_encoder_decoder,
            padding_value=self.padding_value,
            device=self.accelerator.device,
            **({"label_pad_token_id": pad} if "label_pad_token_id" in known else {}),
        )
        if isinstance(model, FullyShardedDataParallel):
            return _FSDPForwardRedirection()(model, lambda: self._loss(model.module, inputs, pad))
        if isinstance(model, DistributedDataParallel):
            return run_inside(model, model.module, lambda: self._loss(model.module, inputs, pad))
        return self._loss(model.module if isinstance(model, DataParallel) else model, inputs, pad)

    def _loss(self, model, inputs, pad):
        with self.accelerator.autocast():  # which accelerate begins in the model's own forward
            return self._loss_of(
                model.get_base_model() if hasattr(model, "get_base_model") else model, inputs, pad
            )  # PEFT's

    def _loss_of(self, model, inputs, pad):
        _check(model)
        ids, mask, target = (inputs[f"concatenated_{name}"] for name in ("input_ids", "attention_mask", "labels"))
        options = {"decoder_input_ids": self._shift_right(target)} if self.is_encoder_decoder else {}
        if self.aux_loss_enabled:
            options["output_router_logits"] = True
        outputs = model.model(ids, attention_mask=mask, use_cache=False, **options)
        hidden, nll_target = outputs.last_hidden_state, target
        if not self.is_encoder_decoder:
            # Tokens before n predict n; the nll is that of the prompt too.
            nll_target = ids.masked_fill(mask != 1, pad)[:, 1:]
            hidden, target = hidden[:, :-1], target[:, 1:]
        loss, aux = LigerFusedLinearORPOLoss(ignore_index=pad, beta=self.beta)(
            model.lm_head.weight, hidden, target, model.lm_head.bias, nll_target=nll_target
        )
        if self.aux_loss_enabled:
            loss = loss + self.aux_loss_coef * outputs.aux_loss
        return loss, aux

    def get_batch_loss_metrics(self, model, batch, train_eval="train"):
        """(loss, metrics), the metrics as Python floats, averaged over the processes."""
        loss, aux = self.concatenated_forward(model, batch)
        chosen_logps, rejected_logps, chosen_logits, rejected_logits, nll = aux[:5]
        chosen_rewards, rejected_rewards, log_odds_ratio, log_odds_chosen = aux[5:]
        values = {
            "rewards/chosen": chosen_rewards,
            "rewards/rejected": rejected_rewards,
            "rewards/accuracies": (chosen_rewards > rejected_rewards).float(),
            "rewards/margins": chosen_rewards - rejected_rewards,
            "logps/rejected": rejected_logps,
            "logps/chosen": chosen_logps,
            "logits/rejected": rejected_logits,
            "logits/chosen": chosen_logits,
            "nll_loss": nll,
            "log_odds_ratio": log_odds_ratio,
            "log_odds_chosen": log_odds_chosen,
        }
        prefix = "eval_" if train_eval == "eval" else ""
        return loss, {
            prefix + name: self.accelerator.gather_for_metrics(value).mean().item() for name, value in values.items()
        }


def _check(model):
    changed = [
        name for name, nothing in _LOGIT_OPTIONS.items() if getattr(model.config, name, nothing) not in (None, nothing)
    ]
    if changed:
        raise ValueError(
            f"{type(model).__name__} changes its logits ({', '.join(changed)}), and the loss does not: train it with "
            "TRL's ORPOTrainer"
        )
    if not isinstance(model.lm_head, torch.nn.Linear):
        raise ValueError(
            f"the loss reads the weight of lm_head, which is a {type(model.lm_head).__name__} and no Linear: train it "
            "with TRL's ORPOTrainer"
        )
