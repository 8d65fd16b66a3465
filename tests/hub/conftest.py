"""The folder's helpers, under every import mode of pytest."""

import pathlib
import sys

import torch

sys.path.insert(0, str(pathlib.Path(__file__).parent))
# The models are so small that threads cost more than they give.
torch.set_num_threads(1)
