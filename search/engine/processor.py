"""How fast this processor is just now: some work that is always the same, and hangs on no engine."""

from __future__ import annotations

import statistics
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

REPEATS = 3
NUMBERS = 1 << 20  # float32, 4 MiB: more than a core's own cache, so that memory is read as decoding reads weights
ADDITIONS = 150


def pace(threads: int) -> float:
    """Seconds for the work, the mean of a few times: sums of arrays in so many threads at once, until all are done.

    A mean, as it is the slow moments that decoding suffers from; in as many threads as decode, as a neighbour on one
    core holds all of them up.
    """
    with ThreadPoolExecutor(threads) as pool:
        arrays = [tuple(np.ones(NUMBERS, dtype=np.float32) for _ in range(3)) for _ in range(threads)]
        taken = []
        for _ in range(REPEATS):
            started = time.perf_counter()
            list(pool.map(_add, arrays))
            taken.append(time.perf_counter() - started)
    return statistics.fmean(taken)


def _add(arrays: tuple[np.ndarray, ...]) -> None:
    first, second, total = arrays
    for _ in range(ADDITIONS):
        np.add(first, second, out=total)  # without Python's lock
