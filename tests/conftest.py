import os
import sys

import pytest
import torch

sys.path.insert(0, os.path.dirname(__file__))

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
