"""Every class of routers of the installed transformers: how its choice is replayed, and the table of docs/routing.md.

    python tests/huggingface/router_classes.py [--write]

prints the table; with --write it writes it into the page.
"""

import argparse
import collections
import functools
import importlib
import inspect
import pathlib
import re
import types
import warnings

import torch
import transformers
from collect_sources import ROUTER_CONFIG, made
from collect_sources import WIDTH as WIDTH
from liger_kernel._routing import routers
from liger_kernel.transformers.patching.formulas import find
from torch import nn

MODELS = pathlib.Path(transformers.__file__).parent / "models"
PAGE = pathlib.Path(__file__).parents[2] / "docs" / "routing.md"
BEGIN, END = "<!-- made by tests/huggingface/router_classes.py -->", "<!-- end -->"
EXPERTS, TOP_K = 8, 3
CONFIG = dict(
    ROUTER_CONFIG,
    norm_topk_prob=True,
    topk_method="group_limited_greedy",
    top_k_experts=TOP_K,
    moe_top_k=TOP_K,
    moe_router_enable_expert_bias=True,
    scoring_func="sqrtsoftplus",
    n_shared_experts=2,
    route_scale=1.3,
    zero_expert_num=2,
    use_expert_bias=True,
    router_hidden_size=16,
    router_jitter_noise=0.1,
    input_jitter_noise=0.0,
    moe_router_logit_softcapping=5.0,
    vocab_size=40,
    rms_norm_eps=1e-5,
    hidden_act="silu",
    moe_normalize_expert_weights=1,
    moe_router_activation_func="sigmoid",
    use_routing_bias=True,
    moe_use_sigmoid=True,
    router_scaling=1.3,
    moe_router_scaling_factor=1.3,
    router_logit_softcapping=5.0,
    use_moe_router_bias=True,
    expert_selection_fn="softmax",
    moe_jitter_eps=None,
    output_multiplier=1.0,
)


@functools.cache
def names() -> dict[tuple[str, str], str]:
    """(family, class) -> its file, of every class that is a router or chooses experts itself."""
    found = {}
    for path in sorted(MODELS.glob("*/modeling_*.py")):
        for source in path.read_text().split("\nclass ")[1:]:
            name = re.match(r"\w+", source)[0]
            other = re.fullmatch(routers.BY_TOKEN, name) or why_not(name)
            chooses = ".topk(" in source and re.search(r"self\.top_k\b|top_k_experts", source)
            if "def forward" in source and (other and name.endswith(("Router", "MoE")) or chooses):
                found[path.parent.name, name] = f"transformers.models.{path.parent.name}.{path.stem}"
    return found


def class_of(family: str, name: str) -> type:
    return getattr(importlib.import_module(names()[family, name]), name)


class Alone(nn.Module):
    """A router where a model has it."""

    def __init__(self, router: nn.Module):
        super().__init__()
        self.layers = nn.ModuleList([nn.ModuleDict({"mlp": router})])

    @property
    def router(self):
        return self.layers[0]["mlp"]

    def forward(self, x: torch.Tensor):
        """What the router returns that is a floating tensor; x is [batch, seq, width]."""
        needed = list(inspect.signature(self.router.forward).parameters)[1:]
        extra = [torch.linspace(-0.3, 0.3, EXPERTS, dtype=x.dtype)] if needed and "bias" in needed[0] else []
        try:
            results = self.router(x.flatten(0, 1), *extra)
        except (ValueError, IndexError):  # one that takes sequences
            results = self.router(x, *extra)
        results = results if isinstance(results, tuple) else (results,)
        return [r for r in results if isinstance(r, torch.Tensor) and r.is_floating_point()]


def alone(cls: type) -> Alone | None:
    """A model of one router with random weights, or None where its constructor wants something else."""
    config = types.SimpleNamespace(**CONFIG)
    config.ffn_config = types.SimpleNamespace(**CONFIG, ffn_hidden_size=16, ffn_act_fn={"name": "silu"})
    torch.manual_seed(0)
    router = made(cls, config)
    if router is None:
        return None
    for tensor in (*router.parameters(), *router.buffers()):
        if tensor.is_floating_point():
            tensor.data.copy_(torch.randn_like(tensor) * 0.3)
    return Alone(router)


def way(cls: type) -> str:
    """How the choice of a class of routers is replayed, unpatched."""
    if re.fullmatch(routers.BY_TOKEN, cls.__name__):
        return "chooses by token ids: left as it is"
    why = why_not(cls.__name__)
    return f"refused: {why}" if why else "top k"


def why_not(name: str) -> str | None:
    return next((why for pattern, why in routers.UNSERVED if re.fullmatch(pattern, name)), None)


def table() -> str:
    """A row for each class: what replays it in a model that is not patched, and in one that is."""
    rows = collections.defaultdict(list)
    for family, name in names():
        cls = class_of(family, name)
        plain, formula = way(cls), find(cls)
        patched = f"operator (`{formula.targets[0].rpartition('.')[2]}`)" if formula and plain == "top k" else plain
        rows[family].append(f"| {family} | `{name}` | {plain} | {patched} |")
    head = ["| family | router | not patched | patched |", "|---|---|---|---|"]
    return "\n".join([*head, *(row for family in sorted(rows) for row in rows[family])])


def documented() -> tuple[str, str]:
    """The version of transformers of the table in the page, and the table."""
    text = PAGE.read_text().split(BEGIN)[1].split(END)[0]
    return re.search(r"transformers ([\d.]+)", text)[1], text[text.index("| family") :].strip()


def main():
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    rows = table()
    if parser.parse_args().write:
        (before, rest), count = PAGE.read_text().split(BEGIN), rows.count("\n") - 1
        head = f"transformers {transformers.__version__}, {count} classes:"
        PAGE.write_text("\n".join([before + BEGIN, "", head, "", rows, "", END + rest.split(END)[1]]))
    print(rows)


if __name__ == "__main__":
    main()
