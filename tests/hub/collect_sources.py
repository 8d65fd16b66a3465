"""Write liger_kernel/hub/known_sources.json: the sources of transformers' norms, rotary embeddings and gated MLPs that
a layer stands for.

    python tests/hub/collect_sources.py     # in an environment of each version of transformers; older lines stay

Every class and function that transformers tags, and every gated MLP, is run against the layers on random input, in
float and in bfloat16; the fingerprint of its source is written under the first layer that computes the same and rounds
in the same places. What no layer stands for is listed, and keeps its own forward.
"""

import ast
import inspect
import json
import pathlib
import sys
import textwrap

import tagged
import torch
import transformers
from liger_kernel.hub import layers
from liger_kernel.transformers.source import fingerprint

TABLE = pathlib.Path(layers.__file__).with_name("known_sources.json")
# Sections of its tables that differ in the two halves, of which the operator reads one.
UNEQUAL_HALVES = {"transformers.models.hunyuan_vl.modeling_hunyuan_vl"}
# Float: sums in another order. Bfloat16: a last bit of some elements, for the same reason.
FLOAT, LAST_BITS = 2.0**-18, 0.02


def same(layer, original, arguments, self=None):
    """Whether a layer computes what `original` does."""
    ours, theirs = layer.forward(self, *arguments), original(*arguments)
    if not isinstance(theirs, tuple):
        ours, theirs = (ours,), (theirs,)
    for a, b in zip(ours, theirs, strict=True):
        if a.dtype != b.dtype or a.shape != b.shape:
            return False
        if a.dtype == torch.float32 and not tagged.close(a, b, FLOAT):
            return False
        if a.dtype == torch.bfloat16 and not (a != b).float().mean() <= LAST_BITS:
            return False
    return True


def branches(cls):
    """Whether a forward may do different things, of which random input shows one."""
    methods = [
        node
        for node in ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0].body
        if isinstance(node, ast.FunctionDef)
    ]
    bodies = [node for method in methods if method.name not in ("__init__", "extra_repr") for node in ast.walk(method)]
    return any(
        isinstance(node, (ast.If, ast.IfExp)) or isinstance(node, ast.Attribute) and "drop" in node.attr
        for node in bodies
    )


def stands_for_module(layer, cls):
    if branches(cls):
        return False
    # Rows of very different sizes tell where eps is added.
    x = torch.randn(64, tagged.WIDTH) * torch.logspace(-4, 1, 64)[:, None]
    for dtype in (torch.float32, torch.bfloat16):
        module = tagged.make(cls, dtype)
        # A product of a rounded activation is rounded once more by an MLP.
        if dtype == torch.bfloat16 and layer is layers.LigerGatedMLP:
            continue
        if module is None or not list(module.parameters()):
            return False
        try:
            if not same(layer, module.forward, (x.to(dtype),), module):
                return False
        except AttributeError:
            return False
    return True


class Refused(torch.nn.Module):
    """Where a layer hands its arguments on, it does not stand for anything."""

    def forward(self, *arguments):
        raise ValueError


def stands_for_function(layer, function):
    for width in (tagged.WIDTH, tagged.WIDTH // 2):
        arguments = tagged.rotary_inputs(torch.float32, width)
        try:
            theirs = function(*arguments)
        except RuntimeError:
            continue
        try:
            if not same(layer, lambda *_: theirs, arguments, Refused()):
                return False
            wide = tagged.rotary_inputs(torch.bfloat16, width, table_dtype=torch.float32)
            return layer is not layers.LigerFloatRotaryEmbedding or function(*wide)[0].dtype == torch.bfloat16
        except ValueError:
            return False
    return False


def main():
    table = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    found, unknown = {}, set()
    parts = [
        (module, name, layers.ROTARIES[::-1] if tag == tagged.ROTARY else layers.NORMS)
        for tag, module, name in tagged.tagged()
    ]
    parts += [
        (module, name, layers.NORMS) for module, name in tagged.norms() if (module, name, layers.NORMS) not in parts
    ]
    parts += [(module, name, (layers.LigerGatedMLP,)) for module, name in tagged.gated_mlps()]
    for module, name, candidates in parts:
        try:
            part = tagged.load(module, name)
        except ImportError as error:
            print(f"{module} cannot be imported: {error}", file=sys.stderr)
            continue
        compare = stands_for_module if isinstance(part, type) else stands_for_function
        layer = (
            None
            if module in UNEQUAL_HALVES and compare is stands_for_function
            else next((c for c in candidates if compare(c, part)), None)
        )
        if layer is None:
            unknown.add(f"{module.rpartition('.')[2]}.{name}")
        else:
            found.setdefault(layer.__name__, {}).setdefault(fingerprint(part), []).append(name)
    for layer, sources in found.items():
        for key, names in sources.items():
            where = f"{names[0]}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")
            table.setdefault(layer, {}).setdefault(key, {})[transformers.__version__] = where
    ordered = {layer: dict(sorted(sources.items())) for layer, sources in sorted(table.items())}
    TABLE.write_text(json.dumps(ordered, indent=1) + "\n")
    print(
        f"transformers {transformers.__version__}: {sum(len(names) for s in found.values() for names in s.values())} "
        f"parts of {sum(map(len, found.values()))} sources"
    )
    print("no layer stands for:", ", ".join(sorted(unknown)))


if __name__ == "__main__":
    main()
