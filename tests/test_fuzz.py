"""Fixed seeds of tests/fuzz.py."""

import fuzz
import pytest
from conftest import EMULATED

TRIALS, TOGETHER = (300, 10) if EMULATED else (1500, 50)
QUICK = TRIALS // 5  # of every run


@pytest.mark.parametrize("first", range(0, TRIALS, TOGETHER))
@pytest.mark.full(when=lambda p: p["first"] >= QUICK)
def test_trials(first, device):
    for seed in range(first, first + TOGETHER):
        fuzz.trial(seed, device, 1000 if EMULATED else 8000)
