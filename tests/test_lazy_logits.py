"""Logits that are computed where they are read, against those of plain torch in float64."""

from types import SimpleNamespace

import liger_kernel
import pytest
import torch
from liger_kernel.operators.lazy_logits import LazyLogits, lazy_heads, with_lazy_heads
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

TOKENS, WIDTH, V, K = 11, 16, 50, 6
FLOAT = 32 * torch.finfo(torch.float32).eps  # sums of some tens of terms


def head(device, dtype=torch.float32, bias=True):
    g = torch.Generator().manual_seed(4)
    tensors = [torch.randn(2, TOKENS, WIDTH, generator=g), torch.randn(V, WIDTH, generator=g) / 2]
    tensors += [torch.randn(V, generator=g)] if bias else []
    ids = torch.randint(0, V, (2, TOKENS, K), generator=g).to(device)
    return [t.to(device, dtype).requires_grad_() for t in tensors], ids


def gemma(z):
    return (z / 5.0).tanh() * 5.0


#: What code of others does with logits, and whether it needs all of them.
READS = {
    "gather": (lambda z, ids: z.gather(-1, ids), False),
    "torch.gather": (lambda z, ids: torch.gather(z, dim=2, index=ids), False),
    "log_softmax": (lambda z, ids: torch.log_softmax(z, dim=-1).gather(-1, ids), False),
    "F.log_softmax": (lambda z, ids: nn.functional.log_softmax(z / 0.7, dim=-1).gather(dim=-1, index=ids), False),
    "slices": (lambda z, ids: z[:, :-1, :][:, -4:].log_softmax(-1).gather(-1, ids[:, 6:-1]), False),
    "mask": (lambda z, ids: z[ids[..., 0] % 2 == 0].gather(-1, ids[ids[..., 0] % 2 == 0]), False),
    "row": (lambda z, ids: z[1].gather(-1, ids[1]), False),
    "logsumexp": (lambda z, ids: torch.logsumexp(z, dim=-1, keepdim=True) + z.logsumexp(2)[..., None], False),
    "topk": (lambda z, ids: torch.topk(z, k=4, dim=-1)[0] + z.topk(4).indices, False),
    "of log-probabilities": (lambda z, ids: z.log_softmax(-1).topk(3).values, False),
    "argmax": (lambda z, ids: z.argmax(dim=-1) + z.logsumexp(-1), False),
    "softcap": (lambda z, ids: (gemma(z) / 0.7).log_softmax(-1).gather(-1, ids), False),
    "softcap's logits": (lambda z, ids: 2 * gemma(z).gather(-1, ids), False),
    "scale": (lambda z, ids: (0.3 * z).float().log_softmax(-1).gather(-1, ids), False),
    "softmax": (lambda z, ids: z.softmax(-1), True),
    "some classes": (lambda z, ids: z[..., 3:9] + z[:, :, 1:7], True),
    "of other rows": (lambda z, ids: z.gather(-1, ids[:, :3]), True),
    "along tokens": (lambda z, ids: z.gather(1, ids % TOKENS), True),
    "by a tensor": (lambda z, ids: (z / torch.tensor(0.7, device=z.device)).logsumexp(-1), True),
    "in place": (lambda z, ids: (z.mul_(0.5), z.logsumexp(-1))[1], True),
    "smallest": (lambda z, ids: z.topk(2, largest=False).values, True),
    "minus": (lambda z, ids: z * -1, True),
    "sum": (lambda z, ids: z.sum() * z.shape[-1] + z.size(1) + z.numel() + z.dim() + len(z), True),
}


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("bias", (True, False))
def test_reads(device, read, bias, monkeypatch):
    """Numbers and gradients, and that nothing else was computed."""
    function, needs_all = READS[read]
    tensors, ids = head(device, bias=bias)
    made = []
    whole = LazyLogits.whole
    monkeypatch.setattr(LazyLogits, "whole", lambda self: (made.append(1), whole(self))[1])
    found = function(LazyLogits.of(*tensors), ids)
    assert bool(made) == needs_all and not isinstance(found, LazyLogits)
    upstream = torch.rand(found.shape, device=device)
    gradients = torch.autograd.grad(found, tensors, upstream)
    doubles = [t.detach().double().requires_grad_() for t in tensors]
    exact = function(nn.functional.linear(*doubles) + 0, ids)
    wanted = torch.autograd.grad(exact, doubles, upstream.double())
    for ours, truth in zip((found, *gradients), (exact, *wanted), strict=True):
        size = truth.abs().max().item()
        torch.testing.assert_close(ours.double(), truth.double(), rtol=0, atol=FLOAT * max(1, size))


def test_about_itself(device):
    tensors, _ = head(device)
    z = LazyLogits.of(*tensors)
    assert isinstance(z, torch.Tensor) and z.shape == (2, TOKENS, V) and z.dtype == torch.float32
    assert z.device == tensors[0].device and z.ndim == 3 and z.size(-1) == V and z.made is None
    part = z[:, 2:5] / 2
    assert isinstance(part, LazyLogits) and part.shape == (2, 3, V) and part.made is None
    torch.testing.assert_close(part.whole(), nn.functional.linear(*tensors)[:, 2:5] / 2)


def test_without_gradients_where_it_was_made_so(device):
    """A teacher's, which is read outside of its no_grad."""
    tensors, ids = head(device)
    with torch.no_grad():
        z = LazyLogits.of(*tensors)
    for read, _ in READS.values():
        z.made = None
        assert not read(z, ids).requires_grad
    assert z.made is None or not z.made.requires_grad


@pytest.mark.parametrize("dtypes", ((torch.bfloat16,) * 2, (torch.bfloat16, torch.float32)), ids=str)
def test_dtypes(device, dtypes):
    """Float numbers of 16-bit heads: a logit is rounded to eps of itself, and so is a weight under autocast."""
    tensors, ids = head(device, bias=False)
    autocast = dtypes[1] == torch.float32
    tensors = [t.detach().to(dtype).requires_grad_() for t, dtype in zip(tensors, dtypes)]
    with torch.autocast(device, torch.bfloat16, enabled=autocast):
        z = LazyLogits.of(*tensors)
        assert z.dtype == torch.bfloat16
    exact = tensors[0].double() @ tensors[1].double().T
    bound = 4 * torch.finfo(torch.bfloat16).eps * exact.abs().max().item()
    for function in (READS["gather"][0], READS["log_softmax"][0], READS["logsumexp"][0]):
        found = function(z, ids)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), function(exact, ids), rtol=0, atol=bound)
    assert z.float().whole().dtype == torch.float32 and z.whole().dtype == torch.bfloat16


class Model(nn.Module):
    def __init__(self, device):
        super().__init__()
        torch.manual_seed(1)
        self.lm_head = nn.Linear(WIDTH, V, device=device)

    def get_output_embeddings(self):
        return self.lm_head

    def forward(self, hidden):
        return self.lm_head(hidden)


def test_heads(device):
    model, hidden = Model(device), torch.randn(3, WIDTH, device=device)
    with lazy_heads(model, model, None) as lazy:
        assert lazy and isinstance(model(hidden), LazyLogits)
    assert "forward" not in vars(model.lm_head) and type(model(hidden)) is torch.Tensor
    model.double()
    with lazy_heads(model):  # no kernels
        assert type(model(hidden.double())) is torch.Tensor


def test_a_patched_model(device):
    """Whose head can also return the loss."""
    config = dict(vocab_size=V, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2)
    model = LlamaForCausalLM(LlamaConfig(**config)).to(device)
    liger_kernel.patch(model)
    ids = torch.arange(9, device=device)[None]
    logits, loss = model(ids).logits, model(ids, labels=ids).loss
    with lazy_heads(model):
        lazy, same = model(ids).logits, model(ids, labels=ids).loss
    assert isinstance(lazy, LazyLogits) and not isinstance(logits, LazyLogits)
    torch.testing.assert_close(lazy.gather(-1, ids[..., None]), logits.gather(-1, ids[..., None]))
    torch.testing.assert_close(same, loss)


def refuse(model):
    class Other(nn.Linear):
        pass

    other = Model("cpu")
    if model == "another class":
        other.lm_head = Other(WIDTH, V)
    elif model == "hook":
        other.lm_head.register_forward_hook(lambda *args: None)
    elif model == "sharded":
        other.lm_head.weight.data = torch.empty(0)
    else:
        other = nn.Linear(2, 2)
    return other


@pytest.mark.parametrize("why", ("another class", "hook", "sharded", "no head"))
def test_heads_that_are_left_alone(why):
    with lazy_heads(refuse(why)) as lazy:
        assert not lazy


def test_a_trainer(device):
    """Outputs that are returned, and trainers that are not served, have logits."""
    model, hidden = Model(device), torch.randn(3, WIDTH, device=device)

    class Trainer:
        teacher_model, served = None, True
        accelerator = SimpleNamespace(unwrap_model=lambda model: model)

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            logits = model(inputs)
            loss = logits.log_softmax(-1).gather(-1, torch.zeros(3, 1, dtype=torch.long, device=device)).sum()
            return (loss, logits) if return_outputs else (loss, isinstance(logits, LazyLogits))

    compute_loss = with_lazy_heads(Trainer.compute_loss, 0, None, lambda trainer: trainer.served)
    trainer = Trainer()
    loss, lazy = compute_loss(trainer, model, hidden)
    assert lazy
    for returns in (True, False):
        trainer.served = returns
        same, logits = compute_loss(trainer, model, hidden, returns)
        torch.testing.assert_close(same, loss)
        assert type(logits) is torch.Tensor or logits is False
