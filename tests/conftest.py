import os
import sys

import pytest
import torch

sys.path.insert(0, os.path.dirname(__file__))
from tiers import left_out  # noqa: E402

#: The CUDA kernels on CPU threads: slow, so that only small shapes and the kernels' own promises are run.
EMULATED = "emulated" in os.environ.get("LIGER_LIBRARY", "")


def devices():
    return ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])


@pytest.fixture(params=devices())
def device(request):
    return request.param


@pytest.fixture(autouse=True)
def same_numbers():
    """Every run draws the same: a bound holds or it does not."""
    torch.manual_seed(0)


def pytest_addoption(parser):
    parser.addoption("--cases", help="files of tests/cases, with commas between: the tests of other cases are left out")


def of_another_case(item, names):
    case = getattr(item, "callspec", None) and item.callspec.params.get("case")
    return hasattr(case, "file") and names and case.file not in names.split(",")


def pytest_configure(config):
    config.addinivalue_line("markers", "full(when=None): only in `make test-all` (tests/tiers.py)")


def pytest_collection_modifyitems(config, items):
    kept, dropped = [], []
    for item in items:
        other = of_another_case(item, config.getoption("--cases"))
        (dropped if other or left_out(item) else kept).append(item)
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = kept
