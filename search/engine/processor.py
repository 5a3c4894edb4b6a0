"""How fast this processor is just now: some work that is always the same, and hangs on no engine."""

from __future__ import annotations

import statistics
import time

import numpy as np

REPEATS = 7
SIDE = 1024  # of a float32 matrix of 4 MiB, which is read from memory again and again
PRODUCTS, CALLS = 40, 60_000


def pace() -> float:
    """Seconds for the work, the median of a few times: matrices read, as decoding reads weights, and Python run."""
    matrix, vector = np.ones((SIDE, SIDE), dtype=np.float32), np.ones(SIDE, dtype=np.float32)
    taken = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        for _ in range(PRODUCTS):
            vector = matrix @ vector
            vector /= SIDE
        count = 0
        for number in range(CALLS):
            count += number & 1
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)
