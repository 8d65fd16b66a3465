"""The losses that TRL up to 1.12 takes from liger_kernel.chunked_loss, in its trainers, against those without."""

import liger_kernel.chunked_loss
import pytest
from conftest import COMMON
from trainers import assert_same_steps, train
from watched import Seen


@pytest.mark.parametrize(
    "kind, loss, options, keys",
    (
        ("dpo", "DPO", {}, {"loss", "rewards/margins", "logps/chosen"}),
        ("dpo", "DPO", dict(loss_type="apo_zero"), {"loss", "rewards/margins"}),
        ("kto", "KTO", {}, {"loss", "kl", "rewards/chosen", "logps/rejected"}),
        ("grpo", "GRPO", {}, {"loss", "kl", "reward"}),
        (
            "grpo",
            "GRPO",
            dict(loss_type="bnpo", importance_sampling_level="sequence", num_iterations=2),
            {"loss", "kl"},
        ),
        ("distillation", "JSD", dict(beta=0.5), {"loss"}),
        ("distillation", "JSD", dict(beta=0.0), {"loss"}),
        ("gkd", "JSD", dict(beta=0.3), {"loss"}),
    ),
)
def test_trainers_take_the_same_steps(kind, loss, options, keys, model, tokenizer, tmp_path, record_property):
    cls, seen, calls = getattr(liger_kernel.chunked_loss, f"LigerFusedLinear{loss}Loss"), Seen(), []

    def watch(trainer):
        assert type(trainer.liger_loss) is cls
        forward = trainer.liger_loss.forward

        def watched(*args, **kwargs):
            with seen:
                found = forward(*args, **kwargs)
            calls.append((found[0] if isinstance(found, tuple) else found).item())
            return found

        trainer.liger_loss.forward = watched

    expected = train(kind, model, tokenizer, tmp_path, **options)
    found = train(kind, model, tokenizer, tmp_path, watch, use_liger_kernel=True, **options)
    assert_same_steps(expected, found, keys)
    assert (
        len(calls) >= COMMON["max_steps"]
        and len(set(calls)) == len(calls)
        and all(abs(value) > 1e-4 for value in calls)
    )
    assert ("linear_distillation_forward" if loss == "JSD" else "linear_log_prob_forward") in seen.counts
    chosen = "".join(f", {name} {value}" for name, value in options.items())
    record_property("setup", f"{kind.upper()}{chosen}, `use_liger_kernel=True`")
    record_property("result", f"{len(calls)} steps of {cls.__name__}, equal metrics and parameters")
