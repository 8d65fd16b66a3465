"""What bench.py times beside this library, torch and torch.compile: packages, and how each is called on a case."""

import ast
import contextlib
import importlib
import importlib.util
import os
import site
import sys
import types
from pathlib import Path
from typing import Optional

import torch
from liger_kernel.measure.build import import_mamba, tune_less

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from loss_cases import CALLS, IGNORE, LOSSES, flat, policy_plain, preference_plain  # noqa: E402


def package_modules():
    return {name: module for name, module in sys.modules.items() if name.split(".")[0] == "liger_kernel"}


@contextlib.contextmanager
def in_place_of_ours(theirs):
    """Modules of the package that has our name are found under it, which torch.compile asks for too."""
    ours = package_modules()
    for name in ours:
        del sys.modules[name]
    sys.modules.update(theirs)
    try:
        yield
    finally:
        theirs.update(package_modules())
        for name in package_modules():
            del sys.modules[name]
        sys.modules.update(ours)


def triton_liger(folder):
    """The functional module of the package in `folder` that has our name, with all of the package's in `modules`."""
    sys.path.insert(0, folder)
    modules = {}
    try:
        with in_place_of_ours(modules):
            functional = importlib.import_module("liger_kernel.transformers.functional")
            importlib.import_module("liger_kernel.chunked_loss")
            importlib.import_module("liger_kernel.ops.fused_moe")
    finally:
        sys.path.remove(folder)
    for module in modules.values():
        if (
            vars(module).get("__file__", "") is None
        ):  # a folder without __init__.py, at which inspect, and so torch.compile, fails
            del module.__file__
    tune_less(modules["liger_kernel.ops.fused_moe"])
    functional.modules = modules
    return functional


def triton_loss(name):
    call, short = CALLS[name]

    def loss(functional, tensors, options):
        with in_place_of_ours(functional.modules):
            return flat(call(functional.modules["liger_kernel.chunked_loss"], short, tensors, options))

    return loss


def triton_experts(functional, tensors, options):
    x, gate_up, down, weights, *_, index = tensors
    with in_place_of_ours(functional.modules):
        function = functional.modules["liger_kernel.ops.fused_moe"].LigerFusedMoEFunction
        return function.apply(x, gate_up, down, index.int(), weights)


#: Of trl.kernels; the last is written in Triton alone.
TRL_MODULES = "chunked_logprob", "chunked_divergence", *["logprob_entropy"] * bool(importlib.util.find_spec("triton"))


def trl_kernels(folder):
    """The functions of trl/kernels in `folder`, without the rest of TRL, of which they use one context."""
    for name, path in (("trl", ["trl"]), ("trl.trainer", []), ("trl.trainer.utils", None)):
        module = sys.modules[name] = types.ModuleType(name)
        if path is not None:
            module.__path__ = [os.path.join(folder, *path)] if path else []
    sys.modules["trl.trainer.utils"].maybe_gather_lm_head_ctx = lambda *parameters: contextlib.nullcontext()
    parts = (importlib.import_module(f"trl.kernels.{name}") for name in TRL_MODULES)
    return types.SimpleNamespace(
        folder=folder,
        **{
            name: value
            for part in parts
            for name, value in vars(part).items()
            if name.startswith(("Chunked", "select"))
        },
    )


def trl_log_probs(kernels, hidden, weight, ids, bias=None, temperature=1.0, outputs=()):
    found = kernels.ChunkedLogProbFunction.apply(
        hidden.reshape(-1, hidden.shape[-1]), weight, bias, ids.reshape(-1), temperature, 32768, None, 1.0, outputs
    )
    placed = [t.view(ids.shape) for t in found if t is not None]
    return placed[0] if len(placed) == 1 else tuple(placed)


def trl_linear_log_prob(kernels, tensors, options):
    hidden, weight, bias, ids = tensors
    rest = bias, options.get("temperature", 1.0), ("entropy",) if options.get("entropy") else ()
    if options.get("ignored") == 0.0:
        return trl_log_probs(kernels, hidden, weight, ids, *rest)
    kept = ids != IGNORE  # TRL works on the tokens that count, where its kernels run
    found = trl_log_probs(kernels, hidden[kept], weight, ids[kept], *rest)
    return tuple(
        t.new_zeros(ids.shape).masked_scatter(kept, t) for t in (found if isinstance(found, tuple) else (found,))
    )


def functions_of(path, names, known):
    """The functions of a file by name, without what else it imports; `known` are the globals that they read."""
    tree = ast.parse(Path(path).read_text())
    tree.body = [node for node in tree.body if getattr(node, "name", None) in names]
    exec(compile(tree, str(path), "exec"), known)
    return types.SimpleNamespace(**{name: known[name] for name in names})


TRL_ASYNC = "_add_tail_bucket", "_jsd_divergence", "_jsd_loss_chunk", "_chunked_jsd_loss"


def trl_topk_divergence(kernels, tensors, options):
    """TRL's loss of few classes, a sum over tokens; without absent ones, in chunks of 256 tokens as in its trainer."""
    hidden, weight, bias, target, ids, teacher = tensors
    assert options.get("ignored") == 0.0 and options.get("tail", "bucket") != "drop", "it leaves no token out"
    path = Path(kernels.folder, "trl/experimental/async_distillation/async_distillation_trainer.py")
    functions = functions_of(path, TRL_ASYNC, {"torch": torch, "F": torch.nn.functional})
    loss = functions._chunked_jsd_loss(
        hidden, weight, bias, 1.0, options.get("softcap"), ids, teacher, ids >= 0, options.get("beta", 0.0),
        options.get("temperature", 1.0), options.get("tail", "bucket") == "bucket", None, 1, 256,
    )[0]  # fmt: skip
    return (loss.expand(len(hidden)),)


def verl_topk_loss(folder, chunked):
    """verl's loss of few classes on logits, as its FSDP engine calls it, without the rest of verl."""
    path = Path(folder, "verl/trainer/distillation/fsdp/losses.py")
    names = "_chunked_topk_log_probs", "kl_divergence", "compute_forward_kl_topk"
    known = {"torch": torch, "F": torch.nn.functional, "DistillationConfig": None, "DistillationLossConfig": None}
    loss = functions_of(path, names, known | {"get_ulysses_sequence_parallel_world_size": lambda: 1})
    options = types.SimpleNamespace(use_chunked_topk=chunked, chunked_topk_chunk_size=4096, log_prob_min_clamp=None)
    config = types.SimpleNamespace(distillation_loss=options)

    def call(logits, ids, teacher):
        # Of nested tensors, as its batches have them, it reads the packed values alone.
        packed = (types.SimpleNamespace(is_nested=True, values=lambda t=t: t) for t in (teacher, ids))
        return loss.compute_forward_kl_topk(logits.unsqueeze(0), *packed, config, "thd")["distillation_losses"][0]

    return call


def verl_topk_divergence(loss, tensors, options):
    hidden, weight, bias, _, ids, teacher = tensors
    assert_truncated(options)
    logits = torch.nn.functional.linear(hidden, weight, bias)
    return (loss(logits / options["temperature"] if "temperature" in options else logits, ids, teacher),)


def veomni_topk_loss(folder):
    """VeOmni's loss of few classes from hidden states, without the rest of VeOmni."""
    try:
        from flash_attn.ops.triton.cross_entropy import cross_entropy_loss
    except ImportError:
        cross_entropy_loss = None
    known = {"torch": torch, "Optional": Optional, "_fa_cross_entropy_loss": cross_entropy_loss}
    known["_FA_CE_AVAILABLE"] = cross_entropy_loss is not None
    known["get_parallel_state"] = lambda: types.SimpleNamespace(sp_enabled=False)
    home = Path(folder, "veomni/ops/kernels/cross_entropy")
    functions_of(
        home / "chunk_logprobs.py", ("_per_token_log_probs_from_logits", "_per_token_entropy_from_logits"), known
    )
    names = "_ChunkedLinearTopkDistill", "chunk_topk_distill_function"
    return functions_of(home / "chunk_topk_distill.py", names, known).chunk_topk_distill_function


def veomni_topk_divergence(loss, tensors, options):
    hidden, weight, bias, target, ids, teacher = tensors
    assert_truncated(options)
    assert bias is None and not options.get("softcap"), "it has neither a bias nor a softcap"
    return (loss(hidden, weight, target, ids, teacher, 1024, IGNORE, target, options.get("temperature", 1.0))[2],)


def mamba2_scan(scan, tensors, options):
    x, dt, A, B, C, dt_bias, starts, D = tensors
    chunk = 128  # of Nemotron-H's configuration
    return scan(
        x, dt, A, B, C, chunk, D, dt_bias=dt_bias, dt_softplus=True, seq_idx=None if starts is None else starts.int()
    )


def assert_truncated(options):
    assert options.get("tail", "bucket") == "drop" and options.get("beta", 0.0) == 0, "it has one loss, without a tail"


def trl_preference(name):
    def call(kernels, tensors, options):
        # TRL makes the mean of the logits in the same pass: no logits, no such result here.
        tokens = lambda x, w, b, y: (x.new_zeros(len(x), 1, 1), trl_log_probs(kernels, x, w, y, b))
        return preference_plain(name, tensors, options, tokens=tokens)

    return call


def trl_policy(kernels, tensors, options):
    return policy_plain("grpo", tensors, options, log_probs=lambda *inputs: trl_log_probs(kernels, *inputs))


def trl_divergence(hard_weight):
    def call(kernels, tensors, options):
        assert not options.get(*hard_weight), "it has no cross entropy"
        *heads, labels = tensors[:7]
        beta = {"forward_kl": 0.0, "reverse_kl": 1.0}.get(options.get("kind"), options.get("beta", 0.5))
        divergence, _ = kernels.ChunkedDivergenceFunction.apply(*heads, beta, options.get("temperature", 1.0))
        counted = torch.ones_like(divergence) if labels is None else (labels != IGNORE).to(divergence)
        return ((divergence * counted).sum() / counted.sum(),)

    return call


#: rival -> case -> (its module, inputs, options) -> result.
LIBRARIES = {
    "quack": {
        "rms_norm": lambda q, t, o: q.rmsnorm(*t, eps=1e-6),
        "softmax": lambda q, t, o: q.softmax(t[0]),
        "cross_entropy": lambda q, t, o: q.cross_entropy(t[0], t[1], reduction="mean"),
    },
    "cut_cross_entropy": {"fused_linear_cross_entropy": lambda c, t, o: c.linear_cross_entropy(t[0], t[1], t[3])},
    "trl": {
        "linear_log_prob": trl_linear_log_prob,
        "linear_topk_divergence": trl_topk_divergence,
        **{f"linear_{name}": trl_preference(name) for name in ("dpo", "orpo", "kto")},
        "linear_grpo": trl_policy,
        "linear_jsd": trl_divergence(("weight_hard_loss", 0.5)),
        "linear_distillation": trl_divergence(("hard_weight", 0.0)),
    },
    "verl": {"linear_topk_divergence": verl_topk_divergence},
    "verl chunked": {"linear_topk_divergence": verl_topk_divergence},
    "veomni": {"linear_topk_divergence": veomni_topk_divergence},
    "mamba-ssm": {"mamba2_scan": mamba2_scan},
    "liger (Triton)": {
        **{name: triton_loss(name) for name in LOSSES},
        "rms_norm": lambda f, t, o: f.liger_rms_norm(*t, 1e-6, in_place=False),
        "fused_add_rms_norm": lambda f, t, o: f.liger_fused_add_rms_norm(*t, 1e-6, in_place=False),
        "modulated_rms_norm": lambda f, t, o: f.liger_modulated_rms_norm(*t, 1e-6, in_place=False),
        "layer_norm": lambda f, t, o: f.liger_layer_norm(*t, 1e-6),
        "group_norm": lambda f, t, o: f.liger_group_norm(*t, t[0].shape[1], o["groups"], 1e-6),
        "poly_norm": lambda f, t, o: f.liger_poly_norm(*t, 1e-6, in_place=False),
        "dyt": lambda f, t, o: f.liger_dyt(*t),
        "activate": lambda f, t, o: f.liger_relu_squared(*t),
        **{
            name: lambda f, t, o, name=name: getattr(f, f"liger_{name}")(*t[:2])
            for name in ("kl_div", "jsd", "tvd", "softmax", "sparsemax")
        },
        "gated": lambda f, t, o: {"silu": f.liger_swiglu, "gelu_tanh": f.liger_geglu}[o["activation"]](*t),
        "rope": lambda f, t, o: f.liger_rope(*t),
        "fused_experts": triton_experts,
        "cross_entropy": lambda f, t, o: f.liger_cross_entropy(t[0], t[1]),
        "fused_linear_cross_entropy": lambda f, t, o: f.liger_fused_linear_cross_entropy(t[0], t[1], t[3]),
    },
}


def libraries(args):
    """rival -> its module, of those that are there."""
    found = {"liger (Triton)": triton_liger(args.triton_liger)} if args.triton_liger else {}
    makers = {
        "trl": ("trl", trl_kernels),
        "verl": ("verl", lambda folder: verl_topk_loss(folder, False)),
        "verl chunked": ("verl", lambda folder: verl_topk_loss(folder, True)),
        "veomni": ("veomni", veomni_topk_loss),
        "mamba-ssm": ("mamba_ssm", lambda folder: import_mamba(folder).mamba_chunk_scan_combined),
    }
    for rival, (package, make) in makers.items():
        installed = importlib.util.find_spec(package)
        folder = os.path.dirname(installed.submodule_search_locations[0]) if installed else None
        if folder := getattr(args, package) or folder:
            found[rival] = make(folder)
    if args.fla:  # the cases of recurrences look for it
        site.addsitedir(args.fla)
    for name in ("quack", "cut_cross_entropy") if args.device == "cuda" else ():
        if folder := getattr(args, name, None):
            site.addsitedir(folder)  # also the folders that its .pth files name: CUTLASS's
        try:
            found[name] = importlib.import_module(name)
        except ImportError:
            pass
    return found
