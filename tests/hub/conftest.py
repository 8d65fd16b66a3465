"""The helpers of this folder, of tests/huggingface and of examples, under every import mode of pytest."""

import pathlib
import sys

import torch

HERE = pathlib.Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "huggingface"), str(HERE), str(HERE.parents[1] / "examples")]
# The models are so small that threads cost more than they give.
torch.set_num_threads(1)
