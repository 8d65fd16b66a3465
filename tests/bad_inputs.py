"""Hands every operator each of its arguments wrong, and prints what it says; tests/test_bad_inputs.py runs this in a
process of its own.

Each valid call is one that the cases of tests/cases make, forward and backward. Of each of its tensors the device, the
dtype, a size and the number of dimensions are changed, one at a time; each must be refused by an exception whose text
names the operator and the argument.
"""

import re
import sys

import torch
from cases import all_cases, as_tuple
from torch.utils._python_dispatch import TorchDispatchMode

#: (operator without _forward or _backward, argument): sizes that need not agree with another tensor's.
#: Rows may come in any number of dimensions.
ROWS = {
    ("embedding", "ids"),
    ("scale", "saved"),
    *((name, "x") for name in ("rms_norm", "layer_norm", "dyt", "poly_norm", "modulated_rms_norm", "xielu")),
    ("attention_residuals", "blocks"),
    ("mhc_coefficients", "x"),
    *((name, "x") for name in ("linear", "qkv", "activated_linear", "gated_linear", "gated_mlp")),
    ("route", "logits"),
    ("expert_load", "logits"),
    ("delta_gates", "a"),
    ("channel_gates", "a"),
}
FREE = {
    "one column more": {
        ("embedding", "weight"),
        ("embedding", "ids"),
        ("embedding", "dy"),
        ("cross_entropy", "x"),
        ("selective_log_softmax", "x"),
        ("class_logits", "class_ids"),
        ("linear_log_prob", "class_ids"),
        ("poly_norm", "x"),
        ("xielu", "x"),
        ("mhc_pre", "x"),
        ("group_norm", "x"),
        ("int2_matmul", "b"),
        ("scale", "saved"),
        ("fused_linear_cross_entropy", "weight"),
        ("route", "logits"),
        ("expert_load", "logits"),
        ("causal_conv1d", "x"),
        ("causal_conv1d", "weight"),
        ("gated_delta_rule", "v"),
        ("channel_gates", "A_log"),
    },
    "of another dtype": {("route", "bias")},
    "a dimension more": ROWS,
    "a dimension less": {*ROWS, ("modulated_rms_norm", "scale")},
}
#: Arguments that are converted from any floating dtype.
CONVERTED = {"class_weight", "normalizer", "g", "dlogp", "dentropy", "soft", "hard", "dlse", "dmean_logit", "weights"}
CONVERTED |= {"dweights", "dload", "dclass_logp", "dlog_tail"}


class Recorder(TorchDispatchMode):
    """Keeps the first call of each operator of this library for each set of arguments that are given."""

    def __init__(self):
        super().__init__()
        self.calls = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "liger":
            given = tuple(isinstance(a, torch.Tensor) for a in args)
            copies = [a.detach().clone() if isinstance(a, torch.Tensor) else a for a in args]
            self.calls.setdefault((func, given), copies)
        return func(*args, **(kwargs or {}))


def valid_calls(device):
    calls = {}
    for case in all_cases().values():
        for options in case.options:
            for trained in (True, False):
                inputs = case.inputs(case.shapes[1], options, case.dtypes[0], device)
                if not trained:
                    inputs = [t if t is None else t.detach() for t in inputs]
                with Recorder() as recorder:
                    out = as_tuple(case.op(*inputs, **options))
                    if trained and case.differentiable:
                        for retain_graph in (True, False):
                            differentiable = [o for o in out if o.requires_grad]
                            torch.autograd.backward(
                                differentiable, [torch.ones_like(o) for o in differentiable], retain_graph=retain_graph
                            )
                calls = {**recorder.calls, **calls}
    return calls


def changes(t):
    yield "on another device", t.to("meta" if t.device.type == "cpu" else "cpu")
    yield (
        "of another dtype",
        t.double() if t.is_floating_point() else t.to(torch.float16) if t.dim() else t.to(torch.complex64),
    )
    yield "complex", t.to(torch.complex64)
    if t.dim() and t.numel():
        yield "one column more", torch.cat((t, t[..., :1]), -1)
        yield "a dimension more", t[None].expand(3, *t.shape).contiguous()
        yield "a dimension less", t[0].clone() if t.dim() > 1 else t[:0].clone()


def valid(name, argument, change, tensors):
    """Whether the changed call is a valid one."""
    if tensors == 1 and change not in ("of another dtype", "complex"):
        return True
    return (name, argument) in FREE.get(change, ()) or change == "of another dtype" and argument in CONVERTED


def main(device):
    for (op, given), args in valid_calls(device).items():
        full = op._schema.name.split("::")[1]
        name = full.removesuffix("_").removesuffix("_forward").removesuffix("_backward")
        tensors = [argument.name for argument, is_tensor in zip(op._schema.arguments, given) if is_tensor]
        for i, argument in enumerate(op._schema.arguments[: len(args)]):
            if not given[i]:
                continue
            for change, wrong in changes(args[i]):
                print(
                    f"{full}({', '.join(tensors)}): {argument.name} {change}: ", end="", flush=True
                )  # before the call, which may crash
                try:
                    op(*(wrong if j == i else a.clone() if given[j] else a for j, a in enumerate(args)))
                    said = "valid" if valid(name, argument.name, change, len(tensors)) else "ACCEPTED"
                except (RuntimeError, TypeError, ValueError, IndexError) as error:
                    text = str(error).splitlines()[0]
                    said = (
                        "refused: " if name in text and re.search(rf"\b({'|'.join(tensors)})\b", text) else "UNNAMED: "
                    ) + text
                print(said, flush=True)
    print("done", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
