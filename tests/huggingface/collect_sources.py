"""Write into sources.json the sources of transformers' classes and functions that parts stand for, and print what
changes.

    python tests/huggingface/collect_sources.py            # of the newest transformers that pip finds
    python tests/huggingface/collect_sources.py 4.57.6 transformers-5.23.0-py3-none-any.whl ...

pip downloads versions. What is known of other versions stays. Every norm, feed-forward block, mixture of experts,
router, forget gate, rotary embedding and decoder layer is taken out of its modeling file and run against the formulas
of liger_kernel/transformers/patching/formulas.py on random input, in float32 and in bfloat16; its fingerprint is
written under the formula that computes the same and rounds in the same places. What a row of the table of families
names and no formula stands for is listed: it keeps its forward in a patched model.
"""

import __future__

import ast
import inspect
import itertools
import json
import linecache
import logging
import re
import subprocess
import sys
import tempfile
import types
import zipfile
from pathlib import Path

import torch
from function_parts import drawn, part_of_function, same_results
from gate_classes import GATE, GATE_BRANCHES, GATE_CONFIG, GATES, WIDTH, same_gate
from liger_kernel.operators.coverage import ACTIVATION_NAMES
from liger_kernel.transformers.patching import numeric
from liger_kernel.transformers.patching.by_source import swaps_of
from liger_kernel.transformers.patching.families import FAMILIES, Swap
from liger_kernel.transformers.patching.formulas import FORMULAS, fingerprint
from liger_kernel.transformers.patching.layers import STEPS, adding
from liger_kernel.transformers.patching.mixers import _convolving
from torch import nn
from transformers.activations import ACT2FN

TABLE = Path(__file__).parents[2] / "python/liger_kernel/transformers/patching/sources.json"
CONFIG = types.SimpleNamespace(
    hidden_size=WIDTH,
    text_hidden_size=WIDTH,
    out_hidden_size=WIDTH,
    intermediate_size=48,
    moe_intermediate_size=48,
    moe_num_shared_experts=2,
    num_experts=4,
    moe_num_experts=4,
    num_local_experts=4,
    n_routed_experts=4,
    moe_latent_size=None,
    swiglu_alpha=1.5,
    swiglu_limit=2.0,
    mlp_ratio=2,
    mlp_bias=True,
    mlp_dropout=0.5,
    use_bias=False,
    use_clipped_linears=False,
    mlp_multipliers=(0.7, 1.3),
    residual_dropout=0.5,
    num_hidden_layers=2,
    num_kv_shared_layers=0,
    kv_sharing_modes=["none", "none"],
    use_double_wide_mlp=False,
    block_auto_adjust_ff_dim=False,
    shared_intermediate_size=48,
    dense_intermediate_size=48,
    hidden_act="silu",
    mlp_hidden_act="relu2",
    hidden_activation="silu",
    activation_function="silu",
)
CLASSES = re.compile(
    r"RMSNorm(Gated|alization)?$|L2Norm$|LayerNorm$|MLP$|Mlp$|Experts$|NaiveMoe$|(ReLUSquared|XIELU)Activation$|Rotary|Rope"
    r"|Top[kK]Router$|ForgetGate$|ShortConv$|MoeStatics$|(Decoder|Encoder|Transformer|Attention)(Text)?Layer$"
)
FUNCTIONS = re.compile(
    r"^(vision_)?apply_(multimodal_)?rotary_(pos_)?emb(_vision|_interleave)?$|^load_balancing_loss_func$"
    r"|^causal_conv1d_fn$|^torch_chunk_gated_delta_rule$|^chunk_kimi_delta_attention$|^mamba2_(chunk_scan|split_conv1d_scan_combined)$"
)
TABLES = re.compile(r"Rotary|Rope")
LAYERS = re.compile(r"Layer$")
CONVOLUTIONS = re.compile(r"ShortConv$")
ROPE_CONFIG = types.SimpleNamespace(
    rope_parameters={"rope_type": "default", "mrope_section": [3, 3, 2]}, head_dim=16, rope_scaling=None
)
ROUTER = re.compile(r"Top[kK]Router$")
ROUTER_CONFIG = dict(
    vars(CONFIG),
    **dict.fromkeys(("num_experts", "num_local_experts", "moe_num_experts", "n_routed_experts"), 8),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk"), 3),
    **dict.fromkeys(("routed_scaling_factor", "router_scaling_factor"), 1.7),
    n_group=4,
    topk_group=2,
    moe_norm_min=0.6,
    scoring_func="sigmoid",
    output_multiplier=0.7,
)
# What branches of routers ask for.
ROUTER_BRANCHES = dict(
    norm_topk_prob=(True, False),
    topk_method=("greedy", "group_limited_greedy"),
    moe_router_logit_softcapping=(5.0, 0.0),
)
# The parts that each kind of source is tried against, in this order.
NORMS = ("rms_norm", "float_rms_norm", "offset_rms_norm")
GATED_NORMS = ("gated_rms_norm", "gate_first_rms_norm", "float_gated_rms_norm")
WEIGHTLESS_NORMS, LAYER_NORMS = ("weightless_rms_norm",), ("float_layer_norm",)
MLPS = (
    *("gated_mlp", "packed_gated_mlp", "granite_gated_mlp", "top2_gated_mlp", "scaled_gated_mlp"),
    *("modernbert_mlp", "gated_mlp_with_dropout", "clamped_gated_mlp", "clamped_swish_mlp", "ungated_mlp"),
)
EXPERTS = ("experts", "transposed_experts", "gpt_oss_experts", "clamped_experts", "clamped_swish_experts")
UNGATED_EXPERTS = ("ungated_experts",)
ROUTERS = tuple(name for name in FORMULAS if name.endswith("_router"))
ACTIVATION_PARTS = ("relu_squared", "xielu")
# Falcon-H1's gate times its multiplier stays in float inside the kernel, and so do the steps of MiniMax-M3's gate.
ROUNDS_LESS = {"scaled_gated_mlp", "clamped_swish_mlp"}
# Sections of its tables differ in the two halves, of which the operator reads one.
UNEQUAL_HALVES = {"modeling_hunyuan_vl"}
# Compared by hand, for all that their branches do.
REVIEWED = {"SeedOssMLP", "AriaExperts", "Glm5NextTextExperts", "HYV4Experts", "MiniMaxM3VLExperts", "XIELUActivation"}
REVIEWED |= {"NemotronHExperts"}
REVIEWED |= {f"{name}MLP" for name in ("ModernBert", "ModernBertDecoder")}
REVIEWED |= {f"{name}Experts" for name in ("DeepseekV4", "GptOss", "HunYuanMoEV1", "Mixtral", "Qwen3_5Moe")}
REVIEWED |= {f"{name}Experts" for name in ("Gemma4Text", "Glm4vMoeText", "Qwen3Moe", "Qwen3Next", "Qwen3VLMoeText")}
REVIEWED |= {"Glm4vMoeTextNaiveMoe", "Glm4vMoeTextTopkRouter", "Gemma4RMSNorm", "MixtralBlockSparseTop2MLP"}
REVIEWED |= {f"{name}TopKRouter" for name in ("Mixtral", "Qwen3Moe", "Qwen3Next", "Qwen3VLMoeText", "Qwen3_5Moe")}
REVIEWED |= {f"{name}RMSNormGated" for name in ("FalconH1", "Qwen3Next", "Qwen3_5", "Qwen3_5Moe")}
REVIEWED |= {f"{name}RMSNormGated" for name in ("Bamba", "GraniteMoeHybrid", "Mamba", "NemotronH", "Zamba2")}
REVIEWED |= {f"{name}TopKRouter" for name in ("Beam", "Ernie4_5_Moe", "Flint", "Olmoe", "Qwen2Moe")}
REVIEWED |= {f"{name}TopKRouter" for name in ("Inkling2", "Inkling2Loop", "Laguna", "LaraMini")} | {"AXK2TopkRouter"}
REVIEWED |= {f"{name}DecoderLayer" for name in ("Phi3", "Qwen3MoeText", "Qwen3Next", "Qwen3_5", "Qwen3_5Moe")}
REVIEWED |= {f"Lfm{name}{part}" for name in ("2", "2Moe", "3") for part in ("DecoderLayer", "ShortConv")}
REVIEWED |= {"DeepseekV2TopkRouter", "DeepseekV3TopkRouter", "BailingHybridForgetGate", "Glm5NextTextForgetGate"}
ANNOTATIONS = __future__.annotations.compiler_flag  # which are not evaluated: they name what is not there
BUILTINS = {"staticmethod", "classmethod", "property"}
_count = itertools.count()


def parts_of(text):
    """The classes and functions of a modeling file that may be parts, without what the file imports."""
    nodes = [node for node in ast.parse(text).body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    nodes = [node for node in nodes if isinstance(node, ast.FunctionDef) or CLASSES.search(node.name)]
    name = f"collected_{next(_count)}"
    module = types.ModuleType(name)
    vars(module).update(torch=torch, nn=nn, F=nn.functional, ACT2FN=ACT2FN, logger=logging.getLogger(name))
    vars(module).update(maybe_autocast=torch.autocast, GradientCheckpointingLayer=nn.Module)
    vars(module).update(is_torchdynamo_exporting=lambda: False)
    sys.modules[name] = module
    module.__file__ = f"<{name}>"
    lines = text.splitlines(True)
    for node in nodes:
        for inner in ast.walk(node):
            for decorator in getattr(inner, "decorator_list", ()):
                if getattr(decorator, "id", None) not in BUILTINS:
                    for line in range(decorator.lineno - 1, decorator.end_lineno):
                        lines[line] = "\n"
    linecache.cache[module.__file__] = (len(text), None, lines, module.__file__)
    tree = ast.parse("".join(lines))
    kept = {(node.name, node.lineno) for node in nodes}
    for node in tree.body:
        if (getattr(node, "name", None), getattr(node, "lineno", None)) not in kept:
            continue
        try:
            code = compile(
                ast.Module([node], []),
                module.__file__,
                "exec",
                flags=__future__.annotations.compiler_flag,
                dont_inherit=True,
            )
            exec(code, vars(module))
        except (NameError, AttributeError):  # a class of one that the file imports
            continue
    found = {node.name: getattr(module, node.name, None) for node in nodes}
    return {n: part for n, part in found.items() if part and (isinstance(part, type) or FUNCTIONS.match(n))}


def branches(cls):
    """Whether a forward may do different things, of which random input shows one."""
    tree = ast.parse(inspect.getsource(cls).lstrip())
    methods = [node for node in tree.body[0].body if isinstance(node, ast.FunctionDef)]
    bodies = [node for method in methods if method.name not in ("__init__", "extra_repr") for node in ast.walk(method)]
    return any(
        isinstance(node, (ast.If, ast.IfExp)) or isinstance(node, ast.Attribute) and "drop" in node.attr
        for node in bodies
    )


def made(cls, config=CONFIG):
    """A module of a class, with an eps that counts; None where its constructor wants something else."""
    given = {"config": config, "hidden_size": WIDTH, "dim": WIDTH, "layer_idx": 0, "intermediate_size": 48}
    given |= {"group_size": WIDTH // 2, "hidden_dim": 48, "hidden_act": "silu"}
    parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]
    needed = [p.name for p in parameters if p.default in (p.empty, None) and p.kind is p.POSITIONAL_OR_KEYWORD]
    optional = {p.name for p in parameters if p.default is None}
    try:
        module = cls(**{name: given[name] for name in needed if name in given or name not in optional})
    except (KeyError, AttributeError, TypeError, NameError):  # a config that has more, what the file imports
        return None
    for name in ("variance_epsilon", "eps"):
        if isinstance(getattr(module, name, None), float):
            setattr(module, name, 0.03)
    return module


def tables_part(cls):
    """The name of the part that tells how the tables are laid out that a class makes, or None.

    Its positions differ in every dimension that a forward may tell apart: three of a token of text, two of a patch.
    """
    module = cls.__new__(cls)
    nn.Module.__init__(module)
    frequencies = torch.rand(8)
    for name in ("inv_freq", "full_attention_inv_freq"):
        setattr(module, name, frequencies)
    vars(module).update(
        attention_scaling=1.25, full_attention_attention_scaling=1.25, mrope_section=[3, 3, 2], config=ROPE_CONFIG,
        alpha=torch.zeros(()), rope_type="default", rope_init_fn=lambda *_: (frequencies, 1.25),
    )  # fmt: skip
    more = ["full_attention"] if "layer_type" in inspect.signature(cls.forward).parameters else []
    found = set()
    for shape in ((2, 6), (3, 2, 6), (6, 2)):
        try:
            tables = cls.forward(module, torch.ones(2, 6, 8), torch.randint(1, 50, shape), *more)
            cos, sin = (t for t in tables)
        except (RuntimeError, TypeError, ValueError, IndexError, AttributeError, KeyError, NameError):
            continue
        if not all(isinstance(t, torch.Tensor) and t.is_floating_point() and t.shape[-1] % 2 == 0 for t in (cos, sin)):
            return None
        kinds = {
            "tables_of_halves": all(torch.equal(*t.chunk(2, -1)) for t in (cos, sin)),
            "tables_of_pairs": all(torch.equal(t[..., ::2], t[..., 1::2]) for t in (cos, sin)),
        }
        found.add(next((name for name, same in kinds.items() if same), None))
    return found.pop() if len(found) == 1 else None


def part_of(original, file):
    """The name of the part that computes what a class or a function does, or None."""
    if not isinstance(original, type):
        return None if file in UNEQUAL_HALVES else part_of_function(original)
    if TABLES.search(original.__name__):
        return tables_part(original) if issubclass(original, nn.Module) else None
    if original.__name__ not in REVIEWED and branches(original):
        return None
    if ROUTER.search(original.__name__):
        return _in_every_branch(ROUTERS, _same_router, of_branches(original, ROUTER_CONFIG, ROUTER_BRANCHES))
    if GATE.search(original.__name__):
        return _in_every_branch(GATES, same_gate, of_branches(original, GATE_CONFIG, GATE_BRANCHES))
    if CONVOLUTIONS.search(original.__name__):
        return "gated_convolution" if _same_convolution(original) else None
    if LAYERS.search(original.__name__):
        return next((name for name, steps in STEPS.items() if _same_layer(original, steps)), None)
    if (module := made(original)) is None:
        return None
    if original.__name__.endswith("Activation"):
        return next((name for name in ACTIVATION_PARTS if _same_activation(name, module.float())), None)
    if "ACT2FN" in inspect.getsource(original) and not any(hasattr(module, name) for name in ACTIVATION_NAMES):
        return None  # it is not seen which activation a module has
    for name in _kinds(original, module):
        target = Swap("", FORMULAS[name].targets).load()
        if numeric.computes(target, module, original.forward, rounded=name not in ROUNDS_LESS):
            return name
    return None


class Step(nn.Module):
    """A submodule of a decoder layer, which notes its arguments."""

    def __init__(self, name, log, more=0):
        super().__init__()
        self.name, self.log, self.more = name, log, more
        self.weight = drawn(WIDTH + len(log) + len(name))[-WIDTH:]

    def forward(self, *args, **kwargs):
        self.log.append((self.name, args, kwargs))
        x = args[0] if args else kwargs["hidden_states"]
        y = x * self.weight + self.weight.flip(0)
        return (y, *[object()] * self.more) if self.more else y


def _same_layer(cls, steps):
    """Whether a decoder layer calls its submodules with the same arguments, and in the same order, as a forward of
    these steps does, and returns the same, whatever its MLP returns."""
    names = [name for name in inspect.signature(cls.forward).parameters if name not in ("self", "hidden_states")]
    given = {name: object() for name in (*names, "more") if name != "kwargs"}
    kinds = ("full_attention", "linear_attention") if steps.linear else (None,)
    ran = set()
    for kind, more, training in itertools.product(kinds, (0, 1), (True, False)):
        results = []
        for forward in (cls.forward, adding(cls.forward, steps)):
            log, module = [], cls.__new__(cls)
            nn.Module.__init__(module)
            module.train(training)
            vars(module).update({"layer_type": kind, "block_type": kind} if kind else {})
            module.is_attention_layer = kind != "linear_attention"
            if steps.scale:
                setattr(module, steps.scale, 0.37)
            linear = kind == "linear_attention"
            mixer = steps.linear if linear else steps.mixer
            for name in (steps.norm, steps.after_mixer, steps.second_norm, steps.after_mlp):
                if name is not None:
                    setattr(module, name, Step(name, log))
            setattr(module, mixer, Step(mixer, log, 0 if linear else 1))
            setattr(module, steps.mlp, Step(steps.mlp, log, more))
            try:
                results.append((forward(module, drawn(3, 2, WIDTH), **given), log))
            except (AttributeError, TypeError, ValueError, NameError, KeyError):
                results.append(None)
        theirs, ours = results
        if theirs is None:  # its MLP must return another number of results
            continue
        if ours is None or not _is_same(theirs, ours):
            return False
        ran.add(kind)
    return len(ran) == len(kinds)


@torch.no_grad()
def _same_convolution(cls):
    """Whether the forward of gated short convolutions computes what that of a class does without a cache."""
    generator = torch.Generator().manual_seed(0)
    mask = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])
    try:
        ours = _convolving(cls.forward)
        for bias, given, dtype in itertools.product((True, False), (None, mask), (torch.float32, torch.bfloat16)):
            config = types.SimpleNamespace(hidden_size=WIDTH, conv_L_cache=3, conv_bias=bias, layer_types=["conv"])
            module, x = cls(config, 0).to(dtype), torch.randn(2, 5, WIDTH, generator=generator).to(dtype)
            a, b = (forward(module, x, None, given) for forward in (ours, cls.forward))
            tolerance = 2.0**-16 if dtype == torch.float32 else 2.0**-7
            if a.dtype != b.dtype or not numeric._close(a.float(), b.float(), tolerance):
                return False
    except (RuntimeError, TypeError, AttributeError, KeyError, NameError):
        return False
    return True


def _is_same(a, b):
    """Whether two nests of tensors, and of other objects, are the same."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(_is_same(a[key], b[key]) for key in a)
    if isinstance(a, (tuple, list)):
        return type(a) is type(b) and len(a) == len(b) and all(map(_is_same, a, b))
    return a is b or isinstance(a, str) and a == b


def of_branches(cls, config, branches):
    """A module of a class for each branch that its forward may take; None where its constructor wants more."""
    every = [dict(zip(branches, values)) for values in itertools.product(*branches.values())]
    return [made(cls, types.SimpleNamespace(**config, **branch)) for branch in every]


def _in_every_branch(names, same, modules):
    """The name of the part that computes what all modules do."""
    if None in modules:
        return None
    return next((n for n in names if all(same(Swap("", FORMULAS[n].targets).load(), m) for m in modules)), None)


@torch.no_grad()
def _same_router(target, module):
    generator = torch.Generator().manual_seed(0)
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.2)
    given = [p for p in inspect.signature(type(module).forward).parameters.values() if p.default is p.empty]
    extra = [torch.randn(8, generator=generator) * 0.2 for _ in given[2:]]
    for dtype in (torch.float32, torch.bfloat16):
        router, x = module.to(dtype), torch.randn(64, WIDTH, generator=generator).to(dtype)
        try:
            try:
                theirs = type(module).forward(router, x, *extra)
            except RuntimeError:  # its weight stays in float
                router = module.float()
                theirs = type(module).forward(router, x, *extra)
            ours = target.forward(router, x, *extra)
        except (RuntimeError, TypeError, ValueError, AttributeError, NameError):
            return False
        if len(theirs) != 3 or any(a.dtype != b.dtype or a.shape != b.shape for a, b in zip(ours, theirs)):
            return False
        # Of equal logits the original takes any.
        clear = (theirs[0].sort(-1).values.diff(dim=-1) > 0).all(-1)
        chosen = [index.sort(-1) for _, _, index in (ours, theirs)]
        weights = [w.gather(-1, order.indices)[clear].float() for (_, w, _), order in zip((ours, theirs), chosen)]
        same = clear.sum() > 10 and torch.equal(ours[0], theirs[0])
        if not same or not torch.equal(*(order.values[clear] for order in chosen)):
            return False
        if not torch.allclose(*weights, rtol=2.0**-18 if theirs[1].dtype == torch.float32 else 2.0**-8, atol=0):
            return False
    return True


def _same_activation(name, module):
    target, x = Swap("", FORMULAS[name].targets).load(), torch.randn(2, WIDTH)
    try:
        return same_results(lambda x: (target.forward(module, x),), lambda x: (module(x),), x)
    except AttributeError:  # a module without the parameters of the target
        return False


def _kinds(original, module):
    """The names of the parts that a class is tried against."""
    if original.__name__.endswith("LayerNorm"):
        return LAYER_NORMS
    if original.__name__.endswith("NormGated"):
        return GATED_NORMS
    if "Norm" in original.__name__:
        return NORMS if list(module.parameters()) else WEIGHTLESS_NORMS
    of_experts = (("gate_up_proj", EXPERTS), ("up_proj", UNGATED_EXPERTS))
    return next((kinds for name, kinds in of_experts if isinstance(getattr(module, name, None), nn.Parameter)), MLPS)


def wheels(arguments, folder):
    """The wheels that arguments name, by a path or by a version, which is downloaded."""
    for argument in arguments or [""]:
        if argument.endswith(".whl"):
            yield argument
            continue
        wanted = f"transformers=={argument}" if argument else "transformers"
        place = Path(folder) / (argument or "newest")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", place, wanted]
        subprocess.run(command, check=True)
        yield from map(str, place.glob("*.whl"))


def main():
    with tempfile.TemporaryDirectory() as folder:
        collect(list(wheels(sys.argv[1:], folder)))


def collect(paths):
    part_by_source, places, unknown, seen = {}, {}, {}, set()
    keeps = {row.module: row.keeps or "(?!)" for row in FAMILIES.values()}
    for path in paths:
        version = re.search(r"transformers-([\d.]+)-", path).group(1)
        with zipfile.ZipFile(path) as wheel:
            for member in sorted(wheel.namelist()):
                if not re.fullmatch(r"transformers/(models/\w+/modeling_\w+|activations)\.py", member):
                    continue
                home = member.removesuffix(".py").replace("/", ".")
                for name, original in parts_of(wheel.read(member).decode()).items():
                    key = fingerprint(original)
                    if key is None:
                        continue
                    if (tried := (key, name in REVIEWED)) not in seen and not part_by_source.get(key):
                        seen.add(tried)
                        part_by_source[key] = part_of(original, home.rpartition(".")[2])
                    if part_by_source[key]:
                        places.setdefault(key, {})[name, version] = None
                    elif home in keeps and not re.fullmatch(keeps[home], name) and swaps_of(original, name):
                        unknown.setdefault(f"{home.rpartition('.')[2]}.{name}", []).append(version)
    before = {key: (part, where) for part, keys in json.loads(TABLE.read_text()).items() for key, where in keys.items()}
    after = dict(before)
    for key, found in places.items():
        after[key] = part_by_source[key], _where(found, before.get(key, ("", ""))[1])
    for key in set(before) & set(part_by_source):
        if not part_by_source[key]:
            del after[key]  # a source that no part computes any more
    table = {part: {} for part in FORMULAS}
    for key, (part, where) in sorted(after.items()):
        table[part][key] = where
    TABLE.write_text(json.dumps(table, indent=1) + "\n")
    for key in sorted(set(before) | set(after)):
        (old, old_where), (new, where) = (entries.get(key, ("", "")) for entries in (before, after))
        if old != new:
            print(f"{key}: {old or 'new'} -> {new or 'nothing stands for it'} ({where or old_where})")
    wider = sum(
        key in before and before[key][0] == part and before[key][1] != where for key, (part, where) in after.items()
    )
    print(f"{wider} known sources are in more versions, or classes, than before")
    for name, versions in unknown.items():
        print(f"nothing stands for {name} of {', '.join(versions)}")
    print(f"{len(after)} sources in {TABLE}")


def _where(places, before):
    """For a reader: a class, how many others have the same source, and in which versions. Names are those of the oldest
    collection."""
    names = list(dict.fromkeys(name for name, _ in places))
    versions = {version for _, version in places}
    oldest = min(versions, key=_numbers)
    known, _, of = before.rpartition(", ")
    versions |= set(of.split(" to ")) - {""}
    first, last = (pick(versions, key=_numbers) for pick in (min, max))
    others = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{known if known and first != oldest else names[0] + others}, {first} to {last}"


def _numbers(version):
    return [int(n) for n in version.split(".")]


if __name__ == "__main__":
    main()
