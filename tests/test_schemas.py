"""The schemas of all operators, as tests/schemas.txt records them: Python, torch.compile and exported programs rely on
them. `python tests/test_schemas.py` records them anew."""

import pathlib

import torch
import torch.nn.functional as F
from liger_kernel import _dtensor
from liger_kernel._library import ops
from liger_kernel.operators.loss import loss_options

RECORD = pathlib.Path(__file__).with_name("schemas.txt")


def schemas():
    names = sorted(name for name in torch._C._dispatch_get_all_op_names() if name.startswith("liger::"))
    return [str(schema) for name in names for schema in torch._C._jit_get_schemas_for_operator(name)]


def test_schemas_are_those_recorded():
    assert schemas() == RECORD.read_text().splitlines()


def test_options_of_cross_entropy_are_in_the_librarys_order():
    """Each option, where Python puts it, does what its name says, in the library and in the rules for DTensors."""
    x, target = torch.tensor([[0.0, 1.0], [0.0, 3.0]]), torch.tensor([0, 1])
    usual = dict(ignore_index=-100, lse_square_scale=1.0, label_smoothing=0.0, reduction="none", softcap=None)
    usual |= dict.fromkeys(("return_z_loss", "return_token_accuracy", "return_predicted_tokens"), False)
    options = lambda **given: loss_options(**{**usual, **given})

    def run(**given):
        loss, *others = ops.cross_entropy(x, target, None, *options(**given))
        return loss, dict(zip(list(usual)[-3:], others))

    loss, others = run()
    assert loss.shape == (2,) and not any(t.numel() for t in others.values())
    for name in others:
        same, others = run(**{name: True})
        assert torch.equal(same, loss) and [key for key, t in others.items() if t.numel()] == [name]
    torch.testing.assert_close(run(use_token_scaling=True)[0], loss * torch.softmax(x, -1)[[0, 1], target])
    torch.testing.assert_close(run(reduction="mean")[0], loss.mean())
    torch.testing.assert_close(run(reduction="sum")[0], loss.sum())
    assert run(ignore_index=1)[0].tolist() == [loss[0].item(), 0]
    z = torch.logsumexp(x, -1)
    torch.testing.assert_close(run(lse_square_scale=0.0)[0], loss - z.square())
    smooth = F.cross_entropy(x, target, reduction="none", label_smoothing=0.2)
    torch.testing.assert_close(run(label_smoothing=0.2, lse_square_scale=0.0)[0], smooth)
    capped = F.cross_entropy(2 * torch.tanh(x / 2), target, reduction="none")
    torch.testing.assert_close(run(softcap=2.0, lse_square_scale=0.0)[0], capped)

    schema = ops.cross_entropy_forward.default._schema
    rule = _dtensor._Rule("cross_entropy_forward", schema, "xtw", "sstxxw")
    adds_up = lambda **given: rule._adds_up([x, target, None, True, *options(**given)])
    assert adds_up() is None and not adds_up(reduction="mean") and adds_up(reduction="sum")
    assert not adds_up(reduction="sum", return_token_accuracy=True)
    assert adds_up(reduction="sum", return_z_loss=True, return_predicted_tokens=True)
    assert not rule._adds_up([x, target, None, True])  # the defaults, which the dispatcher leaves out


if __name__ == "__main__":
    RECORD.write_text("\n".join(schemas()) + "\n")
