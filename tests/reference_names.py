"""The public names of a release of liger-kernel, from its wheel, for test_reference_names.py:

pip download --no-deps liger-kernel==0.8.5 && python tests/reference_names.py liger_kernel-0.8.5-py3-none-any.whl

Written down is what each public module defines, or imports from another module of the package; Triton's kernels apart.
"""

import ast
import json
import pathlib
import sys
import zipfile

RECORD = pathlib.Path(__file__).with_suffix(".json")


def names_of(source: str) -> dict[str, bool]:
    """The public names that a module binds -> whether it is a Triton kernel."""
    found: dict[str, bool] = {}

    def visit(body):
        for node in body:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                found[node.name] = any("triton" in ast.unparse(decorator) for decorator in node.decorator_list)
            elif isinstance(node, (ast.Assign, ast.AnnAssign)):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names = (part for target in targets for part in ast.walk(target) if isinstance(part, ast.Name))
                found.update((name.id, False) for name in names)
            elif isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").startswith("liger_kernel")):
                found.update((alias.asname or alias.name, False) for alias in node.names)
            elif isinstance(node, (ast.If, ast.Try)):
                visit([*node.body, *node.orelse])
                for handler in getattr(node, "handlers", ()):
                    visit(handler.body)

    visit(ast.parse(source).body)
    return {name: kernel for name, kernel in found.items() if not name.startswith("_") and name != "*"}


def read(wheel: str) -> dict[str, list[str]]:
    record = {}
    with zipfile.ZipFile(wheel) as archive:
        for path in sorted(archive.namelist()):
            module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            if path.endswith(".py") and not any(part.startswith("_") for part in module.split(".")):
                names = names_of(archive.read(path).decode())
                if kept := sorted(name for name, kernel in names.items() if not kernel):
                    record[module] = kept
    return record


if __name__ == "__main__":
    RECORD.write_text(json.dumps(read(sys.argv[1]), indent=0) + "\n")
