"""What to run after a change, in a minute or two: prints the commands for the files that differ, and runs them.

make check            # what differs from origin/main
make check BASE=HEAD  # what is not committed
"""

import ast
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator

from check_layers import BORROWS, ROOT, imports

BUILD = os.environ.get("BUILD", "build/wheel")
PYTEST = f"{shlex.quote(sys.executable)} -m pytest -q -p no:cacheprovider"
PACKAGE = "python/liger_kernel/"
#: Families of models that have among them most of what a patch replaces.
FAMILIES = {"llama", "gemma2", "mixtral"}
#: The most test files of one folder for one changed file: those that name most of what is in it.
MOST = 8


def texts(*patterns: str) -> dict[str, str]:
    """name -> text of the files that fit."""
    return {p.relative_to(ROOT).as_posix(): p.read_text() for each in patterns for p in sorted(ROOT.glob(each))}


TESTS = texts("tests/test_*.py", "tests/research/test_*.py", "tests/huggingface/test_*.py")
CASES = texts("tests/cases/[a-z]*.py", "tests/research/cases/*.py")


def naming(words: Iterable[str], files: dict[str, str], before: str = "") -> set[str]:
    """The files that have some of the words: of those in one folder the few that have most."""
    pattern = re.compile(rf"\b{before}({'|'.join(words) or '$^'})\b")
    found: dict[str, list[tuple[int, str]]] = {}
    for name, text in files.items():
        if count := len(set(pattern.findall(text))):
            found.setdefault(os.path.dirname(name), []).append((-count, name))
    return {name for folder in found.values() for _, name in sorted(folder)[:MOST]}


def operators(path: str) -> set[str]:
    """The operators of the family of a file in liger/ops, and of those that borrow from it."""
    family = path.split("/")[2]
    families = {family} | {name for name, of in BORROWS.items() if family in of}
    folders = [os.path.dirname(path)] if family == "research" else [f"liger/ops/{name}/**" for name in families]
    code = "".join(texts(*(f"{folder}/*_op.*" for folder in folders)).values())
    return set(re.findall(r"liger::(\w+)\(", (ROOT / "tests/schemas.txt").read_text())) & set(re.findall(r"\w+", code))


def users(path: str) -> set[str]:
    """The tests of a file of the package: those that name what it defines, or else what the files do that import it."""
    files = {p.relative_to(ROOT / "python").as_posix(): p for p in (ROOT / PACKAGE).rglob("*.py")}
    modules = {name.removesuffix(".py").removesuffix("/__init__").replace("/", "."): p for name, p in files.items()}
    reached: set[str] = set()
    more = {name for name, p in modules.items() if p == ROOT / path}
    while more:
        nodes = [node for name in more for node in ast.parse(modules[name].read_text()).body]
        names = {node.name for node in nodes if getattr(node, "name", "_")[0] != "_"}
        if found := naming(names | {re.escape(modules[name].name) for name in more}, TESTS):
            return found
        reached |= more
        more = {name for name, p in modules.items() if set(imports(p, modules)) & more} - reached
    return set()


def families_in(diff: str) -> set[str]:
    """The families that changed lines name, themselves or by a class of theirs."""
    rows = "".join(path.read_text() for path in (ROOT / PACKAGE).rglob("families.py"))
    families = {name.replace("_", ""): name for name in re.findall(r'^    \w+\("(\w+)"', rows, re.M)}
    found = set()
    for word in re.findall(r"\w+", " ".join(re.findall(r"^[-+](?![-+]).*", diff, re.M))):
        short = word.replace("_", "").lower()
        fits = [name for name in families if short == name or word[0].isupper() and short.startswith(name)]
        found |= {families[max(fits, key=len)]} if fits else set()
    return found


def plan(changed: Iterable[str], diff: Callable[[str], str] = lambda path: "") -> Iterator[str]:
    """The commands for some changed files. diff(path) is what `git diff` says of one."""
    tests, cases, families, ctests, library, kernels = set(), set(), set(), set(), False, False
    for path in changed:
        name, stem = os.path.basename(path), os.path.basename(path).partition(".")[0]
        if re.match("liger/(core|ops)/", path):
            library, kernels = True, kernels or bool(re.search(r"\.cuh?$|core/cuda/", path))
            of = operators(path) if path.startswith("liger/ops/") else set()
            cases |= {os.path.basename(case)[:-3] for case in naming(of, CASES, r"ops\.")} if of else {"all"}
            cases |= {"loss_cases"} if re.match("liger/ops/(head|preference)/", path) else set()
            tests |= naming(of, TESTS, r"(?:ops\.|liger_)")
        elif re.match("liger/(models|train)/|tests/cpp/(compare|run|training)_", path):
            kind = next((kind for kind in ("tokenizer", "config", "training") if kind[:5] in path), "model")
            ctests |= {"models", f"compare_{kind}s?"}
            tests |= {test for test in TESTS if kind[:5] in test and "test_train_" in test}
        elif re.match("liger/|tests/(cpp|emulation)/|.*CMake", path):
            ctests |= {"liger", "liger_emulated", "models", "experts"}
        elif name in ("families.py", "sources.json"):
            families |= families_in(diff(path))
            tests |= {f"tests/huggingface/test_{what}.py" for what in ("families", "stands_for", "rows", "sources")}
        elif path.startswith(PACKAGE):
            tests |= users(path)
            if re.match(PACKAGE + "(transformers|operators)/", path):
                tests.add("tests/huggingface/test_families.py")
        elif path in CASES or name == "loss_cases.py":
            cases.add(stem)
        elif path in TESTS:
            tests.add(path)
        elif path.endswith(".md") or path.startswith("docs/") or name == "mkdocs.yml":
            tests |= {"tests/test_docs.py", "tests/test_measurements.py"}
        elif re.match(r"benchmarks/(results/|recorded)", path):
            tests.add("tests/test_measurements.py")
        elif stem:  # what tests import or read
            tests |= naming((f"import {stem}", f"from {stem}", re.escape(name)), TESTS)
    yield f"{shlex.quote(sys.executable)} tests/check_layers.py"
    if kernels or ctests:
        yield f"cmake -B {BUILD} -DLIGER_TESTS=ON"
    if library or ctests:
        yield f"cmake --build {BUILD} --target {'all' if kernels or ctests else 'liger'}"
    if ctests:
        yield f"ctest --test-dir {BUILD} --output-on-failure -R '^({'|'.join(sorted(ctests))})$'"
    chosen = "--import-mode=importlib "
    if cases:
        tests.add("tests/test_ops.py")
        chosen += "" if "all" in cases else f"--cases {','.join(sorted(cases))} "
    if kernels:
        emulated = f"{ROOT / BUILD}/tests/libliger_emulated.so"
        environment = f"CUDA_VISIBLE_DEVICES= LIGER_EMULATED_DEVICE=sm_90 LIGER_LIBRARY={shlex.quote(emulated)}"
        yield f"{environment} {PYTEST} {chosen}tests/test_ops.py"
    if general := sorted(test for test in tests & TESTS.keys() if "huggingface" not in test):
        yield f"{PYTEST} {chosen}{' '.join(general)}"
    if patched := sorted(test for test in tests & TESTS.keys() if "huggingface" in test):
        yield f"{PYTEST} --families {','.join(sorted(families or FAMILIES))} {' '.join(patched)}"


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout


def main(base: str) -> int:
    since = git("merge-base", base, "HEAD").strip()
    changed = {*git("diff", "--name-only", since).split(), *git("ls-files", "--others", "--exclude-standard").split()}
    for command in plan(sorted(changed), lambda path: git("diff", since, "--", path)):
        print(f"\n$ {command}", flush=True)
        if failed := subprocess.run(command, shell=True, cwd=ROOT).returncode:
            return failed
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
