"""Hybrid models: the functions that their mixers call are this package's, within packed documents. The reference is the
unpatched model, on one document at a time where documents are packed: packed, it mixes them up or refuses."""

import copy
import inspect
import pickle
import re
import sys

import liger_kernel
import peft
import pytest
import torch
import transformers
from conftest import TOLERANCE, Ran, assert_close, run
from liger_kernel.transformers.patching import mixer_functions, mixers
from liger_kernel.transformers.patching.apply import patch
from liger_kernel.transformers.patching.by_source import original_class, row_of
from liger_kernel.transformers.patching.families import MIXERS, MODEL_TYPES
from liger_kernel.transformers.patching.formulas import as_written, find
from packaging.version import parse
from shrink import VOCABULARY, shrunk
from tiny import randomised
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

CALLED = parse(transformers.__version__) >= parse("5.15")  # by mixers, as functions of their modeling module
GATED = parse(transformers.__version__) >= parse("5.16")  # 5.15 hides the forward of LFM's convolutions in a decorator
TYPES = (
    *("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid", "lara_mini", "kimi_linear", "bailing_hybrid"),
    *("nemotron_h", "bamba", "falcon_h1", "granitemoehybrid", "zamba2", "mamba2"),
    *("lfm2", "lfm2_moe", "lfm3"),
)
KINDS = [kind for kind in (TYPES if CALLED else TYPES[:4]) if kind in CONFIG_MAPPING]
CONVOLUTIONAL = [kind for kind in KINDS if kind.startswith("lfm")]
DELTA = [kind for kind in TYPES[:5] if kind in KINDS]
KIMI = [kind for kind in TYPES[5:7] if kind in KINDS]  # delta rules with a gate for each channel
FORGET_GATES = {
    "kimi_linear": ("KimiLinearForgetGate", "LigerForgetGate"),
    "bailing_hybrid": ("BailingHybridForgetGate", "LigerBailingForgetGate"),
}
SCANS = [kind for kind in TYPES[7:13] if kind in KINDS]
# Layers of Mamba-2 are told of no positions.
TOLD = [kind for kind in KINDS if kind != "mamba2"] if CALLED else []
# Nothing but what is replaced and attention, which Granite's masks do not tell of positions: what is packed is as it is
# alone, all of it.
WHOLE = [kind for kind in TOLD if kind != "granitemoehybrid"]
DENSE = ("qwen3_5_text", "bamba", "lfm2")  # one of each, without experts
ONE_OF_EACH = DELTA[:1] + KIMI[:1] + SCANS[:1] + CONVOLUTIONAL[:1]
LENGTHS = (5, 1, 8)
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
each_kind = pytest.mark.parametrize("kind", KINDS)


def made(kind):
    torch.manual_seed(0)
    return randomised(transformers.AutoModelForCausalLM.from_config(shrunk(kind))).train()


def batch(rows=2, length=sum(LENGTHS)):
    ids = torch.randint(3, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}


def positions():
    return torch.cat([torch.arange(n) for n in LENGTHS])[None]


def ends():
    return torch.tensor((0, *LENGTHS), dtype=torch.int32).cumsum(0, dtype=torch.int32)


def index():
    return torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))[None].int()


STARTS = [[0] * 5 + [5] + [6] * 8]


@pytest.fixture
def calls(monkeypatch):
    """Where documents began in the operators that ran."""
    found = []

    def watch(name):
        original = getattr(mixer_functions, name)

        def call(*tensors, starts=None, **more):
            found.append(None if starts is None else starts.tolist())
            return original(*tensors, starts=starts, **more)

        monkeypatch.setattr(mixer_functions, name, call)

    watch("liger_causal_conv1d")
    watch("liger_gated_delta_rule")
    watch("liger_mamba2_scan")
    return found


def convolutions(model):
    """How many modules of a model convolve."""
    return sum(isinstance(module, torch.nn.Conv1d) for module in model.modules())


def called(model):
    """The functions that a patched model calls, ours, and how many modules do."""
    found = set()
    if CALLED or model.config.model_type != "olmo_hybrid":  # whose convolutions are modules before
        found.add(("causal_conv1d_fn", "liger_causal_conv1d_fn", convolutions(model)))
    nets = sum("GatedDeltaNet" in type(module).__name__ for module in model.modules())
    if model.config.model_type in CONVOLUTIONAL and GATED:
        name = next(original_class(m).__name__ for m in model.modules() if hasattr(m, "conv") and hasattr(m, "in_proj"))
        found.add((name, "gates and convolution", convolutions(model)))
    if nets:
        name = "torch_chunk_gated_delta_rule" if CALLED else "chunk_gated_delta_rule"
        found.add((name, "liger_chunk_gated_delta_rule", nets))
    if model.config.model_type in KIMI:
        nets = sum("DeltaAttention" in type(module).__name__ for module in model.modules())
        found.add(("chunk_kimi_delta_attention", "liger_chunk_kimi_delta_attention", nets))
        name, kind = FORGET_GATES[model.config.model_type]
        found.add((name, kind, nets))
    if model.config.model_type in SCANS:
        for name in ("mamba2_chunk_scan", "mamba2_split_conv1d_scan_combined"):
            found.add((name, f"liger_{name}", convolutions(model)))
    return found


def times(model):
    """How many operators a forward of a patched model calls that documents reach."""
    return sum(
        count for name, _, count in called(model) if "split" not in name and not name.endswith(("Gate", "ShortConv"))
    )


# Gates: their gradient is a sum over the tokens that follow in a chunk, here up to 14, of differences that cancel.
# Rounding errors of the terms add up, 2^4 of them.
GATES = re.compile(r"A_log|dt_bias|in_proj_(a|ba)\.|\.a_proj|forget_gate")


def assert_gradients(gradients, expected):
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        assert_close(gradients[name], gradient, TOLERANCE * 2 ** (4 * bool(GATES.search(name))))


def assert_same_step(model, reference, **inputs):
    """The same loss and gradients."""
    (output, gradients), (expected, plain) = run(model, **inputs), run(reference, **inputs)
    assert_close(output.loss, expected.loss)
    assert_gradients(gradients, plain)


def only_mixers(model):
    row = row_of(model)
    return patch(row, model, **{name: name == "mixers" for name in row.switches})


def lines(report):
    return {(entry.name, entry.by, entry.count) for entry in report.replaced if entry.switch == "mixers"}


def home_of(model):
    return sys.modules[original_class(model).__module__]


@each_kind
def test_same_step(kind, calls):
    """Loss and gradients are the plain model's, the report says what runs, and undo takes all of it back."""
    model, reference = made(kind), made(kind)
    classes = [type(module) for module in model.modules()]
    report = liger_kernel.patch(model)
    replaced = called(model)
    assert replaced <= lines(report) and len(lines(report)) == len(replaced) + (kind in TOLD)
    assert "mixers" in report.line() and not [skip for skip in report.skipped if skip.switch == "mixers"]
    assert_same_step(model, reference, **batch())
    assert calls == [None] * times(model)
    report.undo()
    assert [type(module) for module in model.modules()] == classes
    model(**batch())
    assert len(calls) == times(model)


# Routers choose other experts where logits differ in a last bit.
@pytest.mark.parametrize("kind", [kind for kind in KINDS if "moe" not in kind and kind not in KIMI])
def test_16_bits(kind):
    """As exact as the plain model in bfloat16: against that in float32, the error of the convolutions' gradients is at
    most twice a plain one's."""
    exact, plain, ours = made(kind), made(kind).bfloat16(), made(kind).bfloat16()
    only_mixers(ours)
    of_convolutions = {
        f"{name}.{parameter}"
        for name, module in exact.named_modules()
        if isinstance(module, torch.nn.Conv1d)
        for parameter, _ in module.named_parameters()
    }
    gradients = [run(model, **batch())[1] for model in (exact, plain, ours)]
    theirs, own = (
        sum((each[name].float() - gradients[0][name]).square().sum().item() for name in of_convolutions) ** 0.5
        for each in gradients[1:]
    )
    assert of_convolutions and own <= 2 * theirs


@pytest.mark.parametrize("kind", TOLD)
def test_documents_reach_operators(kind, calls):
    """However they are given, and not where a mask or counted positions say that there are none."""
    model, ids = made(kind), batch(1)["input_ids"]
    liger_kernel.patch(model)
    base = model.base_model

    def starts(**given):
        calls.clear()
        with torch.no_grad():
            base(ids, **given)
        assert len(calls) == times(model) and len({str(call) for call in calls}) == 1
        return calls[0]

    assert starts() is None
    assert starts(position_ids=positions()) == STARTS
    assert starts(position_ids=positions(), attention_mask=torch.ones_like(ids)) is None
    assert starts(position_ids=torch.arange(7, 7 + ids.shape[1])[None]) == [[0] * ids.shape[1]]
    assert starts(position_ids=positions(), seq_idx=torch.zeros_like(index())) == [[0] * ids.shape[1]]
    assert starts(cu_seq_lens_q=ends()) == starts(seq_idx=index()) == STARTS


@pytest.mark.parametrize("kind", WHOLE)
@pytest.mark.parametrize("given", ["position_ids", "cu_seq_lens_q", "seq_idx", "checkpointed", "class"])
def test_packed_equals_alone(kind, given):
    """Loss and gradients of packed documents are those of the plain model on each, weighted by their labels."""
    reference = made(kind)
    ids, total = batch(1)["input_ids"], sum(n - 1 for n in LENGTHS)
    for part in ids.split(LENGTHS, 1):  # before the patch of a modeling module, whose functions the reference calls
        if part.shape[1] > 1:
            (reference(input_ids=part, labels=part).loss * (part.shape[1] - 1) / total).backward()
    report = patch(MODEL_TYPES.get(kind) or row_of(reference)) if given == "class" else None
    model = made(kind)
    if report is None:
        report = liger_kernel.patch(model)
    if given == "checkpointed":
        model.gradient_checkpointing_enable()
    labels = ids.clone()
    labels[0, ends()[:-1].long()] = -100
    more = {"cu_seq_lens_q": {"cu_seq_lens_q": ends()}, "seq_idx": {"seq_idx": index()}}.get(given, {})
    _, gradients = run(model, input_ids=ids, labels=labels, position_ids=positions(), **more)
    report.undo()
    assert_gradients(gradients, {name: p.grad for name, p in reference.named_parameters() if p.grad is not None})


@pytest.mark.parametrize("kind", ONE_OF_EACH)
def test_class(kind, calls):
    """Models that are made after the patch call ours; undo gives the modeling module its functions back."""
    home = home_of(made(kind))
    names = [name for name, *_ in called(made(kind))]
    of_home = lambda: [getattr(found := getattr(home, name), "forward", found) for name in names]
    before, report = of_home(), patch(kind)
    model = made(kind)
    assert not any(new is old for new, old in zip(of_home(), before))
    run(model, **batch())
    assert len(calls) == times(model)
    report.undo()
    assert of_home() == before
    assert_same_step(model, made(kind), **batch())


@pytest.mark.parametrize("kind", ONE_OF_EACH)
def test_generation(kind):
    """With a cache, prefill and every token are the plain model's."""
    prompt = batch(2, 6)["input_ids"]
    texts = []
    for patched in (False, True):
        model = made(kind).eval()
        if patched:
            liger_kernel.patch(model)
        texts.append(model.generate(prompt, max_new_tokens=6, do_sample=False, use_cache=True, pad_token_id=0))
    assert torch.equal(*texts)


@pytest.mark.parametrize("kind", ONE_OF_EACH)
def test_padding(kind):
    """Rows that are padded on the left and on the right."""
    inputs, model = batch(), made(kind)
    mask = torch.ones_like(inputs["input_ids"])
    mask[0, :3], mask[1, -4:] = 0, 0
    inputs |= {"attention_mask": mask, "labels": inputs["labels"].masked_fill(mask == 0, -100)}
    only_mixers(model)
    (output, gradients), (expected, plain) = run(model, **inputs), run(made(kind), **inputs)
    assert_close(output.loss, expected.loss)
    for name, gradient in plain.items():
        if not name.endswith(("A_log", "dt_bias")):  # differences of large sums over tokens, of which little is left
            assert_close(gradients[name], gradient)


@pytest.mark.parametrize("kind", ONE_OF_EACH)
def test_autocast_and_frozen_weights(kind, calls):
    """Under autocast the result has the dtype of plain torch's, and a frozen convolution gets no gradient."""
    model, reference = made(kind), made(kind)
    liger_kernel.patch(model)
    for each in (model, reference):
        for module in each.modules():
            if isinstance(module, torch.nn.Conv1d):
                module.requires_grad_(False)
    with torch.autocast("cpu", torch.bfloat16):
        output, gradients = run(model, **batch())
        expected, expected_gradients = run(reference, **batch())
    assert len(calls) == times(model) and gradients.keys() == expected_gradients.keys()
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert frozen and not frozen & gradients.keys()
    # Layers one after another in bfloat16: each rounds to 2^-8 of its numbers.
    torch.testing.assert_close(output.loss.float(), expected.loss.float(), rtol=2**-6, atol=0)


@pytest.mark.parametrize(
    "kind, targets",
    [
        (KINDS[0], ["in_proj_qkvz", "out_proj"]),
        *((kind, ["q_proj", "v_proj", "f_b_proj", "b_proj", "o_proj"]) for kind in KIMI[:1]),
    ],
)
def test_adapters(kind, targets, calls):
    """LoRA on the projections around a convolution, whose weight is frozen then."""
    models = []
    for _ in range(2):
        torch.manual_seed(1)
        config = peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False)
        models.append(peft.get_peft_model(made(kind), config))
    liger_kernel.patch(models[0])
    assert_same_step(*models, **batch())
    assert len(calls) == times(models[0])


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind in DENSE])
def test_original_runs_in_float64(kind, calls):
    """For which there are no kernels."""
    model, reference = made(kind), made(kind).double()
    only_mixers(model)
    model.double()
    for (name, ours), (_, plain) in zip(*(run(each, **batch())[1].items() for each in (model, reference)), strict=True):
        assert torch.equal(ours, plain), name
    assert not calls


def test_original_runs_for_other_convolutions(calls):
    """Activations and widths that the operator has not, and documents of other rows."""
    x, weight = torch.randn(1, 4, 6), torch.randn(4, 3)
    convolve = mixer_functions.liger_causal_conv1d_fn
    assert convolve(x, weight, activation="gelu") is NotImplemented
    assert convolve(x, torch.randn(4, 9)) is NotImplemented
    assert convolve(x.expand(2, 4, 6), weight, cu_seqlens=torch.tensor([0, 6])) is NotImplemented
    assert convolve(x, weight, seq_idx=torch.zeros(1, 5, dtype=torch.int32)) is NotImplemented
    assert not calls
    held = mixers.Held(convolve, mixers.plain_causal_conv1d)
    padded = torch.nn.functional.pad(x, (2, 0))
    expected = torch.nn.functional.conv1d(padded.double(), weight.double()[:, None], groups=4)
    for dtype in (torch.float64, torch.float32):
        y = held(x.to(dtype), weight.to(dtype))
        torch.testing.assert_close(y, expected.to(dtype))
        y = held(x.to(dtype), weight.to(dtype), activation="gelu")
        torch.testing.assert_close(y, torch.nn.functional.gelu(expected).to(dtype))


@pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("w_dtype", FLOATS, ids=str)
@pytest.mark.parametrize("x_dtype", FLOATS, ids=str)
def test_dtypes(x_dtype, w_dtype, autocast):
    """The result has the input's dtype, and gradients those of their tensors, whatever the weight's and autocast's
    are."""
    torch.manual_seed(0)
    shapes, dtypes = ((2, 8, 12), (8, 4), (8,)), (x_dtype, w_dtype, w_dtype)
    ours = [torch.randn(shape).to(dtype).requires_grad_() for shape, dtype in zip(shapes, dtypes)]
    exact, plain = ([t.detach().to(kind).requires_grad_() for t in ours] for kind in (torch.float64, None))
    upstream = torch.randn(shapes[0])
    results = []
    for tensors in (ours, plain, exact):
        convolve = mixer_functions.liger_causal_conv1d_fn if tensors is ours else mixers.plain_causal_conv1d
        with torch.autocast("cpu", autocast, enabled=autocast is not None and tensors is not exact):
            y = convolve(*tensors, "silu")
        results.append([y, *torch.autograd.grad(y, tensors, upstream.to(y.dtype))])
    # Half a unit, of the least exact dtype, for each of the two dozen terms of order one that a weight's gradient sums.
    unit = max(torch.finfo(dtype).eps for dtype in (x_dtype, w_dtype))
    for a, b, c in zip(*results):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a.double(), c.double(), rtol=4 * unit, atol=12 * unit)


def test_positions_of_four_and_three_axes():
    """Those of text come first of four; three count an image's rows and columns, too."""
    four = torch.stack([positions()] * 4)
    four[1:] += 3
    given = {"input_ids": batch(1)["input_ids"]}
    assert mixers._starts_of_step({**given, "position_ids": four}).tolist() == STARTS
    assert mixers._starts_of_step({**given, "position_ids": four[:3]}) is None
    # With a cache, which has columns before: there are more than the positions count.
    kwargs = {mixer_functions.STARTS: torch.zeros(1, 3, dtype=torch.int32)}
    assert mixer_functions.starts_in(kwargs, 1, 7) is None


def test_pickled_and_copied():
    """A patched model can be copied and pickled, and the copy convolves as it does."""
    model = made(KINDS[0])
    try:
        pickle.dumps(model)
        copies = [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))]
    except AttributeError:  # with `kernels`, plain models hold classes that cannot be pickled
        copies = [copy.deepcopy]
    liger_kernel.patch(model)
    expected = run(model, **batch())[0].loss
    for other in (make(model) for make in copies):
        torch.testing.assert_close(run(other, **batch())[0].loss, expected, rtol=0, atol=0)


@pytest.mark.parametrize("kind", [kind for kind in WHOLE if kind in (*DENSE, *KIMI[:1])])
def test_compiled(kind):
    """One graph, with documents."""
    model = made(kind)
    liger_kernel.patch(model)
    torch._dynamo.reset()
    given = {"input_ids": batch(1)["input_ids"], "position_ids": positions()}
    compiled = torch.compile(model.base_model, fullgraph=True, backend="aot_eager")
    expected = model.base_model(**given).last_hidden_state
    assert_close(compiled(**given).last_hidden_state, expected, TOLERANCE)


def scan_inputs(dtype=torch.float32, tokens=sum(LENGTHS)):
    """x, dt, B and C, and what is of heads."""
    torch.manual_seed(0)
    x, B, C = torch.randn(1, tokens, 4, 8), torch.randn(1, tokens, 2, 6), torch.randn(1, tokens, 2, 6)
    dt, heads = torch.randn(1, tokens, 4), [torch.randn(4).to(dtype) for _ in range(2)]
    return [t.to(dtype) for t in (x, dt, B, C)], -torch.rand(4) * 4, *heads


def scanned(scan, tensors, A, D, bias, **more):
    x, dt, B, C = tensors
    return scan(x, dt, A, B, C, chunk_size=8, D=D, dt_bias=bias, dt_softplus=True, return_final_states=True, **more)


@pytest.mark.parametrize("kind", SCANS)
def test_scan_in_16_bits(kind):
    """Mamba-2's scan and its gradients are as exact as transformers', to a tenth, although y is rounded to the dtype of
    x; the exact one is transformers' in float32, whose error is 2^-16 of those."""
    plain = inspect.unwrap(as_written(home_of(made(kind)).mamba2_chunk_scan))
    tensors, *of_heads = scan_inputs(torch.bfloat16, tokens=200)

    def results(scan, dtype=None):
        given = [t.to(dtype).requires_grad_() for t in tensors]
        y, last = scanned(scan, given, *(t if dtype is None else t.to(dtype) for t in of_heads))
        assert last.dtype is torch.float32
        y.backward(torch.linspace(-1, 1, y.numel()).view(y.shape).to(y.dtype))
        return [y, last, *(t.grad for t in given)]

    every = results(plain, torch.float32), results(plain), results(mixer_functions.liger_mamba2_chunk_scan)
    assert every[2][0].dtype is torch.bfloat16
    for expected, theirs, own in zip(*every, strict=True):
        assert (own - expected).norm() <= 1.1 * (theirs - expected).norm()


def test_scan_of_documents():
    """Each has the result that it has alone; the state is the last one's."""
    scan, (tensors, *of_heads) = mixer_functions.liger_mamba2_chunk_scan, scan_inputs()
    alone = [scanned(scan, part, *of_heads) for part in zip(*(t.split(LENGTHS, 1) for t in tensors))]
    named = {"cu_seq_lens_q": ends()}, {"seq_idx": index()}, {mixer_functions.STARTS: torch.tensor(STARTS).int()}
    for given in named:
        y, last = scanned(scan, tensors, *of_heads, **given)
        assert_close(y, torch.cat([y for y, _ in alone], 1))
        assert_close(last, alone[-1][1])
    state = torch.zeros(1, 4, 8, 6)
    assert scanned(scan, tensors, *of_heads, **named[0], initial_states=state) is NotImplemented
    assert scanned(scan, [t.double() for t in tensors], *of_heads) is NotImplemented


@pytest.mark.parametrize("name", MIXERS)
def test_every_function_of_transformers_is_known(name):
    """Each modeling module whose mixers call such a function has it in a source that is known."""
    if not CALLED:
        return
    found = 0
    for kind in dict.fromkeys(CONFIG_MAPPING[kind].__module__.rpartition(".")[0] for kind in CONFIG_MAPPING):
        path = f"{kind}.modeling_{kind.rpartition('.')[2]}"
        try:
            home = __import__(path, fromlist=["_"])
        except ImportError:
            continue
        # Where `kernels` is installed, it is a module that a tag has made of the function.
        function = as_written(getattr(home, name, None))
        if inspect.isfunction(function):
            found += 1
            assert function.__module__ == path
            assert MIXERS[name].targets[0] in find(function).targets, path
    assert found >= {"causal_conv1d_fn": 13, "chunk_kimi_delta_attention": 3}.get(name, 4)


@pytest.mark.parametrize("kind", SCANS[:2] + KIMI)
def test_gates(kind):
    """One operator a mixer, and none of torch's beside it."""
    model = made(kind)
    liger_kernel.patch(model)
    with Ran() as ran:
        run(model, **batch())
    count = sum(hasattr(module, "A_log") for module in model.modules())
    name = "channel_gates" if kind in KIMI else "delta_gates"
    assert count and ran.counts[f"{name}_forward"] == ran.counts[f"{name}_backward"] == count
    assert not {"softplus", "softplus_backward", *(("exp",) if kind in KIMI else ())} & set(ran.counts)
