"""The schemas of all operators, as tests/schemas.txt records them: Python, torch.compile and exported programs rely on
them. `python tests/test_schemas.py` records them anew."""

import pathlib

import liger_kernel.ops  # noqa: F401 (loads the library)
import torch

RECORD = pathlib.Path(__file__).with_name("schemas.txt")


def schemas():
    names = sorted(name for name in torch._C._dispatch_get_all_op_names() if name.startswith("liger::"))
    return [str(schema) for name in names for schema in torch._C._jit_get_schemas_for_operator(name)]


def test_schemas_are_those_recorded():
    assert schemas() == RECORD.read_text().splitlines()


if __name__ == "__main__":
    RECORD.write_text("\n".join(schemas()) + "\n")
