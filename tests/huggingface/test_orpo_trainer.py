"""LigerORPOTrainer on what it takes from TRL's ORPOTrainer, which a stand-in gives here, against the loss on logits."""

import copy
import sys
import types

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import Accelerator
from conftest import VOCABULARY, assert_close, make
from peft import LoraConfig, get_peft_model
from torch import nn

PAD = -100


class ORPOTrainer:
    """The state and the helper that the subclass uses."""

    is_encoder_decoder, padding_value, beta, aux_loss_enabled = False, 0, 0.3, False

    def __init__(self):
        self.accelerator = Accelerator(cpu=True)

    @staticmethod
    def concatenated_inputs(batch, is_encoder_decoder=False, padding_value=0, device=None):
        return {
            "concatenated_" + name: torch.cat((batch["chosen_" + name], batch["rejected_" + name]))
            for name in ("input_ids", "attention_mask", "labels")
        }


class OlderTrainer(ORPOTrainer):
    label_pad_token_id = -7

    @staticmethod
    def concatenated_inputs(batch, is_encoder_decoder=False, label_pad_token_id=-100, padding_value=0, device=None):
        inputs = ORPOTrainer.concatenated_inputs(batch)
        labels = inputs["concatenated_labels"]
        return {**inputs, "concatenated_labels": labels.masked_fill(labels == PAD, label_pad_token_id)}


@pytest.fixture
def imported(monkeypatch):
    """Imports LigerORPOTrainer where ORPOTrainer stands in this module of TRL, or in none."""

    def load(where, base=ORPOTrainer):
        for name in [
            n for n in sys.modules if n.startswith("liger_kernel.transformers.trainer") and "integration" not in n
        ]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, "trl", types.ModuleType("trl") if where else None)
        for name in ("trl.trainer", "trl.experimental", "trl.experimental.orpo"):
            module = types.ModuleType(name)
            if name == where:
                module.ORPOTrainer = base
            monkeypatch.setitem(sys.modules, name, module)
        from liger_kernel.transformers.trainer import LigerORPOTrainer

        assert issubclass(LigerORPOTrainer, base)
        return LigerORPOTrainer

    return load


@pytest.fixture
def batch():
    """Two pairs whose prompts and paddings differ in length."""
    result = {}
    for side, lengths in (("chosen", (9, 6)), ("rejected", (7, 9))):
        ids = torch.randint(3, VOCABULARY, (2, 9))
        mask = torch.stack([(torch.arange(9) < n).long() for n in lengths])
        labels = ids.masked_fill(mask == 0, PAD)
        labels[0, :3] = labels[1, :2] = PAD
        result |= {f"{side}_input_ids": ids * mask, f"{side}_attention_mask": mask, f"{side}_labels": labels}
    return result


def expected(model, batch, beta=0.3):
    """(loss, metrics) with the logits, as TRL has them."""
    inputs = ORPOTrainer.concatenated_inputs(batch)
    ids, mask, labels = (inputs["concatenated_" + name] for name in ("input_ids", "attention_mask", "labels"))
    logits = model(ids, attention_mask=mask).logits[:, :-1]
    nll = F.cross_entropy(logits[:2].flatten(0, 1), ids.masked_fill(mask == 0, PAD)[:2, 1:].flatten())
    labels = labels[:, 1:]
    logp = logits.log_softmax(-1).gather(-1, labels.clamp_min(0)[..., None])[..., 0]
    logp = (logp * (labels != PAD)).sum(1) / (labels != PAD).sum(1)
    chosen, rejected = logp.chunk(2)
    odds = chosen - rejected - (torch.log1p(-chosen.exp()) - torch.log1p(-rejected.exp()))
    means = {
        "rewards/chosen": beta * chosen,
        "rewards/rejected": beta * rejected,
        "rewards/accuracies": (chosen > rejected).float(),
        "rewards/margins": beta * (chosen - rejected),
        "logps/rejected": rejected,
        "logps/chosen": chosen,
        "logits/rejected": logits[2:],
        "logits/chosen": logits[:2],
        "nll_loss": nll,
        "log_odds_ratio": F.logsigmoid(odds),
        "log_odds_chosen": odds,
    }
    return nll - beta * F.logsigmoid(odds).mean(), {name: value.mean().item() for name, value in means.items()}


def check(trainer, model, reference, batch, inner=None):
    loss, metrics = trainer.get_batch_loss_metrics(model, batch)
    plain, plain_metrics = expected(reference, batch)
    assert_close(loss.detach(), plain.detach())
    assert list(metrics) == list(plain_metrics) and all(type(value) is float for value in metrics.values())
    assert metrics == pytest.approx(plain_metrics, rel=1e-4, abs=1e-5)
    loss.backward(), plain.backward()
    gradients = {n: p.grad for n, p in reference.named_parameters() if p.grad is not None}
    assert len(gradients) > 3
    for name, parameter in (inner or model).named_parameters():
        if name in gradients:
            assert_close(parameter.grad, gradients[name])


@pytest.mark.parametrize("where", ["trl.trainer", "trl.experimental.orpo"])
def test_loss_metrics_and_gradients(imported, batch, where):
    trainer, model = imported(where)(), make("llama")
    check(trainer, model, copy.deepcopy(model), batch)
    with torch.no_grad():
        _, metrics = trainer.get_batch_loss_metrics(model, batch, train_eval="eval")
    assert all(name.startswith("eval_") for name in metrics) and len(metrics) == 11


def test_another_label_of_padding(imported, batch):
    model = make("llama")
    check(imported("trl.trainer", OlderTrainer)(), model, copy.deepcopy(model), batch)


def test_an_adapter(imported, batch):
    model = get_peft_model(make("llama"), LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    check(imported("trl.trainer")(), model, copy.deepcopy(model), batch)


@pytest.fixture
def one_process():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
def test_wrapped_models(imported, batch, one_process, wrapper):
    """The wrapper's forward is run: FSDP gathers the parameters and DDP sums the gradients there."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    trainer, model = imported("trl.trainer")(), make("llama")
    reference = copy.deepcopy(model)
    if wrapper == "ddp":
        wrapped, sums = nn.parallel.DistributedDataParallel(model), []

        def hook(state, bucket):
            sums.append(bucket.buffer().numel())
            future = torch.futures.Future()
            future.set_result(bucket.buffer())
            return future

        wrapped.register_comm_hook(None, hook)
        check(trainer, wrapped, reference, batch, inner=model)
        assert sum(sums) == sum(p.numel() for p in model.parameters())
    else:
        wrapped = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
        check(trainer, wrapped, reference, batch, inner=model)


def test_autocast_of_the_trainer(imported, batch):
    """accelerate's mixed precision begins in the model's own forward, which is not run."""
    trainer, model = imported("trl.trainer")(), make("llama")
    plain, _ = trainer.concatenated_forward(model, batch)
    trainer.accelerator.autocast = lambda: torch.autocast("cpu", torch.bfloat16)
    mixed, _ = trainer.concatenated_forward(model, batch)
    assert not torch.equal(plain, mixed) and mixed.item() == pytest.approx(plain.item(), rel=0.05)


def test_routers(imported, batch):
    """The router's loss is added where it is enabled."""
    trainer, model = imported("trl.trainer")(), make("llama")
    plain, _ = trainer.concatenated_forward(model, batch)
    trainer.aux_loss_enabled, trainer.aux_loss_coef, backbone = True, 0.5, model.model.forward

    def forward(*args, output_router_logits=False, **kwargs):
        output = backbone(*args, **kwargs)
        output.aux_loss = torch.tensor(3.0) if output_router_logits else None
        return output

    model.model.forward = forward
    assert_close(trainer.concatenated_forward(model, batch)[0], plain + 1.5)


def test_models_whose_logits_the_loss_would_not_see(imported, batch):
    trainer = imported("trl.trainer")()
    with pytest.raises(ValueError, match="final_logit_softcapping"):
        trainer.concatenated_forward(make("gemma2"), batch)
    model = get_peft_model(make("llama"), LoraConfig(target_modules=["lm_head"]))
    with pytest.raises(ValueError, match="lm_head.*LoRA|lm_head.*lora|lm_head.*Linear"):
        trainer.concatenated_forward(model, batch)


def test_without_trl(imported):
    """The trainer names what is missing; the helper that others import from beside it is there."""
    with pytest.raises(ImportError, match="pip install trl"):
        imported(None)
    from liger_kernel.transformers import fsdp
    from liger_kernel.transformers.trainer.orpo_trainer import _FSDPForwardRedirection

    assert _FSDPForwardRedirection is fsdp._FSDPForwardRedirection
