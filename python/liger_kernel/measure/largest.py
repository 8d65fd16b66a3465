"""The longest sequence and the largest batch that fit on a GPU.

Steps of two sizes are measured with every layer checkpointed. Peak memory grows by a constant amount per token, which
gives the size that fills the memory; a step of that size, or of one a little smaller, then shows that it fits.
"""

import time

import torch

from liger_kernel.measure.meters import is_out_of_memory

SHARE = 0.96  # of the memory that is aimed at: blocks of the allocator leave gaps
LESS = 0.94  # of a size that did not fit is tried next
TRIES = 4
SECONDS = 60  # a step that is said to take longer is not run


def line_through(a: tuple[float, float], b: tuple[float, float]) -> tuple[float, float]:
    """(value at 0, slope) of the line through two points."""
    slope = (b[1] - a[1]) / (b[0] - a[0])
    return a[1] - slope * a[0], slope


def fitting_tokens(a: tuple[int, int], b: tuple[int, int], room: float) -> int:
    """How many tokens a step takes that fills `room` bytes, by two (tokens, peak bytes); 0 where none do."""
    fixed, each = line_through(a, b)
    return max(0, int((room - fixed) / each)) if each > 0 else 0


def seconds_of(tokens: int, a: tuple[int, float], b: tuple[int, float]) -> float:
    """The seconds of a step with one sequence of so many tokens, by two (tokens, seconds): attention's grow with their
    square, all others with their number."""
    each, square = line_through((a[0], a[1] / a[0]), (b[0], b[1] / b[0]))
    return tokens * (max(0.0, each) + max(0.0, square) * tokens)


def search(arm, length: int, batch: int) -> dict:
    """{"length": ..., "batch": ...} of an arm (arm.Arm): of one sequence, and of sequences of `length`. Each is what
    `find` returns."""
    free = torch.cuda.mem_get_info(arm.device)[0] + torch.cuda.memory_reserved(arm.device)
    room = SHARE * min(free, (arm.job["cap_gb"] or float("inf")) * 1e9)
    step = lambda rows, tokens: _peak(arm, rows, tokens)
    small = max(1024, length // 2 // 64 * 64)
    return {
        "length": find(lambda n: step(1, n), small, 2 * small, room, 64),
        "batch": find(lambda n: step(n, length), 1, 2, room, 1, length),
    }


def _peak(arm, batch, length):
    """(peak bytes, seconds) of a step, after one that makes the optimiser's state; None where it does not fit."""
    found = None
    try:
        for number in range(1 if arm.optimizer.state else 2):
            arm.synchronize()
            torch.cuda.reset_peak_memory_stats()
            begin = time.perf_counter()
            arm.step(length, batch, number)
            arm.synchronize()
            found = torch.cuda.max_memory_allocated(), time.perf_counter() - begin
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        found = None
    arm.forget()
    return found


def between(step, fits: int, not_fits: int, multiple: int) -> int:
    """The largest size that fits of those that TRIES halvings of a range find."""
    for _ in range(TRIES):
        middle = (fits + not_fits) // 2 // multiple * multiple
        if middle == fits:
            break
        fits, not_fits = (middle, not_fits) if step(middle) else (fits, middle)
    return fits


def find(step, first: int, second: int, room: float, multiple: int, per: int = 1) -> dict:
    """The largest size of a step that fits into `room` bytes: a multiple of `multiple`. step(size) gives (peak bytes,
    seconds), or None where it does not fit; a size has `per` tokens each.

    Returns a dict: size; tokens; how: "ran", or "extrapolated" where the step would take too long; measured: the two
    (tokens, peak bytes) that were measured first.
    """
    a, tried = step(first), first
    while a is None and first // 2 >= multiple:
        second, first = first, first // 2 // multiple * multiple
        a = step(first)
    if a is None:
        return {"size": 0, "tokens": 0, "how": "ran", "measured": []}
    b = step(second) if first == tried else None
    if b is None:
        size = between(step, first, second, multiple)
        return {"size": size, "tokens": size * per, "how": "ran", "measured": [(first * per, a[0])]}
    size = max(second, fitting_tokens((first, a[0]), (second, b[0]), room) // multiple * multiple)
    how = "ran"
    for _ in range(TRIES):
        if size <= second:
            break
        # Sequences beside each other take as long as one after another.
        if seconds_of(size, (first, a[1]), (second, b[1])) > SECONDS:
            how = "extrapolated"
            break
        if step(size):
            break
        size = int(LESS * size) // multiple * multiple
    else:
        size = second
    return {"size": size, "tokens": size * per, "how": how, "measured": [(first * per, a[0]), (second * per, b[0])]}
