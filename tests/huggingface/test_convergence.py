"""Trained for a few dozen steps from the same seed, a model of patched classes is what it would be without the patch.

Compared are the loss of every step and of an evaluation, the likeliest log-probabilities, of the evaluation or, where
neither loss of this package is on, of the last step, and every parameter in the end. Of six families, `--families` as
in test_families.py: dense, softcapped, with experts, and with images, these with gradient checkpointing.

How far rounding alone carries a training differs from model to model, by factors of a thousand. So the yardstick is the
model itself, trained without the patch once more after a change of every parameter in its last bit.
"""

import pytest
import torch
from liger_kernel.transformers import monkey_patch
from test_families import FUSED, UNFUSED, only, switches_of
from tiny import TINY_MODELS, model_of

CONVERGED = ("llama", "qwen3", "gemma2", "gemma3", "mixtral", "qwen2_5_vl")
STEPS, LIKELIEST = 32, 20
# How many times as far as after that change a patched model may stray, which rounds otherwise in every step too: a loss
# or a likely log-probability, and an element of a parameter, of which some have a gradient that cancels. A rounding
# counts as the least change.
FACTOR, OF_A_PARAMETER = 4, 16


def _converge(family, kind, dtype, fused, flip=False, **training):
    """The first parameters; then the losses of all steps and the evaluation, log-probabilities, the last parameters."""
    model = model_of(family, kind).to(dtype)
    for p in model.parameters() if flip else ():
        p.data.view({4: torch.int32, 2: torch.int16}[p.element_size()]).bitwise_xor_(1)
    inputs = [TINY_MODELS[family][kind][1](seed) for seed in range(5)]
    inputs = [{name: v.to(dtype) if v.is_floating_point() else v for name, v in batch.items()} for batch in inputs]
    if "pixel_values" in inputs[0]:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    first = {name: p.detach().clone() for name, p in model.named_parameters()}
    # With an eps far above rounding: an element whose gradient is nothing else would move by the whole rate.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-5)
    losses = []
    for step in range(STEPS):
        output = model(**inputs[step % 4], **training)
        output.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(output.loss.detach())
    with torch.no_grad():
        evaluation = model.eval()(**inputs[4], **({"skip_logits": False} if training else {}))
    logits = (evaluation if fused else output).logits.detach()
    return first, [torch.stack([*losses, evaluation.loss]), logits.float().log_softmax(-1), *model.parameters()]


def _distance(a, b):
    """The largest difference, in parts of a usual element of b; infinite where one of them is not finite."""
    difference = (a - b).double().abs().max() / b.double().square().mean().sqrt()
    return difference.item() if difference.isfinite() else float("inf")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.full(when=lambda p: p["case"][0] != "mixtral" and (not p["fused"] or p["dtype"] != torch.float32))
@only(lambda row: row.name in CONVERGED)
def test_convergence(case, fused, dtype):
    family, kind = case
    (first, plain), (_, noise) = (_converge(family, kind, dtype, fused, flip) for flip in (False, True))
    training = {"accum_dtype": torch.float32} if fused else {}
    apply = getattr(monkey_patch, f"apply_liger_kernel_to_{family}")
    report = apply(**{**switches_of(family), UNFUSED: False, FUSED: fused})
    try:
        ours, patched = _converge(family, kind, dtype, fused, **training)
    finally:
        report.undo()
    assert ours.keys() == first.keys() and all(torch.equal(ours[name], first[name]) for name in first)
    likeliest = plain[1].topk(LIKELIEST).indices
    for found in (plain, noise, patched):
        found[1] = found[1].gather(-1, likeliest)
    assert plain[0][-2] < 0.8 * plain[0][0]
    floor = torch.finfo(dtype).eps
    factors = (FACTOR, FACTOR, *[OF_A_PARAMETER] * len(first))
    names = ("loss", "log-probabilities", *first)
    for what, factor, a, b, n in zip(names, factors, patched, plain, noise, strict=True):
        strayed, limit = _distance(a, b), factor * max(_distance(n, b), floor)
        assert strayed <= limit, f"{what}: {strayed:.2g} of a usual element, where {limit:.2g} may be"
