"""liger_kernel.trl.patch() against TRL's trainers that distil from a few classes per token."""

from types import SimpleNamespace

import liger_kernel.trl
import pytest
import torch
from liger_kernel.operators.lazy_logits import LazyLogits, with_lazy_heads
from torch.nn.parallel import DistributedDataParallel
from trainers import assert_same_steps, teacher_of, train
from trl.models.utils import _ForwardRedirection


@pytest.fixture
def patched():
    report = liger_kernel.trl.patch()
    yield report
    report.undo()


def candidates(teachers=1, rows=21, classes=40, k=8):
    """A head with a few of a teacher's classes per token, some of which are absent."""
    g = torch.Generator().manual_seed(6)
    hidden, weight = torch.randn(rows, 12, generator=g), torch.randn(classes, 12, generator=g)
    logp = (torch.randn(rows, classes, generator=g) * 2).log_softmax(-1)
    ids = logp.topk(k, -1).indices
    mask = torch.rand(rows, k, generator=g) > 0.2
    teacher = torch.randint(0, teachers, (rows,), generator=g) if teachers > 1 else None
    return (
        hidden,
        weight,
        torch.randn(classes, generator=g),
        ids.masked_fill(~mask, -1),
        logp.gather(1, ids),
        mask,
        teacher,
    )


@pytest.mark.parametrize("add_tail", (True, False))
@pytest.mark.parametrize("beta", (0.0, 0.3, 1.0))
@pytest.mark.parametrize("options", ((1.0, None, 1.0, 1), (2.0, 5.0, 0.7, 3)), ids=str)
def test_asynchronous_distillation(patched, add_tail, beta, options):
    """All five sums of TRL's function, and the gradients of the first."""
    from trl.experimental.async_distillation import async_distillation_trainer as trainer

    scale, softcap, temperature, teachers = options
    hidden, weight, bias, ids, logp, mask, which = candidates(teachers)
    k = 8 if beta == 0 else 2
    tail = (beta, temperature, add_tail, which, teachers, 6)
    results = []
    for function in (trainer._chunked_jsd_loss, trainer._chunked_jsd_loss.liger_original):
        leaves = [t.clone().requires_grad_() for t in (hidden, weight, bias)]
        found = function(*leaves, scale, softcap, ids[:, :k], logp[:, :k], mask[:, :k], *tail)
        results.append((*found, *torch.autograd.grad(found[0], leaves)))
    for ours, theirs in zip(*results, strict=True):
        assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
        # Sums of some hundred float terms; TRL bounds the student's 1 − Q at 1e-7.
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-5 * max(1, theirs.abs().max().item()))


def test_asynchronous_distillation_where_there_are_no_kernels(patched):
    from trl.experimental.async_distillation import async_distillation_trainer as trainer

    hidden, weight, bias, ids, logp, mask, _ = candidates()
    inputs = [t.double() for t in (hidden, weight, bias)]
    ours = trainer._chunked_jsd_loss(*inputs, 1.0, None, ids, logp, mask, 0.0, 1.0, True, None, 1, 256)
    theirs = trainer._chunked_jsd_loss.liger_original(*inputs, 1.0, None, ids, logp, mask, 0.0, 1.0, True, None, 1, 256)
    assert all(map(torch.equal, ours, theirs))


class Server:
    """What TRL asks a vLLM server, of a teacher in this process."""

    teacher = None

    def __init__(self, **ignored):
        pass

    @torch.no_grad()
    def get_sequence_logprobs(self, sequences, prompt_lengths, top_logprobs, temperature):
        found = {"logprobs": [], "logprob_token_ids": [], "actual_logprobs": []}
        for ids, length in zip(sequences, prompt_lengths):
            ids = torch.tensor(ids)
            logp = (self.teacher(ids[None]).logits[0, length - 1 : -1] / temperature).log_softmax(-1)
            top, classes = logp.topk(top_logprobs)
            actual = logp.gather(1, ids[length:, None])
            for name, numbers in zip(found, (top, classes, actual)):
                found[name].append(numbers.tolist())
        return found


@pytest.mark.parametrize(
    "kind, options",
    (
        ("server_distillation", dict(beta=0.0, loss_top_k=5)),
        ("server_distillation", dict(beta=0.0, loss_top_k=5, loss_add_tail=False)),
        ("server_distillation", dict(beta=0.5)),
        ("server_distillation", dict(beta=0.0, loss_top_k=5, use_liger_kernel=True)),
        ("server_distillation", dict(beta=1.0)),
        ("sdft", dict(distillation_alpha=0.5)),
        ("sdft", dict(distillation_alpha=0.0, distillation_add_tail=True)),
        ("sdpo", dict(distillation_topk=5, distillation_alpha=1.0)),
        ("iw_opd", {}),
        ("iw_opd", dict(distillation_objective="jsd", beta=0.0, loss_top_k=5)),
        ("iw_opd", dict(distillation_objective="jsd", beta=0.5, loss_top_k=5, loss_add_tail=False)),
        ("iw_opd", dict(distillation_objective="jsd", beta=1.0, loss_top_k=1, reverse_kl_top_1_mode="argmax")),
    ),
    ids=str,
)
def test_trainers_make_no_logits(kind, options, model, tokenizer, tmp_path, monkeypatch, record_property):
    """The same steps as without the patch, with no row of logits as a whole."""
    tokenizer.save_pretrained(tmp_path)  # which IW-OPD reads beside the model
    Server.teacher = teacher_of(model)
    monkeypatch.setattr("trl.generation.vllm_client.VLLMClient", Server)
    expected = train(kind, model, tokenizer, tmp_path, **options)
    report = liger_kernel.trl.patch()
    try:
        with monkeypatch.context() as m:
            m.setattr(LazyLogits, "whole", lambda self: pytest.fail("logits were made"))
            found = train(kind, model, tokenizer, tmp_path, **options)
    finally:
        report.undo()
    logged = {name for name in expected[0][0] if not any(word in name for word in ("runtime", "time", "per_second"))}
    assert_same_steps(expected, found, logged)
    chosen = "".join(f", {name} {value}" for name, value in options.items())
    record_property("setup", f"{kind}{chosen}, `liger_kernel.trl.patch()`")
    record_property("result", "equal metrics and parameters after 2 steps, without logits")


def test_under_ddp(model, tmp_path):
    """Whose search for unused parameters ends with the model's forward: the loss is computed in it, as without DDP."""
    ids = torch.randint(0, 60, (2, 9), generator=torch.Generator().manual_seed(2))

    class Trainer:
        teacher_model = None
        accelerator = SimpleNamespace(unwrap_model=lambda model: getattr(model, "module", model))

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            logits = model(input_ids=inputs).logits[:, :-1]
            assert isinstance(logits, LazyLogits) == self.lazy
            return -(logits / 0.7).log_softmax(-1).gather(-1, inputs[:, 1:, None]).mean()

    lazy = with_lazy_heads(Trainer.compute_loss, 0, _ForwardRedirection())
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/ranks", rank=0, world_size=1)
    try:
        results = []
        for wrapped in (model, DistributedDataParallel(model, find_unused_parameters=True)):
            trainer = Trainer()
            trainer.lazy = wrapped is not model
            model.zero_grad()
            loss = (lazy if trainer.lazy else Trainer.compute_loss)(trainer, wrapped, ids)
            loss.backward()
            results.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
    finally:
        torch.distributed.destroy_process_group()
    for want, got in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=2e-5 * max(1, want.abs().max().item()))
    assert "forward" not in vars(model.lm_head)
