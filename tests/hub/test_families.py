"""Every class of every row of the table of families, with use_kernels=True, against the untouched model. `make test-hub`."""

import copy
import pathlib
import sys

import pytest
import torch

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "huggingface"))

import conftest  # noqa: E402
