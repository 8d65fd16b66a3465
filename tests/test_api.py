"""What callers rely on: the names and signatures of tests/api.json, which are those of liger_kernel's API and what is
added to it, and that losses keep their options. `python tests/test_api.py` records names and signatures anew."""

import ast
import importlib
import inspect
import json
import pathlib
import pkgutil

import liger_kernel.chunked_loss
import pytest
import torch
from liger_kernel.chunked_loss import cosine_similarity_loss, grpo_loss, jsd_loss

RECORD = pathlib.Path(__file__).with_name("api.json")
# Modules that patches and losses are made of, whose names are no API's, as those of the packages of WITHIN are not; and
# the trainer, which is a class of TRL's and has tests/huggingface/test_orpo_trainer.py.
INTERNAL = {
    *(f"chunked_loss.{name}" for name in ("gradients",)),
    *(f"ops.{name}" for name in ("linear_distillation", "sliced_log_prob")),
    *(f"transformers.trainer{name}" for name in ("", ".orpo", ".orpo_trainer")),
    *(
        f"transformers.{name}"
        for name in (
            "causal_lm experts families head hub_kernels logits lora numeric parts patch quantised replace source "
            "tensor_parallel"
        ).split()
    ),
}
WITHIN = {"operators", "research", "compat", "measure"}
HOOKS = ("_compute_loss",)  # of the losses' bases, for those who derive from them


def is_ours(value):
    return (getattr(value, "__module__", None) or "").partition(".")[0] == "liger_kernel"


def signature_of(function):
    """Without annotations, which break no caller."""
    empty = inspect.Parameter.empty
    signature = inspect.signature(function)
    parameters = [p.replace(annotation=empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=parameters, return_annotation=empty))


def described(name, value, methods=True):
    """(name, signature) of a function; of a class: of its constructor and of the methods that this package defines."""
    if not inspect.isclass(value):
        yield name, signature_of(value) if callable(value) else type(value).__name__
        return
    own = [vars(base) for base in value.__mro__ if is_ours(base)]
    yield name, signature_of(value) if any({"__init__", "__new__"} & base.keys() for base in own) else "class"
    for method in sorted({n for base in own for n in base if not n.startswith("_") or n in HOOKS}) if methods else ():
        if callable(getattr(value, method)):
            yield f"{name}.{method}", signature_of(getattr(value, method))


def names_of(module):
    """The names that a module defines or makes when it is asked, those that a package hands on, and `__all__`."""
    yield from getattr(module, "__all__", ())
    yield from getattr(module, "_LAZY", ())
    package = hasattr(module, "__path__")
    made = getattr(module, "_made", {}).values()  # by what ran before
    for name, value in vars(module).items():
        if not name.startswith("_") and callable(value) and value not in made:
            # A Function's `apply` under another name has no module.
            if value.__module__ == module.__name__ or (package and is_ours(value)) or inspect.ismethod(value):
                yield name


def api(recorded):
    """{module: {name: signature}}. A recorded name stays until it is gone, wherever what it names is defined."""
    found = {}
    for name in ["liger_kernel", *(m.name for m in pkgutil.walk_packages(liger_kernel.__path__, "liger_kernel."))]:
        path = name.split(".")[1:]
        if ".".join(path) in INTERNAL or WITHIN & {*path} or any(part.startswith("_") for part in path):
            continue
        module = importlib.import_module(name)
        kept = (n for n in recorded.get(name, ()) if "." not in n and hasattr(module, n))
        names = sorted({*names_of(module), *kept})
        methods = not hasattr(module, "__path__")  # what a package hands on stands where it is defined
        found[name] = dict(pair for n in names for pair in described(n, getattr(module, n), methods))
    return {name: names for name, names in sorted(found.items()) if names}


def test_api():
    recorded = json.loads(RECORD.read_text())
    found = api(recorded)
    flat = lambda modules: {f"{m}.{n}": s for m, names in modules.items() for n, s in names.items()}
    assert flat(found) == flat(recorded), "if that is meant: python tests/test_api.py"


def not_annotated(path):
    """The public functions and methods of a file that lack an annotation."""
    tree = ast.parse(path.read_text())
    classes = [node.body for node in tree.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]
    for function in (n for body in (tree.body, *classes) for n in body if isinstance(n, ast.FunctionDef)):
        given = function.args
        arguments = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
        annotated = [a.annotation for a in arguments if a and a.arg not in ("self", "cls")]
        if (function.name == "__init__" or not function.name.startswith("_")) and None in (
            function.returns,
            *annotated,
        ):
            yield function.name


@pytest.mark.parametrize("package", ["chunked_loss", "compat", "operators", "research"])
def test_public_functions_are_annotated(package):
    """An editor, help() and mypy see what they take."""
    paths = pathlib.Path(liger_kernel.__path__[0], package).glob("*.py")
    assert not {path.stem: names for path in paths if (names := list(not_annotated(path)))}


@pytest.mark.parametrize("name", ["DPO", "ORPO", "CPO", "SimPO", "KTO", "GRPO", "JSD", "CosineSimilarity"])
def test_losses_have_the_defaults_of_their_functions(name):
    """The two classes of a loss name their options each, with one default, but for two that the API has apart."""
    loss = getattr(liger_kernel.chunked_loss, f"LigerFusedLinear{name}Loss")
    apart = {"SimPO": {"compute_nll_loss"}, "KTO": {"use_ref_model"}}.get(name, set())
    options = inspect.signature(loss).parameters
    of_function = inspect.signature(loss.function.forward).parameters
    differ = {n for n, p in options.items() if of_function[n].default != p.default}
    assert differ == apart and options.keys() <= of_function.keys()


def test_options_of_the_policy_loss():
    options = dict(
        beta=0.1,
        compiled=False,
        use_ref_model=False,
        chunk_size=3,
        epsilon_low=0.1,
        epsilon_high=0.3,
        loss_type="sapo",
        max_completion_length=5,
        importance_sampling_level="sequence",
        sapo_temperature_pos=2.0,
        sapo_temperature_neg=3.0,
        temperature=0.5,
        delta=4.0,
        use_bias_correction_kl=True,
        vespo_k_pos=1.0,
        vespo_lambda_pos=1.5,
        vespo_k_neg=1.6,
        vespo_lambda_neg=1.7,
    )
    module = grpo_loss.LigerFusedLinearGRPOLoss(**options)
    assert {name: getattr(module, name) for name in options} == options


@pytest.mark.parametrize("module", [jsd_loss, cosine_similarity_loss], ids=["jsd", "cosine"])
def test_options_of_the_distillation_losses(module):
    name = "JSD" if module is jsd_loss else "CosineSimilarity"
    loss = getattr(module, f"LigerFusedLinear{name}Loss")
    options = dict(
        weight_hard_loss=0.1,
        weight_soft_loss=0.2,
        beta=0.3,
        ignore_index=7,
        temperature=2.0,
        compiled=False,
        chunk_size=3,
        return_soft_hard_loss=True,
    )
    made = loss(**options)
    assert {name: getattr(made, name) for name in options} == options
    assert issubclass(getattr(module, f"LigerFusedLinear{name}Function"), torch.autograd.Function)
    with pytest.raises(AssertionError):
        loss(temperature=0)


if __name__ == "__main__":
    recorded = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    RECORD.write_text(json.dumps(api(recorded), indent=1) + "\n")
