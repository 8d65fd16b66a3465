"""Write known_sources.json: the sources of transformers' parts, of several versions, that replacements stand for.

    python tests/huggingface/collect_sources.py transformers-4.57.6-py3-none-any.whl
    transformers-5.23.0-py3-none-any.whl ...

The wheels come from `pip download --no-deps transformers==VERSION`. Every part that a row of the table of families
names is taken out of its modeling file and run against the row's replacements on random input; its fingerprint is
written under those that compute the same. A part that none of them stands for is listed, and keeps its forward in a
patched model.
"""

import ast
import inspect
import itertools
import json
import linecache
import re
import sys
import types
import zipfile
from pathlib import Path

import torch
from liger_kernel.transformers import numeric
from liger_kernel.transformers.families import FAMILIES
from liger_kernel.transformers.source import fingerprint
from torch import nn
from transformers.activations import ACT2FN

TABLE = Path(__file__).parents[2] / "python/liger_kernel/transformers/known_sources.json"
CONFIG = types.SimpleNamespace(
    hidden_size=32,
    intermediate_size=48,
    out_hidden_size=48,
    moe_intermediate_size=48,
    num_experts=4,
    num_local_experts=4,
    swiglu_alpha=1.5,
    swiglu_limit=2.0,
    mlp_bias=True,
    mlp_multipliers=(0.7, 1.3),
    num_hidden_layers=2,
    num_kv_shared_layers=0,
    kv_sharing_modes=["none", "none"],
    use_double_wide_mlp=False,
)
# Falcon-H1's gate times its multiplier stays in float inside the kernel.
ROUNDS_LESS = {"swiglu.LigerFalconH1SwiGLUMLP"}
_count = itertools.count()


def parts_of(text, names):
    """The classes and functions of a modeling file that have these names, without what the file imports."""
    tree, wanted = ast.parse(text), {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) or (isinstance(node, ast.ClassDef) and node.name in names):
            node.decorator_list = []
            wanted[node.name] = node
    code = "from __future__ import annotations\n" + "\n\n".join(map(ast.unparse, wanted.values()))
    name = f"collected_{next(_count)}"
    module = types.ModuleType(name)
    vars(module).update(torch=torch, nn=nn, F=nn.functional, ACT2FN=ACT2FN)
    sys.modules[name] = module
    module.__file__ = f"<{name}>"
    linecache.cache[module.__file__] = (len(code), None, code.splitlines(True), module.__file__)
    exec(compile(code, module.__file__, "exec"), vars(module))
    return {found: getattr(module, found) for found in names if hasattr(module, found)}


def agrees(swap, target, part):
    """Whether a target computes what the part does, on random input."""
    replacement = swap.load(target)
    if not isinstance(part, type):
        make = INPUTS.get(part.__name__)
        return numeric._same_function(replacement, part) if make is None else _same(replacement, part, *make())
    CONFIG.hidden_act = CONFIG.hidden_activation = (swap.activations or ("silu",))[0]
    arguments = []
    for parameter in list(inspect.signature(part.__init__).parameters.values())[1:]:
        given = {"config": CONFIG, "hidden_size": 32, "dim": 32, "layer_idx": 0, "intermediate_size": 48}
        if parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
            arguments.append(given[parameter.name])
    module = part(*arguments)
    for name in ("variance_epsilon", "eps"):
        if hasattr(module, name):
            setattr(module, name, 0.03)
    if not list(module.parameters()):
        x = torch.randn(64)
        return bool(torch.equal(replacement.forward(module, x), module(x)))
    return numeric.computes(replacement, module, part.forward, rounded=target not in ROUNDS_LESS)


def _random(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def _sectioned():
    cos, sin = (_random(3, 2, 6, 16 + i)[..., :16].repeat(1, 1, 1, 2) for i in (0, 1))
    return _random(2, 4, 6, 32), _random(2, 2, 6, 32), cos, sin, [4, 6, 6]


def _turns(*shape):
    return torch.polar(torch.ones(*shape), _random(*shape))


INPUTS = {
    "apply_multimodal_rotary_pos_emb": _sectioned,
    "apply_rotary_pos_emb_vision": lambda: (
        _random(6, 4, 32),
        _random(6, 4, 33)[..., :32],
        *(_random(6, 16 + i)[:, :16].repeat(1, 2) for i in (0, 1)),
    ),
    "apply_rotary_emb": lambda: (_random(2, 6, 4, 32), _random(2, 6, 2, 32), _turns(2, 6, 16)),
    "vision_apply_rotary_emb": lambda: (_random(2, 6, 4, 32), _random(2, 6, 4, 34)[..., :32], _turns(6, 1, 16)),
}


def _same(replacement, part, *inputs):
    try:
        return all(numeric._close(a, b, 2.0**-18) for a, b in zip(replacement(*inputs), part(*inputs)))
    except (ValueError, RuntimeError):
        return False


def main():
    found, unknown = {}, {}
    for path in sys.argv[1:]:
        version = re.search(r"transformers-([\d.]+)-", path).group(1)
        with zipfile.ZipFile(path) as wheel:
            members = set(wheel.namelist())
            for row in FAMILIES.values():
                for home in (*row.homes, "transformers.activations"):
                    member = home.replace(".", "/") + ".py"
                    if member not in members:
                        continue
                    names = {
                        name.rpartition(".")[2]: name for name in row.swaps if "." not in name or name.startswith(home)
                    }
                    for short, part in parts_of(wheel.read(member).decode(), names).items():
                        swap, at = row.swaps[names[short]], f"{short} {version}"
                        targets = [target for target in swap.targets if agrees(swap, target, part)]
                        for target in targets:
                            found.setdefault(target, {}).setdefault(fingerprint(part), {})[at] = None
                        if not targets:
                            unknown.setdefault(f"{row.name} {short}", []).append(version)
    table = {
        target: {key: _where(places) for key, places in sorted(entries.items())}
        for target, entries in sorted(found.items())
    }
    TABLE.write_text(json.dumps(table, indent=1) + "\n")
    for name, versions in unknown.items():
        print(f"nothing stands for {name} of {', '.join(versions)}")
    print(f"{sum(map(len, table.values()))} sources in {TABLE}")


def _where(places):
    """For a reader: a class, how many others have the same source, and in which versions."""
    names = list(dict.fromkeys(place.split()[0] for place in places))
    versions = sorted(
        {place.split()[1] for place in places}, key=lambda version: [int(part) for part in version.split(".")]
    )
    others = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{names[0]}{others}, {versions[0]} to {versions[-1]}"


if __name__ == "__main__":
    main()
