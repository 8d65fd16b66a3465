"""What transformers tags for `use_kernels=True`, found in its sources: also where no `kernels` is installed and tags
leave no trace."""

import ast
import functools
import importlib
import inspect
import pathlib
import types

import torch
import transformers
from torch import nn

NORMS, ROTARY = ("RMSNorm", "RMSNormZeroCentered"), "rotary_pos_emb"
WIDTH = 32
CONFIG = types.SimpleNamespace(
    hidden_size=WIDTH,
    intermediate_size=48,
    out_hidden_size=WIDTH,
    text_hidden_size=WIDTH,
    mlp_ratio=2,
    mlp_bias=False,
    use_clipped_linears=False,
    use_bias=False,
    moe_num_shared_experts=2,
    num_hidden_layers=2,
    num_kv_shared_layers=0,
    kv_sharing_modes=["none", "none"],
    use_double_wide_mlp=False,
    hidden_act="silu",
    hidden_activation="silu",
)


@functools.cache
def modeling_files():
    """Module name -> path of every modeling file of the installed transformers."""
    root = pathlib.Path(transformers.__file__).parent / "models"
    return {
        f"transformers.models.{path.parent.name}.{path.stem}": path for path in sorted(root.glob("*/modeling_*.py"))
    }


def tag_of(node):
    """The layer name that a class or a function is tagged with in the source."""
    for decorator in node.decorator_list:
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "use_kernel_forward_from_hub":
            return decorator.args[0].value
    return None


@functools.cache
def tagged():
    """(tag, module, name) of every tagged norm and rotary embedding."""
    found = []
    for module, path in modeling_files().items():
        text = path.read_text()
        if "use_kernel_forward_from_hub(" in text:
            nodes = [node for node in ast.parse(text).body if isinstance(node, (ast.ClassDef, ast.FunctionDef))]
            found += [(tag, module, node.name) for node in nodes if (tag := tag_of(node)) in (*NORMS, ROTARY)]
    return found


def norms():
    """(module, name) of every class that is called an RMSNorm, tagged or not."""
    return [(module, name) for module, name, _ in _classes() if name.endswith("RMSNorm")]


def gated_mlps():
    """(module, name) of every class that has an activation and the three projections of a gated MLP."""
    parts = ("self.gate_proj", "self.up_proj", "self.down_proj", "act")
    return [
        (module, name)
        for module, name, text in _classes()
        if name.lower().endswith("mlp") and all(part in text for part in parts)
    ]


@functools.cache
def _classes():
    found = []
    for module, path in modeling_files().items():
        text = path.read_text()
        lines = text.splitlines()
        nodes = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)]
        found += [(module, node.name, "\n".join(lines[node.lineno - 1 : node.end_lineno])) for node in nodes]
    return found


def load(module, name):
    """The class or, of a tagged function, the function that the tag has made a module of."""
    part = getattr(importlib.import_module(module), name)
    if isinstance(part, nn.Module):
        return next(cell.cell_contents for cell in type(part).forward.__closure__)
    return part


def make(cls, dtype=torch.float32):
    """A module of a norm's or an MLP's class, with weights far from one and an eps that counts; None where its
    constructor wants something else."""
    given = {
        "config": CONFIG,
        "hidden_size": WIDTH,
        "dim": WIDTH,
        "layer_idx": 0,
        "intermediate_size": CONFIG.intermediate_size,
    }
    arguments = []
    for parameter in list(inspect.signature(cls.__init__).parameters.values())[1:]:
        if parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
            if parameter.name not in given:
                return None
            arguments.append(given[parameter.name])
        elif parameter.name == "dim":  # which may be None, of a norm without a weight
            arguments.append(given["dim"])
    torch.manual_seed(0)
    try:
        module = cls(*arguments)
    except (AttributeError, TypeError):  # a config that has more, a size without a default
        return None
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter) / (parameter.shape[-1] ** 0.5 if parameter.dim() > 1 else 1))
    for name in ("variance_epsilon", "eps"):
        if hasattr(module, name):
            setattr(module, name, 0.03)
    return module.to(dtype)


def rotary_inputs(dtype, width=WIDTH, unsqueeze_dim=1, table_dtype=None):
    """q, k with grouped heads, and tables `width` wide with equal halves, of the layout that unsqueeze_dim says."""
    generator = torch.Generator().manual_seed(unsqueeze_dim)
    q, k = (torch.randn(2, heads, 6, WIDTH, generator=generator) for heads in (4, 2))
    if unsqueeze_dim == 2:
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    angles = torch.randn(*((6,) if unsqueeze_dim == 0 else (2, 6)), WIDTH // 2, generator=generator)
    if width == WIDTH:
        angles = torch.cat((angles, angles), -1)
    cos, sin = (table.to(table_dtype or dtype) for table in (angles.cos(), angles.sin()))
    return q.to(dtype), k.to(dtype), cos, sin


def close(actual, expected, tolerance):
    """Every element to `tolerance` of itself and of a usual one of its row."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return False
    actual, expected = actual.float(), expected.float()
    size = expected.abs() + expected.square().mean(-1, keepdim=True).sqrt()
    return bool(((actual - expected).abs() <= tolerance * size).all())
