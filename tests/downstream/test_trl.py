"""liger_kernel.trl.patch() against TRL's own functions, one by one and in its trainers."""

import contextlib
import math
import pathlib
import sys

import liger_kernel.trl
import peft
import pytest
import torch
import trl.trainer.utils as trl_utils
from heads import ALL, FLOAT, TWO_HEADS, assert_alike, assert_no_worse, both, counts, inputs, taken_away
from liger_kernel.operators.eight_bit import LigerLinear8bit
from liger_kernel.transformers import LigerSwiGLUMLP
from trainers import assert_same_steps, train, trainer_of
from trl.kernels import chunked_divergence, chunked_logprob

NAMES = (
    "_ChunkedLogProbFunction",
    "_use_triton",
    "_supports_trl_loss_kernel",
    "_fused_logprob_entropy",
    "is_triton_available",
)


@pytest.fixture
def patched(calls):
    report = liger_kernel.trl.patch()
    yield report
    report.undo()


@contextlib.contextmanager
def without_own_kernels(monkeypatch):
    """TRL's own fused head is an error here."""

    def refuse(*args, **kwargs):
        raise AssertionError("TRL's own function ran")

    with monkeypatch.context() as m:
        m.setattr(chunked_logprob.ChunkedLogProbFunction, "apply", refuse)
        m.setattr(chunked_divergence.ChunkedDivergenceFunction, "apply", refuse)
        yield


def state():
    return {name: vars(trl_utils).get(name) for name in NAMES}


def test_undo_restores():
    before = state()
    report = liger_kernel.trl.patch()
    after = state()
    assert all(after[name] is not before[name] for name in NAMES)
    assert not report.skipped and ("_ChunkedLogProbFunction", "linear_log_prob") in {
        (done.name, done.by) for done in report.replaced
    }
    again = liger_kernel.trl.patch()
    assert state() == after and len(again.replaced) == len(report.replaced)
    assert str(report).splitlines()[1].split()[:2] == ["attribute", "of"]
    again.undo()
    assert state() == after
    report.undo()
    assert state() == before


def test_a_trl_without_an_attribute_is_reported(monkeypatch):
    monkeypatch.delattr(trl_utils, "_use_triton")
    report = liger_kernel.trl.patch()
    assert [skip.name for skip in report.skipped] == ["_use_triton"]
    report.undo()
    assert not hasattr(trl_utils, "_use_triton")


def test_a_trl_without_a_module_is_reported(monkeypatch):
    monkeypatch.setattr(liger_kernel.trl, "_PARTS", (("trl.trainer.none_such", *liger_kernel.trl._PARTS[-1][1:]),))
    report = liger_kernel.trl.patch()
    assert not report.replaced and [skip.switch for skip in report.skipped] == ["trl.trainer.none_such"]


def test_no_trl_is_an_error_that_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "trl", None)
    with pytest.raises(ImportError, match="pip install"):
        liger_kernel.trl.patch()


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
@pytest.mark.parametrize("bias", (True, False))
@pytest.mark.parametrize(
    "options",
    (
        (1.0, 64),
        (0.7, 50, 3.0, 1.6, ALL),
        (1.3, 64, None, 0.4, ALL),
        (0.9, 64, 5.0, 1.0, ("log_probs", "entropy", "is_top1")),
    ),
)
def test_log_prob_function(calls, dtype, bias, options):
    tensors, targets = inputs(400, dtype=dtype, bias=bias)
    (expected, gradients), (found, own) = both(tensors, targets, options)
    if dtype == torch.float32:
        assert_alike(expected, found, FLOAT)
        assert_alike(gradients, own, FLOAT)
        assert expected[4].any()
    else:
        assert_no_worse(tensors, targets, options, (found, own), (expected, gradients))
    assert own[1].abs().max() > 0.1 and [t.requires_grad for t in found if t is not None] == [
        t.requires_grad for t in expected if t is not None
    ]
    assert counts(calls) == {"linear_log_prob_forward": 1, "linear_log_prob_backward_": 1}


@pytest.mark.parametrize("upstream", ((True, False), (False, True), (False, False)))
@pytest.mark.parametrize("outputs", (ALL, ("log_probs",), ("entropy",)))
def test_absent_upstream_gradients(calls, upstream, outputs):
    tensors, targets = inputs()
    (_, gradients), (found, own) = both(tensors, targets, (1.0, 64, None, 1.0, outputs), upstream)
    assert_alike(gradients, own, FLOAT)
    assert found[1] is None or "entropy" in outputs
    used = (upstream[0], upstream[1] and "entropy" in outputs)
    assert [tuple(t is not None for t in args[:2]) for args in calls.get("linear_log_prob_backward_", ())] == [
        used
    ] * any(used)


@pytest.mark.parametrize("frozen", ((0,), (1,), (2,), (1, 2), (0, 1, 2)))
def test_frozen_inputs_get_no_gradient(frozen):
    tensors, targets = inputs()
    for place in frozen:
        tensors[place].requires_grad_(False)
    upstream = (len(frozen) < 3,) * 2
    (expected, gradients), (found, own) = both(tensors, targets, (0.7, 64), upstream)
    assert_alike(expected, found, FLOAT)
    assert_alike(gradients, own, FLOAT)
    assert [g is None for g in own] == [place in frozen for place in range(3)]


@pytest.mark.parametrize(
    "hidden, weight, autocast",
    (
        (torch.bfloat16, torch.float32, None),
        (torch.float32, torch.bfloat16, None),
        (torch.float32, torch.float32, torch.bfloat16),
    ),
)
def test_mixed_dtypes(calls, hidden, weight, autocast):
    tensors, targets = inputs(dtype=hidden, weight_dtype=weight)
    options = 0.7, 64, None, 1.0, ("entropy", "mean_logits")
    theirs, ours = both(tensors, targets, options, autocast=autocast)
    # The operands of a 16-bit gradient's GEMM are rounded to it where everything is one chunk.
    assert_no_worse(tensors, targets, options, ours, theirs, 2 if weight == torch.bfloat16 else 1.1)
    assert [args[-2] for args in calls["linear_log_prob_forward"]] == [autocast]


def test_no_logits_wait_under_no_grad(calls):
    tensors, targets = inputs()
    with torch.no_grad():
        found = both(tensors, targets, (0.7, 64), (False, False))[1][0]
    assert not found[0].requires_grad and [args[-1] for args in calls["linear_log_prob_forward"]] == [0]


def test_masked_tokens_are_left_out_where_there_are_kernels(patched):
    assert (
        trl_utils._use_triton(torch.device("cpu"))
        and trl_utils._use_triton(torch.device("cuda"))
        and not trl_utils._use_triton(torch.device("mps"))
    )


def test_without_triton_trls_kernel_is_not_asked_for(monkeypatch):
    monkeypatch.setattr(liger_kernel.trl, "is_triton_available", lambda: False)
    supports = liger_kernel.trl._supports(lambda *tensors: True, 0)
    assert supports(torch.randn(3, 5)) and not supports(torch.randn(3, 5).double())


def test_no_tokens():
    tensors, targets = inputs(tokens=0)
    (expected, gradients), (found, own) = both(tensors, targets, (0.7, 64))
    assert_alike(expected, found, 0)
    assert_alike(gradients, own, 0)
    assert found[0].requires_grad and not own[1].any()


@pytest.mark.parametrize(
    "change", ({"dtype": torch.float64}, {"options": (1.0, 64, None, 0.0)}, {"options": (1.0, 64, None, -1.5)})
)
def test_what_has_no_kernel_runs_on_trls_own(calls, change):
    tensors, targets = inputs(dtype=change.get("dtype", torch.float32))
    (expected, gradients), (found, own) = both(tensors, targets, change.get("options", (1.0, 64)))
    assert_alike(expected, found, 0)
    assert_alike(gradients, own, 0)
    assert not calls


def test_backward_twice_and_second_derivatives():
    tensors, targets = inputs()
    function = liger_kernel.trl._log_prob_function(chunked_logprob.ChunkedLogProbFunction, 0)
    loss = function.apply(*tensors, targets, 0.7, 64)[0].square().sum()
    first = torch.autograd.grad(loss, tensors, retain_graph=True)
    assert_alike(first, torch.autograd.grad(loss, tensors, retain_graph=True), 0)
    (gradient,) = torch.autograd.grad(loss, tensors[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="second derivative"):
        gradient.sum().backward()


@pytest.mark.parametrize("max_bytes", (0, 1000))
def test_backward_gathers_a_weight_that_was_taken_away(monkeypatch, max_bytes):
    """As under ZeRO-3, where it is empty between the two passes."""
    tensors, targets = inputs()
    function = liger_kernel.trl._log_prob_function(chunked_logprob.ChunkedLogProbFunction, max_bytes)
    expected = torch.autograd.grad(function.apply(*tensors, targets, 0.7, 64)[0].sum(), tensors)
    gather, entered = taken_away(monkeypatch, *tensors[1:])
    with gather(*tensors[1:]):
        logp = function.apply(*tensors, targets, 0.7, 64)[0]
    found = torch.autograd.grad(logp.sum(), tensors)
    assert len(entered) == 2
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("shape", ((7,), (3, 5), (2, 3, 5)))
@pytest.mark.parametrize("masked", (False, True))
@pytest.mark.parametrize("temperature", (1.0, 0.7))
def test_selective_log_softmax(patched, calls, shape, masked, temperature):
    generator = torch.Generator().manual_seed(len(shape))
    classes = 53
    values = torch.randn(*shape, classes, generator=generator) * 2
    index = torch.randint(classes, shape, generator=generator)
    mask = torch.rand(shape, generator=generator) > 0.4 if masked else None
    factors = torch.randn(2, *shape, generator=generator)
    ours, reference = values.clone().requires_grad_(), values.double().requires_grad_()
    logp, entropy = trl_utils.selective_log_softmax_and_entropy(ours, index, temperature=temperature, row_mask=mask)
    (factors[0] * logp + factors[1] * entropy).sum().backward()
    p = (reference / temperature).log_softmax(-1)
    kept = torch.ones(shape) if mask is None else mask
    want = p.gather(-1, index[..., None])[..., 0] * kept, -(p.exp() * p).sum(-1) * kept
    (factors[0] * want[0] + factors[1] * want[1]).sum().backward()
    assert_alike([t.float() for t in (*want, reference.grad)], [logp, entropy, ours.grad], 1e-5)
    assert_alike([want[0].float()], [trl_utils.selective_log_softmax(values, index, temperature, mask)], 1e-5)
    assert_alike([(-(p.exp() * p).sum(-1)).float()], [trl_utils.entropy_from_logits(values / temperature)], 1e-5)
    assert counts(calls) == {"selective_log_softmax": 3}
    detached = trl_utils.selective_log_softmax_and_entropy(ours, index, entropy_requires_grad=False)[1]
    assert not detached.requires_grad


def test_selective_log_softmax_where_ours_does_not_apply(patched, calls):
    logits, index = torch.randn(3, 5, 11), torch.randint(11, (3, 5, 2))
    expected = logits.log_softmax(-1).gather(-1, index)
    torch.testing.assert_close(trl_utils.selective_log_softmax(logits, index), expected)
    torch.testing.assert_close(
        trl_utils.selective_log_softmax(logits.double(), index[..., 0]), expected[..., 0].double()
    )
    with pytest.raises(ValueError, match="temperature"):
        trl_utils.selective_log_softmax(logits, index[..., 0], 0.0)
    assert not calls


@pytest.mark.parametrize(
    "kind, options, keys",
    (
        ("sft", {}, {"loss", "entropy", "mean_token_accuracy"}),
        ("dpo", {}, {"loss", "rewards/margins", "logps/chosen"}),
        ("dpo", dict(use_weighting=True), {"loss", "rewards/margins"}),
        ("distillation", dict(beta=0.5), {"loss"}),
        ("distillation", dict(beta=0.0), {"loss"}),
        ("distillation", dict(beta=1.0), {"loss"}),
        ("kto", {}, {"loss", "kl", "rewards/chosen"}),
        ("grpo", {}, {"loss", "entropy", "kl", "reward"}),
    ),
)
def test_trainers_take_the_same_steps(
    kind, options, keys, model, tokenizer, tmp_path, monkeypatch, calls, record_property
):
    expected = train(kind, model, tokenizer, tmp_path, **options)
    assert not calls
    report = liger_kernel.trl.patch()
    try:
        with without_own_kernels(monkeypatch):
            found = train(kind, model, tokenizer, tmp_path, **options)
    finally:
        report.undo()
    logged = expected[0][0].keys()
    assert keys <= logged and all(step.keys() == logged for step in (*expected[0], *found[0]))
    assert_same_steps(
        expected,
        found,
        {name for name in logged if not any(word in name for word in ("runtime", "time", "per_second"))},
    )
    chosen = "".join(f", {name} {value}" for name, value in options.items())
    record_property("setup", f"{kind.upper()}{chosen}, `liger_kernel.trl.patch()`")
    record_property("result", "equal metrics and parameters after 2 steps, without TRL's own fused head")
    if kind == "distillation":
        assert len(calls[TWO_HEADS]) == 4  # forward and backward
    else:
        assert len(calls["linear_log_prob_forward"]) >= 2 and len(calls["linear_log_prob_backward_"]) == 2


@pytest.mark.parametrize("tuner", ("full", "LoRA"))
@pytest.mark.parametrize("precompute", (False, True))
@pytest.mark.parametrize("kind", ("dpo", "kto"))
def test_policy_and_reference_are_the_same_function(
    kind, precompute, tuner, model, tokenizer, tmp_path, patched, record_property
):
    """In bfloat16 they round alike: the rewards of the first step are 0, to the bit."""
    adapters = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM") if tuner == "LoRA" else None
    model = type(model).from_pretrained(tmp_path, dtype=torch.bfloat16, attn_implementation="eager")
    options = dict(use_liger_kernel=True, precompute_ref_log_probs=precompute)
    trainer = trainer_of(kind, model, tokenizer, tmp_path, dict(peft_config=adapters), **options)
    trainer.train()
    first = trainer.state.log_history[0]
    rewards = [value for name, value in first.items() if name.startswith("rewards/c") or name == "rewards/rejected"]
    assert len(rewards) >= 2 and not any(rewards), first
    if kind == "dpo":
        assert first["loss"] == pytest.approx(math.log(2), rel=1e-6)
    record_property("setup", f"{kind.upper()}, {tuner}, bfloat16, precompute_ref_log_probs={precompute}")
    record_property("result", "policy and reference are equal to the bit before the first step")


@pytest.mark.parametrize("width", (128,))
def test_a_base_in_eight_bits_is_the_reference_too(model, tokenizer, tmp_path, patched):
    """Its log-probabilities, computed before training, are those of the layers that training runs."""
    adapters = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    options = dict(use_liger_kernel=True, liger_kernel_config={"base": "int8"}, precompute_ref_log_probs=True)
    trainer = trainer_of("dpo", model, tokenizer, tmp_path, dict(peft_config=adapters), **options)
    trainer.train()
    first = trainer.state.log_history[0]
    assert any(isinstance(module, LigerLinear8bit) for module in trainer.model.modules())
    assert not first["rewards/chosen"] and not first["rewards/rejected"]


@pytest.mark.parametrize("kind", ("dpo", "kto", "grpo", "rloo", "distillation", "gkd"))
@pytest.mark.parametrize("liger", (True, False))
def test_layers_of_references_and_teachers(kind, liger, model, tokenizer, tmp_path, patched):
    """They are replaced for use_liger_kernel alone."""
    trainer = trainer_of(kind, model, tokenizer, tmp_path, use_liger_kernel=liger)
    beside = getattr(trainer, "ref_model", None) or trainer.teacher_model
    assert liger_kernel.report(beside) is None
    trainer.train()
    assert all(isinstance(layer.mlp, LigerSwiGLUMLP) is liger for layer in beside.model.layers)


@pytest.mark.parametrize(
    "name",
    ("linear_log_prob", "linear_distillation", "linear_dpo", "linear_orpo", "linear_kto", "linear_grpo", "linear_jsd"),
)
def test_benchmarks_time_the_same_loss(name, monkeypatch):
    """What benchmarks/bench.py takes from TRL, without the rest of it, has our results and gradients."""
    root = pathlib.Path(__file__).parents[2]
    for folder in ("tests", "benchmarks"):
        monkeypatch.syspath_prepend(str(root / folder))
    import bench
    import rivals

    case = (bench.all_cases() | bench.LOSSES)[name]
    options, shape = case.bench[0][1], case.shapes[1]
    for module in [module for module in sys.modules if module.split(".")[0] == "trl"]:
        monkeypatch.delitem(sys.modules, module)  # and puts them back
    kernels = rivals.trl_kernels(str(pathlib.Path(trl_utils.__file__).parents[2]))
    assert not hasattr(sys.modules["trl"], "__version__")
    tensors = case.inputs(shape, options)
    wanted = [t for t in tensors if t is not None and t.requires_grad]
    found = []
    for call in (
        lambda: case.op(*tensors, **options),
        lambda: rivals.LIBRARIES["trl"][name](kernels, tensors, options),
    ):
        result = call()
        result = result[0] if isinstance(result, tuple) else result
        found.append((result, *torch.autograd.grad(result.sum(), wanted)))
    assert_alike(*found, FLOAT)
    assert found[0][2].abs().max() > 1e-4
    for module in [module for module in sys.modules if module.split(".")[0] == "trl"]:
        del sys.modules[module]
