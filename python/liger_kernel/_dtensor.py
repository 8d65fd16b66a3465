"""How the operators run on DTensors: each rank on its own shard, with no communication where the formula allows it.

Rows may be sharded along any dimension but the last one. What is the same for all rows (a norm's weight, the head's) is
whole on every rank, and the gradient of it is a partial sum. What is placed in another way is redistributed first, as
by DTensor's own operators. Operators that are not in the table raise DTensor's error, which names them.
"""

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

NONE, MEAN, SUM = 0, 1, 2  # the reductions of a loss

#: operator -> (letters of its tensor arguments, of its results). A rank holds of
#:   x  rows [..., columns]: its own; n  samples [N, ...], of which only the first dimension is sharded: its own
#:   e  elements, or rows of them that are the results' last dimension: its own
#:   t  one value or k values per row; g  one value per row or one in all: its own
#:   r  what is kept of rows for backward, in a layout of its own: its own
#:   b  one row per sample [N, columns], or one for all: its own where the samples are sharded, else everything
#:   c  cosines and sines [1 or batch, positions, ...] of rows [batch, ..., positions, columns]: its own where it has
#:      its own positions or batch
#:   w  what all rows share: everything
#:   s  a loss: its own rows' values, or its part of their sum
#: A digit, or a letter from A for 10 on, is what has the shape of the argument at that position, its gradient: its own,
#: or its part of the sum over rows.
RULES = {
    "rms_norm_forward": ("xw", "xr"),
    "rms_norm_backward": ("xxwr", "12"),
    "fused_add_rms_norm_forward": ("xxw", "xxr"),
    "fused_add_rms_norm_backward": ("xxxwr", "23"),
    "modulated_rms_norm_forward": ("xwbb", "xr"),
    "modulated_rms_norm_backward": ("xxwbbr", "1234"),
    "gated_rms_norm_forward": ("xxw", "xr"),
    "gated_rms_norm_backward": ("xxxwr", "123"),
    "layer_norm_forward": ("xww", "xrr"),
    "layer_norm_backward": ("xxwwrr", "123"),
    "causal_conv1d_forward": ("nwwn", "n"),
    "causal_conv1d_backward": ("nnwwn", "123"),
    "delta_gates_forward": ("nwwn", "nn"),
    "delta_gates_backward": ("nnnwwn", "2345"),
    "channel_gates_forward": ("nww", "n"),
    "channel_gates_backward": ("nnww", "123"),
    "gated_delta_rule_forward": ("nnnnnnwn", "nn"),
    "gated_delta_rule_backward": ("nnnnnnnnwn", "2345678"),
    "activate_forward": ("e", "e"),
    "activate_backward": ("ee", "1"),
    "xielu_forward": ("ewwww", "e"),
    "xielu_backward": ("eewwww", "123"),
    "route_forward": ("xwt", "ttp"),
    "route_backward": ("txt", "1"),
    "expert_load_forward": ("xt", "pp"),
    "expert_load_backward": ("wxt", "1"),
    "gated_forward": ("ee", "e"),
    "gated_backward": ("eee", "12"),
    "gated_packed_forward": ("x", "x"),
    "gated_packed_backward": ("xx", "1"),
    "softmax_forward": ("x", "x"),
    "softmax_backward": ("xx", "1"),
    "rope_forward": ("xxcc", "01"),
    "rope_packed_forward": ("xcc", "x"),
    "qk_norm_rope_forward": ("xxwwcc", "01rr"),
    "qk_norm_rope_backward": ("xxxxwwccrr", "2345"),
    "embedding_forward": ("we", "e"),
    "embedding_backward": ("xt", "p"),
    **dict.fromkeys(("activated_linear_forward", "gated_linear_forward"), ("xwwwww", "xrr")),
    **dict.fromkeys(("activated_linear_backward", "gated_linear_backward"), ("xxwwwwwrr", "12345")),
    "gated_mlp_forward": ("xwwwwwwwwwwww", "xrrrrrr"),
    "gated_mlp_backward": ("xxwwwwwwwwwwwwrrrrrr", "123456789ABCD"),
    "fused_experts_forward": ("xwwtwwwwwwwwt", "xrtrr"),
    "fused_experts_backward": ("xxwwtwwwwwwwwrtrr", "123456789w"),
    "selective_log_softmax_forward": ("xt", "ttr"),
    "selective_log_softmax_backward": ("ttxtr", "2"),
    "cross_entropy_forward": ("xtw", "sstxxw"),
    "divergence_forward": ("xxt", "sxw"),
    "divergence_backward": ("xxxt", "1"),
    "scale_backward": ("xg", "x"),
    "class_logits_forward": ("xwwt", "t"),
    "class_logits_backward": ("txwwt", "123"),
    "linear_log_prob_forward": ("xwwtxwt", "tttttttttttrrr"),
    "linear_log_prob_backward": ("ttttttxwwtxwtwrrr", "678AB"),
    "fused_linear_cross_entropy_forward": ("xwwtww", "sstxxppw"),
    "fused_linear_cross_entropy_backward": ("txwwtww", "123"),
}


def _placement(letter, row, tensor, rows):
    """Where a tensor lies on the ranks of a dimension of the mesh that shards `rows` along the dimension `row`, or not
    at all."""
    if row is None or letter in "wp":
        return Replicate()
    if letter == "b" and row > 0:
        row = -1
    elif letter == "c":
        row = tensor.ndim - 2 if row == rows.ndim - 2 else tensor.ndim - 3 if row == 0 else -1
    return Shard(row) if 0 <= row < tensor.ndim and (letter not in "bcg" or tensor.shape[row] > 1) else Replicate()


class _Rule:
    def __init__(self, name, schema, letters, results):
        self.name, self.schema, self.results = name, schema, results
        tensors = [i for i, argument in enumerate(schema.arguments) if "Tensor" in str(argument.type)]
        self.letters = dict(zip(tensors, letters, strict=True))
        self.argument_of = {digit: tensors[int(digit, 16)] for digit in results if digit in "0123456789ABCD"}

    def __call__(self, cls, op, types, args, kwargs):
        given = {i: letter for i, letter in self.letters.items() if i < len(args) and args[i] is not None}
        for i in given:
            if not isinstance(args[i], DTensor) and args[i].ndim > 0:
                raise TypeError(
                    f"{self.name}: {self.schema.arguments[i].name} is a plain tensor beside DTensors; "
                    "torch.distributed.tensor.distribute_tensor makes it one"
                )
        # Backward finds the layout that forward had: both go by the last rows, which forward saves.
        rows = args[max(i for i, letter in given.items() if letter in "xne")]
        mesh, adds_up = rows.device_mesh, self._adds_up(args)
        layout = [None] * mesh.ndim if adds_up is False else self._layout(rows, args)
        for i, letter in given.items():
            if letter == "b" and args[i].shape[0] > 1:
                layout = [row if row == 0 and args[i].shape[0] == rows.shape[0] else None for row in layout]
        placed = {i: [_placement(letter, row, args[i], rows) for row in layout] for i, letter in given.items()}
        if self.name == "scale_backward":  # a weight's gradient may be a partial sum, which a number multiplies
            placed[0] = [own if own.is_partial() else new for own, new in zip(rows.placements, placed[0])]
        local = list(args)
        for i, letter in given.items():
            if isinstance(args[i], DTensor):
                # Below autograd: torch 2.11 cannot redistribute there what requires a gradient.
                detached = args[i].detach()
                local[i] = (detached if letter == "r" else detached.redistribute(mesh, placed[i])).to_local()
        found = op(*local, **kwargs)
        several = isinstance(found, (tuple, list))

        def wrapped(letter, tensor):
            argument = self.argument_of.get(letter)
            if argument in placed:
                shape, own = args[argument].shape, placed[argument]
                placements = [Partial() if row is not None and not p.is_shard() else p for row, p in zip(layout, own)]
            else:
                shape = rows.shape
                partial = letter == "p" or (letter == "s" and adds_up)
                placements = [
                    Partial() if partial and row is not None else _placement(letter, row, tensor, tensor)
                    for row in layout
                ]
                if self.name == "scale_backward":
                    placements = placed[0]
            if letter == "r" or argument is not None and argument not in placed:
                placements = [Replicate()] * mesh.ndim
            whole = list(tensor.shape)
            for p in placements:
                if p.is_shard():
                    whole[p.dim] = shape[p.dim]
            stride = torch.empty(whole, device="meta").stride()
            return DTensor.from_local(tensor, mesh, placements, run_check=False, shape=torch.Size(whole), stride=stride)

        results = [
            wrapped(letter, tensor) for letter, tensor in zip(self.results, found if several else (found,), strict=True)
        ]
        return tuple(results) if several else results[0]

    def _layout(self, rows, args):
        """For each dimension of the mesh, the dimension of the rows that it shards, or None."""
        letter = next(self.letters[i] for i in self.letters if i < len(args) and args[i] is rows)
        dims = {"n": 1, "x": rows.ndim - 1, "e": rows.ndim}[letter]
        return [p.dim if type(p) is Shard and p.dim < dims else None for p in rows.placements]

    def _adds_up(self, args):
        """Whether a loss of all rows is the sum of the ranks' losses; None where there is none of all rows."""
        if "s" not in self.results:
            return None
        given = {argument.name: value for argument, value in zip(self.schema.arguments, args)}
        reduction = given.get("reduction", MEAN)
        if reduction == NONE:
            return None
        wants_mean = given.get("accuracy", False)  # which is a mean whatever the reduction
        return (reduction == SUM or given.get("normalizer") is not None) and not wants_mean


def register(ops, rules=RULES):
    """Teach DTensor the operators of rules, and what runs a forward pass alone where no gradient is wanted."""
    for name, (letters, results) in rules.items():
        for op in {name, name.removesuffix("_forward")}:
            schema = getattr(ops, op).default._schema
            tensors = sum("Tensor" in str(argument.type) for argument in schema.arguments)
            rule = _Rule(op, schema, letters.ljust(tensors, "w"), results[: len(schema.returns)])
            torch.library.register_torch_dispatch(f"liger::{op}", DTensor, rule)
