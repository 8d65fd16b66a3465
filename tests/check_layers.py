"""Checks that no file reaches around its layer: what may include what, and how long a file may be."""

import ast
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent

#: (files, includes that they must not have, why)
RULES = [
    (
        r"liger/.*(_cuda\.cu|\.cuh)$|liger/core/cuda/.*",
        r"(torch|ATen|c10)/",
        "CUDA kernels are built with no torch on their include path",
    ),
    (
        r"liger/.*_cpu\.(cpp|h)$|liger/core/cpu/.*",
        r"(torch|c10)/|ATen/(?!cpu/vec/|Parallel\.h|Version\.h)",
        "CPU kernels use ATen's vectors and threads alone",
    ),
    (r"liger/core/(?!torch/).*", r"liger/(functions|ops|nn)", "the vocabulary knows no operator"),
    (
        r"liger/core/[a-z]+\.h$|liger/ops/.*(?<!_op)(?<!_cpu)\.h$",
        r"(torch|ATen|c10)/|liger/core/(cuda|cpu|torch)/",
        "what all backends share knows none of them",
    ),
    (r"liger/(functions|ops)/.*", r"torch/nn|torch/torch\.h|liger/nn", "operators do not pay for torch/nn.h"),
    (r"liger/(core|functions|ops|nn)/.*", r"liger/(models|train)/|nlohmann/", "operators and modules know no model"),
    (
        r"liger/models/(config|llama|lora|safetensors|tokenizer)\.h$",
        r"nlohmann/|pcre2|utf8proc|liger/models/(json|regex|config_reader)\.h",
        "a program needs none of what the models are built with",
    ),
    (
        # apart from the headers that hand on what research.h declares
        r"liger/(?!ops/research/|ops\.h|research\.h|nn/(research|norm|activation)\.h)",
        r"liger/(ops/research/|(nn/)?research\.h)",
        "the library is built without its research operators, too (LIGER_RESEARCH)",
    ),
    (
        r"liger/(ops|research)\.h$|liger/functions/.*",
        r"torch/|ATen/(?!core/Tensor\.h)",
        "a public header of functions is light",
    ),
]
#: An operator uses its own folder; the head runs the losses' rows over its chunks, an MLP and experts their activation,
#: what rotates q and k may normalise them, and research operators are built on norms and softmax.
BORROWS = {
    "head": {"loss"},
    "linear": {"activation"},
    "experts": {"activation"},
    "rope": {"norm"},
    "research": {"norm", "activation"},
}
#: A file of more lines should be divided, and one of more than the second number must be. Between the two there is time
#: to divide it where its subjects part, rather than to pack its lines.
LONG, LONGEST = 450, 600

#: The wings, and the modules by whose public names others find what is in them. Nothing else imports these: a package
#: finds such a name when it is asked for one (liger_kernel/_lazy.py).
WINGS = (
    r"(research|compat)(\..*)?|backends|functional|triton(\..*)?|ops\.(utils|backends(\..*)?|experimental\.mm_int8int2)"
    r"|(ops|transformers)\.(attn_res|dyt|fused_neighborhood_attention|group_norm|mhc|multi_token_attention|poly_norm"
    r"|sparsemax)|transformers\.model"
)
#: The floors of liger_kernel, from below: a file imports from its own floor and those below it, and no two files import
#: each other. An __init__.py counts as the package that it is; what it imports by name (importlib) when it is asked for
#: a name does not count, and neither does that Python runs it before the package's modules.
FLOORS = (
    r"_installed|_variant",
    r"liger_kernel|_library|_recompute|_memory(\..*)?|_dtensor|_build|utils|memory|graphs|_lazy",
    # the families of operators, which the two packages of public names hand on
    r"operators(\..*)?|optim|_quantise|_?routing(\..*)?|_invariance(\.(products|audit))?",
    r"ops(\..*)?",
    r"chunked_loss(\..*)?|transformers\.(patching\.(formulas|part|mixer_functions)|functional|experimental(\..*)?|fsdp|expert_parallel|moe"
    r"|(?!trainer)\w*(norm|glu|mlp|experts|router|gate|rope|entropy|div|jsd|tvd|softmax|squared|xielu|centering|loss|convolution))",
    r"transformers(\.(patching|patching\.(place|families|report|numeric)|families|report|model\..*))?"
    r"|megatron\.(cross_entropy|rms_norm|swiglu)",
    r"transformers\.(patching\.(layers|rotations|masks|packed|ones|mixers|attention)|head|logits|lora|tensor_parallel|causal_lm)|hub(\.layers)?",
    r"transformers\.(patching\.(by_source|apply|structure|hub)|patch)|_invariance\.(attention|parts)",
    r"transformers\.(monkey_patch|auto_model|trainer\b.*|trainer_integration)|trl|veomni|verl|ms_swift|megatron(\.monkey_patch)?|env_report"
    r"|_self_test|_train",
    r"_patch|axolotl|measure(\..*)?",
    r"_batch_invariant",
)


def includes(path):
    return re.findall(r'#include\s*[<"]([^>"]+)[>"]', path.read_text())


def imports(path, modules):
    """The modules of liger_kernel that a file imports, inside functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from {name if name in modules else node.module for name in names} & modules.keys()


def import_problems(folder):
    """What is wrong with the imports of the package in a folder."""
    paths = {".".join(p.relative_to(folder).with_suffix("").parts): p for p in sorted(folder.rglob("*.py"))}
    modules = {name.removesuffix(".__init__"): path for name, path in paths.items()}
    found = {name: set(imports(path, modules)) - {name} for name, path in modules.items()}
    floors = {}
    for name in modules:
        short = name.removeprefix("liger_kernel.")
        fits = [i for i, floor in enumerate(FLOORS) if re.fullmatch(floor, short) and not re.fullmatch(WINGS, short)]
        if not fits and not re.fullmatch(WINGS, short):
            yield f"{name} stands on no floor: tests/check_layers.py names them"
        floors[name] = min(fits, default=len(FLOORS))
    for name, others in found.items():
        above = sorted(other for other in others if floors[other] > floors[name])
        yield from (f"{name} imports {other}, which stands above it" for other in above)
    done, path = set(), []

    def circle(name):
        if name in path:
            return path[path.index(name) :]
        if name in done:
            return None
        done.add(name)
        path.append(name)
        here = next((c for other in sorted(found[name]) if (c := circle(other))), None)
        path.pop()
        return here

    yield from (f"a circle of imports: {' -> '.join(c)}" for name in sorted(modules) if (c := circle(name)))


def problems():
    for path in sorted(p for p in (ROOT / "liger").rglob("*") if p.is_file()):
        name = path.relative_to(ROOT).as_posix()
        found = includes(path)
        for files, forbidden, why in RULES:
            if re.match(files, name):
                yield from (f"{name} includes {i}: {why}" for i in found if re.match(forbidden, i))
        family = re.match(r"liger/ops/(\w+)/", name)
        for i in found:
            other = re.match(r"liger/ops/(\w+)/", i)
            if family and other and other[1] != family[1] and other[1] not in BORROWS.get(family[1], ()):
                yield f"{name} includes {i}: no operator includes another's kernel"
        if path.suffix == ".cu":
            for kernel in re.findall(
                r"__global__ void [^{;]*\b(\w+)\([^{;]*\{(?!\n  (?:if \(!beside\) )?await_previous\(\);)",
                path.read_text(),
            ):
                yield (
                    f"{name}: {kernel} must begin with await_previous(), or do so unless it runs `beside` the kernel "
                    "before: launch() does not wait for the kernel before it"
                )
    for path in (ROOT / "python").rglob("*.py"):
        name = path.relative_to(ROOT).as_posix()
        if "torch.ops.liger" in path.read_text() and not name.endswith("_library.py"):
            yield f"{name} uses torch.ops.liger: liger_kernel/_library.py is where libliger is loaded"
    yield from import_problems(ROOT / "python")
    yield from (f"{name} has {lines} lines, more than {LONGEST}" for name, lines in lengths() if lines > LONGEST)


def lengths():
    """(file, number of lines) of all sources."""
    for folder in ("liger", "python", "tests", "benchmarks", "examples"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".h", ".cpp", ".cu", ".cuh", ".py"):
                yield path.relative_to(ROOT).as_posix(), len(path.read_text().splitlines())


if __name__ == "__main__":
    for name, lines in sorted(lengths()):
        if LONG < lines <= LONGEST:
            print(f"warning: {name} has {lines} lines; divide it before it has {LONGEST}")
    found = list(problems())
    print("\n".join(found) or "layers: every file stays in its own")
    sys.exit(bool(found))
