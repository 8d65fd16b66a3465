"""The examples of docs/losses.md run, one after another in one namespace, and their losses move the weight."""

import pathlib
import re

import torch

PAGE = pathlib.Path(__file__).resolve().parent.parent / "docs" / "losses.md"


def test_losses():
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    assert len(blocks) >= 7
    names = {}
    for i, block in enumerate(blocks):
        exec(block, names)
        if i == 0:
            continue
        weight, hidden = names["weight"], names["hidden"]
        assert names["loss"].isfinite() and names["loss"] != 0, block
        assert weight.grad.isfinite().all() and weight.grad.any() and hidden.grad.any(), block
        weight.grad = hidden.grad = None
    assert torch.is_tensor(names["kl"]) and names["kl"] > 0
