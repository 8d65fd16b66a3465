"""The schemas of all operators, as tests/schemas.txt records them: Python, torch.compile and exported programs rely on
them. `python tests/test_schemas.py` records them anew."""

import pathlib

import pytest
import torch
from liger_kernel import _dtensor
from liger_kernel._flags import CrossEntropyFlags
from liger_kernel._library import ops

RECORD = pathlib.Path(__file__).with_name("schemas.txt")


def schemas():
    names = sorted(name for name in torch._C._dispatch_get_all_op_names() if name.startswith("liger::"))
    return [str(schema) for name in names for schema in torch._C._jit_get_schemas_for_operator(name)]


def test_schemas_are_those_recorded():
    assert schemas() == RECORD.read_text().splitlines()


def test_flags_of_cross_entropy_are_in_the_librarys_order():
    """Each flag, where Python puts it, does what its name says, in the library and in the rules for DTensors."""
    x, target = torch.tensor([[0.0, 1.0], [0.0, 3.0]]), torch.tensor([0, 1])
    plain = CrossEntropyFlags(
        ignore_index=-100, reduction=0, token_scaling=False, z_loss=False, accuracy=False, predicted=False
    )
    scales = [0.0, 1.0, 0.0]  # a z-loss, for its flag to ask for

    def run(**flags):
        loss, z_loss, accuracy, predicted = ops.cross_entropy(x, target, None, [*plain._replace(**flags)], scales)
        return loss, dict(z_loss=z_loss, accuracy=accuracy, predicted=predicted)

    loss, others = run()
    assert loss.shape == (2,) and not any(t.numel() for t in others.values())
    for name in others:
        same, others = run(**{name: True})
        assert torch.equal(same, loss) and [key for key, t in others.items() if t.numel()] == [name]
    torch.testing.assert_close(run(token_scaling=True)[0], loss * torch.softmax(x, -1)[[0, 1], target])
    torch.testing.assert_close(run(reduction=1)[0], loss.mean())
    torch.testing.assert_close(run(reduction=2)[0], loss.sum())
    assert run(ignore_index=1)[0].tolist() == [loss[0].item(), 0]
    with pytest.raises(ValueError, match="expected 6 flags"):
        ops.cross_entropy(x, target, None, [*plain, True], scales)

    schema = ops.cross_entropy_forward.default._schema
    rule = _dtensor._Rule("cross_entropy_forward", schema, "xtw", "sstxxw")
    adds_up = lambda **flags: rule._adds_up([x, target, None, [*plain._replace(**flags)]])
    assert adds_up() is None and not adds_up(reduction=1) and adds_up(reduction=2)
    assert not adds_up(reduction=2, accuracy=True) and adds_up(reduction=2, z_loss=True, predicted=True)


if __name__ == "__main__":
    RECORD.write_text("\n".join(schemas()) + "\n")
