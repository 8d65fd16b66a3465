"""The pages of the Python reference: every public name of tests/api.json, with its signature and its docstring.

Names and signatures are those of the record; docstrings are read from the sources, because the site is built without
torch. A name of `liger_kernel.ops` has the anchor `#liger_kernel.ops.<name>`. A name that a module makes at run time,
such as the patch of a family, has its signature only.
"""

import ast
import functools
import html
import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "liger_kernel"
#: page: (its title, the modules whose names it has: those under one of these, but for those of pages before it)
PAGES = {
    "reference/losses.md": ("Losses on hidden states", ("liger_kernel.chunked_loss",)),
    "reference/operators.md": ("Operators", ("liger_kernel.ops",)),
    "reference/transformers.md": ("Modules and patches", ("liger_kernel.transformers",)),
    "reference/package.md": ("Package", ("liger_kernel",)),
}
#: The modules with a section of the page of docstrings, with their titles.
MODULES = {
    "liger_kernel._patch": "Patching a model of any type",
    "liger_kernel.transformers.patching.apply": "Patches",
    "liger_kernel.transformers.patching.report": "Reports of patches",
    "liger_kernel.chunked_loss": "Losses on hidden states",
    "liger_kernel.ops.linear_log_prob": "Log-probabilities under a head",
    "liger_kernel.ops.linear_distillation": "Distillation of a head",
    "liger_kernel.ops.sliced_log_prob": "Sharded and quantised heads",
    "liger_kernel.ops.topk_distillation": "A teacher's most probable classes",
    "liger_kernel.ops.multi_head": "Several heads",
    "liger_kernel.transformers.functional": "Functions",
    "liger_kernel.transformers.rms_norm": "RMSNorm",
    "liger_kernel.transformers.layer_norm": "LayerNorm",
    "liger_kernel.transformers.swiglu": "SwiGLU",
    "liger_kernel.transformers.geglu": "GeGLU",
    "liger_kernel.transformers.router": "Routers",
    "liger_kernel.transformers.cross_entropy": "Cross entropy",
    "liger_kernel.transformers.fused_linear_cross_entropy": "Fused linear cross entropy",
    "liger_kernel._quantise": "Frozen layers in eight bits",
    "liger_kernel.optim": "AdamW",
    "liger_kernel.graphs": "CUDA graphs",
    "liger_kernel.memory": "Memory",
    "liger_kernel.routing": "Router replay",
    "liger_kernel.trl": "TRL",
    "liger_kernel.env_report": "Report of the installation",
}
#: Names that a module imports when it is asked for one, and that other modules have too.
LAZY = {("liger_kernel", name): ("liger_kernel._patch", name) for name in ("patch", "report")}


def source(module: str) -> Path | None:
    """The file of a module of the package; None of another's."""
    path = ROOT / "python" / Path(*module.split("."))
    found = (path.with_suffix(".py"), path / "__init__.py")
    return next((file for file in found if module.split(".")[0] == PACKAGE and file.is_file()), None)


@functools.cache
def defined(module: str) -> dict[str, ast.AST | tuple[str, str]]:
    """name -> its definition in a module, or the module and the name that it is imported from."""
    file, found = source(module), {}
    if file is None:
        return found
    parts = module.split(".") if file.name == "__init__.py" else module.split(".")[:-1]
    for node in ast.walk(tree := ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom):
            base = ".".join([*parts[: len(parts) - node.level + 1], node.module or ""]) if node.level else node.module
            found |= {alias.asname or alias.name: (base.strip("."), alias.name) for alias in node.names}
    return found | {node.name: node for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}


@functools.cache
def places() -> dict[str, list[str]]:
    """name -> the modules of the package that define it."""
    found = {}
    for file in sorted((ROOT / "python" / PACKAGE).rglob("*.py")):
        path = file.relative_to(ROOT / "python").with_suffix("")
        module = ".".join(path.parts).removesuffix(".__init__")
        for name, node in defined(module).items():
            if not isinstance(node, tuple):
                found.setdefault(name, []).append(module)
    return found


def definition(module: str, name: str) -> ast.AST | None:
    """The class or function that a name of a module stands for; None where the sources do not show it."""
    seen = set()
    while (module, name) not in seen:
        seen.add((module, name))
        found = LAZY.get((module, name)) or defined(module).get(name)
        if found is None and len(places().get(name, ())) == 1:  # handed on by a module's __getattr__
            found = places()[name][0], name
        if not isinstance(found, tuple):
            return found
        module, name = found
    return None


def docstring(module: str, name: str) -> str | None:
    """Of a name, or of a method as `Class.method`."""
    top, _, method = name.partition(".")
    node = definition(module, top)
    if method and node is not None:
        node = next((m for m in getattr(node, "body", ()) if getattr(m, "name", None) == method), None)
    return ast.get_docstring(node) if node is not None else None


def entry(module: str, name: str, signature: str) -> str:
    """A heading with the anchor, so that the search finds the name; the signature; the docstring."""
    level = 4 if "." in name else 3
    call = f"{name}{signature}" if signature.startswith("(") else f"{name}: {signature}"
    words = re.sub(r"^ *```.*\n?", "", docstring(module, name) or "", flags=re.M)  # would end the block of code
    body = html.escape(call) + (f"\n\n{html.escape(words)}" if words else "")
    anchor = f"{module}.{name}"
    return f'<h{level} id="{anchor}">{name}</h{level}>\n<pre><code>{body}</code></pre>'


def pages(record: dict[str, dict[str, str]] | None = None) -> dict[str, str]:
    """The text of each page of PAGES, for the names of tests/api.json or of another record."""
    left = dict(record or json.loads((ROOT / "tests" / "api.json").read_text()))
    texts = {}
    for page, (title, roots) in PAGES.items():
        parts = [f"# {title}\n\nEvery public name, its signature and its docstring."]
        for module in [m for m in left if any(f"{m}.".startswith(f"{root}.") for root in roots)]:
            parts.append(f"## {module}")
            parts += [entry(module, name, signature) for name, signature in left.pop(module).items()]
        texts[page] = "\n\n".join(parts) + "\n"
    return texts


def docstrings() -> str:
    """The page that mkdocstrings fills."""
    parts = [f"## {title}\n\n::: {module}\n" for module, title in MODULES.items()]
    return "# Python\n\n" + "\n".join(parts)
