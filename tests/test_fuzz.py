"""Fixed seeds of tests/fuzz.py."""

import fuzz
import pytest
from conftest import EMULATED

TRIALS, TOGETHER = (300, 10) if EMULATED else (1500, 50)


@pytest.mark.parametrize("first", range(0, TRIALS, TOGETHER))
def test_trials(first, device):
    for seed in range(first, first + TOGETHER):
        fuzz.trial(seed, device, 1000 if EMULATED else 8000)
